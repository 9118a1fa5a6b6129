"""Plots of results, which ``tables.py`` draws as SVG files beside their results."""

from __future__ import annotations

from pathlib import Path

from lib.rows import ENGINES, LOGP_PASSES, ROLLOUTS, by_run, is_plain, spread_of

LOGP_LINES = (("n", {"d": 4096, "v": 151936}), ("v", {"n": 4096, "d": 4096}))
"""Variable and fixed sizes of each plot."""
STOCK, ALIGNED, GREY = "#c2410c", "#1d4ed8", "#9ca3af"


def e2e(results: dict, path: Path) -> None:
    """Plot the share of bit-equal logprobs by rollout and training, aligned and stock, for the rows of table `e2e`."""
    results = results | {"rows": list(filter(is_plain, results["rows"]))}
    aligned = [r for r in results["rows"] if r["patched"]]
    models = sorted({r["model"] for r in aligned})
    panels = [
        (
            f"{model}, {'aligned' if patched else 'stock'}",
            [r for r in results["rows"] if r["model"] == model and r["patched"] == patched],
        )
        for model in models
        for patched in (False, True)
    ]
    panels = [(title, rows) for title, rows in panels if rows]
    figure, axes = _figure(len(panels), 1, (9.5, 3.6 * len(panels)))
    for ax, (title, rows) in zip(axes, panels, strict=True):
        of_model = [r for r in results["rows"] if r["model"] == rows[0]["model"]]
        trainings = sorted(
            dict.fromkeys(r["training"] for r in of_model),
            key=lambda t: (t.split("-")[0], "-sp-" in t, t.split("-")[-1]),
        )
        rollouts = [r for r in ROLLOUTS if any(row["rollout"] == r for row in of_model)]
        for row in rows:
            x, y = trainings.index(row["training"]), rollouts.index(row["rollout"])
            equal = row["bit_equal"] == row["tokens"]
            color = ALIGNED if equal else STOCK
            ax.add_patch(_rectangle(x, y, color))
            text = "all" if equal else f"{row['bit_equal'] / row['tokens']:.0%}\n{row['max_abs']:.0e}"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", fontsize=6.5)
        ax.set_xlim(0, len(trainings))
        ax.set_ylim(len(rollouts), 0)
        ax.set_xticks([i + 0.5 for i in range(len(trainings))], trainings, rotation=60, ha="right", fontsize=7)
        ax.set_yticks([i + 0.5 for i in range(len(rollouts))], [ROLLOUTS[r] for r in rollouts], fontsize=7)
        ax.tick_params(length=0)
        ax.set_facecolor("#f3f4f6")
        ax.set_title(
            f"{title}: bit-equal logprobs"
            + (", largest difference" if "stock" in title else "")
            + _commits(results["runs"], rows),
            fontsize=9,
            loc="left",
        )
    figure.savefig(path, metadata={"Date": None})


def cost(results: dict, path: Path) -> None:
    """Plot the median throughput relative to stock, with the range of the repeats; one panel per source digest."""
    colors = {
        "stock": GREY,
        "batch_invariant": STOCK,
        "stock_fused": "#4b5563",
        "hf_compiled": "#0e7490",
        "aligned": ALIGNED,
        "aligned_keeping": "#1d4ed8",
        "stock_te": "#a16207",
        "aligned_te": "#60a5fa",
    }
    units = ("output tokens/s", "prompt tokens/s", "tokens/s")
    rows = [r for r in results["rows"] if r["ratio_to_stock"] is not None and r["unit"] in units]
    panels = [part for part in by_run(results | {"rows": rows}) if part["rows"]]
    shown = [e for e in ENGINES if any(r["engine"] == e for r in rows)]
    counts = [len({(r["what"], r["case"]) for r in part["rows"]}) for part in panels]
    figure, axes = _figure(len(panels), 1, (9.5, 0.9 * len(panels) + 0.8 * sum(counts)), heights=counts)
    height = 0.8 / len(shown)
    for ax, part in zip(axes, panels, strict=True):
        cases = sorted(dict.fromkeys((r["what"], r["case"]) for r in part["rows"]), key=lambda case: case[0])
        present = {(r["what"], r["case"], r["engine"]) for r in part["rows"]}
        positions = {}  # index of an engine's bar within its case
        for case in cases:
            positions |= {(*case, engine): k for k, engine in enumerate(e for e in shown if (*case, e) in present)}
        for engine in shown:
            mine = [r for r in part["rows"] if r["engine"] == engine]
            shares = [r["ratio_to_stock"] for r in mine]
            spreads = [spread_of(r) or (r["ratio_to_stock"],) * 2 for r in mine]
            bars = ax.barh(
                [positions[r["what"], r["case"], engine] * height + cases.index((r["what"], r["case"])) for r in mine],
                shares,
                height=height * 0.92,
                color=colors[engine],
                label=ENGINES[engine].strip("*"),
                xerr=[
                    [share - low for share, (low, _) in zip(shares, spreads, strict=True)],
                    [high - share for share, (_, high) in zip(shares, spreads, strict=True)],
                ],
                error_kw={"elinewidth": 0.8, "ecolor": "#111827"},
            )
            ax.bar_label(bars, [f"{share:.2f}" for share in shares], padding=2, fontsize=7)
        ax.set_yticks(
            [i + 0.4 - height / 2 for i in range(len(cases))], [f"{what}: {case}" for what, case in cases], fontsize=8
        )
        ax.set_ylim(len(cases) - 0.1, -0.2)
        ax.set_title(
            "throughput relative to stock: median, slowest to fastest repeat" + _commits(part["runs"], part["rows"]),
            fontsize=9,
            loc="left",
        )
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=len(shown), loc="outside upper center"
    )
    figure.savefig(path, metadata={"Date": None})


