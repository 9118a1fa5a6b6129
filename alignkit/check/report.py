"""Reports of a check: the terminal table and the self-contained report.html.

Texts are for people; programs read check.json. docs/drift.md and tests/cli/test_check.py quote them. The template
report.html.j2 gets its variables from `write_html`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from ..drift import TokenDifference
from ..jobs.page import data_uri, figure_of
from .run import Compared, Result

SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_MAX_WORST = 12
"""Number of worst tokens per dtype in report.html."""
_STOCK, _PATCHED = "#c2410c", "#1d4ed8"


def table(result: Result) -> Table:
    """Return the terminal table: one line per pair of rollout and training, with stock and patched columns."""
    # Fits in 80 columns. The patched mean is omitted: it is 0 whenever the maximum is.
    view = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title_justify="left",
        title="rollout (vLLM) against training (Megatron-core); d = training - rollout",
    )
    for name in ("dtype", "rollout", "training"):
        view.add_column(f"\n{name}", no_wrap=True)
    for name in ("stock\nequal", "stock\nmax |d|", "stock\nmean |d|", "patched\nequal", "patched\nmax |d|"):
        view.add_column(name, justify="right", no_wrap=True, min_width=7)
    previous = None
    for stock, patched in _lines(result):
        row = patched.row
        if previous not in (None, (row.dtype, row.model)):
            view.add_section()
        previous = row.dtype, row.model
        style = "green" if patched.report.all_equal else "bold red"
        view.add_row(
            SHORT_DTYPES[row.dtype] + "*" * bool(row.model),
            row.rollout,
            row.training,
            *_cells(stock),
            *(Text(cell, style=style) for cell in _cells(patched)[:2]),
        )
    if previous and previous[1]:
        view.caption, view.caption_justify = f"* small MoE model ({previous[1]})", "left"
    return view


def headline(result: Result) -> str:
    """Return the summary sentences.

    Example: ``Patched: 512 of 512 logprobs are bit-equal (1 of 1 rows). Stock: 3 of 512.`` For MoE models also ``Tokens
    routed to other experts in training: patched 0 of 900, stock 41 of 900.``
    """

    def counts(patched: bool) -> tuple[int, int, int, int]:
        reports = [c.report for c in result.compared if c.row.patched == patched]
        return (
            sum(r.bit_equal for r in reports),
            sum(r.tokens for r in reports),
            sum(r.all_equal for r in reports),
            len(reports),
        )

    equal, tokens, good, rows = counts(True)
    stock_equal, stock_tokens, _, stock_rows = counts(False)
    stock = (
        f"{stock_equal} of {stock_tokens}"
        if stock_rows
        else "not run (alignkit check runs stock Megatron-core only without cp, and packed only with te)"
    )
    text = f"Patched: {equal} of {tokens} logprobs are bit-equal ({good} of {rows} rows). Stock: {stock}."
    if _routed(result):
        rerouted, stock_rerouted = (
            _rerouted([c for c in result.compared if c.row.patched == p]) for p in (True, False)
        )
        text += f" Tokens routed to other experts in training: patched {rerouted}, stock {stock_rerouted}."
    return text


def _routed(result: Result) -> bool:
    """Return True if any row has recorded expert choices."""
    return any(c.routing for c in result.compared)


def _rerouted(rows: list[Compared | None]) -> str:
    """Return e.g. ``41 of 900``: rerouted tokens and tokens with known experts, summed over the rows."""
    known = [c.routing for c in rows if c is not None and c.routing]
    return f"{sum(n for n, _ in known)} of {sum(n for _, n in known)}" if known else ""


def write_html(result: Result, path: Path) -> None:
    """Write report.html, which has no scripts and no external resources."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("alignkit.check", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    routed = _routed(result)
    dtypes = list(dict.fromkeys(stock.row.dtype for stock, _ in _pairs(result)))
    path.write_text(
        environment.get_template("report.html.j2").render(
            headline=headline(result),
            good=not result.failures,
            failures=result.failures,
            info=result.info,
            pairs=[
                (
                    patched.row,
                    *((*_cells(c), *[_rerouted([c])] * routed) for c in (stock, patched)),
                    patched.report.all_equal,
                )
                for stock, patched in _lines(result)
            ],
            routed=routed,
            sections=[_section(result, dtype) for dtype in dtypes],
        )
    )


@dataclass
class _Section:
    dtype: str
    example: str
    plots: list[tuple[str, str]]
    """(caption, data URI) per plot."""
    worst: list[tuple[str, TokenDifference, float]]
    """(row, token, training - rollout) for stock engines."""
    metrics: list[tuple[str, str, str]]
    """(name, stock, patched)."""


