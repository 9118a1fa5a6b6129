"""Time of attention against FlashAttention 3 and cuDNN, on one GPU: ``make gpu-attention``; options in ATTENTION_ARGS.

Causal GQA in bf16. The result file is benchmarks/results/h200/attention.jsonl (``lib/results.py``). The fields of a
row, which ``tables.py`` reads:

``impl``
    "alignkit"; "alignkit-triton", alignkit's Triton kernels; "fa3", FlashAttention 3 as vLLM calls it, with its own
    split heuristic and precomputed scheduler metadata; "cudnn", torch's scaled_dot_product_attention with cuDNN;
    "sdpa-deterministic", the same with deterministic algorithms, for which torch does not select cuDNN's backward. An
    implementation that is not installed or fails is reported and skipped.
``pass``
    "decode": one query per request, from a cache of 16-token pages in random order, as a CUDA graph. "forward",
    "backward" (of one earlier forward) and "forward_backward": packed sequences of equal length, or of random lengths
    if ``drawn``.
``batch``, ``context``, ``heads``, ``kv_heads``, ``head_dim``, ``drawn``
    Number of requests or sequences, and positions of each; if ``drawn``, ``context`` is the total over all sequences.
``us``, ``tb_s``, ``tflops``
    Median GPU time with a cold cache; decode: the cache's bytes per time; otherwise: the GEMMs' operations per time.
``x``, ``x_deterministic``
    Time relative to the peer, from interleaved runs: "fa3", or "cudnn" for gradients; and relative to
    "sdpa-deterministic". None or absent if the peer failed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
from lib.options import error_text, time_is_up
from lib.options import parser as options_parser
from lib.results import H200, backend, distinct, merge, read, row_keys, run_info, run_name, stale, with_sources, write
from lib.stopwatch import Stopwatch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from alignkit import ops
from alignkit.runtime import dispatch

PAGE = 16
MAX_CACHE_BYTES = 60e9
COLD_BYTES = 1 << 28
"""Total bytes of the cache copies that a graph reads in turn, several times the size of L2."""
MAX_COPIES = 16
"""Largest number of copies of a cache."""
SPLITS = 32
"""vLLM's limit of FlashAttention 3's split-KV in CUDA graphs."""
MEASURED_OPS = ("attention",)
KEY = ("impl", "pass", "batch", "context", "heads", "kv_heads", "head_dim", "drawn")
PEER = {"decode": "fa3", "forward": "fa3", "backward": "cudnn", "forward_backward": "cudnn"}
OPERATIONS = {"forward": 4, "backward": 10, "forward_backward": 14}
"""Operations per unmasked score, divided by the head dimension."""


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
        weights = torch.rand(self.batch).square() + 0.02  # skewed to short sequences
        lengths = (weights / weights.sum() * self.context).int().clamp(min=1)
        lengths[0] += self.context - lengths.sum()
        return lengths.tolist()

    def __str__(self) -> str:
        size = f"{self.batch} random, {self.context} in total" if self.drawn else f"{self.batch} x {self.context}"
        return f"{size}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


def cases(pass_name: str, quick: bool) -> list[Case]:
    if pass_name != "decode":
        equal = [Case(8, 1024), Case(4, 4096), Case(1, 16384), Case(1, 32768)]
        if quick:
            return equal[1:3]
        random, narrow = Case(64, 65536, drawn=True), [Case(c.batch, c.context, head_dim=64) for c in equal]
        return [*equal, random, *narrow, *(Case(4, 4096, head_dim=dim) for dim in (96, 256))]
    if quick:
        return [Case(b, c) for b, c in ((1, 1024), (1, 32768), (4, 8192), (16, 8192), (64, 8192), (256, 1024))]
    return [
        case
        for heads, kv_heads in ((32, 8), (64, 8), (28, 4))
        for batch in (1, 4, 16, 64, 256)
        for context in (1024, 4096, 8192, 32768, 131072)
        if cache_bytes(case := Case(batch, context, heads, kv_heads)) <= MAX_CACHE_BYTES
    ]


def cache_bytes(c: Case) -> int:
    return c.batch * c.context * c.kv_heads * c.head_dim * 4


# Problems. Each method returns the call to time, after a first call that compiles.


class Decode:
    """Decode queries, and enough copies of the cache that each is read from HBM."""

    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(case.batch * case.context)
        pages = case.context // PAGE
        shape = (case.batch * pages, PAGE, case.kv_heads, 2 * case.head_dim)
        copies = min(MAX_COPIES, math.ceil(COLD_BYTES / cache_bytes(case)))
        self.case = case
        self.caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        self.table = torch.randperm(case.batch * pages, device=device).int().view(case.batch, pages)
        self.q = torch.randn(case.batch, case.heads, case.head_dim, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
        self.lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)

    def replayed(self, call: Callable) -> Callable[[], object]:
        """Return the replay of a CUDA graph of ``call(k_cache, v_cache)`` for each cache."""
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
    """Packed sequences, for the passes other than decode."""

    def __init__(self, case: Case, device: torch.device, pass_name: str = "forward"):
        torch.manual_seed(case.context)
        self.case, self.pass_name, self.gradients, self.lengths = (
            case,
            pass_name,
            pass_name != "forward",
            case.lengths(),
        )
        total = sum(self.lengths)

        def random(heads: int) -> torch.Tensor:
            t = torch.randn(total, heads, case.head_dim, dtype=torch.bfloat16, device=device)
            return t.requires_grad_(self.gradients)

        self.q, self.k, self.v = random(case.heads), random(case.kv_heads), random(case.kv_heads)
        self.g = torch.randn_like(self.q.detach())
        self.starts = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()

    def run(self, call: Callable, g: torch.Tensor) -> Callable[[], object]:
        saved = call() if self.pass_name == "backward" else None

        def timed():
            out = call() if saved is None else saved
            if not self.gradients:
                return out
            return torch.autograd.grad(out, (self.q, self.k, self.v), g, retain_graph=saved is not None)

        timed()
        return timed

    def ours(self):
        return self.run(lambda: ops.attention(self.q, self.k, self.v, self.starts), self.g)

    def fa3(self):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        if self.gradients:
            raise NotImplementedError("vLLM's FlashAttention 3 has no backward")
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
        """Return the call with cuDNN, or with one of the `others` that torch selects."""
        if self.case.drawn:
            raise NotImplementedError("scaled_dot_product_attention: packed sequences are not supported")

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


def with_triton(make: Callable) -> Callable:
    with dispatch.use("triton"):
        call = make()

    def within():
        with dispatch.use("triton"):
            return call()

    return within


IMPLS = {
    "alignkit": lambda p: p.ours(),
    "alignkit-triton": lambda p: with_triton(p.ours),
    "fa3": lambda p: p.fa3(),
    "cudnn": lambda p: p.cudnn(),
    "sdpa-deterministic": lambda p: p.sdpa_deterministic(),
}
IMPLS_BY_PASS = {
    "decode": ("alignkit", "alignkit-triton", "fa3"),
    "forward": ("alignkit", "alignkit-triton", "fa3", "cudnn"),
    "backward": ("alignkit", "alignkit-triton", "cudnn", "sdpa-deterministic"),
    "forward_backward": ("alignkit", "alignkit-triton", "cudnn", "sdpa-deterministic"),
}


def measure(case: Case, pass_name: str, impls: list[str], watch: Stopwatch, seconds: float) -> list[dict]:
    decode = pass_name == "decode"
    problem = Decode(case, watch.device) if decode else Packed(case, watch.device, pass_name)
    calls = {}
    for name in IMPLS_BY_PASS[pass_name]:
        if name in impls:
            try:
                calls[name] = IMPLS[name](problem)
            except Exception as e:  # a peer may raise anything
                print(f"skipped {name}, {pass_name}, {case}: {error_text(e)}", flush=True)
    times = len(problem.caches) if isinstance(problem, Decode) else 1
    medians = watch.medians([*calls.values()], seconds) if calls else []
    us = {name: 1e3 * ms / times for name, ms in zip(calls, medians, strict=True)}
    rows = []
    for name, t in us.items():
        row = {"impl": name, "pass": pass_name, **asdict(case), "us": t}
        if decode:
            row["tb_s"] = cache_bytes(case) / t / 1e6
        else:
            scores = sum(n * (n + 1) // 2 for n in case.lengths()) * case.heads
            row["tflops"] = OPERATIONS[pass_name] * scores * case.head_dim / t / 1e6
        row["x"] = t / us[PEER[pass_name]] if PEER[pass_name] in us else None
        if "sdpa-deterministic" in us:
            row["x_deterministic"] = t / us["sdpa-deterministic"]
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "attention.jsonl", seconds=0.1, resume=True)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PEER,
        default=list(PEER),
        metavar="PASS",
        help=f"passes to measure, of {', '.join(PEER)}; default: all",
    )
    parser.add_argument(
        "--impls", nargs="+", choices=IMPLS, default=list(IMPLS), help="implementations to measure; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer cases of each pass")
    options = parser.parse_args(arguments)

    started, device = time.monotonic(), torch.device("cuda")
    watch, name = Stopwatch(device), run_name()
    info = run_info(ops=MEASURED_OPS, packages=["vllm"], seconds=options.seconds, backend=backend(device))
    old = read(options.json)
    measured = row_keys(with_sources(old, info["sources"]), KEY) if options.resume else set()
    rows: list[dict] = []
    planned = {pass_name: cases(pass_name, options.quick) for pass_name in options.only}
    if options.only_stale:
        found = distinct(stale(old, info["sources"], KEY), "pass", *(field.name for field in fields(Case)))
        planned = {name: [Case(*case) for pass_name, *case in found if pass_name == name] for name in options.only}
    for pass_name in options.only:
        for case in planned[pass_name]:
            if tuple({"impl": "alignkit", "pass": pass_name, **asdict(case)}[k] for k in KEY) in measured:
                continue
            if time_is_up(options, started):
                print(f"not measured, --minutes have passed: {pass_name}, {case}")
                continue
            found = measure(case, pass_name, options.impls, watch, options.seconds)
            torch.cuda.empty_cache()
            rows += found
            summary = (
                f"{r['impl']} {r['us']:.1f} us" + (f" ({r['x']:.2f} of {PEER[pass_name]})" if r["x"] else "")
                for r in found
            )
            print(f"{pass_name}, {case}: {'; '.join(summary)}", flush=True)
            write(options.json, merge(old, name, info, rows, KEY))
        ratios = [r["x"] for r in rows if r["pass"] == pass_name and r["impl"] == "alignkit" and r["x"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(
                f"{pass_name}: {mean:.3f} of {PEER[pass_name]} (geometric mean), largest {max(ratios):.3f}", flush=True
            )
    print(f"{len(rows)} rows, {time.monotonic() - started:.0f} s; {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
