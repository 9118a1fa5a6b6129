"""Mixture of experts against float64, within bounds that follow from the types; and the library's ops against the ops."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit import ops
from alignkit.ops import library
from alignkit.testing import assert_bitwise_equal

from .helpers import dtypes, randn, seeds


@given(n=st.sampled_from([1, 4, 12, 60]), k=st.integers(1, 4), rows=st.integers(1, 9), dtype=dtypes, seed=seeds)
def test_library(n, k, rows, dtype, seed):
    k = min(k, n)
    x, gate, gate_up, down = (
        randn(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(((rows, 24), (n, 24), (n, 32, 24), (n, 24, 16)))
    )
    logits = ops.linear(x, gate, out_dtype=torch.float32)
    assert_bitwise_equal(library.linear_fp32(x, gate, None), logits)
    chosen = ops.moe_router(logits, k)
    for a, b in zip(library.moe_router(logits, k, "softmax", True, None, 1, 1, 1.0), chosen, strict=True):
        assert_bitwise_equal(a, b)
    out = ops.moe_experts(x, chosen[1], chosen[0], gate_up, down)
    assert_bitwise_equal(library.moe_experts(x, chosen[1], chosen[0], gate_up, down, n, 0, "", "", False), out)
    assert_bitwise_equal(ops.moe_experts(x, chosen[1].int(), chosen[0], list(gate_up), list(down)), out)
    assert_bitwise_equal(library.sigmoid_mul(logits[:, :1], x), ops.sigmoid_mul(logits[:, :1], x))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_router_against_float64(score, normalize):
    z = randn(50, 60, scale=3, seed=1).requires_grad_()
    weights, ids = ops.moe_router(z, 4, score=score, normalize=normalize, scale=1.5)
    exact = z.detach().double().requires_grad_()
    scores = exact.softmax(1) if score == "softmax" else exact.sigmoid()
    want = scores.gather(1, ids)
    want = (want / want.sum(1, keepdim=True) if normalize else want) * 1.5
    assert (ids == z.topk(4).indices.sort().values).all()
    g = randn(50, 4)
    weights.backward(g)
    want.backward(g.double())
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(z.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
