"""Figures for a paper, as SVG and PDF: scores against cost, paired differences, mean ranks. They need Matplotlib."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.report.comparison.compare import Comparison
from polyfed.report.comparison.paired_differences import Evidence
from polyfed.report.comparison.score_against_cost import COSTS, Progression, progressions

FORMATS = ("svg", "pdf")

LIGHT = ("#1b1f24", "#0072b2", "#d55e00", "#00805d", "#a64d9c", "#9a7000", "#3f8fbf", "#8c564b")
DARK = ("#f0f3f6", "#58a6ff", "#ff8c42", "#3fcf8e", "#d68bd9", "#e3b341", "#8fd3ff", "#c9a08f")
"""The colours of the pages (assets/report.css)."""

DASHES = ("-", "--", ":", "-.")
"""The line styles. If there are more groups than colours, groups with the same colour have different dashes."""

MOST_BANDS = 4
"""The largest number of groups with bands. More bands would hide each other, so bars at the last point show the range
over runs instead."""

WIDTH = 5.5
"""The width of a figure in inches, which is the width of one text column of NeurIPS and ICML."""


def write_figures(
    comparison: Comparison, proof: Evidence, folder: str | Path, *, metric: str | None = None, dark: bool = False
) -> list[Path]:
    """Write all figures of a comparison.

    Args:
        proof: the tests of the comparison.
        folder: the folder for the files, which is created.
        metric: the metric of the curves. If None, it is chosen as in `evidence`.
        dark: whether to draw for a dark background.

    Returns:
        The paths of the files.

    Raises:
        RecipeError: Matplotlib is not installed, or the folder cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise RecipeError("figures need Matplotlib: pip install 'polyfed[figures]'") from None
    folder = Path(folder)
    figures: dict[str, Any] = {}
    with mpl.rc_context(_style(dark)):  # type: ignore[arg-type]
        for cost, groups in progressions(comparison, metric).items():
            for scenario in dict.fromkeys(group.scenario for group in groups):
                own = [group for group in groups if group.scenario == scenario]
                name = "-".join(part for part in (cost.replace(" ", "-"), scenario) if part)
                figures[name] = _curves(Figure, own, COSTS[cost][0], proof, scenario, dark)
        for scenario in dict.fromkeys(row.scenario for row in proof.differences):
            name = "-".join(part for part in ("differences", scenario) if part)
            figures[name] = _differences(Figure, proof, scenario)
        if proof.ranks is not None:
            figures["ranks"] = _ranks(Figure, proof)
        if names := ", ".join(dict.fromkeys(absent.method for absent in comparison.absent)):
            for figure in figures.values():
                figure.text(0.0, -0.02, f"not compared: {names}", va="top", fontsize=7)
        return _saved(figures, folder)


def _saved(figures: dict[str, Any], folder: Path) -> list[Path]:
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            for kind in FORMATS:
                path = folder / f"{re.sub(r'[^0-9A-Za-z_.-]+', '-', name)}.{kind}"
                date = {"Date": None} if kind == "svg" else {"CreationDate": None}  # equal numbers give equal files
                figure.savefig(path, metadata=date)
                paths.append(path)
    except OSError as error:
        raise RecipeError(f"cannot write figures to {folder}: {error.strerror or error}") from None
    return paths


def _style(dark: bool) -> dict[str, Any]:
    ink, paper, line = ("#e6edf3", "#0d1117", "#30363d") if dark else ("#1b1f24", "#ffffff", "#d8dee4")
    return {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "savefig.facecolor": paper,
        "savefig.bbox": "tight",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": line,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "legend.frameon": False,
        "pdf.fonttype": 42,  # fonts that journals accept and that a reader can select
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "polyfed",
    }


