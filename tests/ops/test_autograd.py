"""Autograd of the ops: first gradients are supported; second gradients and transforms raise one clear error.

The calls follow from the ops' samples.
"""

import pytest
import torch
from torch.autograd import forward_ad

from alignkit import ops
from alignkit.errors import AlignkitError, InputError, UnsupportedError
from alignkit.ops.gated_delta_rule import chunk_gated_delta_rule_bwd_dhu
from alignkit.testing import assert_bitwise_equal
from tests.samples import GENERATORS, arguments, example, generate, leaves_of

X, W, Q, RULE = (torch.randn(6, 16), torch.randn(16, 16), torch.randn(6, 2, 8), torch.randn(1, 70, 1, 64))

SAMPLES = {f"{sample.op} {g.__name__}": sample for g in GENERATORS if not (sample := example(g, rows=6)).schema}
"""Name of an op and its generator -> a call. The custom ops are forward only."""
OPS = {name: sample for name, sample in SAMPLES.items() if leaves_of(sample)}
SEEN = [generate(g, seed, rows=6) for g in GENERATORS for seed in range(30)]
CONSTANTS = {
    f"{sample.op} {name}": (sample, name)
    for sample in SEEN
    if leaves_of(sample) and not sample.schema
    for name, t in sample.tensors().items()
    if t.value.is_floating_point() and not t.leaf
}
"""Op and argument without a gradient -> a call with that argument, and the argument."""
TRANSFORMED = {name: sample for name, sample in SAMPLES.items() if sample.tensors()}


def of(sample, names):
    """Return a sample as a function of these arguments with its floating-point results, and the arguments."""
    args = arguments(sample)
    names = [name for name in names if args[name] is not None]

    def function(*tensors):
        out = sample.call(**args | dict(zip(names, tensors, strict=True)))
        return tuple(t for t in (out if isinstance(out, tuple) else (out,)) if t is not None and t.is_floating_point())

    return function, [args[name] for name in names]


def differentiable(name):
    return of(OPS[name], leaves_of(OPS[name]))


