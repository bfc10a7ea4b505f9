"""Accuracy against size for the four MNIST tables: what others reported, what we measured, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from deephoyer.lab.report.figures.style import CYCLE, GREY, INK, MARKERS, styled
from deephoyer.lab.report.paper_tables import TABLES, PaperTable
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.series import Series, on_front

BELOW, ABOVE = 0.6, 0.6
"""Points of accuracy below and above the one to keep: anything lower would flatten all the rest."""


@styled
def mnist_front(records: Iterable[Record], protocol: str = "test-best") -> Figure:
    """One panel per table. Our points are means over seeds under one protocol; a line joins the Pareto-optimal ones."""
    records = list(records)
    figure = Figure(figsize=(10.4, 8.4))
    for axes, table in zip(figure.subplots(2, 2).flat, list(TABLES.values())[:4], strict=True):
        ours = [s for s in table.series(records) if s.protocol == protocol and "ablation" not in s.tags]
        _others(axes, table)
        _ours(axes, [s for s in ours if -BELOW < 100 * (s.accuracy - (table.floor or 0)) < ABOVE])
        _finish(axes, table)
    by = {"test-best": "the epoch best on test images", "held-out": "the epoch best on held-out images"}[protocol]
    figure.suptitle(f"Accuracy against size on MNIST (ours: means over seeds, {by})", fontsize=12)
    return figure


def _others(axes: Axes, table: PaperTable) -> None:
    """Reported points, with their names; the dense network is far off to the right and left out."""
    names: dict[tuple[float, float], str] = {}
    for row in sorted(table.reported[1:], key=lambda r: r.number or 0):
        x, y = row.number or 0, row.percent or 100 * (table.floor or 0)
        axes.plot(x, y, "x", color=GREY, markersize=6, label="_" if names else "reported", zorder=2)
        name = row.method if row.percent is not None else f"{row.method} (≈)"
        near = next((place for place in names if place[1] == y and x < 1.03 * place[0]), None)
        names[near or (x, y)] = f"{names[near]}, {name}" if near else name
    for place, name in names.items():
        # Downwards: results that compete with them are above or to the left.
        axes.annotate(
            name, place, (-2, -6), textcoords="offset points", rotation=-58, rotation_mode="anchor",
            fontsize=7.5, color=GREY, ha="left", va="center",
        )  # fmt: skip


def _ours(axes: Axes, ours: Sequence[Series]) -> None:
    methods = sorted({series.method for series in ours})
    for i, method in enumerate(methods):
        points = sorted((series.size, 100 * series.accuracy) for series in ours if series.method == method)
        colour, marker = CYCLE[i % len(CYCLE)], MARKERS[(i + i // len(CYCLE)) % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5.5, label=method, zorder=4)
    best = sorted((series.size, 100 * series.accuracy) for series in ours if on_front(series, ours))
    if best:
        axes.plot(*zip(*best, strict=True), color=INK, linewidth=1, label="front of ours", zorder=3)


def _finish(axes: Axes, table: PaperTable) -> None:
    floor = 100 * (table.floor or 0)
    axes.axhline(floor, color=INK, linewidth=0.7, linestyle=":", zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(floor - BELOW, floor + ABOVE)
    axes.margins(x=0.15)
    counted = "nonzero weights" if table.counts == "nonzeros" else "MACs, the paper's counting"
    axes.set(title=table.title, xlabel=f"{counted} (log scale)", ylabel="test accuracy, %")
    axes.legend(loc="upper right", fontsize=6.5, labelspacing=0.2)
