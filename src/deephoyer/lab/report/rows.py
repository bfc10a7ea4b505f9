"""Records gathered into rows: the seeds of one method under one protocol, with mean, spread and best.

Which rows stand in which table is decided here; how a table looks is not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from deephoyer.lab.report import literature
from deephoyer.lab.report.literature import Reported
from deephoyer.lab.report.record import Record, command


@dataclass(frozen=True)
class Kind:
    """One of the paper's tables: a network, and what is counted in it at which accuracy."""

    name: str
    title: str
    model: str
    counts: str
    floor: float
    dense: int
    reported: tuple[Reported, ...]
    layers: tuple[str, ...] = ()

    def size(self, record: Record) -> int:
        total = record.measured.total
        return total.macs_paper if self.counts == "MACs" else total.nonzeros

    def holds(self, record: Record) -> bool:
        """Whether a record belongs here: the network is the same, and so is what was made sparse."""
        stage = record.settings.regularize
        elements = stage is not None and stage.groups == "elements"
        return record.model == self.model and elements == (self.counts == "nonzeros")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("lenet-300-100-elements", "LeNet-300-100, single weights", "lenet-300-100", "nonzeros", 0.984, 266_200,
             literature.LENET_300_100_ELEMENTS, ("fc1", "fc2", "fc3")),
        Kind("lenet-5-elements", "LeNet-5, single weights", "lenet-5", "nonzeros", 0.992, 430_500,
             literature.LENET_5_ELEMENTS, ("conv1", "conv2", "fc1", "fc2")),
        Kind("lenet-300-100-structure", "LeNet-300-100, structure", "lenet-300-100", "MACs", 0.982, 266_200,
             literature.LENET_300_100_STRUCTURE),
        Kind("lenet-5-structure", "LeNet-5, structure", "lenet-5", "MACs", 0.990, 2_293_000,
             literature.LENET_5_STRUCTURE),
    )
}  # fmt: skip

METHODS = {
    "l1": "l1",
    "transformed-l1": "transformed l1",
    "hoyer": "Hoyer",
    "hs": "Hoyer-Square",
    "group-lasso": "group lasso",
    "group-hs": "Group-HS",
    "group-hs-coupled": "Group-HS, coupled",
}
"""What our recipes are called in the paper's words; others go by their own names."""


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed only."""

    kind: Kind
    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def protocol(self) -> str:
        return self.first.protocol

    @property
    def method(self) -> str:
        own = self.first.base.removeprefix(f"{self.kind.model}-")
        return self.first.row or METHODS.get(own, self.first.base)

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(change for change in self.first.overrides if not change.startswith("seed="))

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    @property
    def recipe(self) -> str:
        """The words after `deephoyer run`, but for the seed."""
        return command(self.first.base, self.changes).removeprefix("deephoyer run ")

    @property
    def command(self) -> str:
        """Runs all seeds again."""
        if len(self.records) == 1:
            return self.first.command
        return command(self.first.base, self.changes, "sweep") + " --grid seed=" + ",".join(map(str, self.seeds))

    @cached_property
    def sizes(self) -> list[int]:
        return [self.kind.size(record) for record in self.records]

    @cached_property
    def size(self) -> float:
        return statistics.fmean(self.sizes)

    @cached_property
    def accuracies(self) -> list[float]:
        return [record.measured.accuracy for record in self.records]

    @cached_property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)

    def reaching(self) -> list[Record]:
        """The seeds that keep the accuracy which the table asks for."""
        return [record for record in self.records if record.measured.accuracy >= self.kind.floor]

    def best(self) -> Record:
        """The smallest of those; where there is none, the most accurate."""
        reaching = self.reaching()
        if reaching:
            return min(reaching, key=lambda r: (self.kind.size(r), -r.measured.right, r.seed))
        return max(self.records, key=lambda r: (r.measured.right, -self.kind.size(r), -r.seed))


def rows(records: Iterable[Record], kind: Kind) -> list[Row]:
    """All rows of a kind: test-best first, as in the paper, and the smallest last."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        if kind.holds(record):
            changes = tuple(change for change in record.overrides if not change.startswith("seed="))
            found.setdefault((record.row, record.base, changes, record.tags), []).append(record)
    made = [Row(kind, tuple(sorted(group, key=lambda r: r.seed))) for group in found.values()]
    return sorted(made, key=lambda row: (row.protocol != "test-best", -row.size, row.recipe, row.method))


def is_ablation(row: Row) -> bool:
    return "ablation" in row.first.tags or "-ablate-" in row.first.base


def is_front_only(row: Row) -> bool:
    """A variant of a recipe that nobody gave a row of its own."""
    titled = row.first.row is not None
    varied = any(not change.startswith("select=") for change in row.changes)
    return not is_ablation(row) and ("front" in row.first.tags or (varied and not titled))


def in_table(row: Row) -> bool:
    return not is_ablation(row) and not is_front_only(row)


def on_front(row: Row, others: Sequence[Row]) -> bool:
    """Whether no other row of the same protocol is as small and as accurate, and better in one of both."""
    rivals = [other for other in others if other.protocol == row.protocol]
    return not any(
        r.size <= row.size and r.accuracy >= row.accuracy and (r.size, r.accuracy) != (row.size, row.accuracy)
        for r in rivals
    )
