"""Hashes of the framework functions that alignkit replaces: a function with an untested hash is rejected.

A hash may be added to functions.json only if the replacement computes what that version's function does: at run
time nothing else compares the two.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

from alignkit.errors import UnsupportedError

FILE = Path(__file__).with_name("functions.json")
"""JSON file: framework -> dotted name of a function -> SHA-256 of its source -> versions with this source."""


def digest(function: Callable) -> str:
    """Return the SHA-256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def require_tested(framework: str, *functions: Callable) -> None:
    """Raise UnsupportedError with each of `functions` whose source is in no tested version of the framework."""
    tested = json.loads(FILE.read_text())[framework]
    untested = []
    for function in functions:
        name = f"{function.__module__}.{function.__qualname__}"
        if digest(function) not in tested.get(name, {}):
            versions = sorted({version for each in tested.get(name, {}).values() for version in each})
            untested.append(f"{name} (tested: {', '.join(versions) or 'none'})")
    if untested:
        package = sys.modules.get(functions[0].__module__.partition(".")[0])
        version = getattr(package, "__version__", "")
        raise UnsupportedError(
            f"{framework}{version and f' {version}'}: cannot be patched, because the source code of these functions "
            f"differs from every tested version: {'; '.join(untested)}. Install a tested version"
        )
