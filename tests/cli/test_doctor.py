"""`alignkit doctor`: it finds what is there, does without what is not, and notices a broken op."""
import importlib
import re

import pytest
import torch

from alignkit import doctor, ops
from alignkit.check.machine import installed
from alignkit.contract import contract_id
from alignkit.errors import UnsupportedError


def test_passes_here(alignkit):
    status, out, _ = alignkit("doctor")
    assert status == 0 and "FAIL" not in out
    assert f"{contract_id('cpu')} on cpu" in out and torch.__version__ in out
    for op in doctor.OPS:
        assert f"{op}: " in out
    tests = [line for line in out.splitlines() if line.startswith("pass")]
    # paged_attention is part of the attention test, rope_table of the rope test.
    for op in set(ops.__all__) - {"paged_attention", "rope_table"}:
        assert any(re.search(rf"\b{op}\b", test) for test in tests), op


def test_without_engines(alignkit, without_modules, monkeypatch):
    without_modules("vllm", "megatron")
    monkeypatch.setattr(doctor, "self_test", lambda: iter(()))
    status, out, _ = alignkit("doctor")
    assert status == 0 and out.count("engine not installed") == 2


def test_notices_batch_variance(alignkit, monkeypatch):
    """An op whose bits depend on the number of rows, as a kernel that splits k by shape has."""
    def varying(x, weight, bias=None):
        y = x.float() @ weight.float().T
        return (y * (1 + 2.0**-20 * x.shape[0])).to(x.dtype)

    monkeypatch.setattr(ops, "linear", varying)
    monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
    status, out, _ = alignkit("doctor")
    assert status == 1
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert len(failed) >= 1 and all("linear" in line and "values differ" in line for line in failed)


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
    names = adapter.status().get("points") or adapter.status().get("seams")
    assert not adapter.status()["patched"] and not names  # looking changed nothing
    with doctor.ENGINES[half][1](adapter):
        text = "\n".join(doctor.facts())
        assert "aligned in this process" in text and "stock" not in text
        assert adapter.status()["patched"]
        for name in adapter.status().get("points") or adapter.status()["seams"]:
            assert name in text


def test_an_engine_that_cannot_be_aligned(monkeypatch):
    def refuse(adapter):
        raise UnsupportedError("version 1.2.3")

    monkeypatch.setattr(doctor, "ENGINES", {"megatron": ("torch", refuse)})
    assert "stock, and patch_megatron() cannot align it: UnsupportedError: version 1.2.3" in "\n".join(doctor.facts())
