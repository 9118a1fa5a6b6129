"""Sums of a tensor's bits, from which weights get a fingerprint (alignkit/identity).

Contract: docs/contract.md, "Sums of bits". Integers: every backend of every family gives the same result.
Public: `bit_sums` (docs/api/ops.md).
"""

from __future__ import annotations

import torch

from ...errors import InputError
from ...runtime import dispatch
from .._calls import op
from .._common import WITH_FP16, check_device, check_same_device, check_tensor


@op
def bit_sums(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``sum over j of bits(x[r, j]) * weights[j]`` modulo 2^64 for each row r.

    Args:
        x: [R, C], fp32, bf16 or fp16. The bits of an element count as an unsigned integer. Views with unit column
            stride are read in place.
        weights: [C], int64, on x's device; the bits count as unsigned integers.

    Returns:
        [R], int64, whose bits are the unsigned sums. Not differentiable.

    Raises:
        InputError: a shape, dtype or device is invalid.
    """
    check_tensor("x", x, 2, WITH_FP16)
    check_device("x", x)
    check_tensor("weights", weights, 1, (torch.int64,))
    check_same_device("weights", weights, "x", x)
    if weights.shape[0] != x.shape[1]:
        raise InputError(f"weights: must have x's {x.shape[1]} columns, got {weights.shape[0]}")
    x = x.detach()
    bits = (x if x.stride(1) == 1 else x.contiguous()).view({2: torch.int16, 4: torch.int32}[x.element_size()])
    return dispatch.select("bit_sums", x.device).sums(bits, weights.contiguous())
