"""Hashes of the kernel sources, in which every byte counts, comments too.

setup.py loads this file by its path, so it imports nothing from alignkit. setup.py writes the hashes to built.json and
into the libraries. A changed hash requires a rebuild (`runtime.built`). With versions of torch or Triton that are not
validated, it also requires another golden test (`runtime.validated`). benchmarks/lib/results.py reads ROOT and
SUFFIXES for its digest, which ignores comments.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".inl")
"""Suffixes of kernel sources."""
BUILT = "built.json"
"""Name of the file in an installed package that holds the hashes of the kernel sources at its build."""


def files(part: str) -> list[Path]:
    """Return the files that determine the library of csrc/`part`: its sources, and setup.py (compiler options)."""
    return [
        ROOT / "setup.py",
        ROOT / "csrc/interface.h",
        ROOT / "alignkit/runtime/kernels.h",
        *sorted(file for file in (ROOT / "csrc" / part).rglob("*") if file.suffix in SUFFIXES),
    ]


def digest(found: list[Path]) -> str:
    """Return the SHA-256 over the relative paths and contents of `found`, in that order."""
    total = hashlib.sha256()
    for file in found:
        content = file.read_bytes()
        total.update(f"{file.relative_to(ROOT)} {len(content)} ".encode() + content)
    return total.hexdigest()


def of(part: str) -> str | None:
    """Return the hash of the sources of csrc/`part`, or None if they are not beside the package."""
    return digest(files(part)) if (ROOT / "csrc" / part).is_dir() else None
