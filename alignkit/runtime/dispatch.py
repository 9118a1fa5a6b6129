"""Who computes an op: `choose`, by the op's list of kernels (ops/<op>/order.py) and each kernel's rule beside its code.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ..config import Config, config
from ..errors import BackendError, InputError
from . import cuda, families, native, shown
from .families import Family
from .operands import MOST

CHOICES = Config.backend.allowed
AUTO = Config.backend.default
OPS = {
    "attention": "attention",
    "attention_backward": "attention",
    "paged_attention": "attention",
    "gated_delta_rule": "gated_delta_rule",
    "linear": "linear",
    "linear_resume": "linear",
    "linear_logp": "linear_logp",
    "head_statistics": "linear_logp",
    "head_gradient": "linear_logp",
    "head_products": "linear_logp",
    "moe_router": "moe_router",
    "moe_pairs": "moe_experts",
    "moe_products": "moe_experts",
    "moe_gated": "moe_experts",
    "moe_gradients": "moe_experts",
    "moe_combine": "moe_experts",
    "moe_weigh": "moe_experts",
    "qk_norm_rope": "qk_norm_rope",
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rms_norm_backward": "rms_norm",
    "rope": "rope",
    "sigmoid_mul": "sigmoid_mul",
    "silu_mul": "silu_mul",
}
"""What is chosen for, and the folder of alignkit.ops whose order.py lists the ways to compute it."""
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
    return families.of_backend(name(device))


@dataclass(frozen=True)
class Kernel:
    """A way to compute an op: functions in a file of the op's folder, and for which problems they are right."""

    name: str
    backend: str
    file: str
    """Of the op's folder, without ".py"."""
    rule: str = ""
    """The function of that file that says of a problem why the kernel is not for it, or None; "": it takes all."""
    prepare: str = ""
    """The function that makes of a problem what launches it, for ops that keep that."""
    declines: str = ""
    """When it may decline on the device what it is right for; "": never."""
    folder: str = ""
    """Set by `order`."""

    def load(self) -> ModuleType:
        return importlib.import_module(f"alignkit.ops.{self.folder}.{self.file}")

    def refuses(self, problem: Any) -> str | None:
        """Why it is not for this problem; None: it is."""
        return getattr(self.load(), self.rule)(problem) if self.rule else None


PLAIN = (
    Kernel("triton", families.TRITON, "triton"),
    Kernel("cpu", families.NATIVE, "cpu"),
    Kernel("reference", families.REFERENCE, "reference"),
)
"""The ways to compute most ops, and last of all what no faster kernel is for."""


@functools.cache
def order(op: str) -> tuple[Kernel, ...]:
    """The ways to compute `op`, fastest first."""
    if op not in OPS:
        raise InputError(f"op: {op!r} is none of {', '.join(OPS)}")
    listed = importlib.import_module(f"alignkit.ops.{OPS[op]}.order").ORDER[op]
    return tuple(replace(kernel, folder=OPS[op]) for kernel in listed)


def kernels(op: str, backend: str) -> tuple[Kernel, ...]:
    """Of these, those of `backend` and of the slower ones of its family."""
    family = families.of_backend(backend)
    admitted = family.backends[family.backends.index(backend) :]
    return tuple(kernel for kernel in order(op) if kernel.backend in admitted)


@functools.lru_cache(MOST)
def choose(op: str, problem: Any) -> Kernel:
    """What computes `problem`, which is a described one: the first kernel of the order that is for it."""
    return next(kernel for kernel in kernels(op, problem.backend) if kernel.refuses(problem) is None)


def explain(op: str, problem: Any) -> list[tuple[Kernel, str | None]]:
    """All kernels of the order up to the chosen one, which is last; of the others why they are passed over."""
    told: list[tuple[Kernel, str | None]] = []
    for kernel in kernels(op, problem.backend):
        told.append((kernel, kernel.refuses(problem)))
        if told[-1][1] is None:
            break
    return told


def prepare(op: str, problem: Any, kept: dict[Any, Callable]) -> Callable:
    """What launches `problem`, which it puts into `kept`. A kernel that is for it may yet decline on the device, by a trial;
    one that cannot try now, while a CUDA graph is captured, is asked again next time."""
    first = True
    for kernel in kernels(op, problem.backend):
        if kernel.refuses(problem) is None:
            launch = getattr(kernel.load(), kernel.prepare)(problem)
            if launch is not None:
                if first or not torch.cuda.is_current_stream_capturing():
                    if len(kept) >= MOST:
                        kept.clear()
                    kept[problem] = launch
                return launch
            first = False
    raise BackendError(f"{op}: no kernel is for {problem}")


@functools.cache
def sole(op: str, backend: str) -> ModuleType | None:
    """The file of the kernel that is chosen for every problem; None where that depends on the problem."""
    kernel = kernels(op, backend)[0]
    return None if kernel.rule else kernel.load()


def select(op: str, device: torch.device | str) -> ModuleType:
    """The file that computes `op` for tensors on `device`, of an op for which that does not depend on the problem."""
    module = sole(op, name(device))
    assert module is not None, op
    return module


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
