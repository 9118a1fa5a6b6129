"""Bit-accurate model of the tensor core's sums of bf16 and fp16 products in fp32.

A step adds T products of ascending k and the accumulator. All are aligned to the greatest exponent among them, cut to F
fractional bits toward zero and added exactly. The sum is cut to fp32 toward zero. The exponent of a product is the sum
of its operands' exponents. T and F depend on the GPU (MMA-Sim, arXiv 2511.10909).

docs/contract.md ("On Hopper GPUs") defines the chain by this step. linear/model.py computes a golden case by it, so
that the golden hashes of `linear` do not come from its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Step(NamedTuple):
    """The arithmetic of one fused step."""

    terms: int
    """Products per step."""
    bits: int
    """Fractional bits of the aligned terms."""


HOPPER = Step(16, 25)
"""contract: step of Hopper GPUs; the published model of wgmma and mma.sync, also on Blackwell."""
STEPS = {"Hopper": HOPPER, "Ampere": Step(8, 24)}
"""hardware: known steps by the first GPU architecture that has them; Ada Lovelace has that of Ampere."""
_ZERO = -1000
"""contract: exponent of 0, below those of products, which are at least -252, even when a factor's exponent is added."""
_MIN_EXPONENT = -126
"""hardware: smallest exponent of normal fp32 and bf16 values; subnormal values have it too."""


def chain(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None = None, step: Step = HOPPER) -> torch.Tensor:
    """Return fp32 acc + a [M, K] . b [N, K]^T of bf16 or fp16 values, by steps over ascending k; acc: 0 by default.

    Inf, NaN and overflow follow IEEE 754, except that NaN has other bits than on the GPU. Sums of subnormal products
    are those of the published model, whose versions differ there.
    """
    x, w = (t.double().cpu().numpy() for t in (a, b))
    total = np.zeros((len(x), len(w))) if acc is None else acc.double().cpu().numpy()
    with np.errstate(invalid="ignore"):
        plain = x @ w.T + total  # used where an operand is inf or NaN
        x, w = (np.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0) for t in (x, w))
        ex, ew = _exponent(x), _exponent(w)
        for k in (slice(k, k + step.terms) for k in range(0, x.shape[1], step.terms)):
            exponents = ex[:, None, k] + ew[None, :, k]
            total = _fused(x[:, None, k] * w[None, :, k], exponents.max(-1), total, step.bits)
    return torch.from_numpy(np.where(np.isfinite(plain), total, plain)).float()


def _exponent(x: np.ndarray) -> np.ndarray:
    """Return the exponents of fp32 values."""
    return np.where(x == 0, _ZERO, np.maximum(np.frexp(x)[1] - 1, _MIN_EXPONENT))


def _fused(products: np.ndarray, top: np.ndarray, acc: np.ndarray, bits: int) -> np.ndarray:
    """Return the result of one step; `top` is the greatest exponent of its products. All operations are exact."""
    unit = np.ldexp(1.0, np.maximum(np.maximum(top, _exponent(acc)), _ZERO) - bits)
    total = (np.trunc(products / unit[..., None]).sum(-1) + np.trunc(acc / unit)) * unit
    last = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, _MIN_EXPONENT) - 23)
    total = np.trunc(total / last) * last
    return np.where(np.abs(total) < 2.0**128, total, np.copysign(np.inf, total))
