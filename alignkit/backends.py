"""The one place that picks the backend of an op.

`auto` takes the fastest backend of the tensor's device that keeps the contract. Backends of one device
family give the same bits, so the choice is one of speed; where there is none, it is an error, never a fallback. With
versions of torch and Triton that those bits were not shown with, they are tested first (`alignkit.shown`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from types import ModuleType

import torch

from . import cuda, native, shown
from .config import Config, config
from .errors import BackendError

CHOICES = Config.backend.allowed
GPU = ("triton", "cuda")
CUDA = ("gated_delta_rule", "linear", "linear_logp", "rms_norm")
"""Ops that have CUDA kernels, csrc/sm90, beside those of Triton."""
_choice: str | None = None
"""Of CHOICES; None until ALIGNKIT_BACKEND has been read."""
_names: dict[tuple[torch.device, str], str] = {}
"""By device and choice, the backend that keeps the contract with what is installed."""


def choice() -> str:
    """The backend that is asked for, by `use` or ALIGNKIT_BACKEND, which is read once: see `read_again`."""
    global _choice
    if _choice is None:
        _choice = config.backend
    return _choice


def read_again() -> None:
    """ALIGNKIT_BACKEND is read again when an op is called next."""
    global _choice
    _choice = None


def name(device: torch.device | str = "cpu") -> str:
    """The backend that ops on `device` run on: ``cpu`` (C++), ``reference`` (torch), ``triton``, or ``cuda``, which is
    Triton but for some ops. Raises BackendError for a device without one, for kernels that were built from other
    sources, and where the contract's bits do not hold with the installed versions of torch and Triton."""
    if not isinstance(device, torch.device):
        device = torch.device(device)
    known = None if _choice is None else _names.get((device, _choice))
    if known is not None:
        return known
    chosen = choose(device)
    if shown.require(device, chosen):
        _names[device, choice()] = chosen
    return chosen


def choose(device: torch.device) -> str:
    """As `name`, but whatever versions are installed."""
    admit(device)
    wanted = choice()
    if device.type == "cuda":
        if wanted == "cuda":
            cuda.library()  # raises where it was not built
        return "triton" if wanted == "triton" or not cuda.available() else "cuda"
    if wanted != "auto":
        return wanted
    if native.available():
        return "cpu"
    warnings.warn("alignkit's CPU kernels are not built; using the reference backend: same bits, very slow")
    return "reference"


def admit(device: torch.device) -> None:
    """Raises BackendError for a device that no backend of the choice is for."""
    wanted = choice()
    if device.type == "cuda":
        if wanted not in ("auto", *GPU):
            raise BackendError(f"ALIGNKIT_BACKEND: {wanted!r} is not a backend of CUDA tensors")
        _require_hopper(device)
    elif device.type != "cpu":
        raise BackendError(f"device: alignkit has no backend for {device.type!r} tensors in this version")
    elif wanted in GPU:
        raise BackendError(f"ALIGNKIT_BACKEND: {wanted!r} is not a backend of CPU tensors")


@functools.cache
def _require_hopper(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise BackendError(
            f"device: {torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, capability))}; alignkit's contract for CUDA is that of 9.0 (Hopper)"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendError("device: CUDA tensors need triton, which is not installed")


def family(device: torch.device | str) -> str:
    """The device family whose bits `device` computes: ``cpu`` or ``sm90``."""
    return "sm90" if name(device) in GPU else "cpu"


def select(op: str, device: torch.device | str) -> ModuleType:
    """The module that implements `op` (a folder of alignkit.ops) for tensors on `device`."""
    backend = name(device)
    return _module(op, "triton" if backend == "cuda" and op not in CUDA else backend)


@functools.cache
def _module(op: str, backend: str) -> ModuleType:
    return importlib.import_module(f"alignkit.ops.{op}.{backend}")


@contextlib.contextmanager
def use(wanted: str):
    """Within the block, ops run on backend `wanted`."""
    global _choice
    if wanted not in CHOICES:
        raise BackendError(f"choice: {wanted!r} is none of {', '.join(CHOICES)}")
    before, _choice = _choice, wanted
    try:
        yield
    finally:
        _choice = before


def for_tables() -> contextlib.AbstractContextManager[None]:
    """Within the block a choice for GPUs says nothing of CPU tensors: tables for a GPU are made there."""
    wanted = choice()
    return use("auto" if wanted in GPU else wanted)
