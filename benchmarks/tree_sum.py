"""Time of k-tree reductions over tensor-parallel ranks against NCCL: ``make gpu-tree-sum``; options in TREE_SUM_ARGS.

One process per GPU. Before timing a size, the benchmark compares the bytes with the k-tree over NCCL-gathered sums; the
exit status is 1 if they differ. The result file is benchmarks/results/h200/tree_sum.jsonl (``lib/results.py``). The
fields of a row, which ``tables.py`` reads:

``case``
    "all_reduce"; "reduce_scatter"; "row_parallel K", all_reduce with its GEMM, whose weight [4096, K] is sharded along
    K.
``impl``
    "alignkit": fp32 sums that a GEMM writes to symmetric memory, reduced to bf16. "alignkit, copied": a tensor that is
    first copied to symmetric memory, reduced to fp32. "alignkit, whole" and "alignkit, shares", with --forms: one-shot
    and two-shot, between which "alignkit" chooses by size. "alignkit-gather": an all-gather of the fp32 sums by NCCL,
    added by torch; used without symmetric memory. "nccl-bf16" and "nccl-fp32": NCCL's reduction. "vllm-bf16": vLLM's
    custom all-reduce, for up to 8 MiB, if vLLM is installed.
``pass``
    Number of GPUs, such as "tp2".
``m``, ``n``, ``k``
    A rank's values in bytes of bf16; None; K, or None.
``ms``, ``eager_ms``
    Median time of the slowest rank per call in a CUDA graph of several calls, and in eager mode.
``x``
    ``ms`` relative to "nccl-bf16" in the same case, which transfers half the bytes per value.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lib.options import parser as options_parser
from lib.results import H200, distinct, merge, read, run_info, run_name, stale, write

from alignkit.contract import k_leaves
from alignkit.dist import TP, symmetric
from alignkit.jobs.store import connect_store, serve_store
from alignkit.ops.linear import matmul
from alignkit.testing import bitwise_equal

MEASURED_OPS = ("linear",)
FORMS = ("alignkit, whole", "alignkit, shares")
KEY = ("case", "impl", "pass", "m")
COLUMNS = 4096
KIB = (64, 256, 1024, 4096, 16384, 65536)
LAYERS = (4096, 12288)
"""K of Qwen3-8B's row-parallel layers."""
LAYER_KIB = 4096
"""Smallest size, in KiB, at which layers are measured; the largest is twice that of --kib, a step of 16384 tokens."""
GRAPH_MS = 4.0
"""Approximate duration of a CUDA graph of several calls."""
REPLAYS = 15


def vllm_all_reduce(tp: TP, device: torch.device):
    """Return vLLM's custom all-reduce over these ranks; None if it is unavailable."""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError:
        return None
    ranks = dist.get_process_group_ranks(tp.group)
    found = CustomAllreduce(dist.new_group(ranks, backend="gloo", use_local_synchronization=True), device)
    return None if found.disabled else found


