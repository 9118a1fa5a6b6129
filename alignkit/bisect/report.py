"""Reports of a bisection: the terminal table and the self-contained report.html.

Texts are for people; programs read bisect.json. docs/bisect.md and tests/bisection quote them. The template
report.html.j2 gets its variables from `write_html`.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ..jobs.page import data_uri, figure_of
from .comparison import Comparison, PointDifference
from .run import Result

_MAX_TOKENS = 12
"""Number of differing tokens in report.html."""
_MAX_LISTED = 6
"""Number of names in a list, and of points from the first differing one on in the terminal table."""
_SHARE, _MAX, _SWAPPED = "#c2410c", "#1d4ed8", "#15803d"


def headline(result: Result) -> str:
    """Return one sentence: the first differing point, its tokens and the size of the difference."""
    c = result.comparison
    if c.suspect is None:
        return (
            f"No difference: {c.compared} pairs of point and token compared ({len(c.points)} points, {result.a.rows} "
            "tokens)."
        )
    s = c.suspect
    op = f" (op {s.op})" if s.op else ""
    text = (
        f"The first differing point is {s.point}{op}: {s.differing} of {s.compared} tokens differ, "
        f"first {_token(c.tokens[0])}"
    )
    if s.ranks:
        text += f"; in {s.ranks} of these tokens, the tensor-parallel ranks of one side disagree with each other"
    if s.values:
        v = s.values
        text += f"; at most {v.max_ulps} ulp of {_narrow(s)}, max |d| {v.max_abs:.1e}" + (
            f" (values of {v.tokens} tokens)" if v.tokens < s.differing else ""
        )
    return text + "."


def swapped_line(result: Result) -> str | None:
    """Return one sentence on the effect of the swapped op, or None without a swap."""
    if result.swapped is None:
        return None
    text = f"With alignkit's {result.swap} on the stock side{'s' if _stock_sides(result) > 1 else ''}, "
    suspect = result.comparison.suspect
    if suspect is None:
        return text + (
            "no point differs." if result.swapped.suspect is None else "points differ that did not differ before."
        )
    now = next(p for p in result.swapped.points if p.point == suspect.point)
    if not result.confirmed:
        return text + (
            f"{suspect.point} still differs in {now.differing} tokens (before: {suspect.differing}): "
            f"{result.swap} is not the cause, or not the only cause."
        )
    text += f"{suspect.point} no longer differs: {result.swap} is the cause. "
    new = result.swapped.suspect
    return text + ("No other point differs." if new is None else f"The first differing point is now {new.point}.")


def notes(result: Result) -> list[str]:
    """Return remarks needed to interpret the numbers."""
    remarks = []
    pairs: dict[tuple[str, str], list[str]] = {}
    for p in result.comparison.points:
        if p.dtypes[0] != p.dtypes[1]:
            pairs.setdefault(p.dtypes, []).append(p.point)
    remarks += [f"a is {a}, b is {b}, compared by value: {_names(names)}" for (a, b), names in pairs.items()]
    if result.comparison.missing:
        remarks.append(f"not compared, since not recorded by both sides: {_names(result.comparison.missing)}")
    for name, side in (("a", result.a), ("b", result.b)):
        if side.settings.get("eager"):
            remarks.append(
                f"{name}: vLLM ran eagerly with model runner {side.settings.get('runner')}, without torch.compile or "
                "CUDA graphs, since hooks do not run inside a graph"
            )
    return remarks


def table(result: Result) -> Table:
    """Return the terminal table: points around the first difference, layer outputs and model outputs."""
    view = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title_justify="left",
        title=f"a: {result.names[0]} ({result.a.engine}), b: {result.names[1]} ({result.b.engine})",
    )
    view.add_column("point", no_wrap=True)
    view.add_column("op", no_wrap=True)
    for name in ("differ", "max |d|", "max ulp"):
        view.add_column(name, justify="right", no_wrap=True, min_width=9)
    if result.swapped:
        view.add_column(f"differ, {result.swap} swapped", justify="right", no_wrap=True)
    swapped = {p.point: p for p in result.swapped.points} if result.swapped else {}
    for i in _shown(result.comparison):
        p = result.comparison.points[i]
        style = "bold red" if i == result.comparison.first else "" if p.differing else "green"
        cells = [
            Text(p.point, style=style),
            Text(p.op),
            Text(f"{p.differing}/{p.compared}", style=style),
            *map(Text, _cells(p)),
        ]
        if swapped:
            now = swapped.get(p.point)
            cells.append(Text(f"{now.differing}/{now.compared}" if now else "-"))
        view.add_row(*cells)
    return view


def write_html(result: Result, path: Path) -> None:
    """Write report.html, which has no scripts and no external resources."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("alignkit.bisect", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    c = result.comparison
    swapped = {p.point: p for p in result.swapped.points} if result.swapped else {}
    text = environment.get_template("report.html.j2").render(
        headline=headline(result),
        good=c.suspect is None,
        swapped=swapped_line(result),
        notes=notes(result),
        names=result.names,
        sides=(result.a, result.b),
        settings=_settings(result),
        info=result.info,
        first=c.first,
        op=result.swap,
        points=[(p, f"{p.differing}/{p.compared}", _cells(p), swapped.get(p.point)) for p in c.points],
        tokens=c.tokens[:_MAX_TOKENS],
        differing=len(c.tokens),
        growth=_growth(result),
        by_position=_by_position(c) if c.by_position else None,
    )
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _shown(c: Comparison) -> list[int]:
    """Return the indices of the points listed in the terminal table."""
    if c.first is None:
        return []
    ends = {i for i, p in enumerate(c.points) if p.point.endswith(".residual") or not p.point.startswith("layers.")}
    return sorted(ends | set(range(max(0, c.first - 2), min(len(c.points), c.first + _MAX_LISTED))))


