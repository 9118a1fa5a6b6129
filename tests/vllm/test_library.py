"""The trunk's custom ops: opaque to a compiler, and the same bits as the ops they are made of."""

from unittest import mock

import pytest
import torch

from alignkit import ops
from alignkit.errors import InputError
from alignkit.ops import library
from alignkit.testing import assert_bitwise_equal


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TABLE = ops.rope_table(16, 64, 1e4)
NORM, HEAD_NORM, UP, BIAS, DOWN = drawn(64), drawn(16), drawn(128, 64), drawn(128), drawn(64, 64)
JOINT = drawn(3, 128).view(3, 8, 16)[:, :6].split([4, 2], dim=1)
IDS = torch.tensor([[0, 3], [2, -1], [1, 0]])


def trunk(of, x, residual, positions):
    """Norm, projection, head norm, rotation, activation and projection back, as a decoder's layer has them, and
    another's whose head norm and rotation are one op; `of` is either `library` or `ops`."""
    add_norm = of.add_rms_norm if of is library else lambda x, r, w, eps: ops.rms_norm(x, w, eps, r)
    extra = ("",) if of is library else ()

    def rotate(q):
        return library.rope_qk(q, q, positions, TABLE)[1] if of is library else ops.rope(q, positions, TABLE)

    x, residual = add_norm(x, residual, NORM, 1e-6)
    q, k = of.linear(x, UP, BIAS).split(64, dim=-1)
    q = of.rms_norm(q.view(-1, 4, 16), HEAD_NORM, 1e-6)
    q = rotate(q).view(k.shape)
    heads = (t.view(-1, 4, 16) for t in of.linear(x, UP, BIAS).split(64, dim=-1))
    turned, _ = of.qk_norm_rope(*heads, HEAD_NORM, HEAD_NORM, 1e-6, positions, TABLE)
    k = of.silu_mul(k, turned.view(k.shape))
    return of.row_parallel_linear(of.silu_mul(q, k), DOWN, None, *extra), residual


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_is_eager_is_ops(backend):
    compiled = torch.compile(trunk, fullgraph=True, dynamic=True, backend=backend)
    for rows in (7, 12):
        arguments = drawn(rows, 64), drawn(rows + 1, 64)[:rows], torch.arange(rows)
        expected = trunk(ops, *arguments)
        for actual in (trunk(library, *arguments), compiled(library, *arguments)):
            for a, b in zip(actual, expected, strict=True):
                assert_bitwise_equal(a, b)


@pytest.mark.parametrize(
    "op, arguments",
    [
        (library.linear, (drawn(3, 64), drawn(8, 64), drawn(8))),
        (library.row_parallel_linear, (drawn(3, 64), drawn(8, 64), None, "")),
        (library.rms_norm, (drawn(3, 4, 16), drawn(16), 1e-6)),
        (library.rms_norm, (drawn(3, 128).view(3, 8, 16)[:, :4], drawn(16), 1e-6)),
        (library.add_rms_norm, (drawn(3, 64), drawn(3, 64), drawn(64), 1e-6)),
        (library.rope_qk, (drawn(3, 4, 16), drawn(3, 2, 16), torch.arange(3), TABLE)),
        (library.qk_norm_rope, (*JOINT, drawn(16), drawn(16), 1e-6, torch.arange(3), TABLE)),
        (library.qk_norm_rope, (*JOINT, drawn(16), drawn(16), 1e-6, torch.arange(3), TABLE[:, :8], 8)),
        (library.silu_mul, tuple(drawn(3, 128).chunk(2, dim=-1))),
        (library.linear_fp32, (drawn(3, 64).bfloat16(), drawn(8, 64).bfloat16(), None)),
        (library.moe_router, (drawn(2, 3, 8), 2, "sigmoid", True, drawn(8), 4, 2, 2.5)),
        (library.moe_experts, (drawn(3, 64), IDS, drawn(3, 2), drawn(4, 32, 64), drawn(4, 64, 16), 4, 0, "", "", "")),
        (library.sigmoid_mul, (drawn(3, 1), drawn(3, 64).bfloat16())),
        (library.add, (drawn(3, 64).bfloat16(), drawn(4, 64)[1:].bfloat16())),
    ],
    ids=lambda v: str(v).split(".")[1] if isinstance(v, torch._ops.OpOverload) else "",
)
def test_declared_as_they_are(op, arguments):
    """Shapes, strides and types of the fake implementation, no mutation, no shared memory."""
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_unknown_ranks():
    with pytest.raises(InputError, match="no ranks are named 'mine'"):
        library.row_parallel_linear(drawn(3, 64), drawn(8, 64), None, "mine")
    given = drawn(3, 64), IDS, drawn(3, 2), drawn(4, 32, 64), drawn(4, 64, 16), 4, 0
    for argument, groups in (("tp", ("mine", "", "")), ("ep", ("", "mine", "")), ("rows", ("", "", "mine"))):
        with pytest.raises(InputError, match=f"^{argument}: no ranks are named 'mine'"):
            library.moe_experts(*given, *groups)


