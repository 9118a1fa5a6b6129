"""Who computes an op.

`auto` takes the fastest backend of the tensor's device that keeps the contract. Backends of one device
family give the same bits, so the choice is one of speed; where there is none, it is an error, never a fallback. With
versions of torch and Triton that those bits were not shown with, they are tested first (shown.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from types import ModuleType

import torch

from ..config import Config, config
from ..errors import BackendError
from . import cuda, families, native, shown
from .families import Family

CHOICES = Config.backend.allowed
AUTO = Config.backend.default
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
    chosen = strongest(device)
    if shown.require(device, chosen):
        _names[device, choice()] = chosen
    return chosen


def strongest(device: torch.device) -> str:
    """As `name`, but whatever versions are installed."""
    family, wanted = admit(device), choice()
    if family.on_gpu:
        if wanted == families.CUDA:
            cuda.library()  # raises where it was not built
        return families.TRITON if wanted == families.TRITON or not cuda.available() else families.CUDA
    if wanted != AUTO:
        return wanted
    if native.available():
        return families.NATIVE
    warnings.warn("alignkit's CPU kernels are not built; using the reference backend: same bits, very slow")
    return families.REFERENCE


def admit(device: torch.device) -> Family:
    """The device's family. Raises BackendError for a device of none, and if no backend of the choice is for it."""
    family, wanted = families.of_type(device), choice()
    if family is None:
        raise BackendError(f"device: alignkit has no backend for {device.type!r} tensors in this version")
    if wanted not in (AUTO, *family.backends):
        raise BackendError(f"ALIGNKIT_BACKEND: {wanted!r} is not a backend of {family.device_type.upper()} tensors")
    if family.on_gpu:
        _require_capability(device, family)
    return family


@functools.cache
def _require_capability(device: torch.device, family: Family) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability != family.capability:
        raise BackendError(
            f"device: {torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, capability))}; alignkit's contract for CUDA is that of 9.0 (Hopper)"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendError("device: CUDA tensors need triton, which is not installed")


def family(device: torch.device | str) -> Family:
    """The device family whose bits `device` computes. Raises as `name` does."""
    backend = name(device)
    return next(family for family in families.FAMILIES if backend in family.backends)


def select(op: str, device: torch.device | str) -> ModuleType:
    """The module that implements `op` (a folder of alignkit.ops) for tensors on `device`."""
    backend = name(device)
    return _module(op, families.TRITON if backend == families.CUDA and op not in CUDA else backend)


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
    return use(wanted if wanted in families.CPU.backends else AUTO)
