"""What a person reads: the table on the terminal, and report.html, one file with everything in it."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ...check.report import figure_of
from .comparison import Comparison, PointDifference
from .run import Result

_TOKENS = 12
_A_FEW = 6
_SHARE, _MAX, _SWAPPED = "#c2410c", "#1d4ed8", "#15803d"


def headline(result: Result) -> str:
    """One sentence: the first point that differs, for which tokens, by how much."""
    c = result.comparison
    if c.suspect is None:
        return f"Nothing differs: {len(c.points)} points of {result.a.rows} tokens, {c.compared} rows compared."
    s = c.suspect
    made = f", made by {s.op}" if s.op else ""
    text = (
        f"The first point that differs is {s.point}{made}: {s.differing} of {s.compared} tokens, "
        f"first {_token(c.tokens[0])}"
    )
    if s.ranks:
        text += f"; of {s.ranks} of them a side's tensor-parallel ranks do not agree among themselves"
    if s.values:
        v = s.values
        text += f"; by at most {v.max_ulps} ulp of {_narrow(s)}, max |d| {v.max_abs:.1e}" + (
            f" (looked at {v.tokens} of the tokens)" if v.tokens < s.differing else ""
        )
    return text + "."


def swapped_line(result: Result) -> str | None:
    """What exchanging an op did."""
    if result.swapped is None:
        return None
    text = f"With {result.swap} exchanged for alignkit's on the stock side{'s' if _stock_sides(result) > 1 else ''}, "
    suspect = result.comparison.suspect
    if suspect is None:
        return text + ("nothing differs." if result.swapped.suspect is None else "something does.")
    now = next(p for p in result.swapped.points if p.point == suspect.point)
    if not result.confirmed:
        return text + (
            f"{suspect.point} still differs, in {now.differing} tokens, before {suspect.differing}: "
            f"{result.swap} is not the cause, or not alone."
        )
    text += f"{suspect.point} no longer differs: confirmed"
    new = result.swapped.suspect
    return text + ("; nothing else differs." if new is None else f"; the first that differs is {new.point}.")


def notes(result: Result) -> list[str]:
    """What has to be known to read the numbers."""
    found = []
    pairs: dict[tuple[str, str], list[str]] = {}
    for p in result.comparison.points:
        if p.dtypes[0] != p.dtypes[1]:
            pairs.setdefault(p.dtypes, []).append(p.point)
    found += [f"a has {a}, b has {b}, compared by value: {_names(names)}" for (a, b), names in pairs.items()]
    if result.comparison.missing:
        found.append(f"not recorded by both sides, so not compared: {_names(result.comparison.missing)}")
    for name, side in (("a", result.a), ("b", result.b)):
        if side.settings.get("eager"):
            found.append(
                f"{name}: vLLM ran eagerly, without CUDA graphs and compilation, in its runner "
                f"{side.settings.get('runner')}: nothing can be recorded inside a graph"
            )
    return found


def table(result: Result) -> Table:
    """The points up to and around the first difference, the ends of layers, and the output."""
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
    """Writes the report: no script, and nothing that has to be fetched."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("alignkit.drift.bisect", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
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
        tokens=c.tokens[:_TOKENS],
        differing=len(c.tokens),
        growth=_growth(result),
        by_position=_by_position(c) if c.by_position else None,
    )
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _shown(c: Comparison) -> list[int]:
    """Indexes of the points worth a line on a terminal."""
    if c.first is None:
        return []
    ends = {i for i, p in enumerate(c.points) if p.point.endswith(".residual") or not p.point.startswith("layers.")}
    return sorted(ends | set(range(max(0, c.first - 2), min(len(c.points), c.first + _A_FEW))))


def _cells(p: PointDifference) -> tuple[str, str]:
    if not p.differing:
        return "0", "0"
    return (f"{p.values.max_abs:.1e}", str(p.values.max_ulps)) if p.values else ("-", "-")


def _token(token: tuple[int, int]) -> str:
    return f"sequence {token[0]} position {token[1]}"


def _narrow(p: PointDifference) -> str:
    return min(p.dtypes, key=lambda name: ("float32", "bfloat16", "float16").index(name) == 0)


def _names(names: list[str]) -> str:
    return ", ".join(names[:_A_FEW]) + (f" and {len(names) - _A_FEW} more" if len(names) > _A_FEW else "")


def _stock_sides(result: Result) -> int:
    return sum(name.startswith(("stock-", "hf")) for name in result.names)


def _settings(result: Result) -> list[tuple[str, str, str]]:
    """(name, a, b) of everything that the two sides say of themselves."""

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
    shares.plot(x, [100 * p.differing / max(p.compared, 1) for p in c.points], color=_SHARE, label="as it is")
    if result.swapped and len(result.swapped.points) == len(c.points):
        shares.plot(
            x,
            [100 * p.differing / max(p.compared, 1) for p in result.swapped.points],
            color=_SWAPPED,
            label=f"{result.swap} exchanged",
        )
        shares.legend(frameon=False)
    shares.set_ylabel("% of tokens that differ")
    shares.set_ylim(0, 105)
    known = [(i, p.values.max_abs) for i, p in enumerate(c.points) if p.values and 0 < p.values.max_abs < float("inf")]
    if known:
        sizes.plot(*zip(*known, strict=True), "o-", color=_MAX, markersize=3, linewidth=1)
        sizes.set_yscale("log")
    sizes.set_ylabel("max |d| where recorded")
    ends = [i for i, p in enumerate(c.points) if p.point.endswith(".residual")]
    for axes in (shares, sizes):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        every = max(1, len(ends) // 8)
        axes.set_xticks(ends[::every], [c.points[i].point.split(".")[1] for i in ends[::every]])
        axes.set_xlim(-1, len(c.points))
        axes.set_xlabel("end of layer")
        if c.first is not None:
            axes.axvline(c.first, color="#9ca3af", linewidth=1, linestyle=":")
    return _svg(figure)


def _by_position(c: Comparison) -> str:
    figure, axes = figure_of()
    axes.plot([p for p, _, _ in c.by_position], [m for _, _, m in c.by_position], color=_MAX)
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("max |d| of the logprob")
    axes.set_ylim(bottom=0)
    return _svg(figure)


def _svg(figure) -> str:
    """As a data URI, the same for the same numbers."""
    import matplotlib

    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "alignkit"}):
        figure.savefig(image, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(image.getvalue()).decode()
