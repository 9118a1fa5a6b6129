"""Attention beside its peers, on one GPU: ``make gpu-attention``; options in ATTENTION_ARGS.

bf16, causal, grouped heads. The file (benchmarks/results/h200/attention.json) is ``{"runs": {...}, "rows": [...]}``;
``runs``: by the rows' ``run``, what they were made on. A row:

``impl``
    "alignkit"; "alignkit-triton", that by Triton alone; "fa3", FlashAttention 3 as vLLM calls it, with splits of its
    own choice and its schedule made beforehand; "cudnn", torch's scaled_dot_product_attention by cuDNN;
    "sdpa-deterministic", that under deterministic algorithms, by what torch chooses then: it takes cuDNN's backward
    pass for not deterministic. One that is not installed or fails is named, and the others go on.
``pass``
    "decode": one query of each request, from a cache in pages of 16 in drawn order, as a CUDA graph. "forward"; "backward",
    alone, of one forward pass that came before; "forward_backward": of packed sequences of equal length, or where ``drawn`` of
    drawn ones.
``batch``, ``context``, ``heads``, ``kv_heads``, ``head_dim``, ``drawn``
    Requests or sequences, and positions of each; of drawn lengths, of all together.
``us``, ``tb_s``, ``tflops``
    Median time on the device, cold cache; of decoding, the cache's bytes by it; else the products' operations by it.
``x``, ``x_deterministic``
    The time over that of the peer, timed by turns: "fa3", of gradients "cudnn" and "sdpa-deterministic". None, and
    absent, where that failed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from lib.options import parser as options_parser
from lib.options import time_is_up, told
from lib.results import H200, backend, keys, made_on, merge, of_sources, read, run_name, write
from lib.stopwatch import Stopwatch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from alignkit import ops
from alignkit.runtime import dispatch

PAGE = 16
MOST = 60e9
"""Bytes of a cache at most."""
COLD = 1 << 28
"""Bytes of the caches that a graph reads, one after the other: several times the GPU's own."""
COPIES = 16
"""Of a cache, at most."""
SPLITS = 32
"""vLLM's bound of FlashAttention 3's splits in CUDA graphs."""
KEY = ("impl", "pass", "batch", "context", "heads", "kv_heads", "head_dim", "drawn")
PEER = {"decode": "fa3", "forward": "fa3", "backward": "cudnn", "forward_backward": "cudnn"}
OPERATIONS = {"forward": 4, "backward": 10, "forward_backward": 14}
"""Of a score that is seen, times the head's dimension."""


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    drawn: bool = False

    def lengths(self) -> list[int]:
        if not self.drawn:
            return [self.context] * self.batch
        torch.manual_seed(0)
        weights = torch.rand(self.batch).square() + 0.02  # many short ones, few long ones
        lengths = (weights / weights.sum() * self.context).int().clamp(min=1)
        lengths[0] += self.context - lengths.sum()
        return lengths.tolist()

    def __str__(self) -> str:
        of = f"{self.batch} of {self.context} together" if self.drawn else f"{self.batch} x {self.context}"
        return f"{of}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


def cases(which: str, quick: bool) -> list[Case]:
    if which != "decode":
        equal = [Case(8, 1024), Case(4, 4096), Case(1, 16384), Case(1, 32768)]
        if quick:
            return equal[1:3]
        drawn, narrow = Case(64, 65536, drawn=True), [Case(c.batch, c.context, head_dim=64) for c in equal]
        return [*equal, drawn, *narrow, *(Case(4, 4096, head_dim=dim) for dim in (96, 256))]
    if quick:
        return [Case(b, c) for b, c in ((1, 1024), (1, 32768), (4, 8192), (16, 8192), (64, 8192), (256, 1024))]
    return [
        case
        for heads, kv_heads in ((32, 8), (64, 8), (28, 4))
        for batch in (1, 4, 16, 64, 256)
        for context in (1024, 4096, 8192, 32768, 131072)
        if cache_bytes(case := Case(batch, context, heads, kv_heads)) <= MOST
    ]


