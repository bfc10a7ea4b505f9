"""Accuracy against size for the four MNIST tables: what others reported, what we measured, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from deephoyer.lab.report.figures.style import CYCLE, GREY, INK, MARKERS, styled
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.rows import KINDS, Kind, Row, is_ablation, on_front, rows

BELOW, ABOVE = 0.6, 0.6
"""Percent around the accuracy to keep: what lies lower is no competition, and would flatten all the rest."""


@styled
def front(records: Iterable[Record], protocol: str = "test-best") -> Figure:
    """A panel a table. Points of ours are means over seeds under one protocol; the line joins the best of them."""
    records = list(records)
    figure = Figure(figsize=(10.4, 8.4))
    for axes, kind in zip(figure.subplots(2, 2).flat, KINDS.values(), strict=True):
        own = [r for r in rows(records, kind) if r.protocol == protocol and not is_ablation(r) and _near(r)]
        _others(axes, kind)
        _ours(axes, own)
        _finish(axes, kind)
    by = {"test-best": "the epoch best on test images", "held-out": "the epoch best on held-out images"}[protocol]
    figure.suptitle(f"Accuracy against size on MNIST (ours: means over seeds, {by})", fontsize=12)
    return figure


def _others(axes: Axes, kind: Kind) -> None:
    """Reported points, with their names; the dense network is far off to the right and left out."""
    names: dict[tuple[float, float], str] = {}
    for row in sorted(kind.reported[1:], key=lambda r: r.number):
        x, y = row.number, _percent(row.accuracy, kind)
        axes.plot(x, y, "x", color=GREY, markersize=6, label="_" if names else "reported", zorder=2)
        name = row.method if row.accuracy[0].isdigit() else f"{row.method} (≈)"
        near = next((place for place in names if place[1] == y and x < 1.03 * place[0]), None)
        names[near or (x, y)] = f"{names[near]}, {name}" if near else name
    for place, name in names.items():
        # Downwards, for what competes with them lies above or to the left.
        axes.annotate(
            name, place, (-2, -6), textcoords="offset points", rotation=-58, rotation_mode="anchor",
            fontsize=7.5, color=GREY, ha="left", va="center",
        )  # fmt: skip


def _near(row: Row) -> bool:
    return -BELOW < 100 * (row.accuracy - row.kind.floor) < ABOVE


def _percent(text: str, kind: Kind) -> float:
    return float(text) if text[0].isdigit() else 100 * kind.floor


def _ours(axes: Axes, own: Sequence[Row]) -> None:
    methods = sorted({row.method for row in own})
    for i, method in enumerate(methods):
        points = sorted((row.size, 100 * row.accuracy) for row in own if row.method == method)
        colour, marker = CYCLE[i % len(CYCLE)], MARKERS[(i + i // len(CYCLE)) % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5.5, label=method, zorder=4)
    best = sorted((row.size, 100 * row.accuracy) for row in own if on_front(row, own))
    if best:
        axes.plot(*zip(*best, strict=True), color=INK, linewidth=1, label="front of ours", zorder=3)


def _finish(axes: Axes, kind: Kind) -> None:
    floor = 100 * kind.floor
    axes.axhline(floor, color=INK, linewidth=0.7, linestyle=":", zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(floor - BELOW, floor + ABOVE)
    axes.margins(x=0.15)
    counted = "nonzero weights" if kind.counts == "nonzeros" else "MACs, the paper's counting"
    axes.set(title=kind.title, xlabel=f"{counted} (log scale)", ylabel="test accuracy, %")
    axes.legend(loc="upper right", fontsize=7, labelspacing=0.25)
