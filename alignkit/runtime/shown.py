"""With which versions of torch and Triton the contract's bits were shown: all tests of a family passed with these.

Some of the bits are made by torch's own arithmetic, and on a GPU by what Triton makes of an expression. So with other
versions nothing is assumed: where an op is first called, the golden bits of the family (`alignkit.golden`) are computed
on that device, and unless every one holds, the op raises. That takes seconds, once per installation: what passed is
remembered under ``$XDG_CACHE_HOME/alignkit`` (``~/.cache/alignkit``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import _sources
from ..config import config
from ..errors import BackendError
from . import cuda, families, native
from .families import Family

_lock = threading.Lock()
_verdicts: dict[str, str | None] = {}
"""In this process: by what was tested, the first golden that differs, or None."""
_thread = threading.local()


def installed(family: Family) -> dict[str, str]:
    """The versions that decide a family's bits."""
    found = {"torch": str(torch.__version__)}
    if family.on_gpu:
        import triton

        found["triton"] = triton.__version__
        if config.ptxas:  # an assembler other than Triton's own
            found["ptxas"] = config.ptxas
    return found


def require(device: torch.device, backend: str) -> str:
    """How it is known that `backend` keeps the contract on `device` with what is installed; "" within `unchecked`,
    where it may not. Raises BackendError where it does not, and where it would have to be tested while a CUDA graph is
    captured."""
    if getattr(_thread, "unchecked", False):
        return ""
    family = families.of_type(device)
    assert family is not None  # it has a backend
    versions = installed(family)
    if versions in family.shown:
        return f"shown with {_text(versions)}"
    other = f"shown with {' or '.join(map(_text, family.shown))}; with {_text(versions)} "
    with _lock:
        key = _key(family, device, backend)
        if key not in _verdicts and _remembered(key):
            _verdicts[key] = None
        if key not in _verdicts:
            if family.on_gpu and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"device: the bits of {family.contract_id} were {other}they must be tested, which "
                    "cannot be while a CUDA graph is captured: call an op before"
                )
            _verdicts[key] = test(device, backend)
            if _verdicts[key] is None:
                _remember(key)
    if _verdicts[key] is not None:
        raise BackendError(f"device: the bits of {family.contract_id} were {other}they are others: {_verdicts[key]}")
    return f"{other}every golden bit was tested here"


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Within the block, this thread's calls compute whatever they do with what is installed: to look at it."""
    before, _thread.unchecked = getattr(_thread, "unchecked", False), True
    try:
        yield
    finally:
        _thread.unchecked = before


def test(device: torch.device, backend: str) -> str | None:
    """The first golden that differs on `device`, or None.

    On a thread of its own, where the caller's modes (inference, autocast, default device, stream, torch functions) are
    not in force; and its backwards run there too, as `unchecked` is for that thread alone."""
    from .. import golden

    found: list[str | None] = []

    def run() -> None:
        current = contextlib.nullcontext() if families.on_host(device) else torch.cuda.device(device)
        try:
            with unchecked(), torch.autograd.set_multithreading_enabled(False), current:
                found.append(golden.difference(device, backend))
        except Exception as e:  # it is no less a verdict on this thread
            found.append(f"{type(e).__name__}: {e}")

    thread = threading.Thread(target=run, name="alignkit-golden")
    thread.start()
    thread.join()
    return found[0]


def _text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _key(family: Family, device: torch.device, backend: str) -> str:
    """All that a verdict is for."""
    if family.on_gpu:
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {' '.join(platform.libc_ver())}"
    isa = native.isa() if backend == families.NATIVE else None
    return json.dumps(
        {
            "contract": family.contract_id,
            "backend": backend,
            "isa": isa,
            "device": where,
            "versions": installed(family),
            "package": _package(backend),
        },
        indent=1,
    )


@functools.cache
def _package(backend: str) -> str:
    """The hash of this package: its Python, the golden bits, and the library of `backend`."""
    folder = families.PACKAGE
    libraries = {families.NATIVE: [native.LIBRARY], families.CUDA: [cuda.LIBRARY]}.get(backend, [])
    return _sources.digest([*sorted(folder.rglob("*.py")), *sorted(folder.glob("golden_*.json")), *libraries])


def _file(key: str) -> Path:
    return Path(config.cache).expanduser() / "alignkit" / f"golden-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _remembered(key: str) -> bool:
    try:
        return _file(key).read_text() == key
    except (OSError, UnicodeDecodeError):
        return False


def _remember(key: str) -> None:
    """Where nothing can be written, the next process tests again."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as whole:
            whole.write(key)
        os.replace(whole.name, file)  # other processes see all of it or nothing
    except OSError:
        return
