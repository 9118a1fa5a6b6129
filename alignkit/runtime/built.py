"""Loading and checking of the kernel libraries that setup.py built.

A library reports the hash of its sources and the layout of its structs. A mismatch with the package is an error: the
library would compute different bits or misread its arguments. csrc/interface.h defines the names that libraries export.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

from .. import _sources
from ..errors import BackendError
from .families import PACKAGE

REINSTALL = "reinstall alignkit (in a checkout: `make kernels`) and restart Python"
"""Remedy in the error messages."""


class _Field(ctypes.Structure):
    """The struct AlignkitField of csrc/interface.h."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t)]


def load(library: Path, part: str) -> ctypes.CDLL:
    """Load the library of csrc/`part`; raise BackendError if it was built from different sources."""
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as e:
        raise BackendError(f"{library.name}: cannot be loaded ({e}); {REINSTALL}") from None
    try:
        lib.alignkit_sources.restype = ctypes.c_char_p
        found = lib.alignkit_sources().decode()
    except AttributeError:  # built before libraries reported their sources
        found = ""
    wanted = _expected(part)
    if found != wanted:
        got = f"hash {found[:12]}" if found else "a library without a hash"
        raise BackendError(
            f"{library.name}: must be built from this alignkit's sources (hash {wanted[:12]}), got {got}; {REINSTALL}"
        )
    return lib


def _expected(part: str) -> str:
    """Return the hash of the sources beside the package, or else the hash recorded at installation."""
    sources = _sources.of(part)
    if sources is not None:
        return sources
    try:
        return json.loads((PACKAGE / _sources.BUILT).read_text())[part]
    except (OSError, ValueError, KeyError):
        raise BackendError(
            f"{PACKAGE / _sources.BUILT}: must hold the hash of the {part} kernels' sources under the key {part!r}; "
            f"{REINSTALL}"
        ) from None


def _file(lib: ctypes.CDLL) -> str:
    """Return the file name of a loaded library."""
    return Path(lib._name).name


def check_layout(lib: ctypes.CDLL, name: str, struct: type[ctypes.Structure]) -> None:
    """Raise BackendError unless `struct` has the field names, offsets and sizes of the C struct `name`."""
    try:
        table = ctypes.pointer(_Field.in_dll(lib, f"alignkit_layout_{name}"))
    except ValueError:
        raise BackendError(
            f"{_file(lib)}: must be of the same version as alignkit's Python code, got a library without the struct "
            f"{name}; {REINSTALL}"
        ) from None
    expected = []
    while table[len(expected)].name is not None:
        expected.append((table[len(expected)].name.decode(), table[len(expected)].offset, table[len(expected)].size))
    fields = [(field[0], getattr(struct, field[0])) for field in struct._fields_]
    actual = [("", 0, ctypes.sizeof(struct)), *((field, member.offset, member.size) for field, member in fields)]
    if actual != expected:
        different = sorted(
            f"{field or 'the whole'} at {offset}, {size} bytes" for field, offset, size in set(actual) ^ set(expected)
        )
        raise BackendError(
            f"{_file(lib)}: must be of the same version as alignkit's Python code, got another layout of the struct "
            f"{name} ({'; '.join(different) or 'order of fields'}); {REINSTALL}"
        )
