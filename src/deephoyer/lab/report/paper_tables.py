"""The paper's tables: what others reported, and what we measured, side by side and told apart.

A record stands in one of these tables when one of its tags says in which capacity (`CAPACITIES`). All numbers of ours
come from records; nothing is typed here. Adding a column is adding a line to `_columns`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deephoyer.errors import unknown
from deephoyer.lab.report.literature import PAPER, Reported, reported
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.series import Series, Size, gather
from deephoyer.lab.report.table import Column, Table

CAPACITIES = {
    "dense": "ours, dense",
    "paper-settings": "ours, its settings",
    "paper-data": "ours, its data and loss",
    "best": "ours, best",
}
"""The tags by which a record stands in a table of the paper, in the order of the rows."""

Row = Reported | Series
LONGEST_WORDS = 96


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables: a network on data, what is counted in it, and the accuracy to keep, if any."""

    name: str
    title: str
    data: str
    counts: str
    dense: int
    floor: float | None = None

    @property
    def network(self) -> str:
        return self.name.removesuffix("-elements").removesuffix("-structure")

    @property
    def structural(self) -> bool:
        return self.counts == "MACs"

    @property
    def reported(self) -> tuple[Reported, ...]:
        return reported(self.name)

    @property
    def size_of(self) -> Size:
        if self.floor is None:
            return lambda record: record.measured.macs_executed
        if self.structural:
            return lambda record: record.measured.total.macs_paper
        return lambda record: record.measured.total.nonzeros

    def series(self, records: Iterable[Record]) -> list[Series]:
        """Ours of this network and kind, whether or not they stand in the table."""
        own = [r for r in records if r.network == self.network and r.data == self.data]
        if self.floor is not None:
            own = [r for r in own if r.settings.regularize is not None and r.structural == self.structural]
        return gather(own, self.size_of)

    def table(self, records: Iterable[Record]) -> Table[Row]:
        own = [s for s in self.series(records) if capacity(s)]
        own.sort(key=lambda s: list(CAPACITIES).index(capacity(s) or ""))
        return Table(self.title, _columns(self), [*self.reported, *own])


def capacity(series: Series) -> str | None:
    """The tag by which it stands in a table of the paper."""
    return next((tag for tag in CAPACITIES if tag in series.tags), None)


TABLES = {
    row[0]: PaperTable(*row)
    for row in (
        ("lenet-300-100-elements", "LeNet-300-100, single weights", "mnist", "nonzeros", 266_200, 0.984),
        ("lenet-5-elements", "LeNet-5, single weights", "mnist", "nonzeros", 430_500, 0.992),
        ("lenet-300-100-structure", "LeNet-300-100, structure", "mnist", "MACs", 266_200, 0.982),
        ("lenet-5-structure", "LeNet-5, structure", "mnist", "MACs", 2_293_000, 0.990),
        ("resnet-56", "ResNet-56 on CIFAR-10", "cifar10", "MACs", 125_485_696, None),
        ("resnet-110", "ResNet-110 on CIFAR-10", "cifar10", "MACs", 252_887_680, None),
        ("alexnet", "AlexNet on ImageNet, single weights", "imagenet", "nonzeros", 60_900_000, 0.0),
        ("resnet-50", "ResNet-50 on ImageNet", "imagenet", "MACs", 4_089_184_256, None),
    )
}


def paper_table(name: str) -> PaperTable:
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    return TABLES[name]


# Columns


def _nothing(row: object) -> None:
    return None


def _column(
    header: str,
    theirs: Callable[[Reported], object] = _nothing,
    ours: Callable[[Series], object] = _nothing,
    align: Literal["left", "right"] = "right",
) -> Column[Row]:
    """A column of rows of both kinds."""
    return Column(header, lambda row: theirs(row) if isinstance(row, Reported) else ours(row), align)


