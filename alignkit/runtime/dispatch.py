"""Kernel selection: `choose` walks an op's list of kernels (ops/<op>/op.py) and applies each kernel's rule.

The backend `auto` is the fastest of the tensor's device family. All backends of a family give the same bits, so the
choice affects speed alone. A device without a backend is an error, never a fallback. With versions of torch or Triton
that are not validated, the golden bits are tested first (validated.py). `alignkit explain` prints the choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..config import Config, config
from ..errors import BackendError, InputError
from . import cuda, families, native, prover, validated
from .families import Family
from .operands import MAX_CACHED

CHOICES = Config.backend.allowed
AUTO = Config.backend.default


@dataclass(frozen=True)
class Kernel:
    """An implementation of an op: a module of the op's folder and the rule for which problems to use it."""

    name: str
    backend: str
    load: Callable[[], ModuleType]
    """Function that imports and returns the module, on first use: it may need Triton or a compiled library."""
    rule: Callable[[Any], str | None] | None = None
    """Function of a problem that returns why the kernel rejects it, or None; None accepts every problem."""
    prepare: Callable[[Any], Callable | None] | None = None
    """Function of a problem that returns a launcher, for ops that cache launchers."""
    declines: str = ""
    """Reason for which `prepare` may decline an accepted problem after a trial on the device; "" for never."""

    def rejects(self, problem: Any) -> str | None:
        """Return why the kernel is not used for `problem`, or None if it is."""
        return None if self.rule is None else self.rule(problem)


def one_per_backend(triton: Callable[[], ModuleType], cpu: ModuleType, reference: ModuleType) -> tuple[Kernel, ...]:
    """Return a kernel without a rule for each backend that computes every problem; the last entries of most orders.

    `triton` imports its module on first use; the others need no optional package and are imported already.
    """
    return (
        Kernel("triton", families.TRITON, triton),
        Kernel("cpu", families.NATIVE, lambda: cpu),
        Kernel("reference", families.REFERENCE, lambda: reference),
    )


OPS: dict[str, str] = {}
"""Dispatched operations, with the folder of alignkit.ops whose record (op.py) lists their kernels.

The names are arguments of `alignkit explain`.
"""
_orders: dict[str, tuple[Kernel, ...]] = {}
"""Kernels of each operation, fastest first."""
_launch_caches: dict[int, dict[Any, Callable]] = {}
"""Caches that `prepare` has filled, by id."""
_forced: tuple[str, Kernel] | None = None
"""Operation and kernel of `forced`."""
_choice: str | None = None
"""Requested backend, one of CHOICES; None until ALIGNKIT_BACKEND is read."""
_backends: dict[tuple[torch.device, str], str] = {}
"""Cache of `backend_of`: the validated backend by device and requested backend."""


def choice() -> str:
    """Return the requested backend, from `use` or ALIGNKIT_BACKEND (read once; see `reset_choice`)."""
    global _choice
    if _choice is None:
        _choice = config.backend
    return _choice


def reset_choice() -> None:
    """Discard the requested backend, so that the next op call reads ALIGNKIT_BACKEND again."""
    global _choice
    _choice = None


def backend_of(device: torch.device | str = "cpu") -> str:
    """Return the backend of ops on `device`.

    Args:
        device: A device or its name.

    Returns:
        ``cpu`` (C++), ``reference`` (torch), ``triton``, or ``cuda`` (CUDA kernels for some ops, Triton for the rest).

    Raises:
        BackendError: the device has no backend, the kernels were built from different sources, or the golden bits do
            not hold with the installed versions of torch and Triton.
    """
    if not isinstance(device, torch.device):
        device = torch.device(device)
    known = None if _choice is None else _backends.get((device, _choice))
    if known is not None:
        return known
    device = families.indexed(device)  # the current GPU may change
    chosen = fastest_backend(device)
    if validated.require(device, chosen):
        _backends[device, choice()] = chosen
    return chosen


def fastest_backend(device: torch.device) -> str:
    """Return the backend as `backend_of` does, without validating the installed versions."""
    family, wanted = require_family(device), choice()
    if family.on_gpu:
        if wanted == families.CUDA:
            cuda.library()  # raises if not built
        fastest = families.gpu(device).backends[0]
        return families.TRITON if families.TRITON in (wanted, fastest) or not cuda.available() else fastest
    if wanted != AUTO:
        return wanted
    if native.available():
        return families.NATIVE
    warnings.warn(
        "alignkit's CPU kernels are not built; falling back to the reference backend: same bits, very slow. "
        "Reinstall alignkit with a C++17 compiler on the PATH"
    )
    return families.REFERENCE


def require_family(device: torch.device) -> Family:
    """Return the device's family; raise BackendError if it has none, or if the requested backend does not fit it."""
    family, wanted = families.of_type(device), choice()
    if family is None:
        raise BackendError(f"device: must be of type {' or '.join(families.DEVICE_TYPES)}, got {device.type!r}")
    backends = family.backends
    if family.on_gpu:
        validated.require_shown(device)
        backends = families.gpu(device).backends
        if importlib.util.find_spec("triton") is None:
            version = families.SM90.validated[0]["triton"]
            raise BackendError(f"device: CUDA tensors need triton, which is not installed. Install triton {version}")
    if wanted not in (AUTO, *backends):
        raise BackendError(
            f"ALIGNKIT_BACKEND: must be one of {', '.join((AUTO, *backends))} for "
            f"{family.device_type.upper()} tensors, got {wanted!r}"
        )
    return family


