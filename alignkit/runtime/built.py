"""Loading and checking of the kernel libraries that setup.py built.

A library describes its functions and structs (csrc/interface.h); Python has no second list. It also reports the hash of
its sources. A mismatch with the package is an error: the library would compute different bits.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import _sources
from ..errors import BackendError
from .families import PACKAGE

REINSTALL = "reinstall alignkit (in a checkout: `make kernels`) and restart Python"
"""Remedy in the error messages."""


class _Pointer(ctypes.c_void_p):
    """Type of pointer parameters: accepts a tensor (its address), None (null), and ctypes' pointers and arrays."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ctypes.c_void_p(value.data_ptr())
        if isinstance(value, int):
            raise TypeError(f"pointer: must be a tensor, None or a ctypes object, got {value}")
        return ctypes.c_void_p.from_param(value)


TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "string": ctypes.c_char_p,
    "pointer": _Pointer,
}
"""The types of csrc/interface.h: name -> ctypes' type."""


class _Function(ctypes.Structure):
    """The struct AlignkitFunction of csrc/interface.h."""

    _fields_ = [("address", ctypes.c_void_p), ("types", ctypes.POINTER(ctypes.c_char_p))]


class _Field(ctypes.Structure):
    """The struct AlignkitField of csrc/interface.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("offset", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
    ]


class Library:
    """A loaded library; `library.NAME` is its function NAME, with the types that the library reports."""

    def __init__(self, path: Path):
        """Load a library without a check of its sources; `load` checks them."""
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as e:
            raise BackendError(f"{path.name}: cannot be loaded ({e}); {REINSTALL}") from None
        self.path = path
        self.struct = functools.cache(self._struct)
        self.constructor = functools.cache(self._constructor)

    def _described(self, kind: type, symbol: str) -> Any:
        try:
            return kind.in_dll(self._library, symbol)
        except ValueError:
            raise BackendError(
                f"{self.path.name}: must be of the same version as alignkit's Python code, got a library without "
                f"{symbol}; {REINSTALL}"
            ) from None

    def __getattr__(self, name: str) -> Any:
        """Return the function `name`; raise BackendError if the library has none."""
        if name.startswith("__"):
            raise AttributeError(name)
        types = [TYPES[kind] for kind in self.types(name)]
        described = self._described(_Function, f"{name}_function")
        function, number = ctypes.CFUNCTYPE(*types)(described.address), len(types) - 1

        def call(*arguments: Any) -> Any:
            if len(arguments) != number:  # ctypes itself accepts further arguments
                raise TypeError(f"{name}: must have {number} arguments, got {len(arguments)}")
            return function(*arguments)

        setattr(self, name, call)
        return call

    def types(self, name: str) -> list[str]:
        """Return the names of the types of a function's result and parameters."""
        described, found = self._described(_Function, f"{name}_function"), []
        while described.types[len(found)] is not None:
            found.append(described.types[len(found)].decode())
        return found

    def _struct(self, name: str) -> type[ctypes.Structure]:
        """Return the ctypes class of the struct `name`; cached."""
        table = ctypes.pointer(self._described(_Field, f"alignkit_struct_{name}"))
        rows, fields = [], []
        while table[len(rows)].name is not None:
            row = table[len(rows)]
            rows.append((row.name.decode(), row.offset, row.size))
            if len(rows) > 1:
                kind = TYPES.get(row.type.decode()) or self.struct(row.type.decode())
                kind = ctypes.c_void_p if kind is _Pointer else kind
                length = row.size // ctypes.sizeof(kind)
                fields.append((row.name.decode(), kind if length == 1 else kind * length))
        made = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields})
        members = [(field, getattr(made, field)) for field, _ in fields]
        if [("", 0, ctypes.sizeof(made)), *((field, m.offset, m.size) for field, m in members)] != rows:
            raise BackendError(
                f"{self.path.name}: struct {name} must have the layout of ctypes, got {rows}; {REINSTALL}"
            )
        return made

    def _constructor(self, name: str) -> Callable[..., ctypes.Structure]:
        """Return a function that makes the struct `name` from a keyword argument for each field; cached.

        Pointers take tensors and None; the tensors must stay alive. Python itself rejects missing and unknown fields.
        """
        kind = self.struct(name)
        fields = {field[0]: field[1] for field in kind._fields_}
        address = "{0} if {0} is None else {0}.data_ptr()"
        values = (address.format(field) if of is ctypes.c_void_p else field for field, of in fields.items())
        made = eval(f"lambda *, {', '.join(fields)}: kind({', '.join(values)})", {"kind": kind})
        made.__qualname__ = name
        return made


def load(library: Path, part: str) -> Library:
    """Load the library of csrc/`part`; raise BackendError if it was built from different sources."""
    lib = Library(library)
    try:
        found = lib.alignkit_sources().decode()
    except BackendError:  # built before libraries described themselves
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
