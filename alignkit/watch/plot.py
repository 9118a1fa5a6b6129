"""Plot of drift by step, rendered to SVG on the server.

A point is [first step, last step, tokens, unequal, largest difference], as in `state.summary`.
"""

from __future__ import annotations

import io
import math

_MAX_CURVES = 8
"""Maximum number of per-rank curves.

With more ranks, one curve shows all: the largest difference, and the sum of unequal logprobs.
"""


def svg(curves: list[dict]) -> bytes:
    """Return the plot as SVG; `curves` are those of `state.summary`."""
    from matplotlib.figure import Figure  # not pyplot, whose state is not thread-safe
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for axes in (top, bottom):
        axes.margins(y=0.1)
    combined = len(curves) > _MAX_CURVES
    for label, points in (
        [(f"all {len(curves)} ranks", _all_ranks(curves))]
        if combined
        else [(f"rank {curve['rank']}", curve["points"]) for curve in curves]
    ):
        steps = [last for _, last, *_ in points]
        top.plot(
            steps,
            [math.nan if largest is None else largest for *_, largest in points],
            marker="." if len(steps) < 60 else None,
            linewidth=1.2,
            label=label,
        )
        bottom.plot(
            steps, [unequal for _, _, _, unequal, _ in points], marker="." if len(steps) < 60 else None, linewidth=1.2
        )
    # The log scale reaches below the smallest difference, so that every nonzero difference is above the zero line.
    smallest = min((point[4] for curve in curves for point in curve["points"] if point[4]), default=1e-7) / 2
    top.set_yscale("symlog", linthresh=smallest)
    top.set_ylim(bottom=-0.2 * smallest)
    top.set_ylabel("largest |training - rollout|")
    bottom.set_yscale("symlog", linthresh=1)
    bottom.set_ylim(bottom=-0.3)
    bottom.set_ylabel("logprobs not\nbit-equal")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    if curves:
        top.legend(loc="upper left", fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _all_ranks(curves: list[dict]) -> list[list]:
    """Merge the curves of all ranks.

    A merged point has, per last step, the sums of tokens and unequal logprobs, and the largest difference.
    """
    merged: dict[int, list] = {}
    for curve in curves:
        for first, last, tokens, unequal, largest in curve["points"]:
            point = merged.setdefault(last, [first, last, 0, 0, None])
            point[2] += tokens
            point[3] += unequal
            if largest is not None:
                point[4] = largest if point[4] is None else max(point[4], largest)
    return [merged[last] for last in sorted(merged)]
