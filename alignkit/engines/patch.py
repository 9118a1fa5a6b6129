"""Base class of all engine patches: replaces names in an engine, all or none, and restores them on `undo`.

Public through the subclasses: docs/api/vllm.md and docs/api/megatron.md document `undo` and the keys of `status`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

from alignkit.errors import InputError, UnsupportedError


class Replaced(NamedTuple):
    """One replaced name. stock: the owner's previous attribute, or `INHERITED` if the owner only inherited the name."""

    owner: Any
    name: str
    stock: Any
    new: Any

    def __str__(self) -> str:
        return f"{dotted(self.owner)}.{self.name}"


INHERITED = object()


class Patch:
    """Handle of an engine patch; as a context manager it calls `undo` on exit.

    A subclass sets `engine` and `command` (the function that users call), and calls `replace` in `install`. Each
    subclass has at most one live patch.
    """

    engine: ClassVar[str]
    command: ClassVar[str]
    _live: ClassVar[Any] = None

    @classmethod
    def apply(cls, **options: Any) -> Self:
        """Return the live patch with these `options`, installing it if there is none.

        Raises InputError naming the first option that differs from the live patch's. If `install` raises, restores all
        names and raises the same error.
        """
        live = cls._live
        if live is None:
            live = cls(**options)
            cls._live = live
        for name, value in options.items():
            if live.options[name] != value:
                raise InputError(
                    f"{name}: must be {live.options[name]}, as in the active patch of {cls.engine}, got {value}. Call "
                    "undo() of the active patch first"
                )
        return live

    @classmethod
    def live(cls) -> Self | None:
        """Return the live patch, or None."""
        return cls._live

    @classmethod
    def status(cls) -> dict[str, Any]:
        """Return `patched`, and if true also the engine's version, the options and the replaced names."""
        live = cls._live
        if live is None:
            return {"patched": False}
        return {"patched": True, "version": live.version, **live.options, "names": live.names, **live.facts()}

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.version = ""
        self._replaced: list[Replaced] = []
        try:
            self.install()
        except BaseException:
            self._restore()
            raise

    def install(self) -> None:
        """Set `version` and replace names; if this raises, all replaced names are restored."""
        raise NotImplementedError

    def restored(self) -> None:
        """Clean up after the names have been restored."""

    def facts(self) -> dict[str, Any]:
        """Return the additional items of `status`."""
        return {}

    @property
    def names(self) -> list[str]:
        """Replaced names, as dotted paths."""
        return [str(replaced) for replaced in self._replaced]

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace attribute `name` of `owner`, a class or a module."""
        replaced = Replaced(owner, name, vars(owner).get(name, INHERITED), new)
        setattr(owner, name, new)
        self._replaced.append(replaced)

    def check_in_force(self, but: Iterable[str] = ()) -> None:
        """Raise UnsupportedError naming each name, except those in `but`, that other code has replaced since."""
        foreign = [
            f"{replaced}: was replaced after {self.command}, by {described(now)}"
            for replaced in self._replaced
            if replaced.name not in but and (now := vars(replaced.owner).get(replaced.name)) is not replaced.new
        ]
        if foreign:
            raise UnsupportedError("; ".join(foreign) + ". Undo that replacement")

    def undo(self) -> None:
        """Restore the engine. A second call does nothing.

        Raises UnsupportedError, and changes nothing, if other code has replaced one of the names since. The error lists
        such names; restore them first.
        """
        cls = type(self)
        if cls._live is self:
            self.check_in_force()
            self._restore()
            cls._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _restore(self) -> None:
        while self._replaced:
            owner, name, stock, _ = self._replaced.pop()
            if stock is INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, stock)
        self.restored()


def dotted(owner: Any) -> str:
    """Return the dotted path of a class or a module."""
    return f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__


def described(function: Any) -> str:
    """Return the name and module of a replacement, for error messages."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"a {type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_qualname} of {function.__globals__.get('__name__')}"
