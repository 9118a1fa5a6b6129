"""Logprob bits of the installed vLLM against the installed Megatron-core: ``make gpu-versions``, on a CPU too.

Aligned vLLM samples from a small random-weight Qwen3 and Qwen3-MoE, and aligned Megatron-core recomputes the logprobs
of padded and packed micro-batches. Two GPUs or the CPU also run TP with sequence parallelism, two pipeline stages, and
CP. The engines are those that Python imports, validated or not: with PYTHONPATH, another Megatron-core (the folder that
holds ``megatron``; --commit names a commit of Megatron-LM) or vLLM's Python code over the installed CPU kernels
(``python -m tests.vllm.overlay``).

benchmarks/results/versions.jsonl has a row per vLLM version, Megatron-core version and device: ``{"vllm", "megatron",
"device", "python", "torch", "files", "pairs", "tokens", "bit_equal", "max_abs", "failed"}`` (``lib/results.py``).
``vllm`` ends with "(Python code)" for an overlay.
``files`` maps each engine to the hash of its files with hook points. ``failed`` maps each failed engine to its error;
``pairs`` excludes the pairs of failed engines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lib.models import MOE_SIZES, SIZES
from lib.options import parser as options_parser
from lib.results import RESULTS, distinct, merge, read, run_info, run_name, stale, write

from alignkit.check import plan
from alignkit.check.plan import Row
from alignkit.check.run import Compared, compare_rows
from alignkit.jobs.execute import execute, prepare
from alignkit.jobs.job import draw_prompts
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.terminal import Terminal, console, interrupted_by_sigterm
from alignkit.prove import engines, unproved_allowed
from alignkit.runtime.machine import gpus

DTYPE = "bfloat16"
MODELS = ("qwen3", "qwen3_moe")
PAIRS = {
    1: (("batch", "tp1-padded"), ("batch", "tp1-packed"), ("prompt_logprobs", "tp1-packed")),
    2: (("batch", "tp2-sp-packed"), ("batch", "tp1-pp2-padded"), ("batch", "tp1-cp2-packed")),
}
"""Pairs of rollout and training, by the number of GPUs that they need."""
KEY = ("vllm", "megatron", "device")


def found_engines(commit: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions and the hashes of the files of both engines, by their names in a row."""
    names, files = {}, {}
    for name, versions in zip(("vllm", "megatron"), engines(), strict=True):
        root, version = versions.found()
        names[name] = version.partition("+")[0] + " (Python code)" * any(p.is_symlink() for p in root.glob("*.so"))
        files[name] = versions.inspect(root, version)[1]
    if commit:
        names["megatron"] += f" ({commit})"
    return names, files


def row(compared: list[Compared], failed: dict[str, str], names: dict[str, str], info: dict, device: str) -> dict:
    """Return a row of versions.jsonl."""
    reports = [c.report for c in compared]
    return {
        **names,
        "device": device,
        "python": info["versions"]["python"],
        "torch": info["versions"]["torch"],
        "files": info["files"],
        "pairs": [f"{c.row.model or MODELS[0]}: {c.row.rollout}, {c.row.training}" for c in compared],
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
    parser.add_argument("--commit", help="commit of Megatron-LM that the imported Megatron-core is")
    options = parser.parse_args(arguments)

    names, files = found_engines(options.commit)
    info = run_info(max_tokens=options.max_tokens, prompts=len(plan.PROMPT_LENGTHS), files=files)
    device, old = info["gpus"][0] if info["gpus"] else "CPU", read(options.json)
    if options.only_stale and (*names.values(), device) not in distinct(stale(old, info["sources"], KEY), *KEY):
        print("no stale row of the installed versions")
        return 0
    out = options.out.resolve()
    prepare(out)
    jobs, rows, prompts = [], [], {}
    for arch, size in zip(MODELS, ("small", "small-moe"), strict=True):
        model = make_checkpoint(out / arch, dtype=getattr(torch, DTYPE), **{"arch": arch} | (SIZES | MOE_SIZES)[size])
        vocab = SIZES["small"]["vocab"]
        prompts[arch] = draw_prompts(vocab, 0, plan.PROMPT_LENGTHS)
        mine = [
            Row(DTYPE, *pair, True, "" if arch == MODELS[0] else arch)
            for n, pairs in PAIRS.items()
            if n <= options.ranks
            for pair in pairs
        ]
        sampling = {"max_tokens": options.max_tokens, "temperature": 1.0, "seed": 0}
        experts = arch != MODELS[0]
        jobs += plan.jobs(mine, out, {DTYPE: model}, prompts[arch], gpu=bool(gpus()), experts=experts, **sampling)
        rows += mine
    screen = console()
    with interrupted_by_sigterm(), Terminal(screen) as progress, unproved_allowed(out):
        _, failures = execute(jobs, out, options.timeout, progress, keep_going=True, per_gpu=3)
    completed = [r for r in rows if plan.rollout_file(out, r).exists() and plan.training_file(out, r).exists()]
    # The last line of a failure is the exception's line in the engine's log.
    failed = {name: failure.splitlines()[-1].removeprefix("  | ") for name, failure in failures.items()}
    compared = [c for r in completed for c in compare_rows([r], out, prompts[r.model or MODELS[0]])]
    new = row(compared, failed, names, info, device)
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