def family(device: torch.device | str) -> Family:
    """Return the device family whose bits `device` computes; raise as `backend_of` does."""
    device = torch.device(device)
    backend_of(device)
    found = families.of_type(device)
    assert found is not None  # a device with a backend has a family
    return found


def register(folder: str, orders: Mapping[str, tuple[Kernel, ...]]) -> None:
    """Register the operations of an op's folder, with their kernels, fastest first."""
    for op, kernels in orders.items():
        OPS[op], _orders[op] = folder, kernels


def order(op: str) -> tuple[Kernel, ...]:
    """Return the kernels of `op`, fastest first."""
    if op not in _orders:
        raise InputError(f"op: must be one of {', '.join(OPS)}, got {op!r}")
    return _orders[op]


def kernels(op: str, backend: str) -> tuple[Kernel, ...]:
    """Return the kernels of `op` of `backend` and of the slower backends of its family, fastest first."""
    family = families.of_backend(backend)
    admitted = family.backends[family.backends.index(backend) :]
    found = tuple(
        kernel
        for kernel in order(op)
        if kernel.backend in admitted and not prover.is_passed_over(op, kernel.name, kernel.backend)
    )
    if _forced is None or _forced[1].backend not in admitted:
        return found
    return (_forced[1], found[-1]) if op == _forced[0] else found[-1:]


@contextlib.contextmanager
def forced(op: str, kernel: Kernel) -> Iterator[list[Any]]:
    """Select `kernel` for the problems of `op` that it accepts, and the last kernel of every order for all others.

    Other device families are not affected. Yields a list with an entry for each time the kernel was selected.
    """
    global _forced
    used: list[Any] = []

    def load():
        used.append(None)
        return kernel.load()

    def prepare(problem):
        assert kernel.prepare is not None, kernel.name
        launch = kernel.prepare(problem)
        used.extend([problem] * (launch is not None))
        return launch

    _forget_choices()
    _forced = op, dataclasses.replace(kernel, load=load, prepare=kernel.prepare and prepare)
    try:
        yield used
    finally:
        _forced = None
        _forget_choices()


def _forget_choices() -> None:
    choose.cache_clear()
    static_kernel.cache_clear()
    for cache in _launch_caches.values():
        cache.clear()


@functools.lru_cache(MAX_CACHED)
def choose(op: str, problem: Any) -> Kernel:
    """Return the first kernel that accepts `problem`, an operand description of the op's problem.py."""
    return next(kernel for kernel in kernels(op, problem.backend) if kernel.rejects(problem) is None)


def explain(op: str, problem: Any) -> list[tuple[Kernel, str | None]]:
    """Return the kernels up to the chosen one, each with the reason for its rejection (None for the last)."""
    found: list[tuple[Kernel, str | None]] = []
    for kernel in kernels(op, problem.backend):
        found.append((kernel, kernel.rejects(problem)))
        if found[-1][1] is None:
            break
    return found


def prepare(op: str, problem: Any, cache: dict[Any, Callable]) -> Callable:
    """Return a launcher for `problem` and store it in `cache`.

    A kernel that accepts the problem may still decline it after a trial on the device. During CUDA graph capture no
    trial can run; a fallback chosen then is not cached.
    """
    first = True
    for kernel in kernels(op, problem.backend):
        if kernel.rejects(problem) is None:
            assert kernel.prepare is not None, kernel.name
            launch = kernel.prepare(problem)
            if launch is not None:
                if first or not torch.cuda.is_current_stream_capturing():
                    if len(cache) >= MAX_CACHED:
                        cache.clear()
                    cache[problem] = launch
                    _launch_caches[id(cache)] = cache
                return launch
            first = False
    raise BackendError(
        f"{op}: no kernel supports this problem; `alignkit explain {op}` prints each kernel's reason: {problem!r:.600}"
    )


@functools.cache
def static_kernel(op: str, backend: str) -> ModuleType | None:
    """Return the module that computes every problem of `op`, or None if the choice depends on the problem."""
    kernel = kernels(op, backend)[0]
    return None if kernel.rule or kernel.prepare else kernel.load()


def select(op: str, device: torch.device | str) -> ModuleType:
    """Return the module that computes `op` on `device`, for ops whose choice does not depend on the problem."""
    module = static_kernel(op, backend_of(device))
    assert module is not None, op
    return module


@contextlib.contextmanager
def use(wanted: str):
    """Request backend `wanted` within the block."""
    global _choice
    if wanted not in CHOICES:
        raise BackendError(f"backend: must be one of {', '.join(CHOICES)}, got {wanted!r}")
    before, _choice = _choice, wanted
    try:
        yield
    finally:
        _choice = before


def allow_cpu() -> contextlib.AbstractContextManager[None]:
    """Ignore a requested GPU backend within the block, so that tables for a GPU can be computed on the CPU."""
    wanted = choice()
    return use(wanted if wanted in families.CPU.backends else AUTO)
