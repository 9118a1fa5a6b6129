"""CPU substitutes for the CUDA calls of Megatron-core, so that it runs on a machine without a GPU. No numerics.

`alignkit check`, `alignkit bisect`, the tests and the examples enter `cpu_host`. Megatron-core uses CUDA
unconditionally in these places:

- the current device, for allocations; the current stream, in DDP; synchronization, before a distributed checkpoint
- the device's random state, around dropout and recomputation
- pipeline schedules: a tensor on "cuda", `.cuda()` of the tied embedding, synchronization
- a stream for TransformerEngine's attention under context parallelism
- the router: `te_general_gemm`, which 0.16 leaves undefined without TransformerEngine
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from alignkit.engines.hook_points import relies_on


@contextlib.contextmanager
def _no_fork(self, name: str = "") -> Iterator[None]:
    yield


class _Stream:
    """Stream placeholder. Nothing runs on it: aligned attention does no exchange of its own."""


class _Torch:
    """The torch module for Megatron's schedules, with `zeros` on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size, device=None, **options) -> torch.Tensor:
        return torch.zeros(*size, device="cpu", **options)


@relies_on("tensor_parallel/random.py:CudaRNGStatesTracker", members="fork")
@relies_on("tensor_parallel/random.py:_get_cuda_rng_state")
@relies_on("tensor_parallel/random.py:_set_cuda_rng_state")
@contextlib.contextmanager
def cpu_host() -> Iterator[None]:
    """Let Megatron-core allocate on the CPU, with dropout from torch's CPU generator.

    Keep this context active while models are built, run and differentiated. It does nothing if CUDA is available.
    """
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    substitutes = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "current_stream", lambda device=None: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (schedules, "torch", _Torch()),
        (random.CudaRNGStatesTracker, "fork", _no_fork),
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda *args, **kwargs: None),  # recomputation sets the CPU's state itself
    ]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue] - not restored
    saved = [getattr(owner, name) for owner, name, _ in substitutes]
    for owner, name, substitute in substitutes:
        setattr(owner, name, substitute)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(substitutes, saved, strict=True):
            setattr(owner, name, value)
