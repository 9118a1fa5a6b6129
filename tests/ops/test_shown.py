"""Versions of torch and Triton that the bits were not shown with: tested once, refused if a golden bit differs."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from alignkit import BackendError, golden, ops
from alignkit.runtime import dispatch, families, shown

DEVICE = torch.device(os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu"))
FAMILY = families.of_type(DEVICE)
CASES = {case: golden.CASES[case] for case in ("linears float32", "norms bfloat16", "head bfloat16")}
OTHER = {families.CPU: ({"torch": "1.0"},), families.SM90: ({"torch": "1.0", "triton": "1.0"},)}


@pytest.fixture
def other(monkeypatch, tmp_path):
    """As with versions that the bits were not shown with, in a new process. The cases that are computed, as they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for family, versions in OTHER.items():
        monkeypatch.setattr(family, "shown", versions)
    monkeypatch.setattr(golden, "CASES", CASES)
    computed, hashes = [], golden.hashes
    monkeypatch.setattr(golden, "hashes", lambda case, device: (computed.append(case), hashes(case, device))[1])
    process(monkeypatch)
    return computed


def process(monkeypatch) -> None:
    """Forgets what is remembered in this one."""
    monkeypatch.setattr(dispatch, "_names", {})
    monkeypatch.setattr(shown, "_verdicts", {})


def files(tmp_path) -> list:
    return list((tmp_path / "cache/alignkit").glob("*"))


def silu() -> torch.Tensor:
    return ops.silu_mul(torch.ones(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE))


def test_the_versions_of_the_tests_are_stated():
    """The golden bits of this run are of versions in the table, or were tested first."""
    versions = shown.installed(FAMILY)
    assert versions["torch"] == torch.__version__
    how = shown.require(DEVICE, dispatch.name(DEVICE))
    assert how == "shown with " + ", ".join(f"{k} {v}" for k, v in versions.items()) or "every golden bit" in how


def test_other_versions_are_tested_once(other, monkeypatch, tmp_path):
    silu()
    assert other == list(CASES)
    silu()
    assert len(other) == len(CASES) and len(files(tmp_path)) == 1
    how = shown.require(DEVICE, dispatch.name(DEVICE))
    assert how.startswith("shown with torch 1.0") and f"with torch {torch.__version__}" in how and "tested here" in how

    process(monkeypatch)
    silu()
    assert len(other) == len(CASES)  # from the file

    process(monkeypatch)
    monkeypatch.setattr(shown, "_package", lambda backend: "other kernels")
    silu()
    assert len(other) == 2 * len(CASES) and len(files(tmp_path)) == 2


def test_each_backend_has_a_verdict_of_its_own(other):
    chosen = set()
    for choice in ("auto", "reference" if DEVICE.type == "cpu" else "triton"):
        with dispatch.use(choice):
            silu()
            chosen.add(dispatch.name(DEVICE))
    assert len(other) == len(chosen) * len(CASES)
    assert {json.loads(key)["backend"] for key in shown._verdicts} == chosen


@pytest.mark.parametrize("broken", ["no folder", "no file", "other content", "no text"])
def test_a_cache_that_is_no_use_costs_time_only(other, broken, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    if broken == "no folder":
        cache.write_text("a file")
    silu()
    if broken == "no file":
        for file in files(tmp_path):
            file.unlink()
            file.mkdir()
    elif broken != "no folder":
        for file in files(tmp_path):
            file.write_bytes(b"\xff\xfe" if broken == "no text" else b"{}")
    process(monkeypatch)
    silu()
    assert len(other) == 2 * len(CASES)


def test_bits_that_differ_are_refused(other, monkeypatch, tmp_path):
    kept = golden.load(FAMILY)
    kept["norms bfloat16"][1] = "0" * 64
    monkeypatch.setattr(golden, "load", lambda family: kept)
    for _ in range(2):
        with pytest.raises(BackendError) as refusal:
            silu()
        message = str(refusal.value)
        assert message.startswith(f"device: the bits of {FAMILY.contract_id} were shown with torch 1.0")
        assert f"with torch {torch.__version__}" in message
        assert message.endswith("they are others: norms bfloat16: tensor 1 of 8 has other bits")
    assert other == list(CASES)[:2] and not files(tmp_path)  # once in this process, and another one looks again


def test_a_kernel_that_fails_is_refused(other, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(ops, "rms_norm", broken)
    with pytest.raises(BackendError, match="norms bfloat16: RuntimeError: no such instruction"):
        silu()


def test_a_case_whose_bits_are_not_kept_is_refused(other, monkeypatch):
    monkeypatch.setattr(golden, "CASES", CASES | {"new float32": CASES["linears float32"]})
    with pytest.raises(BackendError, match="new float32: no bits are kept"):
        silu()


def test_the_callers_modes_do_not_matter(other):
    with torch.inference_mode(), torch.autocast(DEVICE.type, dtype=torch.bfloat16), torch.device("meta"):
        assert dispatch.name(DEVICE)
    assert other == list(CASES)


def test_first_called_in_a_backward(other):
    """There, on a GPU, on a thread of autograd's."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g * silu().sum().to(g.device)

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    Late.apply(x).sum().backward()
    assert other == list(CASES) and x.grad is not None


def test_threads_wait_for_one_test(other):
    results = []
    threads = [threading.Thread(target=lambda: results.append(silu())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and other == list(CASES)


def test_never_while_a_graph_is_captured(other, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(shown, "installed", lambda family: {"torch": "2.0", "triton": "3.0"})
    with pytest.raises(BackendError, match="cannot be while a CUDA graph is captured: call an op before"):
        shown.require(torch.device("cuda:0"), "triton")
    assert not other


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_a_captured_graph_stays_whole(other):
    """A first call in a capture is refused; after one outside it, the graph is captured and replayed."""
    x = torch.ones(2, 4, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(BackendError, match="while a CUDA graph is captured"):
        ops.silu_mul(x, x)
    want = ops.silu_mul(x, x)
    assert other == list(CASES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.silu_mul(x, x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


def test_an_assembler_of_the_users_is_another_version(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert shown.installed(families.SM90).keys() == {"torch", "triton"}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert shown.installed(families.SM90)["ptxas"] == "/opt/ptxas"


def test_nothing_is_tested_or_read_at_import():
    code = (
        "import sys, alignkit.ops\n"
        "from alignkit.runtime import native, shown\n"
        "assert not shown._verdicts and not native.library.cache_info().currsize\n"
        "assert 'alignkit.golden' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