def _curves(
    figure_of: Any, groups: Sequence[Progression], x_label: str, proof: Evidence, scenario: str, dark: bool
) -> Any:
    """Draw a score against its cost, with the mean and the range over runs."""
    figure = figure_of(figsize=(WIDTH, 3.2))
    axes = figure.subplots()
    factor = 100.0 if proof.share(scenario) else 1.0
    colours = DARK if dark else LIGHT
    for number, group in enumerate(groups):
        colour, dash = colours[number % len(colours)], DASHES[number // len(colours) % len(DASHES)]
        mean, low, high = ([factor * value for value in part] for part in (group.mean, group.low, group.high))
        marker = "o" if len(mean) < 8 else None
        axes.plot(group.x, mean, dash, color=colour, linewidth=1.4, marker=marker, markersize=3, label=group.label)
        if group.runs < 2:
            continue
        if len(groups) <= MOST_BANDS:
            axes.fill_between(group.x, low, high, color=colour, alpha=0.15, linewidth=0)
        else:
            axes.errorbar(group.x[-1], mean[-1], [[mean[-1] - low[-1]], [high[-1] - mean[-1]]], color=colour, capsize=3)
    axes.set_xlabel(x_label)
    axes.set_ylabel(proof.metrics[scenario].title)
    axes.set_title(scenario, fontsize=9)
    axes.grid(True, linewidth=0.5)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
    return figure


def _differences(figure_of: Any, proof: Evidence, scenario: str) -> Any:
    """Draw paired differences to the baseline with intervals. A filled point is significant after Holm's correction."""
    rows = [row for row in proof.differences if row.scenario == scenario][::-1]
    figure = figure_of(figsize=(WIDTH, 0.7 + 0.28 * len(rows)))
    axes = figure.subplots()
    ink = axes.yaxis.label.get_color()
    factor = 100.0 if proof.share(scenario) else 1.0
    axes.axvline(0.0, color=ink, linewidth=0.8)
    for place, row in enumerate(rows):
        if row.low is not None and row.high is not None:
            axes.plot([factor * row.low, factor * row.high], [place, place], color=ink, linewidth=1.2)
        sure = row.p_holm is not None and row.p_holm < 0.05
        face = ink if sure else axes.get_facecolor()
        axes.plot(factor * row.mean, place, "o", color=ink, markerfacecolor=face, markersize=5)
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    unit = " (points)" if proof.share(scenario) else ""
    axes.set_xlabel(
        f"{proof.metrics[scenario].name} minus that of {rows[0].baseline}{unit}; filled: p < 0.05 after Holm"
    )
    axes.set_title(scenario, fontsize=9)
    axes.grid(True, axis="x", linewidth=0.5)
    return figure


def _ranks(figure_of: Any, proof: Evidence) -> Any:
    """Draw mean ranks on a line. A bar joins methods whose ranks do not differ significantly (Demšar, Fig. 1)."""
    ranks = proof.ranks
    assert ranks is not None
    order = sorted(range(len(proof.methods)), key=lambda method: ranks.ranks[method])
    half = (len(order) + 1) // 2
    depth = 0.30 + 0.16 * len(ranks.cliques)
    bottom = depth + 0.26 * half
    figure = figure_of(figsize=(WIDTH, 0.9 + 1.1 * bottom))
    axes = figure.subplots()
    axes.set_axis_off()
    ink, most = axes.yaxis.label.get_color(), len(order)
    axes.set_xlim(0.3, most + 0.7)
    axes.set_ylim(-bottom - 0.1, 0.75)
    axes.plot([1, most], [0, 0], color=ink, linewidth=1.2)
    for tick in range(1, most + 1):
        axes.plot([tick, tick], [0, 0.07], color=ink, linewidth=1)
        axes.text(tick, 0.1, str(tick), ha="center", va="bottom", fontsize=8)
    end = min(1 + ranks.critical, float(most))
    words = f"critical difference {ranks.critical:.2f}" + (
        " (wider than the axis)" if 1 + ranks.critical > most else ""
    )
    axes.plot([1, end], [0.45, 0.45], color=ink, linewidth=2)
    axes.text(1, 0.5, words, ha="left", va="bottom", fontsize=8)
    for place, method in enumerate(order):
        left = place < half
        y = -depth - 0.26 * (place if left else len(order) - 1 - place)
        x = ranks.ranks[method]
        side = 0.9 if left else most + 0.1
        axes.plot([x, x, side], [0, y, y], color=ink, linewidth=0.8)
        label = f"{proof.methods[method]} ({x:.2f})"
        axes.text(
            side - 0.03 if left else side + 0.03, y, label, ha="right" if left else "left", va="center", fontsize=8
        )
    for level, clique in enumerate(ranks.cliques):
        y = -0.14 - 0.16 * level
        spread = [ranks.ranks[method] for method in clique]
        axes.plot([min(spread) - 0.03, max(spread) + 0.03], [y, y], color=ink, linewidth=3, solid_capstyle="butt")
    return figure