def _commits(runs: dict[str, dict], rows: list[dict]) -> str:
    """Return the commits of rows, newest first, such as ``; commit d9ea3fe``."""
    infos = (runs[name] for name in sorted({row["run"] for row in rows}, reverse=True))
    commits = dict.fromkeys(run["commit"][:7] for run in infos if "commit" in run)
    return f"; commit {', '.join(commits)}" if commits else ""


def linear_logp(results: dict, path: Path) -> None:
    """Plot time relative to the GEMM along n and along v; panels with fewer than two points are omitted."""
    measured, panels = [r for r in results["rows"] if "error" not in r], []
    for along, fixed in LOGP_LINES:
        for pass_name in LOGP_PASSES:
            rows = [r for r in measured if r["pass"] == pass_name and all(r[k] == v for k, v in fixed.items())]
            if len({r[along] for r in rows}) > 1:
                panels.append((along, fixed, pass_name, rows))
    if not panels:
        return
    impls = [
        i
        for i in dict.fromkeys(r["impl"] for r in measured)
        if i != "gemm" and any(r["impl"] == i for *_, rows in panels for r in rows)
    ]
    figure, axes = _figure(-(-len(panels) // 2), min(len(panels), 2), (9.5, 3.8 * -(-len(panels) // 2)))
    for ax, (along, fixed, pass_name, rows) in zip(axes, panels, strict=True):
        for impl in impls:
            points = sorted((r[along], r["x"]) for r in rows if r["impl"] == impl)
            own = impl.startswith("alignkit")
            ax.plot(
                *zip(*points, strict=True) if points else ([], []),
                label=impl,
                marker="o",
                markersize=3,
                linewidth=2 if own else 1,
                zorder=3 if own else 2,
                color=_color(impl, impls),
            )
        ax.axhline(1, color=GREY, linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.grid(color="#e5e7eb", linewidth=0.6)
        ax.tick_params(length=0, labelsize=7)
        ax.set_xlabel(along, fontsize=8)
        sizes = ", ".join(f"{k}={v}" for k, v in fixed.items())
        ax.set_title(f"{pass_name.replace('_', ' + ')}, {sizes}: time relative to the GEMM", fontsize=9, loc="left")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=7, ncols=5, loc="outside upper center")
    figure.savefig(path, metadata={"Date": None})


def _color(impl: str, impls: list[str]) -> str:
    """Return a color: blue for alignkit, others for the peers."""
    own = [i for i in impls if i.startswith("alignkit")]
    if impl in own:
        return (ALIGNED, "#60a5fa", "#1e3a8a")[own.index(impl)]
    return f"C{1 + [i for i in impls if i not in own].index(impl)}"


def _figure(rows: int, columns: int, size: tuple[float, float], heights: list[int] | None = None):
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "alignkit"  # reproducible files
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for ax in axes:
        ax.spines[:].set_visible(False)
    return figure, axes


def _rectangle(x: int, y: int, color: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, color=color, linewidth=0)
