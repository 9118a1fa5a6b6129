"""Time of the fused QK norm and RoPE against separate ops and peers, on one GPU: ``make gpu-qk``; options in QK_ARGS.

The input is the output of a QKV projection in bf16. Implementations are alignkit's fused op and its separate ops,
torch.compile of the formulas (as in stock vLLM's layers), vLLM's separate kernels and its fused kernel. vLLM's kernels
have no backward. An implementation that is not installed or fails is reported and skipped. The result file is
benchmarks/results/h200/qk_norm_rope.jsonl (``lib/results.py``). The fields of a row, which ``tables.py`` reads:

``tokens``, ``heads``, ``kv_heads``, ``head_dim``, ``rotary_dim``
    The problem.
``impl``
    A key of `IMPLS`. vLLM's fused kernel works in place.
``pass``
    ``forward``, or ``forward_backward``, with the gradients of queries, keys and both weights.
``us``
    Median GPU time with a cold cache.
``x``
    Time relative to torch.compile's; null if that failed.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch
from lib.options import error_text, time_is_up
from lib.options import parser as options_parser
from lib.results import H200, backend, distinct, merge, read, run_info, run_name, stale, write
from lib.stopwatch import Stopwatch
from torch.nn.functional import rms_norm as torch_norm

from alignkit import ops
from alignkit.ops import library, rope_table

MEASURED_OPS = ("qk_norm_rope",)
KEY = ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim", "impl", "pass")
TOKENS = {"forward": (1, 4, 16, 64, 256, 1024, 4096, 16384), "forward_backward": (1024, 4096, 16384)}
MODELS = ((32, 8, 128, 128), (64, 8, 128, 128), (32, 4, 128, 128), (16, 2, 256, 64))
"""Query heads, KV heads, head and rotary dimension: Qwen3-8B, -32B, -30B-A3B, and a partial rotary embedding."""
POSITIONS, EPS = 32768, 1e-6
PEER = "torch.compile"


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int


def cases(pass_name: str) -> list[Case]:
    """Return the cases of a pass."""
    return [Case(tokens, *model) for model in MODELS for tokens in TOKENS[pass_name]]


class Inputs:
    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(0)
        self.case = case
        self.sizes = [n * case.head_dim for n in (case.heads, case.kv_heads, case.kv_heads)]
        self.qkv = torch.randn(case.tokens, sum(self.sizes), dtype=torch.bfloat16, device=device)
        self.weights = [torch.rand(case.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.positions = torch.randint(0, POSITIONS, (case.tokens,), device=device)
        self.table = rope_table(case.rotary_dim, POSITIONS, 1e6, device)

    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """Return queries and keys [T, H, D] as views of the projection's output."""
        return [t.unflatten(1, (-1, self.case.head_dim)) for t in qkv.split(self.sizes, dim=1)[:2]]


# Implementations: functions of the inputs that return the call to time.


def _ours(inputs: Inputs) -> Callable:
    q, k = inputs.heads(inputs.qkv)
    return lambda: library.qk_norm_rope(
        q, k, *inputs.weights, EPS, inputs.positions, inputs.table, inputs.case.rotary_dim
    )


def _separate(inputs: Inputs) -> Callable:
    def run():
        normed = (library.rms_norm(x, w, EPS) for x, w in zip(inputs.heads(inputs.qkv), inputs.weights, strict=True))
        return library.rope_qk(*normed, inputs.positions, inputs.table, inputs.case.rotary_dim)

    return run


def _formulas(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    normed = torch_norm(x, (x.shape[-1],), weight, EPS)
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    a, b = normed[..., : table.shape[1]].float().chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, normed[..., table.shape[1] :]], dim=-1)


def _compiled(inputs: Inputs) -> Callable:
    @torch.compile(dynamic=True)  # vLLM compiles once for all numbers of tokens
    def run(qkv, positions, table, *weights):
        return [_formulas(x, w, positions, table) for x, w in zip(inputs.heads(qkv), weights, strict=True)]

    return lambda: run(inputs.qkv, inputs.positions, inputs.table, *inputs.weights)


def _vllm(inputs: Inputs) -> Callable:
    from vllm import _custom_ops as vllm_ops

    (q, k), table, dim = inputs.heads(inputs.qkv), inputs.table.bfloat16(), inputs.case.head_dim

    def run():
        normed = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        for out, x, weight in zip(normed, (q, k), inputs.weights, strict=True):
            vllm_ops.rms_norm(out, x, weight, EPS)
        vllm_ops.rotary_embedding(inputs.positions, *(t.flatten(1) for t in normed), dim, table, True)

    return run


