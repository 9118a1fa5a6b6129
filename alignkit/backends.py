"""The one place that picks the backend of an op.

`auto` takes the fastest backend of the tensor's device that keeps the contract. Backends of one device
family give the same bits, so the choice is one of speed; where there is none, it is an error, never a fallback.
"""
from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from types import ModuleType

import torch

from . import native
from .errors import BackendError

CHOICES = ("auto", "cpu", "reference")
_choice = os.environ.get("ALIGNKIT_BACKEND", "auto")
_warned = False


def name(device: torch.device | str = "cpu") -> str:
    """The backend that ops on `device` run on: ``cpu`` (C++) or ``reference`` (torch).
    Raises BackendError for a device without one."""
    global _warned
    device = torch.device(device)
    if _choice not in CHOICES:
        raise BackendError(f"ALIGNKIT_BACKEND={_choice!r}: choose one of {', '.join(CHOICES)}")
    if device.type != "cpu":
        raise BackendError(f"device: alignkit has no backend for {device.type!r} tensors in this version")
    if _choice != "auto":
        return _choice
    if native.available():
        return "cpu"
    if not _warned:
        warnings.warn("alignkit's CPU kernels are not built; using the reference backend: same bits, very slow")
        _warned = True
    return "reference"


def select(op: str, device: torch.device | str) -> ModuleType:
    """The module that implements `op` (a folder of alignkit.ops) for tensors on `device`."""
    return importlib.import_module(f"alignkit.ops.{op}.{name(device)}")


@contextlib.contextmanager
def use(choice: str):
    """Within the block, ops run on backend `choice`."""
    global _choice
    if choice not in CHOICES:
        raise BackendError(f"choice: {choice!r} is none of {', '.join(CHOICES)}")
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before
