"""Hashes of the framework functions that alignkit replaces: a function with an unknown hash is refused.

A hash may be added to functions.json only if the replacement computes what that version's function does: at run
time nothing else compares the two.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path

from alignkit.errors import UnsupportedError

FILE = Path(__file__).with_name("functions.json")
"""JSON file: framework -> dotted name of a function -> SHA-256 of its source -> versions with this source."""


def digest(function: Callable) -> str:
    """Return the SHA-256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def require_known(framework: str, *functions: Callable) -> None:
    """Raise UnsupportedError with each of `functions` whose source is in no known version of the framework."""
    known = json.loads(FILE.read_text())[framework]
    unknown = []
    for function in functions:
        name = f"{function.__module__}.{function.__qualname__}"
        if digest(function) not in known.get(name, {}):
            versions = sorted({version for each in known.get(name, {}).values() for version in each})
            unknown.append(f"{name} (known from {', '.join(versions) or 'no version'})")
    if unknown:
        raise UnsupportedError(
            f"{framework}: the source of functions that alignkit replaces differs from the known versions: "
            + "; ".join(unknown)
        )