def cache_bytes(c: Case) -> int:
    return c.batch * c.context * c.kv_heads * c.head_dim * 4


# What is timed: of a pass, by a problem, a call of no arguments that was called once.


class Decode:
    """Queries and caches, as many of the latter as it takes that each is read from memory."""

    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(case.batch * case.context)
        pages = case.context // PAGE
        shape = (case.batch * pages, PAGE, case.kv_heads, 2 * case.head_dim)
        copies = min(COPIES, math.ceil(COLD / cache_bytes(case)))
        self.case = case
        self.caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        self.table = torch.randperm(case.batch * pages, device=device).int().view(case.batch, pages)
        self.q = torch.randn(case.batch, case.heads, case.head_dim, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
        self.lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)

    def replayed(self, call: Callable) -> Callable[[], object]:
        """``call(k_cache, v_cache)`` on each cache, as a CUDA graph."""
        for cache in self.caches:
            call(*cache.chunk(2, dim=-1))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for cache in self.caches:
                call(*cache.chunk(2, dim=-1))
        return graph.replay

    def ours(self):
        def call(k, v):
            ops.paged_attention(self.q, k, v, self.table, self.starts, self.lengths, out=self.out)

        return self.replayed(call)

    def fa3(self):
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        c = self.case
        plan = get_scheduler_metadata(
            batch_size=c.batch,
            max_seqlen_q=1,
            max_seqlen_k=c.context,
            num_heads_q=c.heads,
            num_heads_kv=c.kv_heads,
            headdim=c.head_dim,
            cache_seqlens=self.lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=PAGE,
            causal=True,
            num_splits=SPLITS,
        )

        def call(k, v):
            flash_attn_varlen_func(
                q=self.q,
                k=k,
                v=v,
                out=self.out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=1,
                seqused_k=self.lengths,
                max_seqlen_k=c.context,
                softmax_scale=c.head_dim**-0.5,
                causal=True,
                block_table=self.table,
                scheduler_metadata=plan,
                num_splits=SPLITS,
                fa_version=3,
            )

        return self.replayed(call)


class Packed:
    """Of a pass other than decoding."""

    def __init__(self, case: Case, device: torch.device, which: str = "forward"):
        torch.manual_seed(case.context)
        self.case, self.which, self.gradients, self.lengths = case, which, which != "forward", case.lengths()
        total = sum(self.lengths)

        def draw(heads: int) -> torch.Tensor:
            t = torch.randn(total, heads, case.head_dim, dtype=torch.bfloat16, device=device)
            return t.requires_grad_(self.gradients)

        self.q, self.k, self.v = draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)
        self.g = torch.randn_like(self.q.detach())
        self.starts = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()

    def run(self, call: Callable, g: torch.Tensor) -> Callable[[], object]:
        kept = call() if self.which == "backward" else None

        def timed():
            out = call() if kept is None else kept
            if not self.gradients:
                return out
            return torch.autograd.grad(out, (self.q, self.k, self.v), g, retain_graph=kept is not None)

        timed()
        return timed

    def ours(self):
        return self.run(lambda: ops.attention(self.q, self.k, self.v, self.starts), self.g)

    def fa3(self):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        if self.gradients:
            raise NotImplementedError("vLLM has its forward pass alone")
        longest = max(self.lengths)

        def call():
            return flash_attn_varlen_func(
                q=self.q,
                k=self.k,
                v=self.v,
                cu_seqlens_q=self.starts,
                max_seqlen_q=longest,
                cu_seqlens_k=self.starts,
                max_seqlen_k=longest,
                softmax_scale=self.case.head_dim**-0.5,
                causal=True,
                fa_version=3,
            )

        return self.run(call, self.g)

    def cudnn(self, *others: SDPBackend):
        """`others`: may take its place."""
        if self.case.drawn:
            raise NotImplementedError("it takes no packed sequences")

        def dense(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(0, (self.case.batch, -1)).transpose(1, 2)

        def call():
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *others]):
                return scaled_dot_product_attention(
                    *(dense(t) for t in (self.q, self.k, self.v)), is_causal=True, enable_gqa=True
                )

        return self.run(call, dense(self.g))

    def sdpa_deterministic(self):
        others = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
        call = deterministic(partial(self.cudnn, *others))()
        return deterministic(call)


