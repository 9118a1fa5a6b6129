"""A mutation: changes of the text of kernels in a copy of the package."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Change:
    """A change of one file's text, which must occur `times` times."""

    file: str
    old: str
    new: str
    times: int = 1

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text()
        found = text.count(self.old)
        assert found == self.times, f"{self.file}: {self.old!r} must occur {self.times} times, got {found}"
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Mutation:
    """Changes of a backend's kernels, and the golden functions and trials that must notice them.

    A trial is named ``trial OPERATION/KERNEL``; a dtype may follow a golden function. On a GPU, only the cases in
    `noticed` run.
    """

    name: str
    backend: str
    changes: tuple[Change, ...]
    noticed: tuple[str, ...]

    @property
    def file(self) -> str:
        """Name of the mutated library, in which the name's other characters become dashes."""
        return "".join(c if c.isalnum() else "-" for c in self.name) + ".so"

    def apply(self, folder: Path) -> None:
        for change in self.changes:
            change.apply(folder)

    def missing(self, found: dict[str, str]) -> list[str]:
        """Return the golden functions and trials that must notice the mutation and do not, with any dtype."""
        return [case for case in self.noticed if not any((each + " ").startswith(case + " ") for each in found)]

    def row(self, found: dict[str, str]) -> str:
        """Return a row of the table; cases that must notice the mutation and do not are marked."""
        cases = [f"{case} {n}" for case, n in found.items()] + [f"**NOT by {case}**" for case in self.missing(found)]
        return f"| {self.backend} | {self.name} | {'; '.join(cases)} |"


def copy_package(folder: Path, without: str | None) -> None:
    """Copy the package and its sources, with the name and contents that the hash of the sources covers."""
    ignored = shutil.ignore_patterns("__pycache__", *([without] if without else []))
    for part in ("alignkit", "csrc"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    shutil.copy(ROOT / "setup.py", folder)
