"""The two CIFAR-10 tables: accuracy, MACs by both ways of counting, parameters and time, beside what others report.

Here the front is the result, so every measured point has a line of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deephoyer.lab.report import literature_cifar
from deephoyer.lab.report.cells import accuracy, again, grid, spread
from deephoyer.lab.report.literature_cifar import Point
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.rows import Kind, Row, is_ablation, on_front, rows


def executed(record: Record) -> int:
    """MACs of the network that is left after compaction."""
    small = record.measured.compact
    return record.measured.total.macs_there if small is None else small.macs


@dataclass(frozen=True)
class CifarKind(Kind):
    """A network, by the MACs that are really executed; whatever was made sparse in it, dense ones too."""

    points: tuple[Point, ...] = ()

    def size(self, record: Record) -> int:
        return executed(record)

    def holds(self, record: Record) -> bool:
        return record.model == self.model


KINDS = {
    name: CifarKind(name, title, name, "MACs", floor, dense, (), points=points)
    for name, title, floor, dense, points in (
        ("resnet-56", "ResNet-56 on CIFAR-10", 0.9314, 125_485_696, literature_cifar.RESNET_56),
        ("resnet-110", "ResNet-110 on CIFAR-10", 0.9362, 252_887_680, literature_cifar.RESNET_110),
    )
}

TIMES = (("cpu", 1), ("cpu", 64), ("cpu", 256), ("cuda", 1), ("cuda", 256))


def table(name: str, records: Iterable[Record]) -> str:
    """A table by its name, as Markdown; without records, what was reported."""
    kind = KINDS[name]
    every = rows(records, kind)
    own, ablations = ([r for r in every if is_ablation(r) == which] for which in (False, True))
    titles = ["method", "numbers", "start, %", "accuracy, %", "the paper's front there", "MACs, the paper's counting"]
    times = (f"ms, {'CPU' if device == 'cpu' else 'GPU'}, batch {n}" for device, n in TIMES)
    titles += ["MACs executed", "parameters", *times, "front"]
    lines = [_reported(point) for point in kind.points] + [_measured(row, own) for row in own]
    parts = [f"## {kind.title}", _intro(kind), grid(titles, lines, text=2)]
    parts += [again(own, _fewer)]
    if ablations:
        lines = [_measured(row, []) for row in ablations]
        parts += [f"### Ablations: {kind.title}", grid(titles, lines, text=2), again(ablations, _fewer)]
    return "\n\n".join(parts) + "\n"


def _intro(kind: CifarKind) -> str:
    return (
        f"The dense network has {kind.dense:,} MACs; × is how many times fewer. The paper's counting discounts filters "
        "and channels that are zero in a layer, whether or not they can be taken out; *executed* are those of the "
        "network that is left after compaction, with channels physically gone (of others: as they report it). "
        "*Start* is what a run began with, a dense network or an earlier row's, as it saw it. Times are of the dense "
        "and the compacted network, measured in turns on one machine. Ours are means over seeds, ± sd; ● is on the "
        "front of ours of its protocol, by MACs executed. *The paper's front there* is straight between its four "
        "points and flat past the last, at the MACs we execute; in brackets how far we are above it."
    )


def _reported(point: Point) -> list[str]:
    fewer = f"{point.fewer:.2f}×"
    macs = [fewer, ""] if point.papers_counting else ["", fewer]
    empty = [""] * (len(TIMES) + 2)
    return [point.method, f"reported: {point.source}", point.base, point.accuracy, "", *macs, *empty]


def _measured(row: Row, own: Sequence[Row]) -> list[str]:
    seeds = f"seed {row.seeds[0]}" if len(row.seeds) == 1 else f"seeds {', '.join(map(str, row.seeds))}"
    numbers = f"measured, {row.protocol}, {seeds}"
    start = 100 * statistics.fmean(record.accuracy["dense"] for record in row.records)
    macs = [_macs(row, lambda record: record.measured.total.macs_paper), _macs(row, executed)]
    cells = [f"**{row.method}**", numbers, f"{start:.2f}", accuracy(row), _papers_front(row), *macs]
    cells += [spread(_parameters(row))]
    return [*cells, *(_time(row, device, batch) for device, batch in TIMES), "●" if own and on_front(row, own) else ""]


def _papers_front(row: Row) -> str:
    """The paper's accuracy at as many MACs as we execute, and how far above it we are; empty before its first point."""
    points = [p for p in KINDS[row.kind.name].points if p.papers_counting]
    fewer = row.kind.dense / row.size
    if fewer < points[0].fewer:
        return ""
    there = float(np.interp(fewer, [p.fewer for p in points], [float(p.accuracy) for p in points]))
    return f"{there:.2f} ({100 * row.accuracy - there:+.2f})".replace("-", "−")


def _parameters(row: Row) -> list[int]:
    counted = [(record.measured.compact, record.measured.total) for record in row.records]
    return [total.parameters if small is None else small.parameters for small, total in counted]


def _fewer(row: Row) -> str:
    return f", {row.kind.dense / row.size:.2f}×"


def _macs(row: Row, size: Callable[[Record], int]) -> str:
    left = statistics.fmean(size(record) for record in row.records)
    return f"{left / 1e6:.1f}M, {row.kind.dense / left:.2f}×"


def _time(row: Row, device: str, batch: int) -> str:
    """Of the first seed that was timed there."""
    found = [t for record in row.records for t in record.latency if (t.device, t.batch) == (device, batch)]
    return f"{found[0].dense_ms:.3g} → {found[0].ms:.3g}, {found[0].dense_ms / found[0].ms:.2f}×" if found else ""
