"""qk_norm_rope on a GPU: strided rows, CUDA graphs, all schedules, and invalid positions.

test_qk_norm_rope.py holds the helpers.
"""

from unittest import mock

import pytest
import torch

from alignkit import ops
from alignkit.ops import library
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, randn
from .test_qk_norm_rope import POSITIONS, assert_same, assert_same_gradients, separate

pytestmark = pytest.mark.skipif(CPU, reason="needs a GPU")
BF16 = torch.bfloat16


def projected(tokens, heads=32, kv_heads=8, dim=128, dtype=BF16):
    """Return queries and keys as views of a QKV projection."""
    joint = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=tokens)
    q, k, _ = joint.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim)


def rest(tokens, dim=128, rotary=None, dtype=BF16):
    table = ops.rope_table(rotary or dim, POSITIONS, 1e4, "cuda")
    return randn(dim, dtype=dtype), randn(dim, dtype=dtype), 1e-6, torch.randint(0, POSITIONS, (tokens,)), table


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000, 16384])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (64, 8, 128), (28, 4, 128), (16, 8, 64), (7, 1, 256)])
def test_projections_rows_need_no_copy(tokens, heads, kv_heads, dim):
    for dtype in (BF16, torch.float32):
        q, k = projected(tokens, heads, kv_heads, dim, dtype)
        q_weight, k_weight, *given = rest(tokens, dim, dtype=dtype)
        assert_same(q, k, q_weight, k_weight, *given)
        dy = randn(tokens, heads, dim, dtype=dtype, seed=1), randn(kv_heads, tokens, dim, dtype=dtype).transpose(0, 1)
        assert_same_gradients((q, k, q_weight, k_weight), dy, *given)


@pytest.mark.parametrize("dim, rotary", [(128, 64), (256, 64), (96, 96), (80, 80), (5120, 5120), (6000, 64)])
def test_other_head_dims(dim, rotary):
    """The CUDA backend normalizes such long heads in a separate op."""
    q, k = projected(37, 3, 2, dim)
    for zero_centered in (False, True):
        q_weight, k_weight, *given = rest(37, dim, rotary)
        options = {"rotary_dim": rotary, "zero_centered": zero_centered}
        assert_same(q, k, q_weight, k_weight, *given, **options)
        dy = [randn(*x.shape, dtype=BF16, seed=heads) for heads, x in enumerate((q, k))]
        assert_same_gradients((q, k, q_weight, k_weight), dy, *given, **options)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_backends_agree(backend):
    q, k = projected(100)
    given = rest(100)
    want = separate(q, k, *given)
    with dispatch.use(backend):
        for a, b in zip(ops.qk_norm_rope(q, k, *given), want, strict=True):
            assert_bitwise_equal(a, b)


@pytest.mark.parametrize("dim, rotary", [(128, 128), (128, 64), (96, 96)])
@pytest.mark.parametrize("elements", [128, 512, 1024, 4096, 8192])
def test_every_schedule_gives_the_same_bits(elements, dim, rotary):
    from alignkit.ops.qk_norm_rope import triton_backend

    q, k = projected(77, dim=dim)
    given = rest(77, dim, rotary)
    with mock.patch.object(triton_backend, "ELEMENTS", elements):
        assert_same(q, k, *given, rotary_dim=rotary)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("levels", [1, 3, 8])
def test_gradients_of_every_schedule_have_the_same_bits(levels, backend):
    from alignkit.ops.qk_norm_rope import triton_backend

    (q, k), (q_weight, k_weight, *given) = projected(333), rest(333)
    dy = [randn(*x.shape, dtype=BF16, seed=i) for i, x in enumerate((q, k))]
    with mock.patch.object(triton_backend, "TREE_LEVELS", levels), dispatch.use(backend):
        assert_same_gradients((q, k, q_weight, k_weight), dy, *given)


def test_gradients_do_not_synchronize_or_copy_their_inputs():
    """Extra memory holds only rstd and the weight gradients' partial sums: 4 bytes per 16 elements, and their tree."""
    (q, k), (q_weight, k_weight, *given) = projected(4096), rest(4096)
    leaves = [t.detach().requires_grad_() for t in (q, k, q_weight, k_weight)]
    dy = [randn(*x.shape, dtype=BF16, seed=i) for i, x in enumerate((q, k))]

    def run():
        return torch.autograd.grad(ops.qk_norm_rope(*leaves, *given), leaves, dy)

    want = run()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    elements = q.numel() + k.numel()
    rstd, results, sums = 4 * elements // 128, 2 * elements, 4 * elements // 16
    assert torch.cuda.max_memory_allocated() - allocated <= rstd + 2 * results + sums * 65 // 64 + 2**16
    for a, b in zip(again, want, strict=True):
        assert_bitwise_equal(a, b)


def test_graph_capture_without_synchronization():
    q, k = projected(300)
    q_weight, k_weight, eps, positions, table = rest(300)

    def run():
        return library.qk_norm_rope(q, k, q_weight, k_weight, eps, positions, table)

    want = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for a, b in zip(again, want, strict=True):
        assert_bitwise_equal(a, b, "again")
    for values in (q, k):
        values.copy_(values.flip(0))
    positions.copy_(positions.flip(0))
    graph.replay()
    for a, b in zip(out, want, strict=True):
        assert_bitwise_equal(a, b.flip(0), "replayed with other values and positions")


def test_inputs_are_neither_copied_nor_modified():
    """A call allocates only its results, and leaves the rest of the joint tensor unchanged."""
    joint = randn(4096, 48, 128, dtype=BF16, seed=1)
    before, given = joint.clone(), rest(4096)
    ops.qk_norm_rope(joint[:, :32], joint[:, 32:40], *given)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = ops.qk_norm_rope(joint[:, :32], joint[:, 32:40], *given)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - allocated <= sum(t.nbytes for t in results) + 4096
    assert_bitwise_equal(joint, before)


def test_invalid_positions_give_nan_in_the_rotated_part():
    q, k = projected(6)
    q_weight, k_weight, eps, _, table = rest(6, rotary=64)
    positions = torch.tensor([0, -1, 5, POSITIONS, POSITIONS - 1, 2**40])
    bad = [False, True, False, True, False, True]
    found = assert_same(q, k, q_weight, k_weight, eps, positions, table, rotary_dim=64)
    for y in found:
        assert y[..., :64].isnan().flatten(1).all(1).tolist() == bad
        assert not y[..., 64:].isnan().any()
