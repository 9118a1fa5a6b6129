"""Custom ops of alignkit/ops/library.py in layers compiled by torch.compile: the bits of the underlying ops.

No engine runs. A new custom op needs a fake implementation and a case here.
"""

import importlib
from unittest import mock

import pytest
import torch

from alignkit import ops
from alignkit.dist import TP
from alignkit.errors import InputError
from alignkit.ops import library
from alignkit.testing import assert_bitwise_equal


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TABLE = ops.rope_table(16, 64, 1e4)
NORM, HEAD_NORM, UP, BIAS, DOWN = randn(64), randn(16), randn(128, 64), randn(128), randn(64, 64)
JOINT = randn(3, 128).view(3, 8, 16)[:, :6].split([4, 2], dim=1)
IDS = torch.tensor([[0, 3], [2, -1], [1, 0]])


def layer(namespace, x, residual, positions):
    """Compose the ops of two kinds of decoder layer: separate head norm and RoPE, and `qk_norm_rope`.

    `namespace` is `library` or `ops`.
    """
    add_norm = namespace.add_rms_norm if namespace is library else lambda x, r, w, eps: ops.rms_norm(x, w, eps, r)
    extra = ("",) if namespace is library else ()

    def rotate(q):
        return library.rope_qk(q, q, positions, TABLE)[1] if namespace is library else ops.rope(q, positions, TABLE)

    x, residual = add_norm(x, residual, NORM, 1e-6)
    q, k = namespace.linear(x, UP, BIAS).split(64, dim=-1)
    q = namespace.rms_norm(q.view(-1, 4, 16), HEAD_NORM, 1e-6)
    q = rotate(q).view(k.shape)
    heads = (t.view(-1, 4, 16) for t in namespace.linear(x, UP, BIAS).split(64, dim=-1))
    rotated, _ = namespace.qk_norm_rope(*heads, HEAD_NORM, HEAD_NORM, 1e-6, positions, TABLE)
    k = namespace.silu_mul(k, rotated.view(k.shape))
    return namespace.row_parallel_linear(namespace.silu_mul(q, k), DOWN, None, *extra), residual


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_and_eager_layers_match_the_ops(backend):
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for rows in (7, 12):
        arguments = randn(rows, 64), randn(rows + 1, 64)[:rows], torch.arange(rows)
        expected = layer(ops, *arguments)
        for actual in (layer(library, *arguments), compiled(library, *arguments)):
            for a, b in zip(actual, expected, strict=True):
                assert_bitwise_equal(a, b)


@pytest.mark.parametrize(
    "op, arguments",
    [
        (library.linear, (randn(3, 64), randn(8, 64), randn(8))),
        (library.row_parallel_linear, (randn(3, 64), randn(8, 64), None, "")),
        (library.rms_norm, (randn(3, 4, 16), randn(16), 1e-6)),
        (library.rms_norm, (randn(3, 128).view(3, 8, 16)[:, :4], randn(16), 1e-6)),
        (library.add_rms_norm, (randn(3, 64), randn(3, 64), randn(64), 1e-6)),
        (library.rope_qk, (randn(3, 4, 16), randn(3, 2, 16), torch.arange(3), TABLE)),
        (library.qk_norm_rope, (*JOINT, randn(16), randn(16), 1e-6, torch.arange(3), TABLE)),
        (library.qk_norm_rope, (*JOINT, randn(16), randn(16), 1e-6, torch.arange(3), TABLE[:, :8], 8)),
        (library.silu_mul, tuple(randn(3, 128).chunk(2, dim=-1))),
        (library.linear_fp32, (randn(3, 64).bfloat16(), randn(8, 64).bfloat16(), None)),
        (library.moe_router, (randn(2, 3, 8), 2, "sigmoid", True, randn(8), 4, 2, 2.5)),
        (library.moe_experts, (randn(3, 64), IDS, randn(3, 2), randn(4, 32, 64), randn(4, 64, 16), 4, 0, "", "", "")),
        (library.sigmoid_mul, (randn(3, 1), randn(3, 64).bfloat16())),
        (library.add, (randn(3, 64).bfloat16(), randn(4, 64)[1:].bfloat16())),
    ],
    ids=lambda v: str(v).split(".")[1] if isinstance(v, torch._ops.OpOverload) else "",
)
def test_fake_implementations_match(op, arguments):
    """Check shapes, strides and dtypes of the fake implementation, and that no input is mutated or aliased."""
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_unknown_group_names_are_rejected():
    with pytest.raises(InputError, match="must be the name of a registered group, got 'mine'"):
        library.row_parallel_linear(randn(3, 64), randn(8, 64), None, "mine")
    given = randn(3, 64), IDS, randn(3, 2), randn(4, 32, 64), randn(4, 64, 16), 4, 0
    for argument, groups in (("tp", ("mine", "", "")), ("ep", ("", "mine", "")), ("rows", ("", "", "mine"))):
        with pytest.raises(InputError, match=f"^{argument}: must be the name of a registered group, got 'mine'"):
            library.moe_experts(*given, *groups)


