"""Invalid sums over two GPUs end the process with a message before a timeout.

The faults are a dead rank, ranks whose sums differ, and overlapping sums of one rank. Each rank runs this module as a
program. The messages are those of csrc/sm90/rank_sum/all_reduce.cu.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from alignkit.dist import TP, symmetric
from alignkit.jobs.store import connect_store, serve_store
from tests.megatron.gpus import join

ROOT = Path(__file__).parents[2]
PATIENCE = 3
"""Timeout of a sum in seconds."""
STOPPED = 3, -signal.SIGABRT
"""Exit statuses of a rank after a device assertion: this program's, or that of NCCL's watchdog."""
DELAY = 2_000_000_000
"""Delay in cycles, about a second."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def add(workspace, rows=64, columns=128, bias=None, dtype=torch.float32, scatter=False, shared=False):
    """Launch a sum of ones without waiting for it."""
    return workspace.sum(lambda part, out, _: out.fill_(1.0), rows, columns, bias, dtype, scatter, shared)


def graph_of(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def died(workspace):
    if workspace.rank == 1:
        time.sleep(1)  # until the other rank waits on its device
        os.kill(os.getpid(), signal.SIGKILL)
    add(workspace)


def died_before_a_replay(workspace):
    graph = graph_of(lambda: add(workspace))
    dist.barrier()
    if workspace.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    graph.replay()


DIFFERENCES = {
    "rows": {"rows": 72},
    "columns": {"rows": 128, "columns": 64},
    "fewer_blocks": {"rows": 1, "columns": 8},
    "dtype": {"dtype": torch.bfloat16},
    "slices": {"scatter": True},
    "shares": {"shared": True},
    "bias": {"bias": True},
}


def differs(difference, workspace):
    """Launch sums that differ between the ranks in `difference`; rank 0's sum has many CTAs."""
    change = dict(DIFFERENCES[difference]) if workspace.rank else {}
    if "bias" in change:
        change["bias"] = torch.ones(128, device="cuda")
    add(workspace, **change)


def overlaps(workspace):
    """Replay a graph on rank 0 during a sum that waits for rank 1, which is delayed on both streams."""
    graph, other = graph_of(lambda: add(workspace)), torch.cuda.Stream()
    dist.barrier()
    torch.cuda.synchronize()
    if workspace.rank == 1:
        torch.cuda._sleep(DELAY)
    add(workspace)
    with torch.cuda.stream(other):
        if workspace.rank == 1:
            torch.cuda._sleep(DELAY)
        graph.replay()


def comes_between(workspace):
    """Launch a sum on one stream between the two sums of a graph on another stream, without overlap."""

    def two():
        add(workspace)
        torch.cuda._sleep(DELAY)
        add(workspace)

    graph, other = graph_of(two), torch.cuda.Stream()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        graph.replay()
    time.sleep(0.3)
    add(workspace)


def waits_for_the_other_stream(workspace):
    """Make only valid calls: streams wait for each other before and after a graph replay on another stream.

    Eager sums run between replays and between graphs.
    """

    def two():
        add(workspace)
        return add(workspace, rows=7)

    graphs = [graph_of(two) for _ in range(2)]
    other, here = torch.cuda.Stream(), torch.cuda.current_stream()
    for i in range(6):
        torch.cuda._sleep(DELAY // 100)
        y = add(workspace)
        other.wait_stream(here)
        with torch.cuda.stream(other):
            graphs[i % 2].replay()
        here.wait_stream(other)
        graphs[1 - i % 2].replay()
        assert bool((y == workspace.size).all())


CASES = {f.__name__: f for f in (died, died_before_a_replay, overlaps, comes_between, waits_for_the_other_stream)}


def main(case, rank, port):
    """Run a case on one rank, and exit."""
    join(rank, 2, store=connect_store(port))
    tp = TP(dist.group.WORLD)
    workspace = symmetric.workspace(tp.group, torch.device("cuda", rank))
    add(workspace)
    dist.barrier()
    torch.cuda.synchronize()
    print("ready", flush=True)
    status = 0
    try:
        CASES[case](workspace) if case in CASES else differs(case, workspace)
        torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        status = STOPPED[0]
    ctypes.CDLL(None).fflush(None)  # the driver prints to the C library's stdout
    os._exit(status)


def ranks(case):
    """Run `case` on two ranks for at most two minutes; return each rank's exit status and output."""
    store = serve_store()
    environment = os.environ | {
        "ALIGNKIT_SYMMETRIC_TIMEOUT": str(PATIENCE),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.test_tp_faults_cuda", case, str(rank), str(store.port)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    end, found = time.monotonic() + 120, []
    try:
        for process in running:
            output, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
            assert "ready" in output, output
            found.append((process.returncode, output))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize("case", ["died", "died_before_a_replay"])
def test_dead_rank_ends_the_other_after_the_timeout(case):
    (status, output), (other, _) = ranks(case)
    assert other == -signal.SIGKILL
    assert status in STOPPED and f"alignkit: rank 0 waited {PATIENCE} s for rank 1 at the first barrier" in output, (
        output
    )
    assert "ALIGNKIT_SYMMETRIC_TIMEOUT" in output


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_whose_sums_differ_end(difference):
    for rank, (status, output) in enumerate(ranks(difference)):
        expected = f"alignkit: ranks {rank} and {1 - rank} called different tensor-parallel sums"
        assert status in STOPPED and expected in output, output


def test_overlapping_sums_end_the_process():
    (status, output), (other, _) = ranks("overlaps")
    assert status in STOPPED and "a sum started while another was running" in output, output
    assert other in STOPPED  # rank 1 waited for rank 0


def test_sum_between_the_sums_of_a_graph_ends_the_process():
    for status, output in ranks("comes_between"):
        assert status in STOPPED and "a sum ran between two sums of a CUDA graph" in output, output


def test_streams_that_wait_for_each_other_are_valid():
    for status, output in ranks("waits_for_the_other_stream"):
        assert status == 0, output


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
