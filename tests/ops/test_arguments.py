"""Every argument of every op, replaced by values of other kinds and ranges, raises one clear error.

The error begins with the caller's argument name; torch's defaults and modes do not matter. A new op needs its valid
arguments in BASE. A subprocess imports `BASE` and `call` by name. test_bad_input.py lists single cases.
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
from alignkit.ops.gated_delta_rule import chunk_gated_delta_rule_bwd_dhu, fla
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU

X, W, B, T = torch.randn(6, 16), torch.randn(8, 16), torch.randn(8), torch.tensor([0, 1, 2, 3, -100, 5])
N, Q, KV, CU, POS = (
    torch.randn(16),
    torch.randn(6, 4, 8),
    torch.randn(6, 2, 8),
    torch.tensor([0, 2, 6]),
    torch.arange(6),
)
CACHE, PAGES = torch.randn(3, 4, 2, 8), torch.tensor([[0, 1], [2, 0]])
TABLE = ops.rope_table(8, 16, 1e4, X.device)
RULE, PACKED = torch.randn(1, 70, 1, 64), torch.tensor([0, 70])

LOGITS, IDS = torch.randn(6, 8), torch.tensor([[0, 2], [1, 0], [2, -1], [-1, -1], [2, 1], [0, 1]])
SHARES, EXPERTS = torch.rand(6, 2), {"gate_up": torch.randn(3, 24, 16), "down": torch.randn(3, 16, 12)}

BASE = {
    "linear": (ops.linear, {"x": X, "weight": W, "bias": B}),
    "row_parallel_linear": (ops.row_parallel_linear, {"x": X, "weight": W, "bias": B}),
    "rms_norm": (ops.rms_norm, {"x": X, "weight": N, "eps": 1e-6, "residual": X}),
    "silu_mul": (ops.silu_mul, {"gate": X, "up": X}),
    "sigmoid_mul": (ops.sigmoid_mul, {"gate": X[:, :1], "x": X}),
    "moe_router": (ops.moe_router, {"logits": LOGITS, "top_k": 2, "score": "sigmoid", "bias": B, "groups": 2}),
    "moe_experts": (ops.moe_experts, {"x": X, "ids": IDS, "weights": SHARES, **EXPERTS}),
    "rope": (ops.rope, {"x": Q, "positions": POS, "table": TABLE}),
    "qk_norm_rope": (
        ops.qk_norm_rope,
        {"q": Q, "k": KV, "q_weight": B, "k_weight": B, "eps": 1e-6, "positions": POS, "table": TABLE},
    ),
    "rope_table": (ops.rope_table, {"head_dim": 8, "max_position": 16, "base": 1e4, "device": X.device}),
    "attention": (ops.attention, {"q": Q, "k": KV, "v": KV, "cu_seqlens": CU}),
    "paged_attention": (
        ops.paged_attention,
        {
            "q": Q,
            "k_cache": CACHE,
            "v_cache": CACHE,
            "block_table": PAGES,
            "query_start_loc": CU,
            "seq_lens": torch.tensor([2, 4]),
        },
    ),
    "linear_logp": (ops.linear_logp, {"hidden": X, "weight": W, "target": T, "bias": B}),
    "logp_from_logits": (ops.logp_from_logits, {"logits": X, "target": T}),
    "head_logits": (ops.head_logits, {"hidden": X, "weight": W, "bias": B}),
    "log_softmax": (ops.log_softmax, {"logits": X}),
    "token_logp": (ops.token_logp, {"logits": X, "token_ids": T[:, None].clamp(min=0)}),
    "chunk_gated_delta_rule_bwd_dhu": (
        chunk_gated_delta_rule_bwd_dhu,
        {"q": RULE, "k": RULE, "w": RULE, "do": RULE, "dv": RULE, "g": RULE[..., 0], "cu_seqlens": PACKED},
    ),
    "fla": (
        fla.chunk_gated_delta_rule_bwd_dhu,
        {"q": RULE, "k": RULE, "w": RULE, "do": RULE, "dv": RULE, "g": RULE[..., 0], "cu_seqlens": PACKED},
    ),
}
NUMBERS = {
    "rms_norm": ["eps"],
    "qk_norm_rope": ["eps"],
    "moe_router": ["scale"],
    "rope_table": ["base"],
    "attention": ["scale"],
    "paged_attention": ["scale"],
    "linear_logp": ["temperature", "soft_cap", "logit_scale"],
    "logp_from_logits": ["temperature"],
    "head_logits": ["soft_cap", "logit_scale"],
    "log_softmax": ["temperature"],
    "token_logp": ["temperature"],
    "chunk_gated_delta_rule_bwd_dhu": ["scale"],
    "fla": ["scale"],
}
INTEGERS = {
    "moe_router": ["top_k", "groups", "top_groups"],
    "moe_experts": ["num_experts", "first_expert"],
    "rope_table": ["head_dim", "max_position"],
    "rope": ["rotary_dim"],
    "qk_norm_rope": ["rotary_dim"],
    "log_softmax": ["vocab_size"],
    "linear_logp": ["ignore_index", "vocab_size", "vocab_start", "workspace"],
    "logp_from_logits": ["ignore_index", "vocab_size", "vocab_start"],
    "chunk_gated_delta_rule_bwd_dhu": ["num_chunks"],
    "fla": ["chunk_size"],
}
FLAGS = {
    "moe_router": ["normalize"],
    "moe_experts": ["gather"],
    "linear": ["sequence_parallel"],
    "row_parallel_linear": ["sequence_parallel"],
    "rms_norm": ["zero_centered"],
    "qk_norm_rope": ["zero_centered"],
    "linear_logp": ["return_entropy", "keep_logits"],
    "logp_from_logits": ["return_entropy"],
    "chunk_gated_delta_rule_bwd_dhu": ["state_v_first", "base2", "need_dh0"],
    "fla": ["state_v_first", "use_exp2", "transpose_state_layout"],
}
OPTIONAL = {"scale", "rotary_dim", "num_experts", "soft_cap", "vocab_size", "workspace", "num_chunks"}
NAMED = {
    "ep": ["moe_experts"],
    "tp": ["moe_experts", "linear", "row_parallel_linear", "linear_logp", "logp_from_logits"],
    "out_dtype": ["linear", "row_parallel_linear"],
    "out": ["paged_attention"],
    "main_grad": ["linear_logp"],
}


def call(name, **change):
    function, arguments = BASE[name]
    return function(**(arguments | change))


def assert_rejected(name, argument, value, kind=InputError):
    with pytest.raises(kind) as e:
        call(name, **{argument: value})
    assert str(e.value).startswith(f"{argument}: "), str(e.value)


def pairs(table):
    return [(name, argument) for name, arguments in table.items() for argument in arguments]


@pytest.mark.parametrize("name", BASE)
def test_base_call_is_valid(name):
    call(name)


@pytest.mark.parametrize("name,argument", pairs(NUMBERS))
def test_number_rejects_other_kinds_and_ranges(name, argument):
    wrong = [
        "x",
        [1.0],
        True,
        1j,
        float("nan"),
        float("inf"),
        -float("inf"),
        10**400,
        1e39,
        np.float32("nan"),
        np.ones(2),
        torch.float32,
    ]
    if argument != "temperature":
        wrong.append(torch.tensor(1.0))
    if argument not in OPTIONAL:
        wrong.append(None)
    if argument not in ("logit_scale", "scale") or "attention" in name:
        wrong += [0, 0.0, -1.0, 1e-60]
    for value in wrong:
        assert_rejected(name, argument, value)
    want = call(name, **{argument: 2.0})
    for value in (2, np.float32(2), np.float64(2), np.int64(2), fractions.Fraction(2)):
        got = call(name, **{argument: value})
        for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
            assert a is b or torch.equal(a, b), repr(value)


@pytest.mark.parametrize("name,argument", pairs(INTEGERS))
def test_integer_rejects_other_kinds_and_ranges(name, argument):
    wrong = ["x", 6.5, 6.0, True, float("nan"), 2**70, torch.tensor(6), np.float64(6), [6]]
    wrong += [None] * (argument not in OPTIONAL) + [-3] * (argument != "ignore_index")
    for value in wrong:
        assert_rejected(name, argument, value)
    right = {"vocab_start": 0, "num_chunks": 2, "chunk_size": 64, "vocab_size": 7}
    right |= {"top_k": 2, "groups": 2, "top_groups": 1, "num_experts": 3, "first_expert": 0}
    right = right.get(argument, 8)
    if argument == "ignore_index":
        right = -100
    call(name, **{argument: np.int32(right)})


@pytest.mark.parametrize("name,argument", pairs(FLAGS))
def test_flag_rejects_other_kinds(name, argument):
    for value in ("x", None, 2, 1.0, torch.tensor(True), []):
        assert_rejected(name, argument, value)
    call(name, **{argument: np.bool_(False)})


@pytest.mark.parametrize("argument,name", [(argument, name) for argument, names in NAMED.items() for name in names])
def test_other_argument_rejects_other_kinds(argument, name):
    for value in (3, "x", 1.0, [], np.ones(2)):
        assert_rejected(name, argument, value)


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
    yield "array", t.cpu().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BASE)
def test_tensor_argument_rejects_unreadable_tensors(name):
    for argument, t in BASE[name][1].items():
        if isinstance(t, torch.Tensor):
            for kind, value in unreadable(t):
                if value is None:
                    continue
                with pytest.raises((InputError, BackendError)) as e:
                    call(name, **{argument: value})
                message = str(e.value)
                # An error about two devices or dtypes may name the other tensor.
                assert message.startswith(f"{argument}: ") or (
                    kind in ("meta", "float64") and f"{argument}'s" in message
                ), (argument, kind, message)


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
            call("rope", **{argument: BASE["rope"][1][argument].to("meta")})
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


def test_empty_batches_are_valid():
    assert call("row_parallel_linear", x=X[:0]).shape == (0, 8)
    assert call("silu_mul", gate=X[:, :0], up=X[:, :0]).shape == (6, 0)
    assert [t.shape[0] for t in call("rms_norm", x=X[:0], residual=X[:0])] == [0, 0]
    none = torch.zeros(0, dtype=torch.int64)
    empty = {"q": Q[:0], "block_table": PAGES[:0], "query_start_loc": torch.tensor([0]), "seq_lens": none}
    assert call("paged_attention", **empty).shape == (0, 4, 8)
    leaves = [t.clone().requires_grad_() for t in (X[:0], W, B)]
    for function in (ops.linear, ops.row_parallel_linear):
        function(*leaves).sum().backward()
    assert all(bool((t.grad == 0).all()) for t in leaves)
    x, up = (X[:, :0].clone().requires_grad_() for _ in range(2))
    ops.silu_mul(x, up).sum().backward()
    with pytest.raises(InputError, match="^cu_seqlens: at least one sequence must have rows|^q: must not be empty"):
        call(
            "chunk_gated_delta_rule_bwd_dhu",
            cu_seqlens=torch.tensor([0, 0]),
            g=RULE[:, :0, :, 0],
            **dict.fromkeys(("q", "k", "w", "do", "dv"), RULE[:, :0]),
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
from tests.ops.test_arguments import BASE, call
from tests.ops.test_autograd import OPS, leaves_of
from alignkit.ops.rope import _table
def everything():
    _table.cache_clear()
    for name in BASE:
        call(name)
    for function, tensors in OPS.values():
        out = function(*leaves_of(tensors))
        sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
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
                call(name)
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
