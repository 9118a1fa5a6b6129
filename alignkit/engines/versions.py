"""Acceptance of an engine's version: its hook points resolve, and it was validated or is proved on this machine.

What an adapter needs to know of a version, its facts, is derived from the names that exist in the engine's files. No
list of version numbers decides. An engine is *validated* if the files with hook points are those of a version with
which all tests passed (`Versions.validated`), and *proved* if `alignkit prove` wrote a certificate for these files on
this machine. Any other engine is rejected. The tables are in `alignkit.vllm.versions` and `alignkit.megatron.versions`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from alignkit.engines.closed_world import unknown_users
from alignkit.engines.hook_points import HookPoint, Trees, declared, unresolved
from alignkit.errors import UnsupportedError
from alignkit.runtime import certificates, machine

Facts = TypeVar("Facts")
"""Class of an adapter's facts about a version, such as `alignkit.vllm.versions.Version`."""
VALIDATED, PROVED, UNPROVED = "validated", "proved on this machine", "not proved"
"""States of an engine whose hook points resolve."""
DIGITS = 24
"""Hexadecimal digits of a hash of files."""


def rollout_check(family: str, *, tp: int, dp: int = 1, ep: bool = False) -> str:
    """Return the name of the check of a vLLM engine: model family, parallel sizes, and whole experts per rank."""
    return f"rollout {family} tp{tp} dp{dp}" + (" ep" if ep else "")


def training_check(experts: bool, *, tp: int, sp: bool = False, ep: int = 1, pp: int = 1, cp: int = 1) -> str:
    """Return the name of the check of a Megatron model: dense or MoE, and its parallel sizes."""
    return f"training {'moe' if experts else 'dense'} tp{tp}{'-sp' if sp and tp > 1 else ''} ep{ep} pp{pp} cp{cp}"


class Names:
    """The names of one engine package: the hook points that the adapter relies on there, and what is missing.

    declared: hook points by feature ("" for all versions), as in `hook_points.declared`. Each feature must be required,
    optional, chosen or left out by `derive`.
    """

    def __init__(self, root: Path, declared: Mapping[str, Sequence[HookPoint]]):
        self.root, self._declared = root, declared
        self.hook_points: list[HookPoint] = []
        self.missing: list[str] = []
        self.features: set[str] = set()
        self.trees = Trees()

    def require(self, *features: str) -> None:
        """Rely on all names of these features."""
        for feature in features:
            self.hook_points += self._of(feature)
            self.missing += self._unresolved(self._of(feature))

    def optional(self, *features: str) -> None:
        """Rely on the names of these features that exist, each by itself."""
        for feature in features:
            self.hook_points += [point for point in self._of(feature) if not self._unresolved([point])]

    def has(self, feature: str) -> bool:
        """Return whether a feature's first name exists; if so, rely on all its names."""
        present = not self._unresolved(self._of(feature)[:1])
        if present:
            self.require(feature)
        return present

    def either(self, *features: str) -> str:
        """Return the first feature whose names all exist, by default the first one, and rely on its names."""
        whole = [feature for feature in features if not self._unresolved(self._of(feature))]
        self.require(whole[0] if whole else features[0])
        return whole[0] if whole else features[0]

    def leave_out(self, *features: str) -> None:
        """Ignore these features, such as those of another device."""
        self.features |= {*features}

    def _unresolved(self, hook_points: list[HookPoint]) -> list[str]:
        return unresolved(self.root, hook_points, self.trees)

    def _of(self, feature: str) -> list[HookPoint]:
        self.features.add(feature)
        return list(self._declared.get(feature, ()))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector, which takes half of the time while syntax trees grow and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass(frozen=True)
