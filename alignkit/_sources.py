"""The hash of what the kernels are built from. setup.py reads this file by itself: it imports nothing of alignkit."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".inl")
BUILT = "built.json"
"""In a package that was installed without its sources: the hashes of those that it was built from."""


def files(part: str) -> list[Path]:
    """What decides the library of csrc/`part`: its sources, and setup.py with the compilers' options."""
    return [
        ROOT / "setup.py",
        ROOT / "csrc/interface.h",
        *sorted(file for file in (ROOT / "csrc" / part).rglob("*") if file.suffix in SUFFIXES),
    ]


def digest(found: list[Path]) -> str:
    """Of the places and contents of files."""
    total = hashlib.sha256()
    for file in found:
        content = file.read_bytes()
        total.update(f"{file.relative_to(ROOT)} {len(content)} ".encode() + content)
    return total.hexdigest()


def of(part: str) -> str | None:
    """None where the sources are not beside the package."""
    return digest(files(part)) if (ROOT / "csrc" / part).is_dir() else None
