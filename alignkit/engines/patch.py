"""One patch for every engine: names that are replaced, all or none, and put back by `undo`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

from alignkit.errors import InputError, UnsupportedError


class Replaced(NamedTuple):
    """One name of an engine. stock: what its owner had; `INHERITED` if the owner itself had nothing of that name."""

    owner: Any
    name: str
    stock: Any
    new: Any

    def __str__(self) -> str:
        return f"{dotted(self.owner)}.{self.name}"


INHERITED = object()


class Patch:
    """Handle of what is replaced in an engine; also a context manager, which ends in `undo`.

    A subclass names the `engine` and the `command` that its users call, and calls `replace` in `install`. There is one
    live patch of a subclass at a time.
    """

    engine: ClassVar[str]
    command: ClassVar[str]
    _live: ClassVar[Any] = None

    @classmethod
    def apply(cls, **options: Any) -> Self:
        """The patch with these `options`, which is installed if it is not live. Raises InputError, naming the first
        option that is another, if a patch with others is live; what `install` raises, after nothing is replaced any
        more, if that fails."""
        live = cls._live
        if live is None:
            live = cls(**options)
            cls._live = live
        for name, value in options.items():
            if live.options[name] != value:
                raise InputError(f"{name}: {value}, but {cls.engine} is patched with {live.options[name]}")
        return live

    @classmethod
    def live(cls) -> Self | None:
        """The patch in force."""
        return cls._live

    @classmethod
    def status(cls) -> dict[str, Any]:
        """Whether the engine is patched in this process, and if so its version, with which options, and which names are
        replaced."""
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
        """Sets `version` and replaces names; if it raises, all of them are put back."""
        raise NotImplementedError

    def restored(self) -> None:
        """Called when the names have been put back."""

    def facts(self) -> dict[str, Any]:
        """What else `status` says."""
        return {}

    @property
    def names(self) -> list[str]:
        """The names in the engine that are replaced."""
        return [str(replaced) for replaced in self._replaced]

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Sets `owner.name`, of a class or a module."""
        replaced = Replaced(owner, name, vars(owner).get(name, INHERITED), new)
        setattr(owner, name, new)
        self._replaced.append(replaced)

    def check_in_force(self, but: Iterable[str] = ()) -> None:
        """UnsupportedError naming all that was replaced here, except names in `but`, and by someone else since."""
        foreign = [
            f"{replaced}: has been replaced since {self.command}, by {described(now)}"
            for replaced in self._replaced
            if replaced.name not in but and (now := vars(replaced.owner).get(replaced.name)) is not replaced.new
        ]
        if foreign:
            raise UnsupportedError("; ".join(foreign))

    def undo(self) -> None:
        """The engine as it was. Does nothing the second time.

        Raises UnsupportedError, and changes nothing, if someone else has replaced one of the names since: it is named,
        and must be restored first.
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
    """The dotted path of a class or a module."""
    return f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__


def described(function: Any) -> str:
    """What replaced something, for a message."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"a {type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_qualname} of {function.__globals__.get('__name__')}"
