"""Every argument of every op, replaced by values of other kinds and ranges, raises one clear error.

The error begins with the caller's argument name; torch's defaults and modes do not matter. The valid calls follow from
the ops' samples. A subprocess imports `BASE` and `call` by name. test_bad_input.py lists single cases.
"""

import fractions
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from alignkit import ops
from alignkit.errors import BackendError, InputError, UnsupportedError
from alignkit.ops import library
from alignkit.ops.gated_delta_rule import fla
from alignkit.ops.samples import Scalar
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal
from tests.samples import GENERATORS, arguments, assert_same, example, results

from .helpers import CPU

X, W, B, T = torch.randn(6, 16), torch.randn(8, 16), torch.randn(8), torch.tensor([0, 1, 2, 3, -100, 5])
Q, KV, CU, POS = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.tensor([0, 2, 6]), torch.arange(6)
CACHE, PAGES = torch.randn(3, 4, 2, 8), torch.tensor([[0, 1], [2, 0]])
TABLE = ops.rope_table(8, 16, 1e4, X.device)

BASE = {f"{sample.op} {g.__name__}": sample for g in GENERATORS if not (sample := example(g, rows=6)).schema}
"""Name of an op and its generator -> a valid call of a public function."""
SCALARS = {(name, n): a for name, sample in BASE.items() for n, a in sample.given.items() if isinstance(a, Scalar)}
TENSORS = [(name, n) for name, sample in BASE.items() for n in sample.given if (name, n) not in SCALARS]
VALUES = ("temperature",)
"""Arguments that may be a number or a tensor."""


PAGED = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "block_table": PAGES, "query_start_loc": CU}
FIXED = {
    "paged_attention": (ops.paged_attention, PAGED | {"seq_lens": torch.tensor([2, 4])}),
    "linear_logp": (ops.linear_logp, {"hidden": X, "weight": W, "target": T, "bias": B}),
    "rope": (ops.rope, {"x": Q, "positions": POS, "table": TABLE}),
    "rope_table": (ops.rope_table, {"head_dim": 8, "max_position": 16, "base": 1e4}),
    "fla": (
        fla.chunk_gated_delta_rule_bwd_dhu,
        dict.fromkeys(("q", "k", "w", "do", "dv"), torch.randn(1, 70, 1, 64)) | {"cu_seqlens": torch.tensor([0, 70])},
    ),
}
"""Calls for the tests of one op."""


def call(name, **change):
    """Make the valid call `name` with changed arguments."""
    function, args = FIXED[name] if name in FIXED else (BASE[name].call, arguments(BASE[name]))
    return function(**args | change)


def assert_rejected(name, argument, value):
    with pytest.raises(InputError) as e:
        call(name, **{argument: value})
    assert str(e.value).startswith(f"{argument}: "), str(e.value)


def of_kind(*kinds):
    return pytest.mark.parametrize("name,argument", [key for key, a in SCALARS.items() if a.kind in kinds])


@pytest.mark.parametrize("name", BASE)
def test_base_call_is_valid(name):
    call(name)


@of_kind("positive", "positive finite", "finite")
def test_number_rejects_other_kinds_and_ranges(name, argument):
    a = SCALARS[name, argument]
    wrong = ["x", [1.0], True, 1j, np.ones(2), torch.float32, *a.bad]
    wrong += [float("nan"), float("inf"), -float("inf"), 10**400, 1e39, np.float32("nan")]
    wrong += [torch.tensor(1.0)] * (argument not in VALUES) + [None] * (not a.optional)
    wrong += [0, 0.0, -1.0, 1e-60] * (a.kind != "finite")
    for value in wrong:
        assert_rejected(name, argument, value)
    want = results(lambda: call(name, **{argument: 2.0}), {})
    for value in (2, np.float32(2), np.float64(2), np.int64(2), fractions.Fraction(2)):
        assert_same(results(lambda value=value: call(name, **{argument: value}), {}), want, repr(value))


@of_kind("int", "positive int")
def test_integer_rejects_other_kinds_and_ranges(name, argument):
    a = SCALARS[name, argument]
    wrong = ["x", 6.5, 6.0, True, float("nan"), 2**70, torch.tensor(6), np.float64(6), [6], *a.bad]
    wrong += [None] * (not a.optional) + [0, -3] * (a.kind == "positive int")
    for value in wrong:
        assert_rejected(name, argument, value)
    if a.value is not None:
        call(name, **{argument: np.int32(a.value)})


@of_kind("flag")
def test_flag_rejects_other_kinds(name, argument):
    for value in ("x", None, 2, 1.0, torch.tensor(True), []):
        assert_rejected(name, argument, value)
    call(name, **{argument: np.bool_(SCALARS[name, argument].value)})


@of_kind("tp", "dtype", "score")
def test_other_argument_rejects_other_kinds(name, argument):
    for value in (3, "x", 1.0, [], np.ones(2), *SCALARS[name, argument].bad):
        assert_rejected(name, argument, value)