def test_rotated_together():
    q, k = drawn(3, 96).view(3, 6, 16).split([4, 2], dim=1)
    for together, alone in zip(library.rope_qk(q, k, torch.arange(3), TABLE), (q, k), strict=True):
        assert_bitwise_equal(together, ops.rope(alone, torch.arange(3), TABLE))


def test_normalised_and_rotated_together():
    norms = drawn(16), drawn(17)[1:]
    for rotary in (16, 8):
        table = ops.rope_table(rotary, 64, 1e4)
        found = library.qk_norm_rope(*JOINT, *norms, 1e-6, torch.arange(3), table, rotary)
        for together, alone, weight in zip(found, JOINT, norms, strict=True):
            normed = library.rms_norm(alone, weight, 1e-6)
            assert_bitwise_equal(together, ops.rope(normed, torch.arange(3), table, rotary_dim=rotary))


@torch.inference_mode()
def test_a_compiler_leaves_heads_in_the_rows_of_their_projection():
    def attention(x, positions):
        q, k, _ = library.linear(x, UP, None).split([64, 32, 32], dim=-1)
        heads = (t.view(x.shape[0], -1, 16) for t in (q, k))
        q, k = library.qk_norm_rope(*heads, HEAD_NORM, HEAD_NORM, 1e-6, positions, TABLE)
        return q.view(x.shape), k

    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    with mock.patch.object(library, "_forward_qk", side_effect=library._forward_qk) as called:
        for rows in (7, 12):
            compiled(drawn(rows, 64), torch.arange(rows))
    found = [call.args[:2] for call in called.call_args_list]
    assert [[t.stride() for t in pair] for pair in found] == [[(128, 16, 1)] * 2] * 2
    assert all(q.data_ptr() + 64 * 4 == k.data_ptr() for q, k in found)


@pytest.mark.parametrize(
    "call",
    [
        lambda: library.linear(drawn(3, 32), drawn(8, 64), None),
        lambda: library.rms_norm(drawn(3, 32), drawn(64), 1e-6),
        lambda: library.add_rms_norm(drawn(3, 64), drawn(2, 64), drawn(64), 1e-6),
        lambda: library.rope_qk(drawn(3, 4, 16), drawn(2, 2, 16), torch.arange(3), TABLE),
        lambda: library.rope_qk(drawn(3, 4, 16), drawn(3, 2, 32), torch.arange(3), TABLE, 16),
        lambda: library.qk_norm_rope(*JOINT, drawn(16), drawn(8), 1e-6, torch.arange(3), TABLE),
        lambda: library.qk_norm_rope(JOINT[0], drawn(3, 2, 32), drawn(16), drawn(32), 1e-6, torch.arange(3), TABLE, 16),
        lambda: library.silu_mul(drawn(3, 8), drawn(3, 4)),
        lambda: library.add(drawn(3, 8), drawn(1, 8)),
        lambda: library.add(drawn(3, 8), drawn(3, 8).bfloat16()),
    ],
)
def test_shapes_that_do_not_fit(call):
    with pytest.raises(InputError):
        call()
