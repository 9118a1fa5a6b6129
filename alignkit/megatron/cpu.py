"""Lets Megatron-core run on a machine without a GPU. No numerics.

Megatron asks for "the current CUDA device" where it allocates, for the current stream where its DDP might
have to wait, and keeps the random state of dropout on the device. All are answered here with what a CPU
host has.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def _no_fork(self, name: str = "") -> Iterator[None]:
    yield


@contextlib.contextmanager
def cpu_host() -> Iterator[None]:
    """While active, Megatron-core allocates on the CPU and its dropout draws from torch's own generator.

    Does nothing where CUDA is available. It must be active while models are built and while they run.
    """
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    saved = torch.cuda.current_device, torch.cuda.current_stream, CudaRNGStatesTracker.fork
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda device=None: None
    CudaRNGStatesTracker.fork = _no_fork
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.current_stream, CudaRNGStatesTracker.fork = saved
