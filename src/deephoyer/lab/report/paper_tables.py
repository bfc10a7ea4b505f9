"""The paper's tables: numbers that others reported, and below them ours, measured.

Records with a tag of `CAPACITIES` are rows of these tables. All numbers of ours come from records; nothing is typed
here. A new column is a new line in `_columns`.
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
"""The tags of records that are rows of the paper's tables, in the order of the rows, and what the rows are called."""

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
        """Ours of this network and kind, whether or not they are rows of the table."""
        ours = [r for r in records if r.network == self.network and r.data == self.data]
        if self.floor is not None:
            ours = [r for r in ours if r.settings.regularize is not None and r.structural == self.structural]
        return gather(ours, self.size_of)

    def table(self, records: Iterable[Record]) -> Table[Row]:
        ours = [s for s in self.series(records) if capacity(s)]
        ours.sort(key=lambda s: list(CAPACITIES).index(capacity(s) or ""))
        return Table(self.title, _columns(self), [*self.reported, *ours])


def capacity(series: Series) -> str | None:
    """The tag that makes it a row of a table of the paper; None if it is not one."""
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
    """A column of a table with rows of both kinds."""
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
    """The accuracy of five guesses, if there are so many classes that they were counted."""
    if any(record.measured.top5 is None for record in series.records):
        return None
    return series.spread(lambda record: 100 * (record.measured.top5 or 0.0), 2)


def _best_test_epoch(series: Series) -> str | None:
    """Of rows that kept the last epoch: the accuracy of the epoch that is best on test images."""
    if any(record.best_test_epoch is None for record in series.records):
        return None
    return series.spread(lambda record: 100 * (record.best_test_epoch or 0.0), 2)


def _words(series: Series) -> str:
    """The arguments that run it again; the record's path if they are too long."""
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
    """The accuracy of the network that a run started from, dense or of an earlier row, as the run measured it."""
    known = [r.accuracy.get("start", r.accuracy.get("dense")) for r in series.records]
    values = [value for value in known if value is not None]
    return f"{100 * statistics.fmean(values):.2f}" if values else ""


def _papers_front(of: PaperTable, series: Series) -> str:
    """The paper's accuracy at as many MACs as we execute, and how far above it we are."""
    theirs = _front(of, series)
    return "" if theirs is None else f"{theirs:.2f} ({100 * series.accuracy - theirs:+.2f})".replace("-", "−")


def _front(of: PaperTable, series: Series) -> float | None:
    """The paper's points, interpolated; constant past the last, None before the first."""
    points = [(p.fewer or 0, p.percent or 0) for p in of.reported if p.source == PAPER]
    fewer = of.dense / series.size
    if not points or fewer < points[0][0]:
        return None
    return float(np.interp(fewer, [x for x, _ in points], [y for _, y in points]))


def _faster(series: Series, device: str, batch: int) -> str:
    """The dense network's time divided by the compacted one's, of the first seed that was timed on the device."""
    times = [t for record in series.records for t in record.latency if (t.device, t.batch) == (device, batch)]
    return f"{times[0].dense_ms / times[0].ms:.2f}×" if times else ""


# The README's table


def highlights(records: Iterable[Record]) -> Table[PaperTable]:
    """The paper's best row and ours of each table that we have run, in one line per table."""
    every = list(records)

    def ours(tag: str, protocol: str) -> Callable[[PaperTable], object]:
        return lambda table: _highlight(
            table, [s for s in table.series(every) if tag in s.tags and s.protocol == protocol]
        )

    def title(table: PaperTable) -> str:
        return f"{table.title}: " + ("%, at times fewer MACs" if table.floor is None else f"{table.counts} left, at %")

    shown = [table for table in TABLES.values() if any(capacity(s) for s in table.series(every))]
    columns: list[Column[PaperTable]] = [
        Column("", title),
        Column("the paper", _papers_best, "right"),
        Column("ours, its data and loss", ours("paper-data", "test-best"), "right"),
        Column("ours, best", ours("best", "test-best"), "right"),
        Column("ours, best, held-out", ours("best", "held-out"), "right"),
    ]
    return Table("highlights", columns, shown)


def _papers_best(table: PaperTable) -> str:
    rows = [row for row in table.reported if row.source == PAPER]
    if table.floor is None:
        return ", ".join(f"{row.accuracy} at {row.fewer:.2f}×" for row in rows[-2:])
    return f"{rows[-1].size} at {rows[-1].accuracy}"


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


@dataclass(frozen=True)
class ComparedPenalty:
    """A penalty on one network: ours with the tag `compare`, one series for each way of selecting epochs."""

    network: str
    penalty: str
    series: tuple[Series, ...]

    def accuracy(self, protocol: str) -> str | None:
        spreads = (s.spread(lambda r: 100 * r.measured.accuracy, 2) for s in self.series if s.protocol == protocol)
        return next(spreads, None)


def comparison(records: Iterable[Record]) -> Table[ComparedPenalty]:
    """The penalties with equal search effort: for each network the same epochs and the same target size."""
    by_penalty: dict[tuple[str, str], list[Series]] = {}
    compared = [record for record in records if "compare" in record.tags]
    for table in list(TABLES.values())[:4]:
        for series in table.series(compared):
            by_penalty.setdefault((table.title, series.method), []).append(series)
    rows = [ComparedPenalty(network, penalty, tuple(series)) for (network, penalty), series in by_penalty.items()]
    columns: list[Column[ComparedPenalty]] = [
        Column("network", lambda row: row.network),
        Column("penalty", lambda row: row.penalty),
        Column("left", lambda row: f"{row.series[0].size:,.0f}", "right"),
        Column("accuracy, %: test-best", lambda row: row.accuracy("test-best"), "right"),
        Column("held-out", lambda row: row.accuracy("held-out"), "right"),
        Column("strength", lambda row: getattr(row.series[0].first.settings.regularize, "strength", None), "right"),
    ]
    return Table("Penalties compared with equal search effort", columns, rows)
