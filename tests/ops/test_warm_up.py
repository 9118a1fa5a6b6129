"""Parallel compilation of the self-test's kernels (alignkit/ops/warm_up.py)."""

import os
import subprocess
import sys

import pytest
import torch

from alignkit.ops import golden, warm_up
from alignkit.runtime import dispatch

from .helpers import CPU

DEVICE = torch.device("cpu" if CPU else "cuda:0")


def test_the_calls_are_those_of_the_self_test(monkeypatch):
    computed = []
    monkeypatch.setattr(golden, "hashes", lambda case, device: computed.append((case, device)))
    for call in warm_up.calls(DEVICE, dispatch.fastest_backend(DEVICE)):
        if getattr(call, "func", None) is golden.hashes:
            call()
    assert computed == [(case, DEVICE) for case in golden.CASES]
    assert len(warm_up.calls(DEVICE, dispatch.fastest_backend(DEVICE))) > 2 * len(computed)


def test_an_error_of_a_call_does_not_stop_the_others(monkeypatch):
    done = []

    def fail():
        raise RuntimeError

    monkeypatch.setattr(warm_up, "calls", lambda *_: [lambda: done.append(0), fail, lambda: done.append(2)])
    warm_up.main(DEVICE, "auto", 0, 1)
    assert done == [2, 0]


def test_processes_do_not_outlive_the_block(monkeypatch):
    """On a CPU, nothing is compiled."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(warm_up.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with warm_up.ahead(DEVICE, dispatch.fastest_backend(DEVICE)):
        pass
    assert bool(started) != CPU and all(process.poll() is not None for process in started)


@pytest.mark.gpu
@pytest.mark.skipif(CPU, reason="needs a GPU")
def test_a_process_fills_the_cache(tmp_path):
    command = [sys.executable, "-m", "alignkit.ops.warm_up", str(DEVICE), "triton", "0", "60"]
    subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, check=True)
    assert list(tmp_path.iterdir())
