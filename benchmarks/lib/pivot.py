"""Markdown tables from rows: a line for each value of some fields, a column for each value of another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Cell = Callable[[list[dict], dict], str]
"""Text of a cell from its rows and from all rows of its line, which are lists by column."""


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    return [_line(heads), "|---" * len(heads) + "|", *map(_line, lines)]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def pivot(
    rows: Iterable[dict],
    heads: Sequence[str],
    line: tuple[str, ...] | Callable[[dict], tuple],
    column: str | tuple[str, ...] | Callable[[dict], Hashable],
    cell: Cell,
    *,
    show: Callable[..., Sequence[object]] = lambda *values: values,
    title: Callable = str,
    lines: Callable[[Iterable], Iterable] = list,
    columns: Callable[[Iterable], Iterable] = list,
) -> list[str]:
    """Return the lines of a table with a line for each value of `line` and a column for each value of `column`.

    Args:
        rows: rows to show. A cell without rows is empty.
        heads: titles of the cells that name a line.
        line: fields that rows of one line share, or a function that returns their values.
        column: field or fields that rows of one column share, or a function that returns their value.
        cell: text of a cell.
        show: cells that name a line, from its values.
        title: title of a column, from its value.
        lines: order of the lines, such as `sorted`; by default that of their first rows.
        columns: order of the columns, likewise.
    """
    line_of, column_of = _value(line), _value(column)
    found: dict[tuple, dict[Hashable, list[dict]]] = {}
    for row in rows:
        found.setdefault(line_of(row), {}).setdefault(column_of(row), []).append(row)
    order = list(columns(dict.fromkeys(value for by_column in found.values() for value in by_column)))
    body = []
    for values in lines(found):
        mine = found[values]
        body.append([*show(*values), *(cell(mine[value], mine) if value in mine else "" for value in order)])
    return markdown([*heads, *map(title, order)], body)


def _value(of: str | tuple[str, ...] | Callable) -> Callable[[dict], Any]:
    """Return the function that returns the value of a field or of fields."""
    if isinstance(of, str):
        return lambda row: row[of]
    return of if callable(of) else lambda row: tuple(row[field] for field in of)


def last(text: Callable[[dict], str]) -> Cell:
    """Return a cell with the text of its last row."""
    return lambda rows, _: text(rows[-1])


def joined(tables: Iterable[list[str]]) -> str:
    """Return tables as text, with an empty line between them."""
    return "\n\n".join("\n".join(table) for table in tables)
