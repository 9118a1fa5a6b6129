"""Norms of queries and keys and their rotation, beside the separate ops and peers, on one GPU: ``make gpu-qk``; options
in QK_ARGS.

bf16, of a projection's rows: this project's op, its separate ops, what torch.compile makes of the formulas (as of stock
vLLM's layers), vLLM's kernels one after the other, and its fused one; forward, and forward and backward together, which
vLLM's have not. A peer that is not installed or fails is named, and the others go on. The file
(benchmarks/results/h200/qk_norm_rope.json) is ``{"runs": {...}, "rows": [...]}``;
``runs``: by the rows' ``run``, what they were made on. A row:

``tokens``, ``heads``, ``kv_heads``, ``head_dim``, ``rotary_dim``
    The problem. vLLM's kernels take queries and keys where they are, and leave their results there.
``impl``
    Of `IMPLS`.
``pass``
    ``forward``, or ``forward_backward``: with the gradients of queries, keys and both weights, as in training.
``us``
    Median time on the device, cold cache.
``x``
    Over torch.compile's; null where that failed.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from lib.options import parser as options_parser
from lib.options import time_is_up, told
from lib.results import H200, backend, made_on, merge, read, run_name, write
from lib.stopwatch import Stopwatch
from torch.nn.functional import rms_norm as torch_norm

from alignkit import ops
from alignkit.ops import library, rope_table

KEY = ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim", "impl", "pass")
TOKENS = {"forward": (1, 4, 16, 64, 256, 1024, 4096, 16384), "forward_backward": (1024, 4096, 16384)}
MODELS = ((32, 8, 128, 128), (64, 8, 128, 128), (32, 4, 128, 128), (16, 2, 256, 64))
"""Heads, of keys, their dimension and how much of it is rotated: Qwen3-8B, -32B, -30B-A3B; and where a part is."""
POSITIONS, EPS = 32768, 1e-6
PEER = "torch.compile"


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int


def cases(of: str) -> list[Case]:
    """Those of a pass."""
    return [Case(tokens, *model) for model in MODELS for tokens in TOKENS[of]]


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
        """Queries and keys, [T, H, D], in the projection's rows."""
        return [t.unflatten(1, (-1, self.case.head_dim)) for t in qkv.split(self.sizes, dim=1)[:2]]


# Implementations: Inputs -> what is timed.


def _ours(given: Inputs) -> Callable:
    q, k = given.heads(given.qkv)
    return lambda: library.qk_norm_rope(q, k, *given.weights, EPS, given.positions, given.table, given.case.rotary_dim)


def _separate(given: Inputs) -> Callable:
    def run():
        normed = (library.rms_norm(x, w, EPS) for x, w in zip(given.heads(given.qkv), given.weights, strict=True))
        return library.rope_qk(*normed, given.positions, given.table, given.case.rotary_dim)

    return run


def _formulas(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    normed = torch_norm(x, (x.shape[-1],), weight, EPS)
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    a, b = normed[..., : table.shape[1]].float().chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, normed[..., table.shape[1] :]], dim=-1)


def _compiled(given: Inputs) -> Callable:
    @torch.compile(dynamic=True)  # as vLLM compiles: once for all numbers of tokens
    def run(qkv, positions, table, *weights):
        return [_formulas(x, w, positions, table) for x, w in zip(given.heads(qkv), weights, strict=True)]

    return lambda: run(given.qkv, given.positions, given.table, *given.weights)


def _vllm(given: Inputs) -> Callable:
    from vllm import _custom_ops as vllm_ops

    (q, k), table, dim = given.heads(given.qkv), given.table.bfloat16(), given.case.head_dim

    def run():
        normed = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        for out, x, weight in zip(normed, (q, k), given.weights, strict=True):
            vllm_ops.rms_norm(out, x, weight, EPS)
        vllm_ops.rotary_embedding(given.positions, *(t.flatten(1) for t in normed), dim, table, True)

    return run


def _vllm_fused(given: Inputs) -> Callable:
    from vllm import _custom_ops as vllm_ops

    case, table = given.case, given.table.bfloat16()
    sizes = case.heads, case.kv_heads, case.kv_heads, case.head_dim
    return lambda: vllm_ops.fused_qk_norm_rope(given.qkv, *sizes, EPS, *given.weights, table, True, given.positions)


IMPLS: dict[str, Callable[[Inputs], Callable]] = {
    "alignkit": _ours,
    "alignkit, separate": _separate,
    PEER: _compiled,
    "vllm": _vllm,
    "vllm, fused": _vllm_fused,
}


# The same with gradients: q, k, their weights, positions, table -> results.


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


def _with_gradients(made: Callable[[], Callable], given: Inputs) -> Callable:
    leaves = [t.detach().requires_grad_() for t in (*given.heads(given.qkv), *given.weights)]
    dy = [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in leaves[:2]]
    function = made()

    def run():
        with torch.enable_grad():
            return torch.autograd.grad(function(*leaves, given.positions, given.table), leaves, dy)

    return run


PASSES: dict[str, dict[str, Callable[[Inputs], Callable]]] = {
    "forward": IMPLS,
    "forward_backward": {name: functools.partial(_with_gradients, made) for name, made in IN_TRAINING.items()},
}


@torch.no_grad()
def measure(case: Case, of: str, impls: list[str], watch: Stopwatch, seconds: float) -> list[dict]:
    """Rows of a pass, of those that have it."""
    runs = {}
    for name in (name for name in impls if name in PASSES[of]):
        try:
            run = PASSES[of][name](Inputs(case, watch.device))  # of its own: some write to them
            run()
            watch.synchronize()
            runs[name] = run
        except Exception as e:  # a peer may raise whatever it likes
            print(f"{name} failed, {case}: {told(e)}", flush=True)
    us = {name: 1e3 * ms for name, ms in zip(runs, watch.medians(list(runs.values()), seconds), strict=True)}
    print(f"{case}, {of}: " + ", ".join(f"{name} {time:.1f} us" for name, time in us.items()), flush=True)
    peer = us.get(PEER)
    return [
        asdict(case) | {"impl": name, "pass": of, "us": time, "x": None if peer is None else time / peer}
        for name, time in us.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "qk_norm_rope.json", seconds=0.1)
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    watch, run = Stopwatch(device), run_name()
    info = made_on(ops=["qk_norm_rope"], packages=["vllm"], seconds=options.seconds, backend=backend(device))
    old = read(options.json)
    rows: list[dict] = []
    for case, of in [(case, name) for name in options.passes for case in cases(name)]:
        if time_is_up(options, started):
            print(f"no time for {case}, {of}")
            continue
        rows += measure(case, of, options.impls, watch, options.seconds)
        write(options.json, merge(old, run, info, rows, KEY))
    print(f"{len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
