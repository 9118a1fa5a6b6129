"""Mixture of experts beside its peers, on one GPU: ``make gpu-moe``; options in MOE_ARGS.

bf16, the widths of Qwen3-30B-A3B: hidden 2048, 128 experts of 768, 8 a token. The file (benchmarks/results/h200/moe.json) is
``{"runs": {...}, "rows": [...]}``; ``runs``: by the rows' ``run``, what they were made on. A row:

``impl``
    "alignkit"; "each", its products expert by expert; "torch", torch._grouped_mm; "vllm", its Triton experts. One that is not
    installed or fails is named, and the others go on.
``pass``
    "gate_up", "down", "wgrad": a product of all experts, of rows that lie in the order of experts; but ours and that of "each"
    gathers the rows of gate_up, and computes silu(gate) * up of them. "layer": all of the experts' forward pass, from the ids
    on. "layer_backward": that and its gradients. Of up to 256 tokens as a CUDA graph, but for "each", for which the host
    waits, and with gradients.
``tokens``, ``routing``
    "uniform"; "zipf": the i-th expert is chosen as if with a weight of 1 / i.
``us``, ``tflops``
    Median time on the device, cold cache; and the products' operations by it.
``x``
    The time over that of the peer ("torch" of a product, "vllm" of the layer), timed by turns. None where that failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lib.options import parser as options_parser
from lib.options import time_is_up, told
from lib.results import H200, backend, keys, made_on, merge, of_sources, read, run_name, write
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
KEY = ("impl", "pass", "tokens", "routing")
PEER = {"gate_up": "torch", "down": "torch", "wgrad": "torch", "layer": "vllm", "layer_backward": "torch"}
OPERATIONS = {"gate_up": 4, "down": 2, "wgrad": 4, "layer": 6, "layer_backward": 18}
"""Of a pair, times HIDDEN times FEATURES."""


@dataclass(frozen=True)
class Weights:
    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def drawn(device: torch.device) -> Weights:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device) * shape[-1] ** -0.5

        return Weights(draw(EXPERTS, 2 * FEATURES, HIDDEN), draw(EXPERTS, HIDDEN, FEATURES))


class Problem:
    """Drawn tokens, and their pairs in the order of experts."""

    def __init__(self, tokens: int, routing: str, weights: Weights, device: torch.device):
        torch.manual_seed(tokens)
        self.weights = weights
        self.x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        chances = torch.ones(EXPERTS, device=device)
        if routing == "zipf":
            chances /= torch.arange(1, EXPERTS + 1, device=device)
        self.ids = torch.multinomial(chances.expand(tokens, -1), TOP_K).sort(dim=1).values
        self.w = torch.rand(tokens, TOP_K, device=device)
        self.pairs = pairs(self.ids, 0, EXPERTS)
        self.ends = self.pairs.offsets[1:].to(torch.int32)
        self.sorted = self.x[self.pairs.row]
        self.h = torch.randn(tokens * TOP_K, 2 * FEATURES, dtype=torch.bfloat16, device=device)
        self.a = self.h[:, :FEATURES].contiguous()


def _products(only: str = "") -> dict[str, Callable]:
    """Ours; `only`: by that way of computing them."""

    def ways(op: str, p: Grouped):
        return next(k for k in dispatch.kernels(op, p.backend) if only in ("", k.name) and k.refuses(p) is None).load()

    def of(p: Problem, op: str, a, row, b, out, leaves: int = 1):
        like = operand(b) if op == "moe_gradients" else b.operand()
        name = dispatch.name(a.device)
        described = Grouped(name, 0, operand(a), like, operand(out), EXPERTS, leaves, p.ids.numel(), row is not None)
        return ways(op, described)

    def gate_up(p: Problem):
        b = Matrices(p.weights.gate_up)
        of(p, "moe_gated", p.x, p.pairs.row, b, None).gated(p.x, p.pairs.row, b, p.pairs.offsets, None)

    def down(p: Problem):
        b, out, leaves = Matrices(p.weights.down), torch.empty_like(p.sorted), k_leaves(FEATURES)
        of(p, "moe_products", p.a, None, b, out, leaves).products(p.a, None, b, p.pairs.offsets, leaves, out)

    def wgrad(p: Problem):
        out = torch.empty_like(p.weights.gate_up)
        of(p, "moe_gradients", p.h, None, p.sorted, out).gradients(p.h, None, p.sorted, None, p.pairs.offsets, out)

    return {"gate_up": gate_up, "down": down, "wgrad": wgrad}


def _alignkit() -> dict[str, Callable]:
    def layer(p: Problem):
        moe_experts(p.x, p.ids, p.w, p.weights.gate_up, p.weights.down)

    def layer_backward(p: Problem):
        leaves = [t.detach().requires_grad_() for t in (p.x, p.w, p.weights.gate_up, p.weights.down)]
        with torch.enable_grad():
            out = moe_experts(leaves[0], p.ids, *leaves[1:])
        torch.autograd.grad(out, leaves, p.x)

    return _products() | {"layer": layer, "layer_backward": layer_backward}


def _torch() -> dict[str, Callable]:
    product = torch._grouped_mm

    def layer_backward(p: Problem):
        """The products that there must be, of operands that are there; nothing between them."""
        up, down = p.weights.gate_up, p.weights.down
        product(p.sorted, up.mT, offs=p.ends)
        y = product(p.a, down.mT, offs=p.ends)
        product(y, down, offs=p.ends)
        product(p.h, up, offs=p.ends)
        product(p.h.t(), p.sorted, offs=p.ends)
        product(y.t(), p.a, offs=p.ends)

    return {
        "layer_backward": layer_backward,
        "gate_up": lambda p: product(p.sorted, p.weights.gate_up.mT, offs=p.ends),
        "down": lambda p: product(p.a, p.weights.down.mT, offs=p.ends),
        "wgrad": lambda p: product(p.h.t(), p.sorted, offs=p.ends),
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
    "each": lambda: _products("each"),
    "torch": _torch,
    "vllm": _vllm,
}


def loaded(names: list[str]) -> dict[str, dict[str, Callable]]:
    """Those that can be imported."""
    found = {}
    for name in names:
        try:
            found[name] = IMPLS[name]()
        except Exception as e:  # a peer may raise whatever it likes
            print(f"without {name}: {told(e)}", flush=True)
    return found


def prepared(call: Callable, name: str, which: str, problem: Problem) -> Callable[[], object]:
    """What is timed; it has run once. `each` waits for the host, which no graph can hold."""
    call(problem)
    if len(problem.x) > DECODE[-1] or name == "each" or which == "layer_backward":
        return lambda: call(problem)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(problem)
    return graph.replay


def measure(problem: Problem, routing: str, which: str, impls: dict, watch: Stopwatch, seconds: float) -> list[dict]:
    runs = {}
    for name, passes in impls.items():
        if which in passes:
            try:
                runs[name] = prepared(passes[which], name, which, problem)
                runs[name]()
                watch.synchronize()
            except Exception as e:  # as in loaded()
                runs.pop(name, None)
                print(f"FAILED: {len(problem.x)} tokens, {routing}, {which}, {name}: {told(e)}", flush=True)
    us = dict(zip(runs, (1e3 * ms for ms in watch.medians([*runs.values()], seconds)), strict=True)) if runs else {}
    operations = OPERATIONS[which] * problem.ids.numel() * HIDDEN * FEATURES
    return [
        {
            "impl": name,
            "pass": which,
            "tokens": len(problem.x),
            "routing": routing,
            "us": t,
            "tflops": operations / t / 1e6,
            "x": t / us[PEER[which]] if PEER[which] in us else None,
        }
        for name, t in us.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "moe.json", seconds=0.1, resume=True)
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--passes", nargs="+", choices=PEER, default=list(PEER))
    parser.add_argument("--tokens", nargs="+", type=int, default=[*DECODE, *MANY])
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    watch, impls = Stopwatch(device), loaded(options.impls)
    name, info = (
        run_name(),
        made_on(ops=["moe_router", "moe_experts"], packages=["vllm"], seconds=options.seconds, backend=backend(device)),
    )
    old = read(options.json)
    had = keys(of_sources(old, info["sources"]), KEY) if options.resume else set()
    torch.manual_seed(0)
    weights = Weights.drawn(device)
    rows: list[dict] = []
    with torch.no_grad():
        for tokens in options.tokens:
            for routing in ("uniform", "zipf") if tokens > DECODE[-1] else ("uniform",):
                problem = Problem(tokens, routing, weights, device)
                for which in options.passes:
                    if ("alignkit", which, tokens, routing) in had or time_is_up(options, started):
                        continue
                    found = measure(problem, routing, which, impls, watch, options.seconds)
                    rows += found
                    told_of = (f"{r['impl']} {r['us']:.1f} us, {r['tflops']:.0f} TFLOP/s" for r in found)
                    print(f"{tokens} tokens, {routing}, {which}: {'; '.join(told_of)}", flush=True)
                    write(options.json, merge(old, name, info, rows, KEY))
    print(f"{len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
