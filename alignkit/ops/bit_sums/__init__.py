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
def bit_sums(x: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    """Return ``sum over j of bits(x[r, j]) * weights[j]`` modulo 2^64 for each row r.

    Args:
        x: [R, C], fp32, bf16 or fp16, or N such tensors of one shape, stride, dtype and device. The bits of an element
            count as an unsigned integer. Views with unit column stride are read in place.
        weights: [C], int64, on x's device; the bits count as unsigned integers.

    Returns:
        [R], or [N, R] for several tensors; int64, whose bits are the unsigned sums. Not differentiable.

    Raises:
        InputError: a shape, dtype or device is invalid.
    """
    several = isinstance(x, list | tuple)
    tensors = list(x) if several else [x]
    if not tensors:
        raise InputError("x: must be one tensor or more, got none")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        name = f"x: tensor {i}" if several else "x"
        check_tensor(name, tensor, 2, WITH_FP16)
        check_device(name, tensor)
        check_same_device(name, tensor, "tensor 0", first)
        if (tensor.shape, tensor.dtype, tensor.stride()) != (first.shape, first.dtype, first.stride()):
            raise InputError(
                f"{name}: must have the shape, stride and dtype of tensor 0, {tuple(first.shape)}, {first.stride()} "
                f"and {first.dtype}, got {tuple(tensor.shape)}, {tensor.stride()} and {tensor.dtype}"
            )
    check_tensor("weights", weights, 1, (torch.int64,))
    check_same_device("weights", weights, "x", first)
    if weights.shape[0] != first.shape[1]:
        raise InputError(f"weights: must have x's {first.shape[1]} columns, got {weights.shape[0]}")
    of_size = {2: torch.int16, 4: torch.int32}[first.element_size()]
    bits = [(t if t.stride(1) == 1 else t.contiguous()).detach().view(of_size) for t in tensors]
    sums = dispatch.select("bit_sums", first.device).sums(bits, weights.contiguous())
    return sums if several else sums[0]
