"""Workspace of attention: no call uses more memory than the engine's profiling run reserves.

Only shapes are computed, on the meta device; no GPU is needed.
"""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from alignkit.ops.attention import cuda_backend, reserve, sharing
from alignkit.ops.attention import triton_backend as backend

from .helpers import hopper_without_gpu  # noqa: F401 - used by pytest

BF16, PAGE = torch.bfloat16, 16


def decode_values(tokens: int, seqs: int, positions: int, heads: int, kv: int, dim: int) -> int:
    """Return the number of values in the softmax states of one decode call."""
    q = torch.empty(tokens, heads, dim, dtype=BF16, device="meta")
    k = torch.empty(PAGE, kv, dim, dtype=BF16, device="meta")
    table, starts = (
        torch.empty(size, dtype=torch.int32, device="meta") for size in ((seqs, positions // PAGE), seqs + 1)
    )
    arguments = q, k, k, table, starts, starts, PAGE, 1.0, q, tokens <= seqs
    with (
        mock.patch.object(sharing.Sharing, "memory", autospec=True, side_effect=sharing.Sharing.memory) as memory,
        mock.patch.object(backend, "_run"),
        mock.patch.object(backend, "launch_repeatable"),
    ):
        backend.decode(*arguments)
    (s, *_), _ = memory.call_args
    return s.parts * kv * s.slots * s.state


def prefill_bytes(heads: int, kv: int, dim: int) -> int:
    """Return the bytes of workspace that the CUDA prefill kernel receives in one call."""
    q, k = (torch.empty(64, count, dim, dtype=BF16, device="meta") for count in (heads, kv))
    with mock.patch.object(cuda_backend.cuda, "call") as call:
        cuda_backend._attend(cuda_backend.arguments(q, k, k, q, torch.empty(2, device="meta"), 1.0, 1), q.device)
    memory, size = call.call_args.args[-2:]
    assert size == (memory.numel() if memory is not None else 0)
    return size


@pytest.mark.parametrize(
    "heads,kv,dim", [(32, 8, 128), (28, 4, 128), (64, 8, 128), (40, 40, 128), (16, 1, 64), (32, 8, 96), (16, 2, 256)]
)
@pytest.mark.parametrize("positions", [512, 1024, 40960, 131072, 1 << 20])
def test_no_call_uses_more_than_was_reserved(positions, heads, kv, dim):
    max_tokens = 8192
    trial = torch.empty(max_tokens, heads, dim, dtype=BF16, device="meta")
    with mock.patch.object(torch, "empty") as empty:
        reserve(trial, kv, positions)
    ((reserved,), _) = empty.call_args
    calls = [
        4 * decode_values(t, s, positions, heads, kv, dim) for t in (1, 2, 5, 64, 256, max_tokens) for s in (1, 7, 256)
    ]
    calls.append(prefill_bytes(heads, kv, dim))
    assert max(calls) <= reserved
    assert reserved <= 2 * max(calls)