def deterministic(call: Callable) -> Callable:
    def within():
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    return within


def by_triton(make: Callable) -> Callable:
    with dispatch.use("triton"):
        call = make()

    def within():
        with dispatch.use("triton"):
            return call()

    return within


IMPLS = {
    "alignkit": lambda p: p.ours(),
    "alignkit-triton": lambda p: by_triton(p.ours),
    "fa3": lambda p: p.fa3(),
    "cudnn": lambda p: p.cudnn(),
    "sdpa-deterministic": lambda p: p.sdpa_deterministic(),
}
OF = {
    "decode": ("alignkit", "alignkit-triton", "fa3"),
    "forward": ("alignkit", "alignkit-triton", "fa3", "cudnn"),
    "backward": ("alignkit", "alignkit-triton", "cudnn", "sdpa-deterministic"),
    "forward_backward": ("alignkit", "alignkit-triton", "cudnn", "sdpa-deterministic"),
}


def measure(case: Case, which: str, impls: list[str], watch: Stopwatch, seconds: float) -> list[dict]:
    decode = which == "decode"
    problem = Decode(case, watch.device) if decode else Packed(case, watch.device, which)
    calls = {}
    for name in OF[which]:
        if name in impls:
            try:
                calls[name] = IMPLS[name](problem)
            except Exception as e:  # a peer may raise whatever it likes
                print(f"without {name}, {which}, {case}: {told(e)}", flush=True)
    times = len(problem.caches) if isinstance(problem, Decode) else 1
    medians = watch.medians([*calls.values()], seconds) if calls else []
    us = {name: 1e3 * ms / times for name, ms in zip(calls, medians, strict=True)}
    rows = []
    for name, t in us.items():
        row = {"impl": name, "pass": which, **asdict(case), "us": t}
        if decode:
            row["tb_s"] = cache_bytes(case) / t / 1e6
        else:
            seen = sum(n * (n + 1) // 2 for n in case.lengths()) * case.heads
            row["tflops"] = OPERATIONS[which] * seen * case.head_dim / t / 1e6
        row["x"] = t / us[PEER[which]] if PEER[which] in us else None
        if "sdpa-deterministic" in us:
            row["x_deterministic"] = t / us["sdpa-deterministic"]
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "attention.json", seconds=0.1, resume=True)
    parser.add_argument("--only", nargs="+", choices=PEER, default=list(PEER), metavar="PASS", help=", ".join(PEER))
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--quick", action="store_true", help="few cases of each")
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    watch, name = Stopwatch(device), run_name()
    info = made_on(ops=["attention"], packages=["vllm"], seconds=options.seconds, backend=backend(device))
    old = read(options.json)
    had = keys(of_sources(old, info["sources"]), KEY) if options.resume else set()
    rows: list[dict] = []
    for which in options.only:
        for case in cases(which, options.quick):
            if tuple({"impl": "alignkit", "pass": which, **asdict(case)}[k] for k in KEY) in had:
                continue
            if time_is_up(options, started):
                print(f"no time for {which}, {case}")
                continue
            found = measure(case, which, options.impls, watch, options.seconds)
            torch.cuda.empty_cache()
            rows += found
            told_of = (f"{r['impl']} {r['us']:.1f} us" + (f" {r['x']:.2f}" if r["x"] else "") for r in found)
            print(f"{which}, {case}: {'; '.join(told_of)}", flush=True)
            write(options.json, merge(old, name, info, rows, KEY))
        ratios = [r["x"] for r in rows if r["pass"] == which and r["impl"] == "alignkit" and r["x"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{which}: over {PEER[which]} {mean:.3f} (geometric mean), {max(ratios):.3f} at most", flush=True)
    print(f"{len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