def implementations(tp: TP, rows: int, case: str, forms: bool, vllm) -> dict[str, Callable[[], object]]:
    """Return calls with [rows, COLUMNS] on each rank.

    Raises:
        AssertionError: on all ranks, if one rank's bytes differ from the k-tree's.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = symmetric.workspace(tp.group, device)
    if workspace is None:
        raise RuntimeError(
            f"symmetric memory: required between GPUs 0 to {tp.size - 1}, but unavailable; the GPUs must access each "
            "other over NVLink, and ALIGNKIT_SYMMETRIC must not be 0"
        )
    generator = torch.Generator(device).manual_seed(tp.rank)
    sums = torch.randn(rows, COLUMNS, device=device, generator=generator)
    half, scatter = sums.bfloat16(), case == "reduce_scatter"
    part, half_part = (torch.empty_like(t[: rows // tp.size]) for t in (sums, half))

    def ours(product, shared=None):
        return workspace.sum(product, rows, COLUMNS, None, torch.bfloat16, scatter, shared)

    def nccl(t, part):
        if scatter:
            return partial(dist.reduce_scatter_tensor, part, t, group=tp.group)
        return partial(dist.all_reduce, t, group=tp.group)

    others = {"nccl-bf16": nccl(half, half_part), "nccl-fp32": nccl(sums.clone(), part)}
    if vllm is not None and not scatter and vllm.should_custom_ar(half):
        others["vllm-bf16"] = partial(vllm.custom_all_reduce, half)
    copied = partial(tp.tree_sum_scatter if scatter else tp.tree_sum, sums)
    want = tp._sum_gathered(sums, scatter)
    variants = {"": None} | ({", whole": False, ", shares": True} if forms and not scatter else {})
    wrong = [
        name
        for name, shared in variants.items()
        if not bitwise_equal(ours(lambda r, out, _: out.copy_(sums[r]), shared), want.bfloat16())
    ]
    wrong += [] if bitwise_equal(copied(), want) else [", copied"]
    for rank, found in enumerate(_all_gather(tp, wrong)):
        if found:
            raise AssertionError(
                f"{case} of {rows} x {COLUMNS}, rank {rank} of {tp.size}: bytes differ from the k-tree's in "
                + ", ".join(f"'alignkit{name}'" for name in found)
            )
    return {f"alignkit{name}": partial(ours, lambda *_: None, shared) for name, shared in variants.items()} | {
        "alignkit, copied": copied,
        "alignkit-gather": lambda: tp._sum_gathered(sums, scatter).bfloat16(),
        **others,
    }


def layers(tp: TP, rows: int, k: int) -> dict[str, Callable[[], object]]:
    """Return calls of a row-parallel layer; raise as `implementations` does."""
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = symmetric.workspace(tp.group, device)
    generator = torch.Generator(device).manual_seed(tp.rank)

    def random(*shape):
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    x, w, leaves = random(rows, k // tp.size), random(COLUMNS, k // tp.size), k_leaves(k) // tp.size

    def ours():
        def product(part, to, spare):
            matmul(x[part], w, leaves=leaves, to=to, spare=spare)

        return workspace.sum(product, rows, COLUMNS, None, torch.bfloat16, False)

    def stock():
        y = x @ w.t()
        dist.all_reduce(y, group=tp.group)
        return y

    want = tp._sum_gathered(matmul(x, w, leaves=leaves), False).bfloat16()
    for rank, same in enumerate(_all_gather(tp, bitwise_equal(ours(), want))):
        if not same:
            raise AssertionError(
                f"row_parallel {k}, {rows} rows, rank {rank} of {tp.size}: bytes differ from the k-tree's"
            )
    return {"alignkit": ours, "nccl-bf16": stock}


def _all_gather(tp: TP, value) -> list:
    values = [None] * tp.size
    dist.all_gather_object(values, value, group=tp.group)
    return values


def _median(tp: TP, run: Callable[[], object], times: int) -> float:
    """Return the median milliseconds of `run` on the slowest rank."""
    durations = []
    for _ in range(times):
        dist.barrier(tp.group)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        durations.append(start.elapsed_time(end))
    return max(_all_gather(tp, statistics.median(durations)))


def times(tp: TP, run: Callable[[], object], capture) -> dict[str, float]:
    """Return ``ms`` and ``eager_ms`` of a row; `capture` returns the context in which to capture a graph."""

    def several():
        for _ in range(calls):
            run()

    calls = 5
    several()
    calls = max(2, min(50, round(GRAPH_MS / (_median(tp, several, 3) / calls))))
    eager = _median(tp, several, 5) / calls
    graph = torch.cuda.CUDAGraph()
    with capture(), torch.cuda.graph(graph):
        several()
    graph.replay()
    return {"ms": _median(tp, graph.replay, REPLAYS) / calls, "eager_ms": eager}


def measure(tp: TP, kib: int, case: str, forms: bool, vllm) -> list[dict]:
    rows, k = (kib << 10) // 2 // COLUMNS, int(case.split()[1]) if " " in case else None
    run = implementations(tp, rows, case, forms, vllm) if k is None else layers(tp, rows, k)
    durations = {
        impl: times(tp, call, vllm.capture if impl.startswith("vllm") else nullcontext) for impl, call in run.items()
    }
    found = [
        {"case": case, "impl": impl, "pass": f"tp{tp.size}", "m": kib << 10, "n": None, "k": k}
        | t
        | {"x": t["ms"] / durations["nccl-bf16"]["ms"]}
        for impl, t in durations.items()
    ]
    if tp.rank == 0:
        print(
            f"{case:<14} tp{tp.size} {kib:>6} KiB  "
            + "  ".join(
                f"{r['impl']} {r['ms'] * 1e3:.1f} us ({r['eager_ms'] * 1e3:.1f}) x {r['x']:.2f}" for r in found
            ),
            flush=True,
        )
    return found


def planned(options: argparse.Namespace, old: dict, digest: str, ranks: int) -> list[tuple[str, int, bool]]:
    """Return the cases on this number of ranks, each with its size in KiB and whether both forms are measured."""
    if options.only_stale:
        rows = [row for row in stale(old, digest, KEY) if row["pass"] == f"tp{ranks}"]
        both = {(row["case"], row["m"]) for row in rows if row["impl"] in FORMS}
        return [(case, m >> 10, (case, m) in both) for case, m in distinct(rows, "case", "m")]
    layer_sizes = [kib for kib in (*options.kib, 2 * max(options.kib)) if kib >= LAYER_KIB]
    cases = [(case, options.kib) for case in ("all_reduce", "reduce_scatter")]
    cases += [(f"row_parallel {k}", layer_sizes) for k in LAYERS]
    return [(case, kib, options.forms) for case, sizes in cases for kib in sizes]


def work(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 writes the file."""
    started, old = time.monotonic(), read(options.json)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=connect_store(port), rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    name, info, rows = run_name(), run_info(ops=MEASURED_OPS), []
    # Largest group first: ranks of different earlier groups cannot share symmetric memory.
    for size in reversed([n for n in symmetric.SIZES if n <= world]):
        group = dist.new_group(list(range(size)))
        if rank < size:
            tp = TP(group)
            vllm = vllm_all_reduce(tp, torch.device("cuda", rank))
            for case, kib, forms in planned(options, old, info["sources"], size):
                rows += measure(tp, kib, case, forms, vllm)
                info["seconds"] = round(time.monotonic() - started, 1)
                if rank == 0:
                    write(options.json, merge(old, name, info, rows, KEY))
        dist.barrier()
    if rank == 0:
        print(f"{len(rows)} rows, {time.monotonic() - started:.1f} s; {options.json}")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "tree_sum.jsonl")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="largest number of GPUs")
    parser.add_argument(
        "--kib", nargs="+", type=int, default=list(KIB), help="sizes of a rank's values in bf16, in KiB"
    )
    parser.add_argument("--forms", action="store_true", help="measure one-shot and two-shot at all sizes")
    options = parser.parse_args(arguments)
    world = max((n for n in symmetric.SIZES if n <= options.gpus), default=0)
    if not world:
        parser.error(
            f"--gpus: must be at least 2, got {options.gpus}; this machine has {torch.cuda.device_count()} GPUs"
        )
    try:
        store = serve_store()
        mp.spawn(work, (world, store.port, options), nprocs=world)
    except mp.ProcessRaisedException as e:
        print(e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
