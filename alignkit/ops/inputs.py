"""Inputs of the golden cases and of the self-test, equal on every machine and with every version of torch.

A change of `Inputs` changes the golden bits of all cases. `Normal` may change: no stored result depends on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import numpy as np
import torch


class Inputs:
    """Generator of a case's inputs on a device, identical on every machine and with every version of torch."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype):
        self.device, self.dtype = torch.device(device), dtype

    def integers(self, *shape: int, seed: int, below: int) -> torch.Tensor:
        """Return pseudorandom int64 in [0, below)."""
        v = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            v = (v ^ (v >> np.uint64(shift))) * np.uint64(factor)
        v = torch.from_numpy(((v >> np.uint64(32)) % np.uint64(below)).astype(np.int64)).reshape(shape)
        return v.to(self.device)

    def values(self, *shape: int, seed: int, scale: float = 2.0**-6, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return multiples of `scale`, -100 to 100 times; exact in bf16 if `scale` is a power of two."""
        return ((self.integers(*shape, seed=seed, below=201) - 100).double() * scale).to(dtype or self.dtype)

    def rough(
        self, *shape: int, seed: int, low: int = -8, high: int = 0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return fp32 or bf16 values in which all bits of the significand are random, so that their sums round.

        Signs are random, exponents random in [low, high]; below -126 the values are subnormal. The values are built
        from bits, because the caller's floating-point mode may flush subnormal numbers.
        """
        bits = self.integers(*shape, seed=seed, below=1 << 24)
        exponent = (127 + low + self.integers(*shape, seed=seed + 1000, below=high - low + 1)).clamp(min=0)
        bits = (bits >> 23) * -(1 << 31) + (exponent << 23) + bits % (1 << 23)
        if (dtype or self.dtype) == torch.bfloat16:
            return (bits >> 16).to(torch.int16).view(torch.bfloat16)
        return bits.to(torch.int32).view(torch.float32)

    def halves(self, n: int, seed: int) -> list[torch.Tensor]:
        """Return the indices below n in random order, in two halves."""
        order = self.integers(n, seed=seed, below=1 << 31).argsort(stable=True)
        return [order[: n // 2], order[n // 2 : n // 2 * 2]]

    def rough_gradients(self, *shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `rough` values of a wide range, in which two random halves of the rows have sum 0.

        The exact sum over the rows is 0, so the computed one consists of rounding errors alone.
        """
        g = self.rough(*shape, seed=seed, low=-24, dtype=dtype)
        first, second = self.halves(shape[0], seed)
        g[second] = -g[first]
        return g

    def tensor(self, data: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=self.device)

    def starts(self, lengths: list[int]) -> torch.Tensor:
        """Return cu_seqlens of sequences."""
        return self.tensor([0, *itertools.accumulate(lengths)])

    def run(self, function: Callable, *leaves: torch.Tensor, rough: bool = False) -> list[torch.Tensor]:
        """Return the outputs of `function` and the gradients of its leaves, for fixed gradients of the outputs.

        The gradients of the outputs are `values`, or with `rough` `rough_gradients`.
        """
        leaves = tuple(t.clone().requires_grad_() for t in leaves)
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        values = self.rough_gradients if rough else self.values
        grads = [values(*o.shape, dtype=o.dtype, seed=90 + i) for i, o in enumerate(out)]
        torch.autograd.backward(out, grads)
        return [*(o.detach() for o in out), *(cast(torch.Tensor, t.grad) for t in leaves)]


class Normal:
    """Generator of the self-test's inputs: normal values of one dtype on a device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.dtype, self.device = dtype, device

    def __call__(self, seed: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal values."""
        values = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        return values.to(self.device, dtype or self.dtype)

    def integers(self, seed: int, *shape: int, below: int) -> torch.Tensor:
        """Return int64 in [0, below)."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randint(below, shape, generator=generator, device="cpu").to(self.device)
