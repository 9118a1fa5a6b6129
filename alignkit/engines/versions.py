"""Classes of the table of an engine's versions: the hook points of each version, and whether alignkit supports it.

The tables are in `alignkit.vllm.versions` and `alignkit.megatron.versions`. CONTRIBUTING.md, "Adding a vLLM minor",
lists what a new row needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from alignkit.engines.hook_points import HookPoint, unresolved
from alignkit.errors import UnsupportedError

Facts = TypeVar("Facts")
"""Class of an adapter's facts about a version, such as `alignkit.vllm.versions.Version`. Error messages append
``str(facts)`` to the version: ``.x on cuda`` gives "0.26.x on cuda"."""


@dataclass(frozen=True)
class Row(Generic[Facts]):
    """Row of one version.

    hook_points: names that the engine must have. runs: facts of a supported version that the adapter reads, or None if
    the version is listed but not supported, because alignkit has not been run on it.
    """

    hook_points: tuple[HookPoint, ...]
    runs: Facts | None = None


@dataclass(frozen=True)
class Versions(Generic[Facts]):
    """Table of an engine's versions.

    engine: name for messages. rows: keyed by a full version (0.19.2), or by a minor one (0.26) for all its patches.
    """

    engine: str
    rows: dict[str, Row[Facts]]
    _verified: set[tuple[Path, str]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Package directories and versions already verified in this process."""

    def known(self, version: str) -> str | None:
        """Return the row key of a full `version`, or None. The local suffix after `+` (0.19.2+9d061af) is ignored."""
        release = version.partition("+")[0]
        return next((key for key in (release, ".".join(release.split(".")[:2])) if key in self.rows), None)

    def require(self, version: str) -> Facts:
        """Return the facts of `version` for the adapter. Raises UnsupportedError if alignkit does not support it."""
        key = self.known(version)
        if key is not None and (facts := self.rows[key].runs) is not None:
            return facts
        runs = ", ".join(f"{key}{facts}" for key, row in self.rows.items() if (facts := row.runs) is not None)
        raise UnsupportedError(f"{self.engine} {version}: not supported. Install one of: {runs}")

    def unresolved(self, root: Path, version: str) -> list[str]:
        """Return the hook points of a known `version` that the package at `root` lacks, each with the reason."""
        return unresolved(root, self.rows[self.known(version) or version].hook_points)

    def require_hook_points(self, root: Path, version: str) -> None:
        """Raise UnsupportedError naming the hook points of a known `version` that the package at `root` lacks."""
        if (root, version) not in self._verified:
            if lacking := self.unresolved(root, version):
                raise UnsupportedError(
                    f"{self.engine} {version}: must be the released package, but in this one these names are missing "
                    f"or changed: {'; '.join(lacking)}. Reinstall the release"
                )
            self._verified.add((root, version))
