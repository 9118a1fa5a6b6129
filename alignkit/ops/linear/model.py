"""GEMMs of the sm90 family by the tensor-core model, on a CPU: bf16 and fp16 by ../tensor_core.py, fp32 by fma chains.

`alignkit.ops.golden` computes hashes of `linear` by this file. No dispatch order contains it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import tensor_core
from ..inputs import Inputs
from ..tensor_core import STEPS
from . import cpu


def matmul(a, b, leaves, bias, out, accumulate) -> None:
    """Compute the contract's GEMM on Hopper GPUs; the arguments are those of reference.py."""
    parts = [_chain(x, w) for x, w in zip(a.chunk(leaves, dim=1), b.chunk(leaves, dim=1), strict=True)]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    total = parts[0] if bias is None else parts[0] + bias.float()
    out.copy_(out + total if accumulate else total)


def _chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != torch.float32:
        return tensor_core.chain(a, b)
    total = torch.empty(len(a), len(b), dtype=torch.float32)
    cpu.matmul(a, b, 1, None, total, False)
    return total


def identify(chain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str | None:
    """Return the key of `tensor_core.STEPS` whose sums `chain` computes, or None.

    Args:
        chain: Function of bf16 a [M, K] and b [N, K] on the CPU that returns a . b^T in fp32.
    """
    given = Inputs("cpu", torch.bfloat16)
    a, b = given.rough(16, 256, seed=1), given.rough(32, 256, seed=2)
    got = chain(a, b)
    return next((key for key, step in STEPS.items() if torch.equal(got, tensor_core.chain(a, b, step=step))), None)
