"""Classes of the table of an engine's versions: the hook points of each version, and whether alignkit supports it.

The tables are in `alignkit.vllm.versions` and `alignkit.megatron.versions`. CONTRIBUTING.md, "Adding a vLLM minor",
lists what a new row needs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from alignkit.engines.hook_points import HookPoint, declared, unresolved
from alignkit.errors import UnsupportedError

Facts = TypeVar("Facts")
"""Class of an adapter's facts about a version, such as `alignkit.vllm.versions.Version`. Error messages append
``str(facts)`` to the version: ``.x on cuda`` gives "0.26.x on cuda"."""


@dataclass(frozen=True)
class Row(Generic[Facts]):
    """Row of one version.

    features: features of the version, separated by spaces: the values of `when` in the adapter's declarations of hook
    points. runs: facts of a supported version that the adapter reads, or None if the version is listed but not
    supported, because alignkit has not been run on it.
    """

    features: str
    runs: Facts | None = None


@dataclass(frozen=True)
class Versions(Generic[Facts]):
    """Table of an engine's versions.

    engine: name for messages. package: the engine's package, and adapter: the adapter's folder, which declares the hook
    points. rows: keyed by a full version (0.19.2), or by a minor one (0.26) for all its patches.
    more: hook points of all versions that are not declared.
    """

    engine: str
    package: str
    adapter: Path
    rows: dict[str, Row[Facts]]
    more: tuple[HookPoint, ...] = ()
    _verified: set[tuple[Path, str]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Package directories and versions already verified in this process."""

    @functools.cached_property
    def declared(self) -> dict[str, list[HookPoint]]:
        """Hook points by feature ("" for all versions)."""
        found = declared(self.adapter, self.package)
        if unknown := found.keys() - {"", *(feature for row in self.rows.values() for feature in row.features.split())}:
            raise ValueError(f"when: must be a feature of a version in the table, got {', '.join(sorted(unknown))}")
        return found

    def hook_points(self, version: str) -> list[HookPoint]:
        """Return the names that a known `version` of the engine must have."""
        features = self.rows[self.known(version) or version].features.split()
        found = [hook_point for feature in ("", *features) for hook_point in self.declared.get(feature, ())]
        return [*found, *self.more]

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
        return unresolved(root, self.hook_points(version))

    def require_hook_points(self, root: Path, version: str) -> None:
        """Raise UnsupportedError naming the hook points of a known `version` that the package at `root` lacks."""
        if (root, version) not in self._verified:
            if lacking := self.unresolved(root, version):
                raise UnsupportedError(
                    f"{self.engine} {version}: must be the released package, but in this one these names are missing "
                    f"or changed: {'; '.join(lacking)}. Reinstall the release"
                )
            self._verified.add((root, version))
