"""An engine's versions as rows of a table: what is known of each, and whether the adapter runs on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from alignkit.engines.seams import Seam, unresolved
from alignkit.errors import UnsupportedError

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Row(Generic[Facts]):
    """A version that has been read. runs: what the adapter must know to run on it; None: it has not been run."""

    seams: tuple[Seam, ...]
    runs: Facts | None = None


@dataclass(frozen=True)
class Versions(Generic[Facts]):
    """engine: its name in messages. rows: by version, or by minor version with all its patch releases."""

    engine: str
    rows: dict[str, Row[Facts]]
    _whole: set[tuple[Path, str]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Package directories that lacked nothing: an engine's sources are read once in a process."""

    def known(self, version: str) -> str | None:
        """The key of the row that a full `version` belongs to. What follows a `+` says how it was built: 0.19.2+9d061af
        is Megatron-core 0.19.2 under some git checkout, 0.26.1+cu129 vLLM 0.26."""
        release = version.partition("+")[0]
        return next((key for key in (release, ".".join(release.split(".")[:2])) if key in self.rows), None)

    def require(self, version: str) -> Facts:
        """What the adapter must know of `version`. Raises UnsupportedError if it does not run there."""
        key = self.known(version)
        if key is not None and (facts := self.rows[key].runs) is not None:
            return facts
        known = "unknown version;" if key is None else "its seams are known, but"
        runs = " and ".join(f"{key}{facts}" for key, row in self.rows.items() if (facts := row.runs) is not None)
        raise UnsupportedError(f"{self.engine} {version}: {known} alignkit runs on {runs}")

    def unresolved(self, root: Path, version: str) -> list[str]:
        """The seams of a known `version` that the package directory `root` lacks, each with the reason."""
        return unresolved(root, self.rows[self.known(version) or version].seams)

    def require_seams(self, root: Path, version: str) -> None:
        """Raises UnsupportedError naming what the package directory `root`, of a known `version`, lacks."""
        if (root, version) not in self._whole:
            if lacking := self.unresolved(root, version):
                raise UnsupportedError(f"this build of {self.engine} {version} is not as known: {'; '.join(lacking)}")
            self._whole.add((root, version))
