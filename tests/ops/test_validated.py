"""Unvalidated versions of torch and Triton: tested once by the golden bits, and rejected if one differs.

The tests pretend that the installed versions are unvalidated (alignkit/runtime/validated.py).
"""

import importlib
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from alignkit import BackendError, ops
from alignkit.ops import golden
from alignkit.runtime import dispatch, families, validated

from .helpers import pretend_gpu

DEVICE = torch.device(os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu"))
FAMILY = families.of_type(DEVICE)
CASES = {case: golden.CASES[case] for case in ("linears float32", "norms bfloat16", "head bfloat16")}
OTHER = {families.CPU: ({"torch": "1.0"},), families.SM90: ({"torch": "1.0", "triton": "1.0"},)}
"""Validated versions that are not installed, by family."""


@pytest.fixture
def computed_cases(monkeypatch, tmp_path):
    """Pretend that the installed versions are unvalidated; return the log of computed golden cases."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for family, versions in OTHER.items():
        monkeypatch.setattr(family, "validated", versions)
    monkeypatch.setattr(golden, "CASES", CASES)
    monkeypatch.setattr(golden.trials, "compare", lambda device, backend: None)  # test_trials.py covers it
    computed, hashes = [], golden.hashes
    monkeypatch.setattr(golden, "hashes", lambda case, device: (computed.append(case), hashes(case, device))[1])
    forget_verdicts(monkeypatch)
    return computed


def forget_verdicts(monkeypatch) -> None:
    """Clear this process's cached verdicts, as in a new process."""
    monkeypatch.setattr(dispatch, "_backends", {})
    monkeypatch.setattr(validated, "_verdicts", {})


def files(tmp_path) -> list:
    return list((tmp_path / "cache/alignkit").glob("*"))


def silu() -> torch.Tensor:
    return ops.silu_mul(torch.ones(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE))


def test_installed_versions_are_validated_or_tested():
    versions = validated.installed(FAMILY)
    assert versions["torch"] == torch.__version__
    verdict = validated.require(DEVICE, dispatch.backend_of(DEVICE))
    assert (
        verdict == "validated with " + ", ".join(f"{k} {v}" for k, v in versions.items())
        or "all golden bits" in verdict
    )


def test_unvalidated_versions_are_tested_once(computed_cases, monkeypatch, tmp_path):
    silu()
    assert computed_cases == list(CASES)
    silu()
    assert len(computed_cases) == len(CASES) and len(files(tmp_path)) == 1
    verdict = validated.require(DEVICE, dispatch.backend_of(DEVICE))
    assert verdict.startswith("validated with torch 1.0")
    assert f"all golden bits match here with torch {torch.__version__}" in verdict

    forget_verdicts(monkeypatch)
    silu()
    assert len(computed_cases) == len(CASES)  # from the file

    forget_verdicts(monkeypatch)
    monkeypatch.setattr(validated, "_package", lambda backend: "other kernels")
    silu()
    assert len(computed_cases) == 2 * len(CASES) and len(files(tmp_path)) == 2


def test_each_backend_has_a_verdict_of_its_own(computed_cases):
    chosen = set()
    for choice in ("auto", "reference" if DEVICE.type == "cpu" else "triton"):
        with dispatch.use(choice):
            silu()
            chosen.add(dispatch.backend_of(DEVICE))
    assert len(computed_cases) == len(chosen) * len(CASES)
    assert {json.loads(key)["backend"] for key in validated._verdicts} == chosen


@pytest.mark.parametrize("broken", ["no folder", "no file", "other content", "no text"])
def test_broken_cache_only_repeats_the_test(computed_cases, broken, monkeypatch, tmp_path):
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
    forget_verdicts(monkeypatch)
    silu()
    assert len(computed_cases) == 2 * len(CASES)


def test_other_bits_are_rejected(computed_cases, monkeypatch, tmp_path):
    golden_hashes = golden.load(FAMILY)
    golden_hashes["norms bfloat16"][1] = "0" * 64
    monkeypatch.setattr(golden, "load", lambda family: golden_hashes)
    for _ in range(2):
        with pytest.raises(BackendError) as raised:
            silu()
        message = str(raised.value)
        assert message.startswith(f"device: {FAMILY.contract_id} is validated with torch 1.0")
        assert f"with torch {torch.__version__}" in message
        assert "its golden bits differ: norms bfloat16: tensor 2 of 8 differs from its golden hash" in message
    assert computed_cases == list(CASES)[:2] and not files(tmp_path)  # cached in this process only


def test_failing_kernel_is_rejected(computed_cases, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(importlib.import_module("alignkit.ops.rms_norm.op"), "rms_norm", broken)
    with pytest.raises(BackendError, match="norms bfloat16: RuntimeError: no such instruction"):
        silu()


def test_case_without_golden_bits_is_rejected(computed_cases, monkeypatch):
    monkeypatch.setattr(golden, "CASES", CASES | {"new float32": CASES["linears float32"]})
    with pytest.raises(
        BackendError, match="new float32: golden_.* of this installation has no golden bits for this case"
    ):
        silu()


def test_modes_of_the_caller_do_not_affect_the_test(computed_cases):
    with torch.inference_mode(), torch.autocast(DEVICE.type, dtype=torch.bfloat16), torch.device("meta"):
        assert dispatch.backend_of(DEVICE)
    assert computed_cases == list(CASES)


def test_first_op_may_run_in_a_backward(computed_cases):
    """On a GPU, a backward runs on an autograd thread."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g * silu().sum().to(g.device)

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    Late.apply(x).sum().backward()
    assert computed_cases == list(CASES) and x.grad is not None


def test_threads_wait_for_one_test(computed_cases):
    results = []
    threads = [threading.Thread(target=lambda: results.append(silu())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and computed_cases == list(CASES)


def test_no_test_runs_during_graph_capture(computed_cases, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(validated, "installed", lambda family: {"torch": "2.0", "triton": "3.0"})
    with pytest.raises(BackendError, match="which a CUDA graph capture prevents. Call an op before"):
        validated.require(gpu, "triton")
    assert not computed_cases


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_capture_succeeds_after_an_eager_call(computed_cases):
    """A first call during capture raises; after an eager call, the graph can be captured and replayed."""
    x = torch.ones(2, 4, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(BackendError, match="which a CUDA graph capture prevents. Call an op before"),
    ):
        ops.silu_mul(x, x)
    want = ops.silu_mul(x, x)
    assert computed_cases == list(CASES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.silu_mul(x, x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


def test_user_ptxas_counts_as_another_version(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert validated.installed(families.SM90).keys() == {"torch", "triton"}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert validated.installed(families.SM90)["ptxas"] == "/opt/ptxas"


def test_import_runs_no_test_and_loads_no_library():
    code = (
        "import sys, alignkit.ops\n"
        "from alignkit.runtime import native, validated\n"
        "assert not validated._verdicts and not native.library.cache_info().currsize\n"
        "assert 'alignkit.ops.golden' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
