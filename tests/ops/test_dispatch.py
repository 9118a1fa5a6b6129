"""Choice of the kernel for a problem, without a GPU. No choice changes a bit.

choices.json holds random problems of the GPU family by op; ``answer`` is the kernel that must be chosen, "separate" if
the head's GEMM and its elementwise kernel run separately. ``proven`` says whether cuBLASLt has an algorithm that passed
its trial. A rule or cost model that changes a choice changes its answer here. tests/cli/test_explain.py reads
the file too.
"""

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

from .helpers import gemm

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


def chosen_kernel(op: str, p: dict) -> str:
    if op == "rms_norm" and p["residual"]:
        op = "add_rms_norm"
    described_problem = problem(op.removeprefix("add_"), p)
    accepting = [
        k.name for k in dispatch.kernels(op, described_problem.backend) if k.rejects(described_problem) is None
    ]
    assert (
        dispatch.choose(op, described_problem).name
        == dispatch.explain(op, described_problem)[-1][0].name
        == accepting[0]
    )
    if op == "linear" and not p["proven"] and accepting[0] == "cublaslt":  # cuBLASLt declines on the device
        return accepting[1]
    return "separate" if op.startswith("head_") and accepting[0] == "triton" else accepting[0]


@pytest.mark.parametrize("op", CHOICES)
def test_choices_match_the_table(op):
    for p in CHOICES[op]:
        assert chosen_kernel(op, p) == p["answer"], p


def test_table_covers_every_linear_kernel():
    seen = {p["answer"] for p in CHOICES["linear"]}
    assert seen == {k.name for k in dispatch.kernels("linear", families.CUDA)}


def test_backend_falls_back_within_its_family():
    skinny = gemm(leaves=8)
    assert dispatch.choose("linear", skinny).name == "tree"
    assert dispatch.choose("linear", skinny._replace(backend=families.TRITON)).name == "tiles"
    assert dispatch.choose("linear", skinny._replace(backend=families.REFERENCE)).name == "reference"
    assert dispatch.choose("linear", skinny._replace(backend=families.NATIVE)).name == "cpu"
    assert [k.name for k in dispatch.kernels("gated_delta_rule", families.NATIVE)] == ["reference"]


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("op", dispatch.OPS)
def test_last_kernel_of_each_backend_accepts_every_problem(op, family):
    """The modules that the records load must exist too."""
    for backend in family.backends:
        found = dispatch.kernels(op, backend)
        assert found and not found[-1].rule
        for kernel in found:
            assert kernel.load().__name__.startswith(f"alignkit.ops.{dispatch.OPS[op]}.")


def test_unknown_op_is_rejected():
    with pytest.raises(InputError, match="op: must be one of attention, .*, got 'matmul'"):
        dispatch.order("matmul")


def fake_kernels(monkeypatch, capturing=False):
    """Install two fake kernels, the first of which declines; return the log of prepare calls."""
    prepared = []
    launches = {"first": None, "second": lambda: "launched"}
    found = tuple(
        dispatch.Kernel(
            name,
            families.TRITON,
            lambda: dispatch,
            prepare=lambda p, name=name: prepared.append(name) or launches[name],
        )
        for name in launches
    )
    monkeypatch.setattr(dispatch, "kernels", lambda op, backend: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return prepared


@pytest.mark.parametrize("capturing", [False, True])
def test_decision_during_graph_capture_is_not_cached(monkeypatch, capturing):
    prepared, cache, p = fake_kernels(monkeypatch, capturing), {}, gemm()
    assert dispatch.prepare("linear", p, cache)() == "launched"
    assert prepared == ["first", "second"] and bool(cache) == (not capturing)


def test_cache_of_decisions_is_bounded(monkeypatch):
    fake_kernels(monkeypatch)
    monkeypatch.setattr(dispatch, "MAX_CACHED", 2)
    cache = {}
    for m in (1, 2, 3):
        dispatch.prepare("linear", gemm(m=m), cache)
    assert [p.m for p in cache] == [3]


def test_problem_without_a_kernel_raises(monkeypatch):
    monkeypatch.setattr(dispatch, "kernels", lambda op, backend: ())
    with pytest.raises(BackendError, match="linear: no kernel supports this problem"):
        dispatch.prepare("linear", gemm(), {})


def test_operand_records_alignment():
    t = torch.empty(9, dtype=torch.bfloat16)
    assert operand(t)[3] and not operand(t[1:])[3] and operand(None) is None
