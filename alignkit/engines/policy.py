"""Allow-list policy for engine configurations: every field that is not known to be safe is rejected by name.

This file has only the classes. The tables are in `alignkit.vllm.policy` and `alignkit.megatron.policy`. A table decides
which settings are accepted, so a field that affects bits must have a row and may not be in `free`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

REQUIRED = object()
"""Sentinel: the default of a field that has none."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Rule for one field of a configuration.

    allows: predicate of the field's value and the `context`, which holds the other settings. message: error text, as a
    format string with `{field}`, `{value}` and `{context}`, or a function of value and context.
    """

    field: str
    allows: Callable[[Any, Any], bool]
    message: str | Callable[[Any, Any], str]

    def refusal(self, value: Any, context: Any) -> str | None:
        if self.allows(value, context):
            return None
        if isinstance(self.message, str):
            return self.message.format(field=self.field, value=value, context=context)
        return self.message(value, context)


def only(field: str, wanted: Any, label: str = "") -> Row:
    """Return the row of a field that must equal `wanted`. label: common name of the feature that the field enables."""
    name = f"{field} ({label})" if label else field
    shown = repr(wanted).replace("{", "{{").replace("}", "}}")
    unknown = "no value is supported, because alignkit does not know this field of this version"
    message = f"{name}: {unknown if wanted is REQUIRED else f'must be {shown}'}, got {{value!r:.200}}"
    return Row(field, lambda value, _: value == wanted, message)


class Policy:
    """Table of rules for the fields of a configuration.

    Fields outside of `free` and `rows`, such as the new ones of later engine versions, must have their defaults.

    free: names of fields that may have any value, separated by spaces. ignored_prefixes: name prefixes of further such
    fields. rows: rules, one or several for a field. labels: field -> feature name, shown in errors about defaults.
    """

    def __init__(
        self,
        *,
        free: str,
        rows: tuple[Row, ...] = (),
        labels: Mapping[str, str] | None = None,
        ignored_prefixes: tuple = (),
    ) -> None:
        self._free, self._rows, self._labels, self._ignored_prefixes = (
            frozenset(free.split()),
            rows,
            labels or {},
            ignored_prefixes,
        )

    @property
    def fields(self) -> frozenset[str]:
        """Names of all fields in the table."""
        return self._free.union(self._labels, (row.field for row in self._rows))

    @property
    def restricted(self) -> frozenset[str]:
        """Names of the fields in `rows`."""
        return frozenset(row.field for row in self._rows)

    def rows_for(self, names: Iterable[str], default: Callable[[str], Any]) -> tuple[Row, ...]:
        """Return the rules that apply to a configuration with fields of these `names`, in their order.

        default: maps a field name to its default; called only for fields that must have their default.
        """
        by_field: dict[str, list[Row]] = {}
        for row in self._rows:
            by_field.setdefault(row.field, []).append(row)
        return tuple(
            row
            for name in names
            if name not in self._free and not name.startswith(self._ignored_prefixes)
            for row in by_field.get(name) or [only(name, default(name), self._labels.get(name, ""))]
        )


def refusals(config: Any, rows: tuple[Row, ...], context: Any = None) -> Iterator[str]:
    """Yield an error text for each of the `rows` that `config` violates."""
    for row in rows:
        if (refusal := row.refusal(getattr(config, row.field), context)) is not None:
            yield refusal


def default(config: type, name: str) -> Any:
    """Return the default of a dataclass field; Pydantic stores it in a FieldInfo object."""
    field = config.__dataclass_fields__[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if hasattr(field.default, "is_required"):
        return REQUIRED if field.default.is_required() else field.default.get_default(call_default_factory=True)
    return REQUIRED if field.default is dataclasses.MISSING else field.default
