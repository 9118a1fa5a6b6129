"""Lets Megatron-core run on a machine without a GPU. No numerics.

Megatron asks for "the current CUDA device" where it allocates, for the current stream where its DDP might
have to wait, for all work to be done before it writes a distributed checkpoint, and for the device's random state around
dropout and recomputation; its pipeline makes a tensor on "cuda", moves the tied embedding there and waits for the device;
it makes a stream for TransformerEngine's attention under context parallelism; its router asks for a product of
TransformerEngine's by a name that 0.16 leaves undefined where that is not installed.
All are answered here with what a CPU host has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def _no_fork(self, name: str = "") -> Iterator[None]:
    yield


class _Stream:
    """Nothing is put on it: aligned, TransformerEngine's attention exchanges nothing by itself."""


class _Torch:
    """torch, as Megatron's schedules use it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size, device=None, **options) -> torch.Tensor:
        return torch.zeros(*size, device="cpu", **options)


@contextlib.contextmanager
def cpu_host() -> Iterator[None]:
    """While active, Megatron-core allocates on the CPU and its dropout draws from torch's own generator.

    Does nothing where CUDA is available. It must be active while models are built, run and differentiated.
    """
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    answers = [
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
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue] - and so it stays
    saved = [getattr(owner, name) for owner, name, _ in answers]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(answers, saved, strict=True):
            setattr(owner, name, value)
