"""Which kernel is chosen for which problem. choices.json holds a drawn population of problems of the GPU's family, each with the
kernel that computed it when every kernel decided for itself; no choice changes a bit, but each was measured."""

import json
from pathlib import Path

import pytest
import torch

from alignkit import BackendError, InputError
from alignkit.runtime import dispatch, families
from alignkit.runtime.operands import operand

pytest.importorskip("triton")
from alignkit.ops import linear as _linear  # noqa: F401
from alignkit.ops.gated_delta_rule.problem import Delta
from alignkit.ops.linear.problem import Product
from alignkit.ops.linear_logp.problem import Head, HeadGradient, HeadProducts
from alignkit.ops.rms_norm.problem import Norm

from .helpers import product

CHOICES = json.loads(Path(__file__).with_name("choices.json").read_text())
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def described(t):
    if t is None:
        return None
    shape, strides, dtype, aligned = t
    return torch.Size(shape), tuple(strides), TYPES[dtype], aligned


def problem(op: str, p: dict):
    t = {name: described(value) for name, value in p.items() if isinstance(value, list) or value is None}
    if op == "linear":
        return Product(p["backend"], None, t["a"], t["b"], t["bias"], t["out"], p["leaves"], p["accumulate"])
    if op == "rms_norm":
        return Norm("cuda", (t["x"], t["weight"]))
    if op == "rms_norm_backward":
        return Norm("cuda", tuple(t[name] for name in ("x", "dy", "weight", "d_total") if t[name] is not None))
    if op == "gated_delta_rule":
        return Delta("cuda", TYPES[p["dtype"]])
    kind = {"head_statistics": Head, "head_gradient": HeadGradient, "head_products": HeadProducts}[op]
    return kind(backend="cuda", **t)


def answer(op: str, p: dict) -> str:
    if op == "rms_norm" and p["residual"]:
        op = "add_rms_norm"
    of = problem(op.removeprefix("add_"), p)
    right = [k.name for k in dispatch.kernels(op, of.backend) if k.refuses(of) is None]
    assert dispatch.choose(op, of).name == dispatch.explain(op, of)[-1][0].name == right[0]
    if op == "linear" and not p["proven"] and right[0] == "cublaslt":  # which declines on the device
        return right[1]
    return "apart" if op.startswith("head_") and right[0] == "triton" else right[0]


@pytest.mark.parametrize("op", CHOICES)
def test_choices_are_those_of_the_table(op):
    for p in CHOICES[op]:
        assert answer(op, p) == p["answer"], p


def test_the_table_has_each_kernel():
    seen = {p["answer"] for p in CHOICES["linear"]}
    assert seen == {k.name for k in dispatch.kernels("linear", families.CUDA)}


def test_a_backend_admits_the_slower_ones_of_its_family():
    few = product(leaves=8)
    assert dispatch.choose("linear", few).name == "tree"
    assert dispatch.choose("linear", few._replace(backend=families.TRITON)).name == "tiles"
    assert dispatch.choose("linear", few._replace(backend=families.REFERENCE)).name == "reference"
    assert dispatch.choose("linear", few._replace(backend=families.NATIVE)).name == "cpu"
    assert [k.name for k in dispatch.kernels("gated_delta_rule", families.NATIVE)] == ["reference"]


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("op", dispatch.OPS)
def test_the_last_of_each_backend_takes_all(op, family):
    """So there is always a kernel; and what a list names exists."""
    for backend in family.backends:
        found = dispatch.kernels(op, backend)
        assert found and not found[-1].rule
        for kernel in found:
            module = kernel.load()
            assert all(callable(getattr(module, name)) for name in (kernel.rule, kernel.prepare) if name)


def test_an_op_that_is_none():
    with pytest.raises(InputError, match="op: 'matmul' is none of attention, "):
        dispatch.order("matmul")


def kernels(monkeypatch, capturing=False):
    """Stand-ins: the first of two declines."""
    asked = []
    module = type("Module", (), {})
    module.first = lambda p: asked.append("first")
    module.second = lambda p: asked.append("second") or (lambda: "launched")
    found = tuple(dispatch.Kernel(name, families.TRITON, "", prepare=name) for name in ("first", "second"))
    monkeypatch.setattr(dispatch, "kernels", lambda op, backend: found)
    monkeypatch.setattr(dispatch.Kernel, "load", lambda self: module)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return asked


@pytest.mark.parametrize("capturing", [False, True])
def test_what_declines_while_a_graph_is_captured_is_asked_again(monkeypatch, capturing):
    asked, kept, p = kernels(monkeypatch, capturing), {}, product()
    assert dispatch.prepare("linear", p, kept)() == "launched"
    assert asked == ["first", "second"] and bool(kept) == (not capturing)


def test_no_more_are_kept_than(monkeypatch):
    kernels(monkeypatch)
    monkeypatch.setattr(dispatch, "MOST", 2)
    kept = {}
    for m in (1, 2, 3):
        dispatch.prepare("linear", product(m=m), kept)
    assert [p.m for p in kept] == [3]


def test_a_problem_for_none(monkeypatch):
    monkeypatch.setattr(dispatch, "kernels", lambda op, backend: ())
    with pytest.raises(BackendError, match="linear: no kernel is for Product"):
        dispatch.prepare("linear", product(), {})


def test_a_description_tells_alignment():
    t = torch.empty(9, dtype=torch.bfloat16)
    assert operand(t)[3] and not operand(t[1:])[3] and operand(None) is None