def _columns(of: PaperTable) -> list[Column[Row]]:
    start = [
        _column("method", lambda r: r.method, lambda s: f"**{s.method}**", "left"),
        _column("numbers", lambda r: r.source, lambda s: CAPACITIES[capacity(s) or ""], "left"),
        _column("epoch selection", ours=_selection, align="left"),
        _column("seeds", ours=lambda s: len(s.records)),
    ]
    accuracy = lambda s: s.spread(lambda x: 100 * x.measured.accuracy, 2)  # noqa: E731
    if of.name == "alexnet":
        middle = [
            _column("top-5 error, points more", lambda r: r.accuracy),
            _column("top-5, %", ours=_top5),
            _column("top-1, %", ours=accuracy),
        ]
    else:
        title = "top-1, %" if of.data == "imagenet" else "accuracy, %"
        middle = [_column(title, lambda r: r.accuracy, accuracy)]
    end = [_column("`deephoyer run`", ours=_words, align="left")]
    return [*start, *middle, *(_on_cifar(of) if of.floor is None else _on_mnist(of)), *end]


def _selection(series: Series) -> str:
    return f"{series.protocol}; settings chosen on test images" if series.picked_on_test else series.protocol


def _on_mnist(of: PaperTable) -> list[Column[Row]]:
    floor = of.floor or 0
    keeping = _column(f"seeds with {100 * floor:.1f} %, the smallest", ours=lambda s: _keeping(s, floor), align="left")
    return [
        _column(of.counts, lambda r: r.size, lambda s: s.spread(s.size_of)),
        _column("left", lambda r: r.left, lambda s: f"{100 * s.size / of.dense:.2f} %"),
        _column("widths" if of.structural else "by layer", lambda r: r.layers, lambda s: _by_layer(of, s), "left"),
        *([keeping] if floor else []),
    ]


def _on_cifar(of: PaperTable) -> list[Column[Row]]:
    papers = lambda r: r.source == PAPER  # noqa: E731
    return [
        _column("top-5, %", lambda r: r.top5, _top5),
        _column("measured by us, %", lambda r: r.measured),
        _column("best test epoch, %", ours=_best_test_epoch),
        _column("its start, %", lambda r: r.base, _start),
        _column("the paper's front there", ours=lambda s: _papers_front(of, s)),
        _column("fewer MACs, the paper's counting", lambda r: f"{r.fewer:.2f}×" if papers(r) else "",
                lambda s: f"{of.dense / s.mean(lambda x: x.measured.total.macs_paper):.2f}×"),
        _column("executed", lambda r: "" if papers(r) else f"{r.fewer:.2f}×", lambda s: f"{of.dense / s.size:.2f}×"),
        _column("parameters", ours=lambda s: s.spread(lambda x: x.measured.parameters_left)),
        _column("faster: CPU, 64", ours=lambda s: _faster(s, "cpu", 64)),
        _column("GPU, 256", ours=lambda s: _faster(s, "cuda", 256)),
    ]  # fmt: skip


def _top5(series: Series) -> str | None:
    """Where there are so many classes that five guesses were counted."""
    if any(record.measured.top5 is None for record in series.records):
        return None
    return series.spread(lambda record: 100 * (record.measured.top5 or 0.0), 2)


def _best_test_epoch(series: Series) -> str | None:
    """Beside rows of the last epoch: what the best one on test images would have been."""
    if any(record.best_test_epoch is None for record in series.records):
        return None
    return series.spread(lambda record: 100 * (record.best_test_epoch or 0.0), 2)


def _words(series: Series) -> str:
    """The words that run it again; the record's path where they are too many."""
    record = "/".join(series.first.path.split("/")[-3:])
    return f"`{series.words if len(series.words) <= LONGEST_WORDS else record}`"


def _by_layer(of: PaperTable, series: Series) -> str:
    if of.structural:
        return series.best(of.floor or 0).measured.layer_widths or ""
    layers = zip(*(record.measured.layers for record in series.records), strict=True)
    return "-".join(f"{statistics.fmean(layer.nonzeros for layer in layer_of_seeds):.0f}" for layer_of_seeds in layers)


def _keeping(series: Series, floor: float) -> str:
    reaching = series.reaching(floor)
    if not reaching:
        return f"0 of {len(series.records)}"
    best = series.best(floor)
    smallest = f"{series.size_of(best):,} ({100 * best.measured.accuracy:.2f} %)"
    return f"{len(reaching)} of {len(series.records)}: {smallest}"


def _start(series: Series) -> str:
    """What a run began with, a dense network or an earlier row's, as it saw it."""
    known = [r.accuracy.get("start", r.accuracy.get("dense")) for r in series.records]
    values = [value for value in known if value is not None]
    return f"{100 * statistics.fmean(values):.2f}" if values else ""


