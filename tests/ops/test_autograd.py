"""Autograd of the ops: first gradients are supported; second gradients and transforms raise one clear error.

A new op needs an entry in OPS.
"""

import pytest
import torch
from torch.autograd import forward_ad

from alignkit import ops
from alignkit.errors import AlignkitError, UnsupportedError
from alignkit.ops.gated_delta_rule import chunk_gated_delta_rule_bwd_dhu
from alignkit.testing import assert_bitwise_equal

X, W, B, UP = (torch.randn(6, 16), torch.randn(16, 16), torch.randn(16), torch.randn(6, 16))
T, Q, CU, POS = torch.tensor([0, 1, 2, 3, -100, 5]), torch.randn(6, 2, 8), torch.tensor([0, 2, 6]), torch.arange(6)
TABLE = ops.rope_table(8, 16, 1e4, X.device)
RULE = torch.randn(1, 70, 1, 64)
IDS, SHARES = torch.tensor([[0, 2], [1, 0], [2, -1], [-1, -1], [2, 1], [0, 1]]), torch.rand(6, 2)
EXPERTS = torch.randn(3, 24, 16), torch.randn(3, 16, 12)

OPS = {
    "linear": (ops.linear, (X, W, B)),
    "row_parallel_linear": (ops.row_parallel_linear, (X, W, B)),
    "rms_norm": (lambda x, w, r: ops.rms_norm(x, w, 1e-6, r), (X, B, UP)),
    "silu_mul": (ops.silu_mul, (X, UP)),
    "sigmoid_mul": (lambda x, gate: ops.sigmoid_mul(gate, x), (X, X[:, :1].contiguous())),
    "moe_router": (lambda z: ops.moe_router(z, 3)[0], (X,)),
    "moe_experts": (lambda x, w, *e: ops.moe_experts(x, IDS, w, *e), (X, SHARES, *EXPERTS)),
    "rope": (lambda x: ops.rope(x, POS, TABLE), (Q,)),
    "attention": (lambda q, k, v: ops.attention(q, k, v, CU), (Q, Q.flip(0), Q.flip(1))),
    "linear_logp": (lambda h, w, b: ops.linear_logp(h, w, T, bias=b, return_entropy=True), (X, W, B)),
    "logp_from_logits": (lambda z: ops.logp_from_logits(z, T), (X,)),
}
"""Op and differentiable inputs. test_arguments.py imports `OPS` and `leaves_of` by name in a subprocess."""
OTHERS = {
    "head_logits": (ops.head_logits, (X, W, B)),
    "log_softmax": (ops.log_softmax, (X,)),
    "token_logp": (lambda z: ops.token_logp(z, T.clamp(min=0)[:, None]), (X,)),
    "paged_attention": (
        lambda q, k: ops.paged_attention(
            q, k[None], k[None], torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 6]), torch.tensor([6])
        ),
        (Q, Q),
    ),
    "chunk_gated_delta_rule_bwd_dhu": (lambda *t: chunk_gated_delta_rule_bwd_dhu(*t)[::2], (RULE,) * 5),
}
"""Ops without gradients."""


