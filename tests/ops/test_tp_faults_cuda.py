"""Sums over GPUs that cannot be right end the process with a message, within a bound of time: a rank that has died, ranks
that add different things, and sums of one rank that overlap. Each rank is a process of its own, and is lost."""

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

from alignkit.check.store import meet, served
from alignkit.dist import TP, symmetric
from tests.megatron.gpus import join

ROOT = Path(__file__).parents[2]
PATIENCE = 3
STOPPED = 3, -signal.SIGABRT
"""The exit status of a rank whose device was stopped: ours, or that of NCCL's watchdog, where that saw it first."""
LATE = 2_000_000_000
"""Cycles, about a second."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def add(workspace, rows=64, columns=128, bias=None, dtype=torch.float32, scatter=False, shared=False):
    """A sum of ones, not waited for."""
    return workspace.sum(lambda part, out, _: out.fill_(1.0), rows, columns, bias, dtype, scatter, shared)


def graph_of(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def died(workspace):
    if workspace.rank == 1:
        time.sleep(1)  # the other waits on its device by then
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


def differs(what, workspace):
    """In `what`; the first has many blocks."""
    change = dict(DIFFERENCES[what]) if workspace.rank else {}
    if "bias" in change:
        change["bias"] = torch.ones(128, device="cuda")
    add(workspace, **change)


def overlaps(workspace):
    """Rank 0 replays a graph beside a sum that waits for rank 1, which is late on both streams."""
    graph, other = graph_of(lambda: add(workspace)), torch.cuda.Stream()
    dist.barrier()
    torch.cuda.synchronize()
    if workspace.rank == 1:
        torch.cuda._sleep(LATE)
    add(workspace)
    with torch.cuda.stream(other):
        if workspace.rank == 1:
            torch.cuda._sleep(LATE)
        graph.replay()


def comes_between(workspace):
    """A sum on one stream while a graph of two, on another, is between them: they do not overlap."""

    def two():
        add(workspace)
        torch.cuda._sleep(LATE)
        add(workspace)

    graph, other = graph_of(two), torch.cuda.Stream()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        graph.replay()
    time.sleep(0.3)
    add(workspace)


def waits_for_the_other_stream(workspace):
    """What is allowed: a graph on another stream, before and after which streams wait for each other; sums between
    replays and between graphs."""

    def two():
        add(workspace)
        return add(workspace, rows=7)

    graphs = [graph_of(two) for _ in range(2)]
    other, here = torch.cuda.Stream(), torch.cuda.current_stream()
    for i in range(6):
        torch.cuda._sleep(LATE // 100)
        y = add(workspace)
        other.wait_stream(here)
        with torch.cuda.stream(other):
            graphs[i % 2].replay()
        here.wait_stream(other)
        graphs[1 - i % 2].replay()
        assert bool((y == workspace.size).all())


CASES = {f.__name__: f for f in (died, died_before_a_replay, overlaps, comes_between, waits_for_the_other_stream)}


def main(case, rank, port):
    """What a rank runs."""
    join(rank, 2, store=meet(port))
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
    ctypes.CDLL(None).fflush(None)  # of the C library, to which the driver prints
    os._exit(status)


def ranks(case):
    """Runs `case` on two ranks: of each the exit status and what it said. None runs longer than two minutes."""
    store = served()
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
            said, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
            assert "ready" in said, said
            found.append((process.returncode, said))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize("case", ["died", "died_before_a_replay"])
def test_a_rank_that_has_died(case):
    (status, said), (other, _) = ranks(case)
    assert other == -signal.SIGKILL
    assert status in STOPPED and f"alignkit: rank 0 waited {PATIENCE} s for rank 1 at the first meeting" in said, said
    assert "ALIGNKIT_SYMMETRIC_TIMEOUT" in said


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_add_different_things(what):
    for rank, (status, said) in enumerate(ranks(what)):
        assert status in STOPPED and f"alignkit: ranks {rank} and {1 - rank} do not add the same thing" in said, said


def test_sums_that_overlap():
    (status, said), (other, _) = ranks("overlaps")
    assert status in STOPPED and "a sum began while another was running" in said, said
    assert other in STOPPED  # it waited for the first


def test_a_sum_between_those_of_a_graph():
    for status, said in ranks("comes_between"):
        assert status in STOPPED and "found that another came between" in said, said


def test_streams_that_wait_for_each_other():
    for status, said in ranks("waits_for_the_other_stream"):
        assert status == 0, said


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
