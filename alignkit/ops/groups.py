"""Process groups by name, for the custom ops: a compiled graph can hold a string but not a process group."""

from __future__ import annotations

from ..dist import TP
from ..errors import InputError

_groups: dict[str, TP] = {}


def register_group(name: str, tp: TP) -> None:
    """Register `tp` under `name` in this process, for the `group`, `tp`, `ep` and `rows` arguments of the ops.

    Registering a name again replaces the group.
    """
    _groups[name] = tp


def group_of(name: str, argument: str = "group") -> TP | None:
    """Return the group registered under `name`; None for an empty name."""
    if not name:
        return None
    if name not in _groups:
        raise InputError(
            f"{argument}: must be the name of a registered group, got {name!r}. Call "
            "alignkit.ops.library.register_group() in this process first"
        )
    return _groups[name]
