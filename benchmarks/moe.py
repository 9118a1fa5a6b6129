"""Time of MoE experts against torch and vLLM, on one GPU: ``make gpu-moe``; options in MOE_ARGS.

The sizes are those of Qwen3-30B-A3B in bf16: hidden 2048, 128 experts of width 768, top-8. The result file is
benchmarks/results/h200/moe.jsonl (``lib/results.py``). The fields of a row, which ``tables.py`` reads:

``impl``
    "alignkit"; "each" (alignkit's GEMMs expert by expert); "torch" (torch._grouped_mm); "vllm" (its Triton experts). An
    implementation that is not installed or fails is reported and skipped.
``pass``
    "gate_up", "down", "wgrad": one grouped GEMM, with rows sorted by expert. In gate_up, "alignkit" and "each" also
    gather the rows and compute silu(gate) * up. "layer": the experts' forward from the ids. "layer_backward": the
    same with gradients. Up to 256 tokens run as a CUDA graph, except "layer_backward" and "each", which synchronizes.
``tokens``, ``routing``
    "uniform"; "zipf": expert i has weight 1 / i.
``us``, ``tflops``
    Median GPU time with a cold cache, and the GEMMs' operations per time.
``x``
    Time relative to the peer from interleaved runs: "vllm" for "layer", "torch" otherwise. None if the peer failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lib.options import error_text, time_is_up
from lib.options import parser as options_parser
from lib.results import H200, backend, distinct, merge, read, row_keys, run_info, run_name, stale, with_sources, write
from lib.stopwatch import Stopwatch

from alignkit.contract import k_leaves
from alignkit.ops import moe_experts
from alignkit.ops.moe_experts.pairs import pairs
from alignkit.ops.moe_experts.problem import Grouped, Matrices
from alignkit.runtime import dispatch
from alignkit.runtime.operands import operand

HIDDEN, FEATURES, EXPERTS, TOP_K = 2048, 768, 128, 8
DECODE = (1, 4, 16, 64, 256)
MANY = (8192, 32768, 131072)
MEASURED_OPS = ("moe_router", "moe_experts")
KEY = ("impl", "pass", "tokens", "routing")
PEER = {"gate_up": "torch", "down": "torch", "wgrad": "torch", "layer": "vllm", "layer_backward": "torch"}
OPERATIONS = {"gate_up": 4, "down": 2, "wgrad": 4, "layer": 6, "layer_backward": 18}
"""Operations per (token, expert) pair, divided by HIDDEN * FEATURES."""


@dataclass(frozen=True)
class Weights:
    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def random(device: torch.device) -> Weights:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device) * shape[-1] ** -0.5

        return Weights(normal(EXPERTS, 2 * FEATURES, HIDDEN), normal(EXPERTS, HIDDEN, FEATURES))


class Problem:
    """Random tokens, and their (token, expert) pairs sorted by expert."""

    def __init__(self, tokens: int, routing: str, weights: Weights, device: torch.device):
        torch.manual_seed(tokens)
        self.weights = weights
        self.x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        weight = torch.ones(EXPERTS, device=device)
        if routing == "zipf":
            weight /= torch.arange(1, EXPERTS + 1, device=device)
        self.ids = torch.multinomial(weight.expand(tokens, -1), TOP_K).sort(dim=1).values
        self.w = torch.rand(tokens, TOP_K, device=device)
        self.pairs = pairs(self.ids, 0, EXPERTS)
        self.ends = self.pairs.offsets[1:].to(torch.int32)
        self.sorted = self.x[self.pairs.row]
        self.h = torch.randn(tokens * TOP_K, 2 * FEATURES, dtype=torch.bfloat16, device=device)
        self.a = self.h[:, :FEATURES].contiguous()


def _gemms(only: str = "") -> dict[str, Callable]:
    """Return alignkit's grouped GEMMs; `only`: with the kernels of this name."""

    def select(op: str, p: Grouped):
        return next(k for k in dispatch.kernels(op, p.backend) if only in ("", k.name) and k.rejects(p) is None).load()

    def kernel(p: Problem, op: str, a, row, b, out, leaves: int = 1):
        like = operand(b) if op == "moe_gradients" else b.operand()
        name = dispatch.backend_of(a.device)
        described = Grouped(name, 0, operand(a), like, operand(out), EXPERTS, leaves, p.ids.numel(), row is not None)
        return select(op, described)

    def gate_up(p: Problem):
        b = Matrices(p.weights.gate_up)
        kernel(p, "moe_gated", p.x, p.pairs.row, b, None).gated(p.x, p.pairs.row, b, p.pairs.offsets, None)

    def down(p: Problem):
        b, out, leaves = Matrices(p.weights.down), torch.empty_like(p.sorted), k_leaves(FEATURES)
        kernel(p, "moe_products", p.a, None, b, out, leaves).products(p.a, None, b, p.pairs.offsets, leaves, out)

    def wgrad(p: Problem):
        out = torch.empty_like(p.weights.gate_up)
        kernel(p, "moe_gradients", p.h, None, p.sorted, out).gradients(p.h, None, p.sorted, None, p.pairs.offsets, out)

    return {"gate_up": gate_up, "down": down, "wgrad": wgrad}


def _alignkit() -> dict[str, Callable]:
    def layer(p: Problem):
        moe_experts(p.x, p.ids, p.w, p.weights.gate_up, p.weights.down)

    def layer_backward(p: Problem):
        leaves = [t.detach().requires_grad_() for t in (p.x, p.w, p.weights.gate_up, p.weights.down)]
        with torch.enable_grad():
            out = moe_experts(leaves[0], p.ids, *leaves[1:])
        torch.autograd.grad(out, leaves, p.x)

    return _gemms() | {"layer": layer, "layer_backward": layer_backward}


