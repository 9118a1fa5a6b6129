"""Functions of a framework that are replaced, each known by its source: one that is not as it was may do more by now."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path

from alignkit.errors import UnsupportedError

FILE = Path(__file__).with_name("functions.json")
"""Framework -> dotted name of a function -> SHA-256 of its source, and the versions that have it so."""


def digest(function: Callable) -> str:
    """The SHA-256 of a function's source as it stands in its file."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def require_known(framework: str, *functions: Callable) -> None:
    """Raises UnsupportedError naming each of `functions` that is not as in a version of the framework that was read."""
    known = json.loads(FILE.read_text())[framework]
    strange = []
    for function in functions:
        name = f"{function.__module__}.{function.__qualname__}"
        if digest(function) not in known.get(name, {}):
            versions = sorted({version for each in known.get(name, {}).values() for version in each})
            strange.append(f"{name} (known of {', '.join(versions) or 'no version'})")
    if strange:
        raise UnsupportedError(
            f"{framework}: alignkit takes the place of these functions, and they are not as it knows them: "
            + "; ".join(strange)
        )