def _cells(p: PointDifference) -> tuple[str, str]:
    if not p.differing:
        return "0", "0"
    return (f"{p.values.max_abs:.1e}", str(p.values.max_ulps)) if p.values else ("-", "-")


def _token(token: tuple[int, int]) -> str:
    return f"sequence {token[0]} position {token[1]}"


def _narrow(p: PointDifference) -> str:
    return min(p.dtypes, key=lambda name: ("float32", "bfloat16", "float16").index(name) == 0)


def _names(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )


def _stock_sides(result: Result) -> int:
    return sum(name.startswith(("stock-", "hf")) for name in result.names)


def _settings(result: Result) -> list[tuple[str, str, str]]:
    """Return (name, a, b) for every setting and version of the two sides."""

    def flat(side) -> dict[str, str]:
        settings = {k: str(v) for k, v in side.settings.items() if k != "versions"}
        versions = {f"version of {k}": str(v) for k, v in (side.settings.get("versions") or {}).items()}
        return {"engine": side.engine, "contract": side.contract, "weights": side.weights} | settings | versions

    a, b = flat(result.a), flat(result.b)
    return [(name, a.get(name, ""), b.get(name, "")) for name in dict.fromkeys([*a, *b])]


def _growth(result: Result) -> str:
    from matplotlib.ticker import MaxNLocator

    c = result.comparison
    figure, (shares, sizes) = figure_of(2)
    x = range(len(c.points))
    shares.plot(x, [100 * p.differing / max(p.compared, 1) for p in c.points], color=_SHARE, label="as run")
    if result.swapped and len(result.swapped.points) == len(c.points):
        shares.plot(
            x,
            [100 * p.differing / max(p.compared, 1) for p in result.swapped.points],
            color=_SWAPPED,
            label=f"{result.swap} swapped",
        )
        shares.legend(frameon=False)
    shares.set_ylabel("% of tokens differing")
    shares.set_ylim(0, 105)
    known = [(i, p.values.max_abs) for i, p in enumerate(c.points) if p.values and 0 < p.values.max_abs < float("inf")]
    if known:
        sizes.plot(*zip(*known, strict=True), "o-", color=_MAX, markersize=3, linewidth=1)
        sizes.set_yscale("log")
    sizes.set_ylabel("max |d| (recorded tokens)")
    ends = [i for i, p in enumerate(c.points) if p.point.endswith(".residual")]
    for axes in (shares, sizes):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        every = max(1, len(ends) // 8)
        axes.set_xticks(ends[::every], [c.points[i].point.split(".")[1] for i in ends[::every]])
        axes.set_xlim(-1, len(c.points))
        axes.set_xlabel("end of layer")
        if c.first is not None:
            axes.axvline(c.first, color="#9ca3af", linewidth=1, linestyle=":")
    return data_uri(figure, "svg")


def _by_position(c: Comparison) -> str:
    figure, axes = figure_of()
    axes.plot([p for p, _, _ in c.by_position], [m for _, _, m in c.by_position], color=_MAX)
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("max |d| of the logprob")
    axes.set_ylim(bottom=0)
    return data_uri(figure, "svg")
