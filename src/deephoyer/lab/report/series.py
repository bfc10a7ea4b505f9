"""Runs that differ by their seed alone, taken together: mean, spread, best, and the front they stand on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deephoyer.errors import UserError
from deephoyer.lab.recipe import Command
from deephoyer.lab.report.record import Record
from deephoyer.lab.schema import Recipe, is_file

Size = Callable[[Record], int]
"""What a table counts of a record: nonzeros, or MACs by one of the ways."""


PICKED_ON_TEST = {
    ("lenet-300-100", "Hoyer-Square in ten rounds, input dropout"),
    ("lenet-300-100", "Hoyer-Square in five rounds, shifts, teachers"),
    ("lenet-300-100", "Group-HS to a target, decaying rates"),
    ("lenet-300-100", "Group-HS to a target, shifts, teachers"),
}
"""Rows, by network, whose strengths and other settings were chosen on test images before the held-out runs."""


@dataclass(frozen=True)
class Series:
    """The seeds of one recipe, in order."""

    records: tuple[Record, ...]
    size_of: Size

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def method(self) -> str:
        return self.first.row

    @property
    def protocol(self) -> str:
        return self.first.protocol

    @property
    def picked_on_test(self) -> bool:
        """Whether test images had a say in its settings, though they have none in its epochs."""
        return self.protocol == "held-out" and (self.first.network, self.method) in PICKED_ON_TEST

    @property
    def tags(self) -> tuple[str, ...]:
        return self.first.tags

    @property
    def words(self) -> str:
        """What stands after `deephoyer run`, but for the seed."""
        said = tuple(change for change in self.first.overrides if not change.startswith("seed="))
        return str(Command(self.first.base, said)).removeprefix("deephoyer run ")

    @cached_property
    def size(self) -> float:
        return self.mean(self.size_of)

    @cached_property
    def accuracy(self) -> float:
        return self.mean(lambda record: record.measured.accuracy)

    def mean(self, of: Callable[[Record], float]) -> float:
        return statistics.fmean(of(record) for record in self.records)

    def spread(self, of: Callable[[Record], float], digits: int = 0) -> str:
        """Mean ± sample standard deviation, as tables show it."""
        values = [of(record) for record in self.records]
        mean = f"{statistics.fmean(values):,.{digits}f}"
        return f"{mean} ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else mean

    def reaching(self, floor: float) -> list[Record]:
        """The seeds that keep the accuracy which a table asks for."""
        return [record for record in self.records if record.measured.accuracy >= floor]

    def best(self, floor: float) -> Record:
        """The smallest of those; where there is none, the most accurate."""
        reaching = self.reaching(floor)
        if reaching:
            return min(reaching, key=lambda r: (self.size_of(r), -r.measured.right, r.seed))
        return max(self.records, key=lambda r: (r.measured.right, -self.size_of(r), -r.seed))


def gather(records: Iterable[Record], size_of: Size) -> list[Series]:
    """All series: those of the last epoch, then test-best, as in the paper, then held-out; the smallest last."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.digest, []).append(record)
    families: dict[str, list[Record]] = {}
    for digest, group in groups.items():
        families.setdefault(_family(group) or digest, []).extend(group)
    found = [Series(tuple(sorted(group, key=lambda r: r.seed)), size_of) for group in families.values()]
    order = ("last", "test-best", "held-out")
    return sorted(found, key=lambda s: (order.index(s.protocol), -s.size, s.words))


def _family(group: Sequence[Record]) -> str | None:
    """What seeds have in common that each began with a network of their own seed; None where they did not."""
    made = [_chain(record.settings, record.seed) for record in group]
    return None if not made or None in made else json.dumps(made[0], sort_keys=True)


def _chain(recipe: Recipe, seed: int) -> dict[str, Any] | None:
    """The settings of a run with those of the runs that it starts from; None unless all have this seed."""
    if recipe.start is None or is_file(recipe.start):
        return recipe.settings() if recipe.start is None else None
    try:
        before = Command.parse(recipe.start).read()
    except UserError:  # words of another version
        return None
    chain = _chain(before, seed) if before.seed == seed else None
    return None if chain is None else recipe.settings() | {"start": chain}


def on_front(series: Series, others: Sequence[Series]) -> bool:
    """Whether no other one of the same protocol is as small and as accurate, and better in one of both."""
    rivals = [other for other in others if other.protocol == series.protocol]
    return not any(
        r.size <= series.size
        and r.accuracy >= series.accuracy
        and (r.size, r.accuracy) != (series.size, series.accuracy)
        for r in rivals
    )
