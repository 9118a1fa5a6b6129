"""Validation of the installed versions of torch and Triton.

Some bits depend on torch's own arithmetic, and on a GPU on Triton's code generation. `Family.validated` lists the
versions with which all tests passed. With other versions, the first op call on a device computes the family's golden
bits (`alignkit.ops.golden`) there and raises unless all of them match. The test takes seconds, once per installation: a
pass is cached under ``$XDG_CACHE_HOME/alignkit`` (``~/.cache/alignkit``). Another cache key only repeats the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import _sources
from ..config import config
from ..errors import BackendError
from . import certificates, cuda, families, native, prover
from .families import Family

_lock = threading.Lock()
_verdicts: dict[str, str | None] = {}
"""Verdicts of this process by cache key: the first golden mismatch, or None."""
_thread = threading.local()


def installed(family: Family) -> dict[str, str]:
    """Return the installed versions that can affect a family's bits."""
    found = {"torch": str(torch.__version__)}
    if family.on_gpu:
        import triton

        found["triton"] = triton.__version__
        if config.ptxas:  # an assembler other than the one bundled with Triton
            found["ptxas"] = config.ptxas
    return found


def require(device: torch.device, backend: str) -> str:
    """Require that `backend` gives the contract's bits on `device` with the installed versions.

    Returns:
        The evidence, as text; "" within `unchecked`, which skips the check.

    Raises:
        BackendError: a golden differs, or the test would have to run during CUDA graph capture.
    """
    if getattr(_thread, "unchecked", False):
        return ""
    family = families.of_type(device)
    assert family is not None  # a device with a backend has a family
    versions = installed(family)
    if versions in family.validated:
        return f"validated with {_text(versions)}"
    validated = f"validated with {' or '.join(map(_text, family.validated))}"
    with _lock:
        key = _key(family, device, backend)
        if key not in _verdicts and family.stored and _is_cached(key):  # otherwise the test gives the contract id
            _verdicts[key] = None
        if key not in _verdicts:
            if family.on_gpu and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"device: {family.contract_id} is {validated}, got {_text(versions)}. Other versions need "
                    "a test of the golden bits, which a CUDA graph capture prevents. Call an op before the capture"
                )
            _verdicts[key] = test(device, backend)
            if _verdicts[key] is None and not prover.passed_over():  # the next process warns again
                _cache(key)
    if _verdicts[key] is not None:
        raise BackendError(
            f"device: {family.contract_id} is {validated}; with {_text(versions)} its golden bits differ: "
            f"{_verdicts[key]}. Install a validated version"
        )
    return f"{validated}; all golden bits match here with {_text(versions)}"


def require_shown(device: torch.device) -> None:
    """Require a GPU on which all tests passed, or a proof. This function alone accepts and rejects kinds of GPUs.

    `unchecked` and `alignkit prove` skip it.

    Raises:
        BackendError: alignkit does not know the GPU's compute capability, or its bits were not shown there and no
            certificate proves them.
    """
    gpu = families.gpu(device)
    if gpu.shown or getattr(_thread, "unchecked", False) or certificates.proving():
        return
    key = facts(device, gpu.backends[0])
    if (reason := certificates.rejection(certificates.OPS, key, [certificates.SELF_TEST])) is not None:
        shown = ", ".join(str(known) for known in families.GPUS if known.shown)
        raise BackendError(
            f"device: the contract's bits were shown on GPUs of compute capability {shown} alone, got "
            f"{torch.cuda.get_device_name(device)} with {families.capability_text(gpu.capability)}. "
            f"`{certificates.COMMAND} --ops` can prove them on this GPU, which is rejected until then ({reason})"
        )


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Skip `require` and `require_shown` for this thread's calls within the block. For the prover and tests alone."""
    before, _thread.unchecked = getattr(_thread, "unchecked", False), True
    try:
        yield
    finally:
        _thread.unchecked = before


def test(device: torch.device, backend: str) -> str | None:
    """Return the first golden mismatch on `device`, or None.

    Runs on a new thread, where the caller's modes (inference, autocast, default device, stream, torch functions) are
    inactive. Backward passes run on that thread too, because `unchecked` is per thread.
    """
    found: list[str | None] = []

    def run() -> None:
        current = contextlib.nullcontext() if families.on_host(device) else torch.cuda.device(device)
        try:
            with unchecked(), torch.autograd.set_multithreading_enabled(False), current:
                found.append(prover.first_mismatch(device, backend))
        except Exception as e:  # an error is a verdict as well
            found.append(f"{type(e).__name__}: {e}")

    thread = threading.Thread(target=run, name="alignkit-golden")
    thread.start()
    thread.join()
    return found[0]


def _text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _key(family: Family, device: torch.device, backend: str) -> str:
    """Return the cache key of a verdict: everything that the bits may depend on."""
    return json.dumps(facts(device, backend), indent=1)


def facts(device: torch.device, backend: str) -> dict[str, str]:
    """Return everything that the bits on `device` may depend on, as text: hardware, versions, and alignkit's files."""
    family = families.of_type(device)
    assert family is not None  # a device with a backend has a family
    contract = family.contract_id if family.stored else f"{family.name}, version {family.version}"
    found = {"contract": contract, "backend": backend, "python": platform.python_version_tuple()[1]}
    if family.on_gpu:
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": f"{properties.name}, {properties.multi_processor_count} SMs",
            "driver": cuda.driver_version(),
            "cublaslt": _cublaslt(),
        }
    else:
        found["device"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        found["libc"] = " ".join(platform.libc_ver())
        if backend == families.NATIVE:
            found["isa"] = native.isa()
    return found | installed(family) | {"alignkit": _package(backend)}


@functools.cache
def _cublaslt() -> str:
    """Return the version of the cuBLASLt library that torch uses, or "absent"."""
    try:
        version = ctypes.CDLL(cuda.CUBLASLT).cublasLtGetVersion
    except OSError:
        return "absent"
    version.restype = ctypes.c_size_t
    return str(version())


@functools.cache
def _package(backend: str) -> str:
    """Return the hash of the package: its Python files, the golden hashes, and the library of `backend`."""
    folder = families.PACKAGE
    libraries = {families.NATIVE: [native.LIBRARY], families.CUDA: [cuda.LIBRARY]}.get(backend, [])
    return _sources.digest([*sorted(folder.rglob("*.py")), *sorted(folder.rglob("golden_*.json")), *libraries])


def _file(key: str) -> Path:
    return Path(config.cache).expanduser() / "alignkit" / f"golden-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _is_cached(key: str) -> bool:
    try:
        return _file(key).read_text() == key
    except (OSError, UnicodeDecodeError):
        return False


def _cache(key: str) -> None:
    """Cache a passed test on disk; without write access, the next process tests again."""
    with contextlib.suppress(OSError):
        certificates.replace_file(_file(key), key)