class Versions(Generic[Facts]):
    """Versions of an engine.

    engine: name for messages. subject: name of its certificates. package: the engine's package. adapter: the adapter's
    folder, which declares the hook points. derive: function that relies on the names that it needs and returns the
    facts. validated: version with which all tests passed -> hash of its files with hook points. users: function of the
    engine that alignkit replaces -> all files that may refer to it; a reference in another file would bypass the
    replacement. more: hook points of all versions that are not declared. elsewhere: whether the engine runs only in
    other processes, which require a validated or proved version themselves.
    """

    engine: str
    subject: str
    package: str
    adapter: Path
    derive: Callable[[Names], Facts]
    validated: Mapping[str, str]
    users: Mapping[str, Collection[str]]
    more: tuple[HookPoint, ...] = ()
    elsewhere: Callable[[], bool] = lambda: False
    _inspected: dict[Path, tuple[Facts, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Facts and hash of the packages inspected in this process."""

    @functools.cached_property
    def declared(self) -> dict[str, list[HookPoint]]:
        """Hook points by feature ("" for all versions)."""
        found = declared(self.adapter, self.package)
        return found | {"": [*found[""], *self.more]}

    def names(self, root: Path) -> tuple[Names, Facts]:
        """Return the names that the adapter relies on in the package at `root`, and the facts."""
        with _without_collections():
            names = Names(root, self.declared)
            facts = self.derive(names)
            if unknown := self.declared.keys() - names.features:
                raise ValueError(f"when: must be a feature that `derive` handles, got {', '.join(sorted(unknown))}")
            names.missing += unknown_users(root, self.users, names.trees)
        return names, facts

    def inspect(self, root: Path, version: str) -> tuple[Facts, str]:
        """Return the facts and the hash of the files with hook points; raise UnsupportedError if a name is missing."""
        if root not in self._inspected:
            names, facts = self.names(root)
            if names.missing:
                raise UnsupportedError(
                    f"{self.engine} {_release(version)}: these names are missing or changed: "
                    f"{'; '.join(names.missing)}. {self._remedy()}"
                )
            self._inspected[root] = facts, digest(names)
        return self._inspected[root]

    def found(self) -> tuple[Path, str]:
        """Return the package directory and the version of the installed engine; imports the engine."""
        engine = importlib.import_module(self.package)
        return Path(next(iter(engine.__path__))), engine.__version__

    def on_disk(self) -> tuple[Path, str] | None:
        """Return the package directory and the version of the engine beside this process, or None; does not import it.

        A checkout without metadata has the version "unknown".
        """
        if not machine.installed(self.package):
            return None
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, f"{self.package} is a package"
        version = machine.version(self.subject) or machine.version(f"{self.subject}-cpu") or "unknown"
        return Path(spec.submodule_search_locations[0]), version

    def require_names(self) -> None:
        """Require that the engine beside this process has the names that alignkit relies on, if there is an engine.

        For a process that starts workers and runs no engine. The workers require a validated or proved version too,
        which depends on their GPU.

        Raises:
            UnsupportedError: a name is missing.
        """
        if (found := self.on_disk()) is not None:
            self.inspect(*found)

    def inspect_installed(self) -> None:
        """Inspect the installed engine, so that processes forked later need not."""
        with contextlib.suppress(UnsupportedError):  # raised again when the engine is patched
            self.inspect(*self.found())

    def installed(self, *checks: str) -> Facts:
        """Return the facts of the installed engine; see `require`. If it runs elsewhere, its names must resolve."""
        if self.elsewhere():
            return self.inspect(*self.found())[0]
        return self.require(*self.found(), checks)

    def describe(self, root: Path, version: str) -> str:
        """Return the state of the engine at `root` as text, with the validated version or the remedy."""
        state = self.state(root, version)
        if state == VALIDATED:
            found = self.inspect(root, version)[1]
            return f"{state} (files of {next(name for name, known in self.validated.items() if known == found)})"
        return state if state == PROVED else f"{state}: run `{certificates.COMMAND}`"

    def state(self, root: Path, version: str, checks: Iterable[str] = ()) -> str:
        """Return VALIDATED, PROVED or UNPROVED; raise UnsupportedError if a name is missing."""
        if self._is_validated(root, version):
            return VALIDATED
        return UNPROVED if self._rejection(root, version, checks) else PROVED

    def evidence(self, root: Path, version: str) -> str:
        """Return what an accepted engine was accepted by, as text: equal on all machines that may work together."""
        if self._is_validated(root, version) or certificates.proving():
            return f"files {self.inspect(root, version)[1]}"
        return f"certificate {certificates.require(self.subject, self.key(root, version), ()).digest}"

    def require(self, root: Path, version: str, checks: Iterable[str] = ()) -> Facts:
        """Return the facts of the engine at `root`.

        Args:
            root: the engine's package directory.
            version: its version, for messages and the certificate.
            checks: names of the checks that its certificate must have if the engine is not validated.

        Raises:
            UnsupportedError: a hook point is missing, or the engine is neither validated nor proved here.
        """
        accepted = self._is_validated(root, version) or certificates.proving()
        if not accepted and (reason := self._rejection(root, version, checks)):
            raise UnsupportedError(
                f"{self.engine} {_release(version)}: is neither validated nor proved on this machine ({reason}). Run "
                f"`{certificates.COMMAND}`, which takes minutes. {self._remedy()}"
            )
        return self.inspect(root, version)[0]

    def _is_validated(self, root: Path, version: str) -> bool:
        return self.inspect(root, version)[1] in self.validated.values()

    def _rejection(self, root: Path, version: str, checks: Iterable[str]) -> str | None:
        """Return why no certificate proves the engine with these checks, or None."""
        return certificates.rejection(self.subject, self.key(root, version), checks)

    def key(self, root: Path, version: str) -> dict[str, str]:
        """Return the key of a certificate of the engine at `root`."""
        _, found = self.inspect(root, version)
        return machine.proof_key() | {self.subject: _release(version), f"files of {self.subject}": found}

    def _remedy(self) -> str:
        return f"Validated: {', '.join(self.validated)}"


def digest(names: Names) -> str:
    """Return the hash of the files with hook points."""
    files = {_file(names.root, point.file) for point in names.hook_points}
    return certificates.files_digest(names.root, tuple(sorted(files)))[:DIGITS]


def _file(root: Path, name: str) -> str:
    """Return the path below `root` of a hook point's file, whose name may lack the suffix."""
    if name.endswith(".py"):
        return name
    return f"{name}/__init__.py" if (root / name).is_dir() else f"{name}.py"


def _release(version: str) -> str:
    """Return a version without its local part, which names the commit of any checkout that Megatron-core lies in."""
    return version.partition("+")[0]
