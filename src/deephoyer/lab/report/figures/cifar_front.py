"""Accuracy against the reduction of MACs, ResNet-56 and -110 on CIFAR-10: what others reported, and ours.

Ours are drawn twice: by the paper's counting, and by the MACs that are executed after compaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from deephoyer.lab.report.figures.style import BLUE, GREY, INK, ORANGE, RED, styled
from deephoyer.lab.report.literature import PAPER
from deephoyer.lab.report.paper_tables import TABLES, PaperTable
from deephoyer.lab.report.record import Record

Spot = tuple[float, float]
LEAST, MOST = 91.4, 94.8
"""The range of accuracies in percent: anything lower would flatten all the rest."""
BESIDE = {
    ("Pruning-A", 1.12): (-8, 7),
    ("SFP", 1.70): (-22, -9),
    ("OCSPruner", 2.0): (-34, 8),
    ("ResRep", 2.12): (-36, -9),
    ("SRR-GR", 2.16): (7, -3),
    ("DepGraph", 2.13): (5, 6),
    ("DepGraph", 2.57): (6, 4),
    ("C-SGD-5/8", 2.55): (5, -10),
    ("C-SGD-5/8", 2.56): (2, 6),
    ("LRF", 3.8): (-8, -12),
    ("channel pruning", 2.0): (-70, -9),
    ("AMC", 2.0): (-27, 3),
    ("CNN-FCF-B", 3.44): (-54, 3),
    ("CHIP", 1.80): (-22, 5),
    ("CHIP", 2.09): (-8, 6),
}
"""Names that would run into others: how far they are moved, in points."""


@styled
def cifar_front(records: Iterable[Record]) -> Figure:
    """One panel per network. Our points are means over seeds; where there are several, each seed is a dot.

    Lines join the Pareto-optimal points.
    """
    records = list(records)
    figure = Figure(figsize=(11.6, 5.4))
    for axes, name in zip(figure.subplots(1, 2).flat, ("resnet-56", "resnet-110"), strict=True):
        _others(axes, TABLES[name])
        _ours(axes, TABLES[name], records)
        _finish(axes, TABLES[name].title)
    figure.suptitle("Accuracy against multiply-accumulates on CIFAR-10", fontsize=12)
    drawn = dict(pair[::-1] for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True))
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=3)
    return figure


def _others(axes: Axes, table: PaperTable) -> None:
    papers: list[Spot] = []
    theirs: list[Spot] = []
    measured: list[Spot] = []
    for row in table.reported:
        if row.percent is None or row.fewer is None or row.percent < LEAST:
            continue
        spot = (row.fewer, row.percent)
        (papers if row.source == PAPER else theirs if row.accuracy else measured).append(spot)
        if row.source != PAPER:
            move = BESIDE.get((row.method, row.fewer), (5, 3))
            axes.annotate(row.method, spot, move, textcoords="offset points", fontsize=7.5, color=GREY)
    axes.plot(*_columns(theirs), "x", color=GREY, markersize=6, label="reported by others", zorder=2)
    if measured:
        label = "others' networks, measured by us"
        axes.plot(*_columns(measured), "P", color=GREY, markersize=5, label=label, zorder=2)
    label = "Group-HS, reported by DeepHoyer (its counting)"
    axes.plot(*_columns(papers), "D", color=ORANGE, markersize=5, label=label, zorder=2)
    front = pareto([*theirs, *measured, *papers])
    axes.plot(*_columns(front), color=GREY, linewidth=1, linestyle="--", label="front of all others", zorder=1)


def _ours(axes: Axes, table: PaperTable, records: Sequence[Record]) -> None:
    for protocol, fill in (("last", "full"), ("test-best", "left"), ("held-out", "none")):
        ours = [s for s in table.series(records) if s.protocol == protocol and "ablation" not in s.tags]
        for title, colour, marker, count in (
            ("the paper's counting", BLUE, "^", lambda record: record.measured.total.macs_paper),
            ("physically executed", RED, "o", lambda record: record.measured.macs_executed),
        ):
            spots = [(table.dense / s.mean(count), 100 * s.accuracy) for s in ours]
            spots = [spot for spot in spots if LEAST <= spot[1] <= MOST]
            seeds = [
                (table.dense / count(r), 100 * r.measured.accuracy)
                for s in ours
                if len(s.records) > 1
                for r in s.records
            ]
            axes.plot(*_columns(seeds), ".", color=colour, markersize=2.5, zorder=4)
            if spots:
                label = f"ours, {title} ({protocol})"
                axes.plot(*_columns(spots), marker, color=colour, markersize=5.5, fillstyle=fill, label=label, zorder=4)
                axes.plot(*_columns(pareto(spots)), color=colour if fill == "full" else INK, linewidth=1, zorder=3)


def pareto(spots: Iterable[Spot]) -> list[Spot]:
    """The points that no other beats in both coordinates, from left to right.

    >>> pareto([(1.0, 94.0), (2.0, 93.0), (2.0, 92.0), (1.5, 92.5)])
    [(1.0, 94.0), (2.0, 93.0)]
    """
    best: list[Spot] = []
    for spot in sorted(set(spots), reverse=True):
        if not best or spot[1] > best[-1][1]:
            best.append(spot)
    return best[::-1]


def _columns(spots: Sequence[Spot]) -> tuple[list[float], list[float]]:
    return [x for x, _ in spots], [y for _, y in spots]


def _finish(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(0.97, 9)
    axes.set_ylim(LEAST, MOST)
    axes.xaxis.set_major_locator(FixedLocator([1, 1.5, 2, 2.5, 3, 4, 5, 6, 8]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    axes.set(title=title, xlabel="times fewer MACs than the dense network (log scale)", ylabel="test accuracy, %")
