"""Kinds of GPUs: shown, provable or unknown. Only the query of the device is replaced; nothing is computed on a GPU."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from alignkit import BackendError, InputError, contract_id, drift
from alignkit.ops import golden
from alignkit.runtime import cuda, dispatch, families, machine, validated
from alignkit.runtime.certificates import RUNNING, Certificate

from .helpers import gemm, pretend_gpu
from .test_contract_id import IDS

ROOT = Path(__file__).parents[2]
PROVABLE = [gpu for gpu in families.GPUS if not gpu.shown]
GPU = pytest.mark.parametrize("gpu", PROVABLE, ids=lambda gpu: families.capability_text(gpu.capability))


@pytest.fixture(autouse=True)
def no_digest(monkeypatch):
    """Restore the digest of the sm80 family after each test."""
    monkeypatch.setattr(families.SM80, "digest", "")


def test_only_hopper_is_shown():
    assert [gpu.capability for gpu in families.GPUS if gpu.shown] == [(9, 0)]
    assert {gpu.capability: gpu.family.name for gpu in families.GPUS} == dict.fromkeys(
        [(8, 0), (8, 6), (8, 9)], "sm80"
    ) | dict.fromkeys([(9, 0), (10, 0), (10, 3), (12, 0)], "sm90")


def test_hopper_has_every_backend(monkeypatch):
    gpu = pretend_gpu(monkeypatch, (9, 0))
    assert dispatch.require_family(gpu) is families.SM90
    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(cuda, "library", lambda: None)
    assert [chosen(gpu, wanted) for wanted in ("auto", "cuda", "triton")] == ["cuda", "cuda", "triton"]
    monkeypatch.setattr(cuda, "available", lambda: False)
    assert chosen(gpu, "auto") == "triton"


def chosen(gpu: torch.device, wanted: str) -> str:
    with dispatch.use(wanted):
        return dispatch.fastest_backend(gpu)


@GPU
def test_gpu_that_is_not_shown_is_rejected(gpu, monkeypatch):
    device = pretend_gpu(monkeypatch, gpu.capability, "Some GPU")
    message = (
        r"device: .* were shown on GPUs of compute capability 9.0 \(H100, H200\) alone, got Some GPU with "
        f"{re.escape(families.capability_text(gpu.capability))}. `alignkit prove --ops` can prove them on this GPU, "
        r"which is rejected until then \(.*: holds no certificate of ops\)"
    )
    for call in (dispatch.require_family, dispatch.backend_of, dispatch.family, contract_id):
        with pytest.raises(BackendError, match=message):
            call(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NotImplementedError, match=message):
        machine.require_environment()


@GPU
def test_a_certificate_admits_a_gpu(gpu, monkeypatch, tmp_path):
    """It counts for this GPU, driver and toolchain alone, and `alignkit prove` needs none while it runs."""
    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path))
    device = pretend_gpu(monkeypatch, gpu.capability, "Some GPU")
    key = validated.facts(device, families.TRITON)
    assert key["device"] == "Some GPU, 100 SMs" and key["backend"] == "triton"
    Certificate("ops", key, {"self-test": 31}).write()
    assert dispatch.require_family(device) is gpu.family
    monkeypatch.setattr(cuda, "driver_version", lambda: "13010")
    with pytest.raises(BackendError, match="driver must be '13010', got '13000'"):
        dispatch.require_family(device)
    Certificate("ops", validated.facts(device, families.TRITON), {"rows": 1}).write()
    with pytest.raises(BackendError, match="lacks the check 'self-test'"):
        dispatch.require_family(device)
    monkeypatch.setenv("ALIGNKIT_PROOF", str(tmp_path / "running"))
    (tmp_path / "running").write_text(RUNNING)
    assert dispatch.require_family(device) is gpu.family


@GPU
def test_prover_may_use_a_gpu_that_is_not_shown(gpu, monkeypatch):
    """Triton alone computes there: the library holds code for Hopper, and cuBLASLt was tried there alone."""
    device = pretend_gpu(monkeypatch, gpu.capability)
    monkeypatch.setattr(cuda, "available", lambda: True)
    with validated.unchecked():
        assert dispatch.family(device) is gpu.family
        assert [chosen(device, wanted) for wanted in ("auto", "triton")] == ["triton", "triton"]
        with pytest.raises(BackendError, match="ALIGNKIT_BACKEND: must be one of auto, triton for CUDA .* got 'cuda'"):
            chosen(device, "cuda")
        for leaves in (1, 8):
            there = gemm(m=512, backend=families.TRITON, leaves=leaves)._replace(device=0)
            reasons = {kernel.name: why for kernel, why in dispatch.explain("linear", there)}
            assert reasons.pop("tiles") is None and reasons.keys() == {"cublaslt", "hopper"}
            assert all("must have compute capability 9.0 (H100, H200), got" in str(why) for why in reasons.values())
    with pytest.raises(BackendError, match="rejected until then"):
        dispatch.backend_of(device)  # `unchecked` leaves nothing behind


def test_kernels_for_hopper_are_used_on_hopper(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))
    assert dispatch.choose("linear", gemm(m=512, backend=families.TRITON)._replace(device=0)).name == "cublaslt"
    assert dispatch.choose("linear", gemm(m=512, backend=families.TRITON, leaves=8)).name == "hopper"
    assert gemm().gpu is families.HOPPER  # a hypothetical GPU, as in `alignkit explain`


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (9, 1), (12, 1)])
def test_unknown_gpu_is_rejected_even_unchecked(capability, monkeypatch):
    device = pretend_gpu(monkeypatch, capability, "Other GPU")
    message = (
        r"device: must have compute capability 8.0 \(A100.*12.0 \(RTX 5090.*got Other GPU with "
        f"{capability[0]}.{capability[1]}"
    )
    with validated.unchecked(), pytest.raises(BackendError, match=message):
        dispatch.backend_of(device)


def test_gpu_without_an_index_is_the_current_one(monkeypatch):
    """A machine may have GPUs of several kinds, so the current GPU's backend is not cached."""
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(validated, "require", lambda *_: "shown")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 5)][index])
    dispatch.backend_of("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(BackendError, match="got a GPU with 7.5"):
        dispatch.backend_of("cuda")


def test_gpu_families_have_the_constants_of_the_kernels():
    """The Triton kernels take the contract's constants from sm90."""
    own = {"name", "version", "validated", "backends", "stored", "digest"}
    for field in {f.name for f in dataclasses.fields(families.Family)} - own:
        assert getattr(families.SM80, field) == getattr(families.SM90, field), field


def test_digest_of_the_golden_bits_completes_the_contract_id(monkeypatch):
    """Machines whose golden bits differ have other ids, which the comparison of logprobs rejects."""
    device = pretend_gpu(monkeypatch, (8, 0))
    with validated.unchecked(), pytest.raises(BackendError, match="sm80 needs the digest of the golden bits"):
        contract_id(device)
    case = "norms float32"
    computed = {case: golden.hashes(case, "cpu")}
    digest = golden.digest(computed)
    families.SM80.set_digest(digest)
    with validated.unchecked():
        here = contract_id(device)
    assert here == f"alignkit-1/sm80/v128/k8/kv128/leaf512/golden-{digest}"
    families.SM80.set_digest(digest)
    other = golden.digest({case: [*computed[case][:-1], "0" * 64]})
    with pytest.raises(BackendError, match=f"must compute the same golden bits, got the digests {digest} and {other}"):
        families.SM80.set_digest(other)

    logprobs = drift.Logprobs([[1]], [[5, 6]], [torch.zeros(2)], here)
    assert drift.compare(logprobs, logprobs)
    with pytest.raises(InputError, match="contract: rollout and training must have the same contract id"):
        drift.compare(logprobs, dataclasses.replace(logprobs, contract=here.replace(digest, other)))


@pytest.mark.parametrize("gpu", [gpu for gpu in PROVABLE if gpu.family is families.SM90], ids=str)
def test_gpus_under_sm90s_contract_have_its_id(gpu, monkeypatch):
    device = pretend_gpu(monkeypatch, gpu.capability)
    with validated.unchecked():
        assert contract_id(device) == IDS["sm90"]


def test_readme_lists_every_gpu():
    text = (ROOT / "README.md").read_text()
    for gpu in families.GPUS:
        state, capability = "shown" if gpu.shown else "provable", families.capability_text(gpu.capability)
        row = f"| {state} | {capability} | {gpu.models} | {gpu.shared_memory >> 10} KB | `{gpu.family.name}` |"
        assert row in text