@pytest.mark.parametrize("name,argument", [key for key in TENSORS if key[1] not in VALUES])
def test_tensor_argument_rejects_other_kinds(name, argument):
    for value in (3, "x", 1.0, [], np.ones(2)):
        assert_rejected(name, argument, value)


@pytest.mark.skipif(not CPU, reason="values on a GPU are not validated")
@pytest.mark.parametrize(
    "name,fault", [(name, fault[0]) for name, sample in BASE.items() for fault in sample.faults], ids=str
)
def test_fault_of_an_op_is_rejected_by_name(name, fault):
    """The faults are those of the samples, such as ids out of range."""
    (_, put, names), args = next(f for f in BASE[name].faults if f[0] == fault), arguments(BASE[name])
    put(args)
    with pytest.raises(InputError) as e:
        BASE[name].call(**args)
    assert str(e.value).startswith(tuple(names)), str(e.value)


def unreadable(t):
    """Yield tensors and other objects, made from t, that kernels cannot read."""
    yield "meta", t.to("meta")
    yield "sparse", t.to_sparse()
    if t.ndim > 1:
        yield "nested", torch.nested.nested_tensor(list(t))
        yield "jagged", torch.nested.nested_tensor(list(t), layout=torch.jagged)
    yield "complex", t.to(torch.complex64)
    yield "negated", torch._neg_view(t) if t.is_floating_point() else None
    yield "bool", t.bool()
    yield "float64", t.double()
    yield "quantized", torch.quantize_per_tensor(t.float().cpu(), 0.1, 0, torch.qint8)
    yield "fake", FakeTensorMode().from_tensor(t)
    freed = t.clone()
    freed.untyped_storage().resize_(0)
    yield "freed", freed
    yield "zero", torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)
    yield "number", 3
    yield "list", t.tolist()
    yield "array", t.float().cpu().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,argument", [key for key in TENSORS if key[1] not in VALUES])
def test_tensor_argument_rejects_unreadable_tensors(name, argument):
    t = arguments(BASE[name])[argument]
    for kind, value in unreadable(t) if t is not None else ():
        if value is None:
            continue
        with pytest.raises((InputError, BackendError)) as e:
            call(name, **{argument: value})
        message = str(e.value)
        # An error about two devices or dtypes may name the other tensor.
        assert message.startswith(f"{argument}: ") or (kind in ("meta", "float64") and f"{argument}'s" in message), (
            kind,
            message,
        )


def test_errors_use_the_callers_names():
    for change, message in (
        ({"k_cache": CACHE.bfloat16()}, "k_cache: dtype"),
        ({"v_cache": CACHE.bfloat16()}, "v_cache: dtype"),
        ({"k_cache": CACHE[..., :4], "v_cache": CACHE[..., :4]}, "k_cache: head_dim must equal q's 8, got 4"),
        ({"q": Q[:, :3]}, "k_cache: number of heads must divide q's 3, got 2"),
        ({"q": Q[:, :0]}, "q: number of heads and head_dim must be at least 1"),
        ({"k_cache": CACHE.transpose(2, 3).contiguous().transpose(2, 3)}, "k_cache: stride of head_dim must be 1"),
    ):
        with pytest.raises(InputError, match="^" + message):
            call("paged_attention", **change)
    positions = torch.arange(6)
    with pytest.raises(InputError, match="^k: expected 3"):
        library.rope_qk(Q, KV[0], positions, TABLE)
    with pytest.raises(InputError, match="^k: expected 3"):
        library.qk_norm_rope(Q, KV[0], B, B, 1e-6, positions, TABLE)
    with pytest.raises(InputError, match="^k_weight: expected a tensor, got None"):
        torch.ops.alignkit.qk_norm_rope(Q, KV, B, None, 1e-6, positions, TABLE)
    if CPU:  # the expected number depends on values
        with pytest.raises(InputError, match="^chunk_indices: must be 2, the number of chunks in cu_seqlens, got 5"):
            call("fla", chunk_indices=torch.zeros(5, 2))
    with pytest.raises(InputError, match="^x: head_dim must be even and positive, got 7"):
        call("rope", x=Q[..., :7], table=TABLE[:, :7])
    for argument in ("table", "positions"):
        with pytest.raises(InputError, match=f"^{argument}: device"):
            call("rope", **{argument: FIXED["rope"][1][argument].to("meta")})
    for device in ("nowhere", "cuda:99", None, 1.5):
        assert_rejected("rope_table", "device", device)


