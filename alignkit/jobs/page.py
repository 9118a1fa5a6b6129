"""Figures of the self-contained pages report.html of `alignkit check` and `alignkit bisect`."""

from __future__ import annotations

import base64
import io
from typing import Literal

from ..errors import UnsupportedError
from ..runtime.machine import installed


def require_report_libraries() -> None:
    """Raise UnsupportedError if a library that `write_html` needs is not installed."""
    missing = [name for name in ("matplotlib", "jinja2") if not installed(name)]
    if missing:
        raise UnsupportedError(
            f"report.html: missing packages: {', '.join(missing)}. Run pip install 'alignkit[report]', or pass "
            "--no-report."
        )


def figure_of(columns: int = 1):
    """Return a figure and its axes: a single one, or an array if `columns` > 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots(1, columns)
    for ax in axes if columns > 1 else [axes]:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def data_uri(figure, kind: Literal["png", "svg"] = "png") -> str:
    """Return the figure as a data URI, deterministic for equal data."""
    import matplotlib

    image = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "alignkit"}):
        figure.savefig(image, format=kind, dpi=144, metadata=metadata)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64," + base64.b64encode(image.getvalue()).decode()