class PaddedTP(TP):
    """A rank that must pad its rows because another rank has more."""

    def padded_rows(self, rows):
        return rows + 3


def test_padding_for_other_ranks_keeps_the_bits():
    library.register_group("longer", PaddedTP())
    given = randn(3, 64), IDS, randn(3, 2), randn(4, 32, 64), randn(4, 64, 16), 4, 0, "", ""
    torch.library.opcheck(library.moe_experts, (*given, "longer"), test_utils=("test_schema", "test_faketensor"))
    assert_bitwise_equal(library.moe_experts(*given, "longer"), library.moe_experts(*given, ""))


def test_rope_qk_matches_rope():
    q, k = randn(3, 96).view(3, 6, 16).split([4, 2], dim=1)
    for together, alone in zip(library.rope_qk(q, k, torch.arange(3), TABLE), (q, k), strict=True):
        assert_bitwise_equal(together, ops.rope(alone, torch.arange(3), TABLE))


def test_qk_norm_rope_matches_norm_then_rope():
    norms = randn(16), randn(17)[1:]
    for rotary in (16, 8):
        table = ops.rope_table(rotary, 64, 1e4)
        found = library.qk_norm_rope(*JOINT, *norms, 1e-6, torch.arange(3), table, rotary)
        for together, alone, weight in zip(found, JOINT, norms, strict=True):
            normed = library.rms_norm(alone, weight, 1e-6)
            assert_bitwise_equal(together, ops.rope(normed, torch.arange(3), table, rotary_dim=rotary))


@torch.inference_mode()
def test_compiled_qk_norm_rope_reads_views_of_the_projection():
    def attention(x, positions):
        q, k, _ = library.linear(x, UP, None).split([64, 32, 32], dim=-1)
        heads = (t.view(x.shape[0], -1, 16) for t in (q, k))
        q, k = library.qk_norm_rope(*heads, HEAD_NORM, HEAD_NORM, 1e-6, positions, TABLE)
        return q.view(x.shape), k

    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    record = importlib.import_module("alignkit.ops.qk_norm_rope.op")
    with mock.patch.object(record, "forward", side_effect=record.forward) as called:
        for rows in (7, 12):
            compiled(randn(rows, 64), torch.arange(rows))
    found = [call.args[:2] for call in called.call_args_list]
    assert [[t.stride() for t in pair] for pair in found] == [[(128, 16, 1)] * 2] * 2
    assert all(q.data_ptr() + 64 * 4 == k.data_ptr() for q, k in found)


@pytest.mark.parametrize(
    "call",
    [
        lambda: library.linear(randn(3, 32), randn(8, 64), None),
        lambda: library.rms_norm(randn(3, 32), randn(64), 1e-6),
        lambda: library.add_rms_norm(randn(3, 64), randn(2, 64), randn(64), 1e-6),
        lambda: library.rope_qk(randn(3, 4, 16), randn(2, 2, 16), torch.arange(3), TABLE),
        lambda: library.rope_qk(randn(3, 4, 16), randn(3, 2, 32), torch.arange(3), TABLE, 16),
        lambda: library.qk_norm_rope(*JOINT, randn(16), randn(8), 1e-6, torch.arange(3), TABLE),
        lambda: library.qk_norm_rope(JOINT[0], randn(3, 2, 32), randn(16), randn(32), 1e-6, torch.arange(3), TABLE, 16),
        lambda: library.silu_mul(randn(3, 8), randn(3, 4)),
        lambda: library.add(randn(3, 8), randn(1, 8)),
        lambda: library.add(randn(3, 8), randn(3, 8).bfloat16()),
    ],
)
def test_mismatched_shapes_are_rejected(call):
    with pytest.raises(InputError):
        call()
