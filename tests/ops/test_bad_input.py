"""Invalid input, case by case: CASES pairs a call with the beginning of its error, which is the argument's name.

The error comes before any computation. A GPU does not validate values first; there, device assertions and NaN rows are
tested. test_arguments.py replaces every argument in a systematic way.
"""

import subprocess
import sys

import pytest
import torch

from alignkit import ops
from alignkit.contract.rope import Llama3, Yarn
from alignkit.errors import BackendError, InputError
from alignkit.ops import library
from alignkit.ops.linear_logp import token_logp
from alignkit.runtime import dispatch

from .helpers import CPU


def gpu(test):
    skip = pytest.mark.skipif(CPU, reason="behavior of a GPU on values that are not validated first")
    return pytest.mark.gpu(skip(test))


X, W, B = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
T = torch.tensor([0, 1, 2, -100])
Q, KV = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
CU = torch.tensor([0, 2, 6])
CACHE = torch.randn(3, 4, 2, 8)
TABLE, LENS = torch.tensor([[0, 1], [2, 0]]), torch.tensor([2, 4])
NAN, INF = X.clone(), X.clone()
NAN[0, 0], INF[1, 1] = float("nan"), float("inf")
POS = torch.arange(6)
ROPE = ops.rope_table(8, 16, 10000.0, X.device)


def lp(hidden=X, weight=W, target=T, **kw):
    return ops.linear_logp(hidden, weight, target, **kw)


def paged(q=Q, k=CACHE, v=CACHE, table=TABLE, starts=CU, lens=LENS, **kw):
    return ops.paged_attention(q, k, v, table, starts, lens, **kw)


def norm_rope(q=Q, k=KV, q_weight=B, k_weight=B, eps=1e-6, positions=POS, table=ROPE, **kw):
    return ops.qk_norm_rope(q, k, q_weight, k_weight, eps, positions, table, **kw)


