"""Names and groups of stored rows, shared by ``tables.py`` and ``plots.py``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from statistics import median

ROLLOUTS = {
    "batch": "batch",
    "one": "one request at a time",
    "prompt_logprobs": "prompt_logprobs (prefill)",
    "prefix": "prefix-cache hits",
    "chunked": "chunked prefill",
    "eager": "batch, eager",
    "v1": "batch, V1 runner",
    "tp2": "batch, TP 2",
    "tp4": "batch, TP 4",
    "tp2-ep": "batch, TP 2 EP 2",
    "tp4-ep": "batch, TP 4 EP 4",
    "dp2": "batch, DP 2",
    "dp2-ep": "batch, DP 2 EP 2",
    "dp4-ep": "batch, DP 4 EP 4",
    "tp2-dp2-ep": "batch, TP 2 DP 2 EP 4",
    "routed": "batch, eager, V1 runner",
    "tp2-ep-routed": "batch, TP 2 EP 2, eager, V1 runner",
    "tp4-ep-routed": "batch, TP 4 EP 4, eager, V1 runner",
}
ENGINES = {
    "stock": "stock",
    "batch_invariant": "stock, VLLM_BATCH_INVARIANT=1",
    "stock_fused": "stock, fusions enabled",
    "hf_compiled": "Hugging Face, compiled",
    "aligned": "**aligned**",
    "aligned_keeping": "**aligned, keep_logits**",
    "stock_te": "stock, TransformerEngine",
    "aligned_te": "**aligned, TransformerEngine**",
}
LOGP_PASSES = ("forward", "forward_backward")


def sources_of(run: dict) -> tuple:
    """Return the source digest of a run, or its commit, and its contract."""
    return run.get("sources") or run.get("commit"), run.get("contract")


def by_run(results: dict, same: Callable[[dict], Hashable] = sources_of) -> list[dict]:
    """Split results by the runs' value of `same`, by default sources and contract; return the parts, newest first."""
    runs = results["runs"]
    found: dict[Hashable, list[str]] = {}
    for name in sorted(runs, key=lambda name: (runs[name]["date"], name), reverse=True):
        found.setdefault(same(runs[name]), []).append(name)
    return [
        {"runs": {name: runs[name] for name in names}, "rows": [r for r in results["rows"] if r["run"] in names]}
        for names in found.values()
    ]


def is_plain(row: dict) -> bool:
    """Return whether a row has Megatron-core's local layer spec without PP and CP; old rows lack these fields."""
    return (row.get("spec", "local"), row.get("pp", 1), row.get("cp", 1)) == ("local", 1, 1)


def spread_of(row: dict) -> tuple[float, float] | None:
    """Return the slowest and fastest repeat's throughput relative to stock's median; None without repeats."""
    seconds = row.get("seconds")
    if not seconds:
        return None
    middle = row["ratio_to_stock"] * median(seconds)
    return middle / max(seconds), middle / min(seconds)