def loss(out):
    return sum(
        (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in (out if isinstance(out, tuple) else (out,))
    )


def leaves_of(tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", OPS)
def test_double_backward_is_rejected_by_name(name):
    function, tensors = OPS[name]
    leaves = leaves_of(tensors)
    grads = torch.autograd.grad(loss(function(*leaves)) ** 2, leaves, create_graph=True)
    with pytest.raises(
        UnsupportedError, match=rf"^{name}: double backward \(the gradient of a gradient\) is not supported"
    ):
        sum((g * g).sum() for g in grads).backward()
    for leaf in leaves if name != "rope" else ():  # each leaf alone, with an incoming gradient that has no graph
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        (grad,) = torch.autograd.grad(outs, leaf, [torch.ones_like(o) for o in outs], create_graph=True)
        with pytest.raises(UnsupportedError, match=f"^{name}: "):
            torch.autograd.grad(grad.sum(), leaves, allow_unused=True)


def test_gradient_of_rope_has_no_graph():
    """Rotation is linear, so its gradient does not depend on the input."""
    (q,) = leaves_of((Q,))
    (grad,) = torch.autograd.grad(ops.rope(q, POS, TABLE).sum(), q, create_graph=True)
    assert not grad.requires_grad


@pytest.mark.parametrize("name", OPS)
def test_unused_double_backward_graph_changes_no_bit(name):
    function, tensors = OPS[name]
    found = []
    for create_graph in (False, True):
        leaves = leaves_of(tensors)
        for _ in range(2):
            loss(function(*leaves)).backward(create_graph=create_graph)
        found.append([t.grad.detach() for t in leaves])
    for a, b in zip(*found, strict=True):
        assert_bitwise_equal(a, b)


def test_gradient_penalty_of_an_mlp_raises():
    """No incoming gradient depends on the second weight here."""
    x, w1, w2 = leaves_of((X, W, W))
    (grad,) = torch.autograd.grad(ops.linear(torch.tanh(ops.linear(x, w1)), w2).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"^linear: double backward \(the gradient of a gradient\)"):
        (grad**2).sum().backward()


def test_torch_gradcheck_passes_and_gradgradcheck_raises():
    def function(x, w):
        return ops.linear(x, w)

    x, w = leaves_of((X[:2, :3].contiguous(), W[:2, :3].contiguous()))
    with pytest.warns(UserWarning, match="double precision"):  # noqa: PT031 - each of the two warns
        assert torch.autograd.gradcheck(function, (x, w), eps=1e-2, atol=1e-2, rtol=1e-2)
        with pytest.raises(UnsupportedError, match="^linear: "):
            torch.autograd.gradgradcheck(function, (x, w), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_results_of_the_gated_delta_rule_are_not_differentiable():
    leaves = leaves_of((RULE,) * 5)
    dh, dh0, dv2 = chunk_gated_delta_rule_bwd_dhu(*leaves)
    with pytest.raises(UnsupportedError, match="^chunk_gated_delta_rule_bwd_dhu: "):
        (dh.sum() + dv2.sum()).backward()
    with torch.no_grad():
        assert dh0 is None and not chunk_gated_delta_rule_bwd_dhu(*leaves)[0].requires_grad


@pytest.mark.parametrize("name", [*OPS, *OTHERS])
@pytest.mark.parametrize("transform", ["vmap", "jvp", "vjp", "grad", "dual"])
def test_transforms_are_rejected(name, transform):
    function, tensors = (OPS | OTHERS)[name]
    with pytest.raises(AlignkitError, match=r"torch\.func|forward-mode"):  # noqa: PT012 - one of them runs
        if transform == "vmap":
            torch.vmap(function)(*(t[None] for t in tensors))
        elif transform == "jvp":
            torch.func.jvp(function, tensors, tensors)
        elif transform == "vjp":
            torch.func.vjp(function, *tensors)
        elif transform == "grad":
            torch.func.grad(lambda *t: loss(function(*t)))(*tensors)
        else:
            with forward_ad.dual_level():
                function(*(forward_ad.make_dual(t, t) for t in tensors))


def test_call_without_tensors_inside_a_transform_is_rejected():
    with pytest.raises(UnsupportedError, match=r"^rope_table: .*torch\.func"):
        torch.func.grad(lambda x: (x * ops.rope_table(2, 8, 1e4)[0]).sum())(torch.ones(2))


@pytest.mark.parametrize("name", OPS)
def test_batched_gradients_are_rejected(name):
    function, tensors = OPS[name]
    leaves = leaves_of(tensors)
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    with pytest.raises(AlignkitError, match=name) as e:
        torch.autograd.grad(out, leaves, torch.ones(3, *out.shape), is_grads_batched=True, allow_unused=True)
    assert "vmap" in str(e.value)


@pytest.mark.parametrize("name", OPS)
def test_incoming_gradients_may_be_views(name):
    """Use a negated, a zero and an expanded gradient."""
    function, tensors = OPS[name]

    def grads(incoming):
        leaves = leaves_of(tensors)
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(out, [incoming(o.detach()) for o in out])
        return [t.grad for t in leaves]

    for incoming, want in (
        (lambda o: torch.ones_like(o)._neg_view(), lambda o: -torch.ones_like(o)),
        (lambda o: torch._efficientzerotensor(o.shape, dtype=o.dtype, device=o.device), torch.zeros_like),
        (lambda o: torch.ones((), dtype=o.dtype).expand(o.shape), torch.ones_like),
    ):
        for a, b in zip(grads(incoming), grads(want), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["linear_logp", "logp_from_logits"])
def test_sparse_gradients_are_rejected_by_name(name):
    function, tensors = OPS[name]
    out = function(*leaves_of(tensors))
    out = out[0] if isinstance(out, tuple) else out
    with pytest.raises(AlignkitError, match=f"^{name}: the gradient of a result: expected a dense tensor"):
        out.backward(torch.ones_like(out).to_sparse())


@pytest.mark.parametrize("name", OPS)
def test_saved_tensor_hooks_may_change_strides(name):
    """A clone of overlapping windows has other strides too."""
    function, tensors = OPS[name]

    def grads():
        leaves = leaves_of(tensors)
        loss(function(*leaves)).backward()
        return [t.grad for t in leaves]

    want = grads()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT if t.ndim > 1 else t, lambda t: t):
        for a, b in zip(grads(), want, strict=True):
            assert_bitwise_equal(a, b)