CASES = [
    ("x: expected a tensor", lambda: ops.linear([1.0], W)),
    ("x: dtype", lambda: ops.linear(X.double(), W.double())),
    ("x: dtype", lambda: ops.linear(X.int(), W.int())),
    ("weight: dtype", lambda: ops.linear(X.half(), W)),
    ("weight: shape", lambda: ops.linear(X, W[:, :5])),
    ("weight: expected 2 dimensions", lambda: ops.linear(X, B)),
    ("weight: dtype", lambda: ops.linear(X, W.bfloat16())),
    ("weight: device", lambda: ops.linear(X, W.to("meta"))),
    ("weight: must not be empty", lambda: ops.linear(X, W[:0])),
    ("bias: expected shape (8,), got (8, 1)", lambda: ops.linear(X, W, B[:, None])),
    ("bias: dtype", lambda: ops.linear(X, W, B.bfloat16())),
    ("out_dtype", lambda: ops.linear(X, W, out_dtype=torch.bfloat16)),
    ("weight: shape", lambda: ops.row_parallel_linear(X, W[:, :5])),
    ("weight: shape must be (16,)", lambda: ops.rms_norm(X, B, 1e-6)),
    ("eps", lambda: ops.rms_norm(X, torch.ones(16), 0.0)),
    ("residual: shape must equal x's (4, 16), got (2, 16)", lambda: ops.rms_norm(X, torch.ones(16), 1e-6, X[:2])),
    ("residual: dtype", lambda: ops.rms_norm(X, torch.ones(16), 1e-6, X.bfloat16())),
    ("up: shape must equal gate's (4, 16), got (8, 16)", lambda: ops.silu_mul(X, W)),
    ("up: dtype", lambda: ops.silu_mul(X, X.bfloat16())),
    ("gate: last dimension must be even if up is None, got 3", lambda: ops.silu_mul(X[:, :3])),
    ("head_dim: must be a positive even number, got 7", lambda: ops.rope_table(7, 10, 1e4)),
    ("max_position", lambda: ops.rope_table(8, 0, 1e4)),
    (
        "scaling: must be None, or an alignkit.contract.rope.Llama3 or Yarn",
        lambda: ops.rope_table(8, 9, 1e4, scaling={}),
    ),
    ("scaling.factor", lambda: ops.rope_table(8, 9, 1e4, scaling=Llama3(0.0, 1.0, 4.0, 64))),
    ("scaling.low_freq_factor: must be below", lambda: ops.rope_table(8, 9, 1e4, scaling=Llama3(8.0, 4.0, 4.0, 64))),
    ("scaling.beta_slow", lambda: ops.rope_table(8, 9, 1e4, scaling=Yarn(8.0, 64, 32.0, -1.0, 1.0, True))),
    (
        "base: must be more than 1 for YaRN",
        lambda: ops.rope_table(8, 9, 0.5, scaling=Yarn(8.0, 64, 32.0, 1.0, 1.0, True)),
    ),
    ("positions: must be in [0, 16), got -1 at index 0", lambda: ops.rope(Q, torch.tensor([-1, 0, 0, 0, 5, 5]), ROPE)),
    ("positions: must be in [0, 16), got 16 at index 5", lambda: ops.rope(Q, torch.tensor([0, 0, 0, 0, 0, 16]), ROPE)),
    ("positions: dtype", lambda: ops.rope(Q, POS.int(), ROPE)),
    ("positions: must have 6 entries, got 5", lambda: ops.rope(Q, POS[:5], ROPE)),
    ("table: must have 8 columns, x's head_dim, got 4", lambda: ops.rope(Q, POS, ROPE[:, :4])),
    ("table: must have rotary_dim = 4 columns, got 8", lambda: ops.rope(Q, POS, ROPE, rotary_dim=4)),
    ("rotary_dim: must be even and at most x's head_dim 8, got 3", lambda: ops.rope(Q, POS, ROPE, rotary_dim=3)),
    ("rotary_dim: must be even and at most x's head_dim 8, got 10", lambda: ops.rope(Q, POS, ROPE, rotary_dim=10)),
    ("rotary_dim: must be at least 1, got 0", lambda: ops.rope(Q, POS, ROPE, rotary_dim=0)),
    ("table: must have rotary_dim = 4 columns, got 8", lambda: library.rope_qk(Q, KV, POS, ROPE, 4)),
    ("table: must have 8 columns, q's head_dim, got 4", lambda: library.rope_qk(Q, KV, POS, ROPE[:, :4])),
    ("k: head_dim must equal q's 8, got 16", lambda: library.rope_qk(Q, KV.repeat(1, 1, 2), POS, ROPE, 8)),
    ("k: head_dim must equal q's 8, got 4", lambda: library.rope_qk(Q, KV[..., :4], POS, ROPE[:, :4], 4)),
    ("k: head_dim must equal q's 8, got 16", lambda: norm_rope(k=KV.repeat(1, 1, 2))),
    ("k: number of tokens must equal q's 6, got 5", lambda: norm_rope(k=KV[:5])),
    ("k: dtype", lambda: norm_rope(k=KV.bfloat16())),
    ("q: expected 3 dimensions", lambda: norm_rope(q=Q[:, 0])),
    ("q_weight: shape must be (8,) to match q's last dimension, got (4,)", lambda: norm_rope(q_weight=B[:4])),
    ("k_weight: shape must be (8,) to match k's last dimension, got (16,)", lambda: norm_rope(k_weight=B.repeat(2))),
    ("k_weight: dtype", lambda: norm_rope(k_weight=B.bfloat16())),
    ("eps: must be positive, got 0.0", lambda: norm_rope(eps=0.0)),
    (
        "positions: must be in [0, 16), got 16 at index 5",
        lambda: norm_rope(positions=torch.tensor([0, 0, 0, 0, 0, 16])),
    ),
    ("table: must have rotary_dim = 4 columns, got 8", lambda: norm_rope(rotary_dim=4)),
    ("table: must have 8 columns, q's head_dim, got 4", lambda: norm_rope(table=ROPE[:, :4])),
    ("q: head_dim must be even and positive, got 7", lambda: norm_rope(q=Q[..., :7], k=KV[..., :7])),
    ("k: number of heads must divide q's 4, got 3", lambda: ops.attention(Q, *torch.randn(2, 6, 3, 8), CU)),
    ("k: head_dim must equal q's 8, got 4", lambda: ops.attention(Q, KV[..., :4], KV[..., :4], CU)),
    ("v: shape must equal k's (6, 2, 8), got (5, 2, 8)", lambda: ops.attention(Q, KV, KV[:5], CU)),
    ("k: number of rows must equal q's 6, got 5", lambda: ops.attention(Q, KV[:5], KV[:5], CU)),
    ("k: dtype", lambda: ops.attention(Q, KV.bfloat16(), KV, CU)),
    (
        "cu_seqlens: must not decrease, got 4, then 2 at index 2",
        lambda: ops.attention(Q, KV, KV, torch.tensor([0, 4, 2, 6])),
    ),
    ("cu_seqlens: last entry must equal q's 6 rows, got 5", lambda: ops.attention(Q, KV, KV, torch.tensor([0, 5]))),
    ("cu_seqlens: must begin with 0, got 1", lambda: ops.attention(Q, KV, KV, torch.tensor([1, 6]))),
    ("scale", lambda: ops.attention(Q, KV, KV, CU, scale=-1.0)),
    (
        "seq_lens: must be at least the number of queries, got 1 for 2 queries of sequence 0",
        lambda: paged(lens=torch.tensor([1, 4])),
    ),
    ("seq_lens: must be at most 8 (block_table's 2 columns of 4 positions), got 11", lambda: paged(lens=LENS + 7)),
    ("seq_lens: must have 2 entries, one per sequence, got 3", lambda: paged(lens=torch.tensor([2, 4, 4]))),
    (
        "block_table: entries in use must be in [0, 3), got 3 at (1, 0)",
        lambda: paged(table=torch.tensor([[0, 1], [3, 0]])),
    ),
    ("block_table: entries in use must be in [0, 3)", lambda: paged(table=torch.tensor([[-1, 1], [0, 0]]))),
    ("block_table: must have 2 rows, one per sequence, got 1", lambda: paged(table=TABLE[:1])),
    ("v_cache: shape must equal k_cache's", lambda: paged(v=CACHE[:2])),
    ("query_start_loc: last entry must not exceed q's 6 rows, got 7", lambda: paged(starts=torch.tensor([0, 2, 7]))),
    ("target: must be in [0, 8), got 8 at (3,)", lambda: lp(target=torch.tensor([0, 1, 2, 8]))),
    (
        "target: must be nonnegative or ignore_index (-100), got -1 at (0,)",
        lambda: lp(target=torch.tensor([-1, 1, 2, 3])),
    ),
    ("target: must be in [0, 7), got 7 at (1,)", lambda: lp(target=torch.tensor([0, 7, 2, 3]), vocab_size=7)),
    ("target: must be nonnegative or ignore_index (-1), got -100 at (3,)", lambda: lp(ignore_index=-1)),
    ("target: shape", lambda: lp(target=T[:3])),
    ("target: dtype", lambda: lp(target=T.int())),
    ("hidden: values must be finite, got nan at (0, 0)", lambda: lp(hidden=NAN)),
    ("hidden: values must be finite, got inf at (1, 1)", lambda: lp(hidden=INF)),
    ("hidden: dtype", lambda: lp(hidden=X.half(), weight=W.half())),
    ("bias: expected shape (8,), got (8, 1)", lambda: lp(bias=B[:, None])),
    ("weight: shape", lambda: lp(weight=W[:, :4])),
    ("weight: must not be empty", lambda: lp(weight=W[:0])),
    ("vocab_start", lambda: lp(vocab_start=3)),
    ("vocab_size: must be at most 8, the sum of all ranks' vocabulary shards, got 9", lambda: lp(vocab_size=9)),
    ("vocab_size: must be at least 1, got 0", lambda: lp(vocab_size=0)),
    ("temperature: must be positive, got 0.0", lambda: lp(temperature=0.0)),
    ("temperature: must be finite, got nan", lambda: lp(temperature=float("nan"))),
    ("temperature: shape", lambda: lp(temperature=torch.ones(3))),
    ("temperature: must be positive and finite, got -1.0", lambda: lp(temperature=torch.tensor([1.0, 1.0, -1.0, 1.0]))),
    ("soft_cap", lambda: lp(soft_cap=0.0)),
    ("main_grad: dtype", lambda: lp(main_grad=torch.zeros(8, 16).bfloat16())),
    ("main_grad: shape must equal weight's (8, 16), got (8, 15)", lambda: lp(main_grad=torch.zeros(8, 15))),
    ("main_grad: must be contiguous, got strides", lambda: lp(main_grad=torch.zeros(16, 8).t())),
    ("logit_scale", lambda: lp(logit_scale=float("inf"))),
    ("token_ids: must be in [0, 8), got 8 at (14, 0)", lambda: token_logp(W.t(), torch.arange(16)[:, None] // 2 + 1)),
    ("token_ids: shape", lambda: token_logp(W, torch.zeros(7, 1, dtype=torch.int64))),
    ("token_ids: dtype", lambda: token_logp(W, torch.zeros(8, 1))),
    ("token_ids: expected 2 dimensions", lambda: token_logp(W, torch.zeros(8, dtype=torch.int64))),
    ("temperature: must be positive", lambda: lp(temperature=torch.tensor(-1.0))),
    ("target: expected a tensor", lambda: lp(target=3)),
    ("target: must be in [0, 9), got 9", lambda: ops.logp_from_logits(X, torch.tensor([0, 9, 0, 0]), vocab_size=9)),
    ("logits: dtype", lambda: ops.log_softmax(X.half())),
]
"""Beginning of the error, and the call."""


@pytest.mark.parametrize("message,call", CASES, ids=[f"{i}-{m.split(':')[0]}" for i, (m, _) in enumerate(CASES)])
def test_error_begins_with_the_argument_name(message, call, monkeypatch):
    monkeypatch.setenv("ALIGNKIT_STRICT", "1")  # validates values on a GPU
    with pytest.raises(InputError) as e:
        call()
    assert str(e.value).startswith(message), str(e.value)


def test_all_ignored_rows_give_zeros():
    w = W.clone().requires_grad_()
    logp = ops.linear_logp(X, w, torch.full((4,), -100))
    logp.sum().backward()
    assert (logp == 0).all() and (w.grad == 0).all()


def test_nan_in_given_logits_stays_in_its_row():
    logits = X.clone()
    logits[2, 3] = float("nan")
    logp = ops.log_softmax(logits)
    assert logp[2].isnan().all() and torch.equal(logp[:2], ops.log_softmax(X)[:2])


@pytest.mark.skipif(not CPU, reason="functional tensors of the CPU")
def test_functional_tensors_with_an_offset_are_rejected():
    weight = torch._to_functional_tensor(torch.ones(9)[1:])  # no memory, but a nonzero address
    with pytest.raises(InputError, match="^weight: "):
        ops.rms_norm(torch.ones(4, 8), weight, 1e-6)


def test_quantized_temperature_is_rejected():
    temperature = torch.quantize_per_tensor(torch.tensor(1.0, device="cpu"), 0.1, 0, torch.qint8)
    with pytest.raises(InputError, match="^temperature: "):
        ops.log_softmax(torch.ones(2, 3), temperature=temperature)


def test_none_that_the_dispatcher_accepts_is_rejected():
    from alignkit.ops import library  # noqa: F401 - registers the custom ops

    with pytest.raises(InputError, match="^x: expected a tensor, got None"):
        torch.ops.alignkit.row_parallel_linear(None, torch.ones(8, 16), None, "")


def test_device_without_a_backend_is_rejected():
    with pytest.raises(BackendError, match="device: .*meta"):
        ops.rms_norm(X.to("meta"), torch.ones(16, device="meta"), 1e-6)
    with pytest.raises(BackendError, match="^backend: must be one of"), dispatch.use("tpu"):
        pass
    for choice in ("triton", "cuda") if CPU else ("cpu", "reference"):
        with (
            dispatch.use(choice),
            pytest.raises(BackendError, match=f"^ALIGNKIT_BACKEND: must be one of .* for C.*, got '{choice}'"),
        ):
            ops.rms_norm(X, torch.ones(16), 1e-6)


DEVICE_ASSERT = """
import torch
from alignkit import ops
torch.set_default_device("cuda")
logp = ops.linear_logp(torch.ones(4, 16), torch.ones(8, 16), torch.tensor([0, 1, -100, {target}]),
                       temperature=torch.tensor([1.0, 1.0, 1.0, {temperature}]))
torch.cuda.synchronize()
"""


@gpu
@pytest.mark.parametrize(
    "target,temperature,message",
    [
        (7, 1.0, None),
        (8, 1.0, "target: ids must be in [0, vocab_size) or ignore_index"),
        (-1, 1.0, "target: ids must be in"),
        (7, 0.0, "temperature: values must be positive and finite"),
        (7, float("inf"), "temperature: values must be"),
    ],
)
def test_device_assertion_stops_at_wrong_values(target, temperature, message):
    code = DEVICE_ASSERT.format(target=target, temperature=f'float("{temperature}")')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (message is None), done.stderr
    assert message is None or message in done.stderr, done.stderr


@gpu
def test_undefined_values_are_nan_in_their_row():
    """Use positions outside the table, ids outside the vocabulary, and NaN hidden states."""
    positions = torch.tensor([0, -1, 5, 16, 15, 2])
    assert ops.rope(Q, positions, ROPE).isnan().flatten(1).all(1).tolist() == [False, True, False, True, False, False]
    ids = torch.tensor([[0, 8], [-1, 7]])
    assert token_logp(X[:2, :8], ids).isnan().tolist() == [[False, True], [True, False]]
    assert lp(hidden=NAN).isnan().tolist() == [True, False, False, False]
