"""The tables, as Markdown: what others reported and what we measured, side by side and told apart.

`table` gives one of the paper's four MNIST tables, with the front and the ablations of the same network
below it; those of CIFAR-10 look otherwise and are in `cifar.py`. All numbers of ours come from records;
nothing is typed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deephoyer.errors import unknown
from deephoyer.lab.report import cifar
from deephoyer.lab.report.cells import accuracy, again, grid, spread
from deephoyer.lab.report.literature import NOT_SAID, Reported
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.rows import KINDS, Kind, Row, in_table, is_ablation, on_front, rows

NAMES = (*KINDS, *cifar.KINDS)


def table(name: str, records: Iterable[Record]) -> str:
    """A table by its name, as Markdown; without records, what was reported.

    >>> table("lenet-5-structure", []).splitlines()[0]
    '## LeNet-5, structure'
    """
    if name not in NAMES:
        raise unknown("table", name, NAMES)
    if name in cifar.KINDS:
        return cifar.table(name, records)
    kind = KINDS[name]
    every = rows(records, kind)
    parts = [f"## {kind.title}", _intro(kind), _main(kind, [r for r in every if in_table(r)])]
    parts += [again([r for r in every if in_table(r)])]
    parts += [_front(kind, [r for r in every if not is_ablation(r)]), _ablations(kind, every)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _intro(kind: Kind) -> str:
    counted = {
        "nonzeros": "Nonzero weights left, biases not counted",
        "MACs": "Multiply-accumulates left, zero filters and channels of each layer discounted (the paper's counting)",
    }[kind.counts]
    return (
        f"{counted}. The accuracy to keep is {100 * kind.floor:.1f} %. *Best* is the smallest seed that keeps it; "
        "where none does, the most accurate one, marked †."
    )


# The table itself


def _main(kind: Kind, own: Sequence[Row]) -> str:
    details = [name.upper() for name in kind.layers] or ["structure"]
    titles = ["method", "numbers", "accuracy, %", kind.counts, "left", "fewer", *details]
    lines = [_reported(kind, row) for row in kind.reported]
    for row in own:
        lines += [_mean(row), _best(row)] if len(row.records) > 1 else [_best(row)]
    return grid(titles, lines, text=2)


def _reported(kind: Kind, row: Reported) -> list[str]:
    details = list(row.layers) or [NOT_SAID] * len(kind.layers) if kind.layers else [row.structure]
    times = kind.dense / row.number
    fewer = f"{times:.0f}×" if times > 20 else f"{times:.1f}×"  # printed sizes are rounded
    return [row.method, f"reported: {row.source}", row.accuracy, row.size, row.left, fewer, *details]


def _mean(row: Row) -> list[str]:
    count, kind = len(row.records), row.kind
    numbers = f"measured, {row.protocol}: mean ± sd of {count} seeds; {len(row.reaching())} of them keep the accuracy"
    layers = [spread([_layer(record, name) for record in row.records]) for name in kind.layers] or [""]
    return [f"**{row.method}**", numbers, accuracy(row), spread(row.sizes), *_shares(kind, row.size), *layers]


def _best(row: Row) -> list[str]:
    best, kind, count = row.best(), row.kind, len(row.records)
    mark = "" if row.reaching() else " †"
    which = f"best of {count}, seed {best.seed}" if count > 1 else f"one seed, {best.seed}"
    layers = [f"{_layer(best, name):,}" for name in kind.layers] or [best.measured.structure or ""]
    numbers, shown = f"measured, {row.protocol}: {which}", f"{100 * best.measured.accuracy:.2f}{mark}"
    size = kind.size(best)
    return [f"**{row.method}**", numbers, shown, f"{size:,}", *_shares(kind, size), *layers]


def _layer(record: Record, name: str) -> int:
    return next(layer.nonzeros for layer in record.measured.layers if layer.name == name)


def _shares(kind: Kind, size: float) -> list[str]:
    return [f"{size / kind.dense:.2%}".replace("%", " %"), f"{kind.dense / size:.1f}×" if size else ""]


# The front, the ablations


def _front(kind: Kind, own: Sequence[Row]) -> str:
    if not own:
        return ""
    titles = ["method", "recipe and changes", "selected", "seeds", "accuracy, %", kind.counts, "on the front"]
    ordered = sorted(own, key=lambda row: (row.protocol != "test-best", row.method, row.size))
    lines = [[*_point(row), "●" if on_front(row, own) else ""] for row in ordered]
    about = (
        f"### Front: {kind.title}\n\nMeans over seeds, ± sd. A point is on the front when no other of the same "
        "protocol is at once as small and as accurate. `deephoyer run RECIPE CHANGES seed=0` runs a line again."
    )
    return about + "\n\n" + grid(titles, lines, text=3)


def _ablations(kind: Kind, every: Sequence[Row]) -> str:
    parts = [row for row in every if is_ablation(row)]
    if not parts:
        return ""
    bases = {row.first.base.partition("-ablate-")[0] for row in parts}
    whole = [row for row in every if in_table(row) and row.first.base in bases]
    titles = ["what", "recipe and changes", "selected", "seeds", "accuracy, %", kind.counts, "fewer"]
    lines = [[*_point(row, _ablated(row)), _shares(kind, row.size)[1]] for row in [*whole, *parts]]
    return f"### Ablations: {kind.title}\n\nMeans over seeds, ± sd.\n\n" + grid(titles, lines, text=3)


def _ablated(row: Row) -> str:
    return row.first.row or row.first.base.partition("-ablate-")[2] or row.method


def _point(row: Row, title: str | None = None) -> list[str]:
    seeds = str(len(row.records))
    return [title or row.method, f"`{row.recipe}`", row.protocol, seeds, accuracy(row), spread(row.sizes)]