def _torch() -> dict[str, Callable]:
    gemm = torch._grouped_mm

    def layer_backward(p: Problem):
        """Run the necessary GEMMs alone, on existing operands."""
        up, down = p.weights.gate_up, p.weights.down
        gemm(p.sorted, up.mT, offs=p.ends)
        y = gemm(p.a, down.mT, offs=p.ends)
        gemm(y, down, offs=p.ends)
        gemm(p.h, up, offs=p.ends)
        gemm(p.h.t(), p.sorted, offs=p.ends)
        gemm(y.t(), p.a, offs=p.ends)

    return {
        "layer_backward": layer_backward,
        "gate_up": lambda p: gemm(p.sorted, p.weights.gate_up.mT, offs=p.ends),
        "down": lambda p: gemm(p.a, p.weights.down.mT, offs=p.ends),
        "wgrad": lambda p: gemm(p.h.t(), p.sorted, offs=p.ends),
    }


def _vllm() -> dict[str, Callable]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts

    config = VllmConfig()

    def layer(p: Problem):
        with set_current_vllm_config(config):
            fused_experts(p.x, p.weights.gate_up, p.weights.down, p.w, p.ids.to(torch.int32))

    return {"layer": layer}


IMPLS: dict[str, Callable[[], dict[str, Callable]]] = {
    "alignkit": _alignkit,
    "each": lambda: _gemms("each"),
    "torch": _torch,
    "vllm": _vllm,
}


def loaded(names: list[str]) -> dict[str, dict[str, Callable]]:
    """Import implementations; skip those that fail."""
    found = {}
    for name in names:
        try:
            found[name] = IMPLS[name]()
        except Exception as e:  # a peer may raise anything
            print(f"skipped {name}: {error_text(e)}", flush=True)
    return found


def prepared(call: Callable, name: str, pass_name: str, problem: Problem) -> Callable[[], object]:
    """Return the call to time, after a first run; `each` synchronizes, so it cannot be captured in a CUDA graph."""
    call(problem)
    if len(problem.x) > DECODE[-1] or name == "each" or pass_name == "layer_backward":
        return lambda: call(problem)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(problem)
    return graph.replay


def measure(
    problem: Problem, routing: str, pass_name: str, impls: dict, watch: Stopwatch, seconds: float
) -> list[dict]:
    runs = {}
    for name, passes in impls.items():
        if pass_name in passes:
            try:
                runs[name] = prepared(passes[pass_name], name, pass_name, problem)
                runs[name]()
                watch.synchronize()
            except Exception as e:  # a peer may raise anything
                runs.pop(name, None)
                print(f"FAILED: {len(problem.x)} tokens, {routing}, {pass_name}, {name}: {error_text(e)}", flush=True)
    us = dict(zip(runs, (1e3 * ms for ms in watch.medians([*runs.values()], seconds)), strict=True)) if runs else {}
    operations = OPERATIONS[pass_name] * problem.ids.numel() * HIDDEN * FEATURES
    return [
        {
            "impl": name,
            "pass": pass_name,
            "tokens": len(problem.x),
            "routing": routing,
            "us": t,
            "tflops": operations / t / 1e6,
            "x": t / us[PEER[pass_name]] if PEER[pass_name] in us else None,
        }
        for name, t in us.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "moe.jsonl", seconds=0.1, resume=True)
    parser.add_argument(
        "--impls", nargs="+", choices=IMPLS, default=list(IMPLS), help="implementations to measure; default: all"
    )
    parser.add_argument("--passes", nargs="+", choices=PEER, default=list(PEER), help="passes to measure; default: all")
    parser.add_argument("--tokens", nargs="+", type=int, default=[*DECODE, *MANY], help="numbers of tokens")
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    watch, impls = Stopwatch(device), loaded(options.impls)
    name, info = (
        run_name(),
        run_info(ops=MEASURED_OPS, packages=["vllm"], seconds=options.seconds, backend=backend(device)),
    )
    old = read(options.json)
    measured = row_keys(with_sources(old, info["sources"]), KEY) if options.resume else set()
    torch.manual_seed(0)
    weights = Weights.random(device)
    rows: list[dict] = []
    planned = {
        (tokens, routing): options.passes
        for tokens in options.tokens
        for routing in (("uniform", "zipf") if tokens > DECODE[-1] else ("uniform",))
    }
    if options.only_stale:
        found = distinct(stale(old, info["sources"], KEY), "tokens", "routing", "pass")
        planned = {case[:2]: [each[2] for each in found if each[:2] == case[:2]] for case in found}
    with torch.no_grad():
        for (tokens, routing), passes in planned.items():
            problem = Problem(tokens, routing, weights, device)
            for pass_name in passes:
                if ("alignkit", pass_name, tokens, routing) in measured or time_is_up(options, started):
                    continue
                found = measure(problem, routing, pass_name, impls, watch, options.seconds)
                rows += found
                summary = (f"{r['impl']} {r['us']:.1f} us, {r['tflops']:.0f} TFLOP/s" for r in found)
                print(f"{tokens} tokens, {routing}, {pass_name}: {'; '.join(summary)}", flush=True)
                write(options.json, merge(old, name, info, rows, KEY))
    print(f"{len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