def loss(out):
    return sum((o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in out)


def copies(tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", OPS)
def test_double_backward_is_rejected_by_name(name):
    function, tensors = differentiable(name)
    leaves = copies(tensors)
    grads = torch.autograd.grad(loss(function(*leaves)) ** 2, leaves, create_graph=True)
    message = rf"^{OPS[name].op}: double backward \(the gradient of a gradient\) is not supported"
    with pytest.raises(UnsupportedError, match=message):
        sum((g * g).sum() for g in grads).backward()
    for leaf in () if OPS[name].linear else leaves:  # each leaf alone, with an incoming gradient that has no graph
        outs = function(*leaves)
        (grad,) = torch.autograd.grad(outs, leaf, [torch.ones_like(o) for o in outs], create_graph=True)
        with pytest.raises(UnsupportedError, match=f"^{OPS[name].op}: "):
            torch.autograd.grad(grad.sum(), leaves, allow_unused=True)


def test_gradient_of_rope_has_no_graph():
    """Rotation is linear, so its gradient does not depend on the input."""
    (q,) = copies((Q,))
    (grad,) = torch.autograd.grad(
        ops.rope(q, torch.arange(6), ops.rope_table(8, 16, 1e4, q.device)).sum(), q, create_graph=True
    )
    assert not grad.requires_grad


@pytest.mark.parametrize("name", OPS)
def test_unused_double_backward_graph_changes_no_bit(name):
    function, tensors = differentiable(name)
    found = []
    for create_graph in (False, True):
        leaves = copies(tensors)
        for _ in range(2):
            loss(function(*leaves)).backward(create_graph=create_graph)
        found.append([t.grad.detach() for t in leaves])
    for a, b in zip(*found, strict=True):
        assert_bitwise_equal(a, b)


def test_arguments_without_a_gradient_are_known():
    assert sorted(CONSTANTS) == [
        "linear_logp main_grad",
        "linear_logp temperature",
        "logp_from_logits temperature",
        "moe_router bias",
        "qk_norm_rope table",
        "rope table",
    ]


@pytest.mark.parametrize("name", CONSTANTS)
def test_an_argument_that_gets_no_gradient_must_not_require_one(name):
    sample, argument = CONSTANTS[name]
    value = sample.tensors()[argument].value.to(torch.get_default_device())
    args = arguments(sample) | {argument: value.clone().requires_grad_()}
    with pytest.raises(InputError, match=f"^{argument}: must not require a gradient, .*, got requires_grad = True"):
        sample.call(**args)
    with torch.no_grad():
        sample.call(**args)
    sample.call(**args | {argument: value.clone()})


def test_gradient_penalty_of_an_mlp_raises():
    """No incoming gradient depends on the second weight here."""
    x, w1, w2 = copies((X, W, W))
    (grad,) = torch.autograd.grad(ops.linear(torch.tanh(ops.linear(x, w1)), w2).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"^linear: double backward \(the gradient of a gradient\)"):
        (grad**2).sum().backward()


def test_torch_gradcheck_passes_and_gradgradcheck_raises():
    def function(x, w):
        return ops.linear(x, w)

    x, w = copies((X[:2, :3].contiguous(), W[:2, :3].contiguous()))
    with pytest.warns(UserWarning, match="double precision"):  # noqa: PT031 - each of the two warns
        assert torch.autograd.gradcheck(function, (x, w), eps=1e-2, atol=1e-2, rtol=1e-2)
        with pytest.raises(UnsupportedError, match="^linear: "):
            torch.autograd.gradgradcheck(function, (x, w), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_results_of_the_gated_delta_rule_are_not_differentiable():
    leaves = copies((RULE,) * 5)
    dh, dh0, dv2 = chunk_gated_delta_rule_bwd_dhu(*leaves)
    with pytest.raises(UnsupportedError, match="^chunk_gated_delta_rule_bwd_dhu: "):
        (dh.sum() + dv2.sum()).backward()
    with torch.no_grad():
        assert dh0 is None and not chunk_gated_delta_rule_bwd_dhu(*leaves)[0].requires_grad


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("transform", ["vmap", "jvp", "vjp", "grad", "dual"])
def test_transforms_are_rejected(name, transform):
    sample = TRANSFORMED[name]
    function, tensors = of(sample, [n for n, t in sample.tensors().items() if t.value.is_floating_point()])
    tensors = tuple(tensors)
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
    function, tensors = differentiable(name)
    leaves = copies(tensors)
    out = function(*leaves)[0]
    with pytest.raises(AlignkitError, match=OPS[name].op) as e:
        torch.autograd.grad(out, leaves, torch.ones(3, *out.shape), is_grads_batched=True, allow_unused=True)
    assert "vmap" in str(e.value)


@pytest.mark.parametrize("name", OPS)
def test_incoming_gradients_may_be_views(name):
    """Use a negated, a zero and an expanded gradient."""
    function, tensors = differentiable(name)

    def grads(incoming):
        leaves = copies(tensors)
        out = function(*leaves)
        torch.autograd.backward(out, [incoming(o.detach()) for o in out])
        return [t.grad for t in leaves]

    for incoming, want in (
        (lambda o: torch.ones_like(o)._neg_view(), lambda o: -torch.ones_like(o)),
        (lambda o: torch._efficientzerotensor(o.shape, dtype=o.dtype, device=o.device), torch.zeros_like),
        (lambda o: torch.ones((), dtype=o.dtype).expand(o.shape), torch.ones_like),
    ):
        for a, b in zip(grads(incoming), grads(want), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", [name for name, sample in OPS.items() if sample.op.endswith("logits") or "logp" in name]
)
def test_sparse_gradients_are_rejected_by_name(name):
    function, tensors = differentiable(name)
    out = function(*copies(tensors))[0]
    with pytest.raises(AlignkitError, match=f"^{OPS[name].op}: the gradient of a result: expected a dense tensor"):
        out.backward(torch.ones_like(out).to_sparse())


@pytest.mark.parametrize("name", OPS)
def test_saved_tensor_hooks_may_change_strides(name):
    """A clone of overlapping windows has other strides too."""
    function, tensors = differentiable(name)

    def grads():
        leaves = copies(tensors)
        loss(function(*leaves)).backward()
        return [t.grad for t in leaves]

    want = grads()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT if t.ndim > 1 else t, lambda t: t):
        for a, b in zip(grads(), want, strict=True):
            assert_bitwise_equal(a, b)