def _papers_front(of: PaperTable, series: Series) -> str:
    """The paper's accuracy at as many MACs as we execute, and how far above it we are."""
    there = _front(of, series)
    return "" if there is None else f"{there:.2f} ({100 * series.accuracy - there:+.2f})".replace("-", "−")


def _front(of: PaperTable, series: Series) -> float | None:
    """Straight between the paper's points and flat past the last; none before its first."""
    points = [(p.fewer or 0, p.percent or 0) for p in of.reported if p.source == PAPER]
    fewer = of.dense / series.size
    if not points or fewer < points[0][0]:
        return None
    return float(np.interp(fewer, [x for x, _ in points], [y for _, y in points]))


def _faster(series: Series, device: str, batch: int) -> str:
    """Of the first seed that was timed there."""
    times = [t for record in series.records for t in record.latency if (t.device, t.batch) == (device, batch)]
    return f"{times[0].dense_ms / times[0].ms:.2f}×" if times else ""


# In a few lines


def highlights(records: Iterable[Record]) -> Table[PaperTable]:
    """What the README shows: the paper's row and ours of each table that we have run, in a line."""
    every = list(records)

    def ours(tag: str, protocol: str) -> Callable[[PaperTable], object]:
        return lambda table: _highlight(
            table, [s for s in table.series(every) if tag in s.tags and s.protocol == protocol]
        )

    asked = {True: "%, at times fewer MACs", False: "{} left, at %"}
    shown = [table for table in TABLES.values() if any(capacity(s) for s in table.series(every))]
    columns: list[Column[PaperTable]] = [
        Column("", lambda table: f"{table.title}: {asked[table.floor is None].format(table.counts)}"),
        Column("the paper", _papers_best, "right"),
        Column("ours, its data and loss", ours("paper-data", "test-best"), "right"),
        Column("ours, best", ours("best", "test-best"), "right"),
        Column("ours, best, held-out", ours("best", "held-out"), "right"),
    ]
    return Table("highlights", columns, shown)


def _papers_best(table: PaperTable) -> str:
    own = [row for row in table.reported if row.source == PAPER]
    if table.floor is None:
        return ", ".join(f"{row.accuracy} at {row.fewer:.2f}×" for row in own[-2:])
    return f"{own[-1].size} at {own[-1].accuracy}"


def _highlight(table: PaperTable, series: list[Series]) -> str | None:
    """The smallest of them, with its mean accuracy; on CIFAR-10 the two that are farthest above the paper's front."""
    if not series:
        return None
    if table.floor is None:
        ahead = sorted(series, key=lambda s: 100 * s.accuracy - (_front(table, s) or 100))[-2:]
        ahead.sort(key=lambda s: -s.size)
        return ", ".join(f"{100 * s.accuracy:.2f} at {table.dense / s.size:.2f}×" for s in ahead)
    least = min(series, key=lambda s: s.size)
    mark = " †" if least.picked_on_test else ""
    return f"{least.spread(least.size_of)} at {least.spread(lambda r: 100 * r.measured.accuracy, 2)}{mark}"


# Penalties compared with equal search effort


def comparison(records: Iterable[Record]) -> Table[tuple[str, str, list[Series]]]:
    """Ours with the tag `compare`: one network, one budget, one size asked for; a penalty a row, both protocols."""
    rows: dict[tuple[str, str], list[Series]] = {}
    every = list(records)
    for table in list(TABLES.values())[:4]:
        for series in table.series(r for r in every if "compare" in r.tags):
            rows.setdefault((table.title, series.method), []).append(series)
    found = [(title, method, own) for (title, method), own in rows.items()]

    def by(protocol: str) -> Callable[[tuple[str, str, list[Series]]], object]:
        return lambda row: next(
            (s.spread(lambda x: 100 * x.measured.accuracy, 2) for s in row[2] if s.protocol == protocol), None
        )

    columns: list[Column[tuple[str, str, list[Series]]]] = [
        Column("network", lambda row: row[0]),
        Column("penalty", lambda row: row[1]),
        Column("left", lambda row: f"{row[2][0].size:,.0f}", "right"),
        Column("accuracy, %: test-best", by("test-best"), "right"),
        Column("held-out", by("held-out"), "right"),
        Column("strength", lambda row: getattr(row[2][0].first.settings.regularize, "strength", None), "right"),
    ]
    return Table("Penalties compared with equal search effort", columns, found)
