"""One policy for the configurations of all engines, by allow-list: what is not known to be right is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class _Required:
    def __repr__(self) -> str:
        return "what alignkit knows of it, which is nothing"


REQUIRED = _Required()
"""Stands for the default of a field that has none."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one field of a configuration may be.

    allows: called with the value and with what else was asked for (the `context`). says: the refusal, called with the
    same, or a text in which `{field}`, `{value}` and `{context}` stand for themselves.
    """

    field: str
    allows: Callable[[Any, Any], bool]
    says: str | Callable[[Any, Any], str]

    def refusal(self, value: Any, context: Any) -> str | None:
        if self.allows(value, context):
            return None
        if isinstance(self.says, str):
            return self.says.format(field=self.field, value=value, context=context)
        return self.says(value, context)


def only(field: str, wanted: Any, called: str = "") -> Row:
    """The row of a field that must have one value. called: what people call the thing that another switches on."""
    label = f"{field} ({called})" if called else field
    shown = repr(wanted).replace("{", "{{").replace("}", "}}")
    says = f"{label}: {{value!r}} is not supported, only {shown}"
    return Row(field, lambda value, _: value == wanted, says)


class Policy:
    """free: names of the fields that may have any value. inert: beginnings of the names of others. rows: what other
    fields may be, one row or several each. called: names for fields that must be at their default, as all are that
    are not in `free` nor in `rows`, and so all that a later version of the engine brings.
    """

    def __init__(
        self, *, free: str, rows: tuple[Row, ...] = (), called: Mapping[str, str] | None = None, inert: tuple = ()
    ) -> None:
        self._free, self._rows, self._called, self._inert = frozenset(free.split()), rows, called or {}, inert

    @property
    def fields(self) -> frozenset[str]:
        """Names of all fields that are in the table."""
        return self._free.union(self._called, (row.field for row in self._rows))

    @property
    def judged(self) -> frozenset[str]:
        """Names of the fields that have rows of their own."""
        return frozenset(row.field for row in self._rows)

    def over(self, names: Iterable[str], default: Callable[[str], Any]) -> tuple[Row, ...]:
        """The rows to look at, for a configuration with fields of these `names`, in their order. default: gives a
        field's; it is asked for those only that must be at it."""
        by_field: dict[str, list[Row]] = {}
        for row in self._rows:
            by_field.setdefault(row.field, []).append(row)
        return tuple(
            row
            for name in names
            if name not in self._free and not name.startswith(self._inert)
            for row in by_field.get(name) or [only(name, default(name), self._called.get(name, ""))]
        )


def refusals(config: Any, rows: tuple[Row, ...], context: Any = None) -> Iterator[str]:
    """What of a `config` the `rows` do not allow, in their order."""
    for row in rows:
        if (refusal := row.refusal(getattr(config, row.field), context)) is not None:
            yield refusal


def default(config: type, name: str) -> Any:
    """The default of a dataclass's field. Pydantic keeps it in a description of the field."""
    field = config.__dataclass_fields__[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if hasattr(field.default, "is_required"):
        return REQUIRED if field.default.is_required() else field.default.get_default(call_default_factory=True)
    return REQUIRED if field.default is dataclasses.MISSING else field.default