def _section(result: Result, dtype: str) -> _Section:
    pairs = [(s, p) for s, p in _pairs(result) if s.row.dtype == dtype]
    stock, patched = [s for s, _ in pairs], [p for _, p in pairs]
    example = pairs[0]
    worst = [
        (f"{c.row.rollout} against {c.row.training}", t, t.training - t.rollout) for c in stock for t in c.report.worst
    ]
    worst.sort(key=lambda entry: abs(entry[2]) if entry[2] == entry[2] else float("inf"), reverse=True)
    numbers = [c.report.metrics("") for c in example]
    return _Section(
        dtype=dtype,
        example=f"{example[0].row.rollout} against {example[0].row.training}",
        plots=[
            (
                "Differences over all rows. The leftmost bar counts logprobs without a difference.",
                _histogram(stock, patched),
            ),
            (
                "Rollout and training logprob of each token, and their difference: "
                f"{example[0].row.rollout} against {example[0].row.training}.",
                _scatter(*example),
            ),
            ("Mean absolute difference at each sampled position, over all rows.", _by_position(stock, patched)),
        ],
        worst=worst[:_MAX_WORST],
        metrics=[(name, _number(numbers[0][name]), _number(numbers[1][name])) for name in numbers[0]],
    )


def _lines(result: Result) -> list[tuple[Compared | None, Compared]]:
    """Return (stock, patched) per pair of rollout and training in row order; stock is None if it has no such row."""
    stock = {c.row: c for c in result.compared if not c.row.patched}
    return [(stock.get(replace(c.row, patched=False)), c) for c in result.compared if c.row.patched]


def _pairs(result: Result) -> list[tuple[Compared, Compared]]:
    """Return the lines of the main model that have both a stock and a patched row."""
    return [(stock, patched) for stock, patched in _lines(result) if stock and not stock.row.model]


def _cells(c: Compared | None) -> tuple[str, ...]:
    if c is None:
        return "", "", ""
    r = c.report
    return f"{r.bit_equal}/{r.tokens}", *(f"{x:.1e}" if x else "0" for x in (r.max_abs, r.mean_abs))


def _number(x: float) -> str:
    if isinstance(x, int) or x in (0.0, 1.0):
        return str(int(x))  # exact
    return f"{x:.1e}" if abs(x) < 1e-2 else f"{x:.6g}"


def _difference(c: Compared) -> torch.Tensor:
    """Return the finite values of training - rollout, float64 [tokens]."""
    d = torch.cat(c.training.logprobs).double() - torch.cat(c.rollout.logprobs).double()
    return d[d.isfinite()]


def _histogram(stock: list[Compared], patched: list[Compared]) -> str:
    figure, axes = figure_of()
    lowest, highest, step = -9.0, 1.0, 0.25
    edges = torch.arange(lowest, highest + step / 2, step, dtype=torch.float64)
    zero_at = lowest - 4 * step
    for k, (label, color, rows) in enumerate((("stock", _STOCK, stock), ("patched", _PATCHED, patched))):
        d = torch.cat([_difference(c) for c in rows]).abs()
        counts = torch.histogram(d[d > 0].log10().clamp(lowest, highest), edges).hist
        width = step * 0.45
        x = torch.cat([torch.tensor([zero_at], dtype=torch.float64), edges[:-1] + step / 4])
        y = torch.cat([(d == 0).sum().reshape(1).double(), counts])
        axes.bar((x + k * width).tolist(), y.tolist(), width=width, color=color, label=label)
    ticks = range(int(lowest), int(highest) + 1, 2)
    axes.set_xticks([zero_at + width / 2, *ticks], ["0", *(f"$10^{{{t}}}$" for t in ticks)])
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("|training - rollout|")
    axes.set_ylabel("logprobs")
    axes.legend(frameon=False)
    return data_uri(figure)


def _scatter(stock: Compared, patched: Compared) -> str:
    figure, (values, differences) = figure_of(2)
    for label, color, c in (("stock", _STOCK, stock), ("patched", _PATCHED, patched)):
        x, y = (torch.cat(side.logprobs).double() for side in (c.rollout, c.training))
        keep = x.isfinite() & y.isfinite()
        x, y = x[keep], y[keep]
        dots = {"s": 9, "color": color, "alpha": 0.5, "linewidths": 0, "label": label}
        values.scatter(x.tolist(), y.tolist(), **dots)
        differences.scatter(x.tolist(), (y - x).tolist(), **dots)
    values.set_ylabel("training logprob")
    differences.set_ylabel("training - rollout")
    for axes in (values, differences):
        axes.set_xlabel("rollout logprob")
    values.legend(frameon=False)
    return data_uri(figure)


def _by_position(stock: list[Compared], patched: list[Compared]) -> str:
    figure, axes = figure_of()
    for label, color, rows in (("stock", _STOCK, stock), ("patched", _PATCHED, patched)):
        by_position: dict[int, list[float]] = {}
        for c in rows:
            for a, b in zip(c.rollout.logprobs, c.training.logprobs, strict=True):
                for i, d in enumerate((b.double() - a.double()).abs().tolist()):
                    if d == d and d != float("inf"):
                        by_position.setdefault(i, []).append(d)
        positions = sorted(by_position)
        axes.plot(
            positions,
            [sum(by_position[i]) / len(by_position[i]) for i in positions],
            color=color,
            label=label,
            linewidth=2,
            clip_on=False,
        )
    axes.set_xlabel("sampled position")
    axes.set_ylabel("mean |training - rollout|")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return data_uri(figure)