def test_output_that_shares_memory_is_rejected():
    both = torch.zeros(3, 8, 16)
    weight, main_grad, hidden = both[0].requires_grad_(), both[0].detach(), both[1, :6].detach()
    for change, other in (
        ({"weight": weight, "main_grad": main_grad}, "weight"),
        ({"hidden": hidden, "main_grad": both[1].detach()}, "hidden"),
        ({"bias": both[2, 3, :8].detach(), "main_grad": both[2].detach()}, "bias"),
    ):
        with pytest.raises(InputError, match=f"^main_grad: must not share memory with {other}$"):
            call("linear_logp", **change)
    weight = W.clone().requires_grad_()
    weight.grad = torch.zeros(8, 16)
    with pytest.raises(InputError, match=r"^main_grad: must not share memory with weight\.grad$"):
        call("linear_logp", weight=weight, main_grad=weight.grad)
    grads = torch.zeros(8 * 16 + 6)
    logp = call("linear_logp", weight=weight, main_grad=grads[:128].view(8, 16))
    with pytest.raises(InputError, match="^main_grad: must not share memory with the gradient of logp"):
        logp.backward(grads[100:106])
    call("linear_logp", weight=weight, main_grad=grads[:128].view(8, 16)).backward(grads[128:])
    q = Q.clone()
    with pytest.raises(InputError, match="^out: must not share memory with q"):
        call("paged_attention", q=q, out=q)


def test_batches_without_sequences():
    none = torch.zeros(0, dtype=torch.int64)
    empty = {"q": Q[:0], "block_table": PAGES[:0], "query_start_loc": torch.tensor([0]), "seq_lens": none}
    assert call("paged_attention", **empty).shape == (0, 4, 8)
    with pytest.raises(InputError, match="^cu_seqlens: at least one sequence must have rows|^q: must not be empty"):
        call(
            "fla",
            **{name: t[:, :0] for name, t in FIXED["fla"][1].items() if t.ndim > 1},
            cu_seqlens=torch.tensor([0, 0]),
        )


def test_writing_to_a_rope_table_does_not_change_the_cache():
    want = ops.rope_table(8, 32, 3e4, X.device).clone()
    ops.rope_table(8, 32, 3e4, X.device).zero_()
    ops.rope_table(8, 32, 3e4, X.device).data.fill_(7)
    assert_bitwise_equal(ops.rope_table(8, 32, 3e4, X.device), want)


def test_rope_table_from_inference_mode_can_train():
    with torch.inference_mode():
        table = ops.rope_table(8, 17, 2e4, X.device)
        ops.rope(Q, POS, table)
    for either in (table, ops.rope_table(8, 17, 2e4, X.device)):
        q = Q.clone().requires_grad_()
        ops.rope(q, POS, either).sum().backward()
        assert q.grad.isfinite().all()


EVERYTHING = """
import torch
from alignkit.runtime import dispatch
from tests.ops.test_arguments import BASE
from tests.samples import arguments, leaves_of, results
from alignkit.ops.rope import _table
given = {name: arguments(sample) for name, sample in BASE.items()}
def everything():
    _table.cache_clear()
    for name, sample in BASE.items():
        results(sample.call, given[name], leaves_of(sample))
"""


@pytest.mark.parametrize("context", ["torch.device('meta')", "FakeTensorMode()"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_default_device_without_memory(backend, context):
    """A separate process contains a segmentation fault."""
    if backend == "reference" and X.is_cuda:
        pytest.skip("the reference backend runs on the CPU")
    if context == "FakeTensorMode()":
        code = (
            EVERYTHING
            + f"""
from torch._subclasses.fake_tensor import FakeTensorMode
from alignkit.errors import UnsupportedError
with dispatch.use({backend!r}):
    for name in BASE:
        try:
            with {context}:
                BASE[name].call(**given[name])
        except UnsupportedError as e:
            assert "FakeTensorMode" in str(e), e
        else:
            raise AssertionError(name)
"""
        )
    else:
        code = (
            EVERYTHING
            + f"""
with dispatch.use({backend!r}), {context}:
    everything()
"""
        )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_custom_ops_have_fake_kernels():
    with FakeTensorMode() as mode:
        x, w, q, k, table = (mode.from_tensor(t) for t in (X, W, Q, KV, TABLE))
        assert library.linear(x, w, None).shape == (6, 8)
        assert library.rms_norm(x, w[0], 1e-6).shape == X.shape
        assert library.rope_qk(q, k, torch.arange(6), table)[1].shape == KV.shape
        assert library.qk_norm_rope(q, k, q[0, 0], q[0, 0], 1e-6, torch.arange(6), table)[1].shape == KV.shape
        assert library.silu_mul(x, x).shape == X.shape
    with pytest.raises(InputError, match="^up: dtype"):
        library.silu_mul(X, X.bfloat16())


def test_fake_mode_raises_an_alignkit_error():
    with pytest.raises(UnsupportedError, match="^linear: unsupported under FakeTensorMode"), FakeTensorMode():
        ops.linear(X, W)


@pytest.mark.parametrize("choice", ["triton", "cuda"])
def test_rope_table_is_computed_on_the_cpu_for_every_gpu_backend(choice):
    want = ops.rope_table(64, 37, 7.0)
    with dispatch.use(choice):
        got = ops.rope_table(64, 38, 7.0)
    assert_bitwise_equal(got[:37], want)