def _vllm_fused(inputs: Inputs) -> Callable:
    from vllm import _custom_ops as vllm_ops

    case, table = inputs.case, inputs.table.bfloat16()
    sizes = case.heads, case.kv_heads, case.kv_heads, case.head_dim
    return lambda: vllm_ops.fused_qk_norm_rope(inputs.qkv, *sizes, EPS, *inputs.weights, table, True, inputs.positions)


IMPLS: dict[str, Callable[[Inputs], Callable]] = {
    "alignkit": _ours,
    "alignkit, separate": _separate,
    PEER: _compiled,
    "vllm": _vllm,
    "vllm, fused": _vllm_fused,
}


# Implementations with gradients: (q, k, q_weight, k_weight, positions, table) -> rotated q and k.


def _ours_in_training(q, k, q_weight, k_weight, positions, table):
    return ops.qk_norm_rope(q, k, q_weight, k_weight, EPS, positions, table, rotary_dim=table.shape[1])


def _separate_in_training(q, k, q_weight, k_weight, positions, table):
    normed = ops.rms_norm(q, q_weight, EPS), ops.rms_norm(k, k_weight, EPS)
    return [ops.rope(x, positions, table, rotary_dim=table.shape[1]) for x in normed]


def _formulas_of_both(q, k, q_weight, k_weight, positions, table):
    return [_formulas(x, w, positions, table) for x, w in ((q, q_weight), (k, k_weight))]


IN_TRAINING: dict[str, Callable[[], Callable]] = {
    "alignkit": lambda: _ours_in_training,
    "alignkit, separate": lambda: _separate_in_training,
    PEER: lambda: torch.compile(dynamic=True)(_formulas_of_both),
}


def _with_gradients(make: Callable[[], Callable], inputs: Inputs) -> Callable:
    leaves = [t.detach().requires_grad_() for t in (*inputs.heads(inputs.qkv), *inputs.weights)]
    dy = [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in leaves[:2]]
    function = make()

    def run():
        with torch.enable_grad():
            return torch.autograd.grad(function(*leaves, inputs.positions, inputs.table), leaves, dy)

    return run


PASSES: dict[str, dict[str, Callable[[Inputs], Callable]]] = {
    "forward": IMPLS,
    "forward_backward": {name: functools.partial(_with_gradients, make) for name, make in IN_TRAINING.items()},
}


@torch.no_grad()
def measure(case: Case, pass_name: str, impls: list[str], watch: Stopwatch, seconds: float) -> list[dict]:
    """Return the rows of a pass, for the implementations that support it."""
    runs = {}
    for name in (name for name in impls if name in PASSES[pass_name]):
        try:
            run = PASSES[pass_name][name](Inputs(case, watch.device))  # fresh inputs: some work in place
            run()
            watch.synchronize()
            runs[name] = run
        except Exception as e:  # a peer may raise anything
            print(f"{name} failed, {case}, {pass_name}: {error_text(e)}", flush=True)
    us = {name: 1e3 * ms for name, ms in zip(runs, watch.medians(list(runs.values()), seconds), strict=True)}
    print(f"{case}, {pass_name}: " + ", ".join(f"{name} {time:.1f} us" for name, time in us.items()), flush=True)
    peer = us.get(PEER)
    return [
        asdict(case) | {"impl": name, "pass": pass_name, "us": time, "x": None if peer is None else time / peer}
        for name, time in us.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "qk_norm_rope.jsonl", seconds=0.1)
    parser.add_argument(
        "--impls", nargs="+", choices=IMPLS, default=list(IMPLS), help="implementations to measure; default: all"
    )
    parser.add_argument(
        "--passes", nargs="+", choices=PASSES, default=list(PASSES), help="passes to measure; default: all"
    )
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    watch, run = Stopwatch(device), run_name()
    info = run_info(ops=MEASURED_OPS, packages=["vllm"], seconds=options.seconds, backend=backend(device))
    old = read(options.json)
    rows: list[dict] = []
    planned = [(case, name) for name in options.passes for case in cases(name)]
    if options.only_stale:
        found = distinct(stale(old, info["sources"], KEY), *(field.name for field in fields(Case)), "pass")
        planned = [(Case(*case), pass_name) for *case, pass_name in found]
    for case, pass_name in planned:
        if time_is_up(options, started):
            print(f"not measured, --minutes have passed: {case}, {pass_name}")
            continue
        rows += measure(case, pass_name, options.impls, watch, options.seconds)
        write(options.json, merge(old, run, info, rows, KEY))
    print(f"{len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
