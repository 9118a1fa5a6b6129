"""Loads what setup.py built, if it is of this alignkit: a library says from which sources it was built, and where the
fields of its structs lie. Another one would compute other bits, or read arguments from the wrong places."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

from .. import _sources
from ..errors import BackendError
from .families import PACKAGE

AGAIN = "install alignkit again (in a checkout: `make kernels`) and restart Python"


class _Field(ctypes.Structure):
    """AlignkitField of csrc/interface.h."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t)]


def load(library: Path, part: str) -> ctypes.CDLL:
    """The library of csrc/`part`. Raises BackendError if it was built from other sources than this alignkit's."""
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as e:
        raise BackendError(f"{library.name} cannot be loaded ({e}): {AGAIN}") from None
    try:
        lib.alignkit_sources.restype = ctypes.c_char_p
        found = lib.alignkit_sources().decode()
    except AttributeError:  # of a time when libraries did not say
        found = "unknown"
    wanted = _expected(part)
    if found != wanted:
        raise BackendError(
            f"{library.name} was built from other sources ({found[:12]}) than those of this alignkit "
            f"({wanted[:12]}): {AGAIN}"
        )
    return lib


def _expected(part: str) -> str:
    """The hash of the sources beside the package, else of those that it was installed from."""
    sources = _sources.of(part)
    if sources is not None:
        return sources
    try:
        return json.loads((PACKAGE / _sources.BUILT).read_text())[part]
    except (OSError, ValueError, KeyError):
        raise BackendError(
            f"{_sources.BUILT} of the package does not say from which sources the kernels of {part} were built: {AGAIN}"
        ) from None


def check_layout(lib: ctypes.CDLL, name: str, struct: type[ctypes.Structure]) -> None:
    """Raises BackendError unless the fields of `struct` have the names and places of those of the C struct `name`."""
    try:
        table = ctypes.pointer(_Field.in_dll(lib, f"alignkit_layout_{name}"))
    except ValueError:
        raise BackendError(f"{name}: the library does not say where this struct's fields lie: {AGAIN}") from None
    there = []
    while table[len(there)].name is not None:
        there.append((table[len(there)].name.decode(), table[len(there)].offset, table[len(there)].size))
    fields = [(field[0], getattr(struct, field[0])) for field in struct._fields_]
    here = [("", 0, ctypes.sizeof(struct)), *((field, at.offset, at.size) for field, at in fields)]
    if here != there:
        different = sorted(
            f"{what or 'the whole'} at {offset}, {size} bytes" for what, offset, size in set(here) ^ set(there)
        )
        raise BackendError(
            f"{name}: Python and the library disagree about the fields of this struct "
            f"({'; '.join(different) or 'their order'}): {AGAIN}"
        )
