"""Runs that differ only in their seed, taken together: mean, spread, best, and whether they are Pareto-optimal."""

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
"""What a table counts: nonzeros, or MACs in one of the two ways."""


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
        """Whether its settings were chosen on test images, although its epochs were not."""
        return self.protocol == "held-out" and (self.first.network, self.method) in PICKED_ON_TEST

    @property
    def tags(self) -> tuple[str, ...]:
        return self.first.tags

    @property
    def words(self) -> str:
        """What follows `deephoyer run` in its command, without the seed."""
        overrides = tuple(override for override in self.first.overrides if not override.startswith("seed="))
        return str(Command(self.first.base, overrides)).removeprefix("deephoyer run ")

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
        """The smallest seed that keeps this accuracy; if there is none, the most accurate one."""
        reaching = self.reaching(floor)
        if reaching:
            return min(reaching, key=lambda r: (self.size_of(r), -r.measured.right, r.seed))
        return max(self.records, key=lambda r: (r.measured.right, -self.size_of(r), -r.seed))


def gather(records: Iterable[Record], size_of: Size) -> list[Series]:
    """All series: first those that kept the last epoch, then test-best, then held-out; the smallest of each last."""
    by_digest: dict[str, list[Record]] = {}
    for record in records:
        by_digest.setdefault(record.digest, []).append(record)
    groups: dict[str, list[Record]] = {}
    for digest, group in by_digest.items():
        groups.setdefault(_identity_of_chain(group) or digest, []).extend(group)
    every = [Series(tuple(sorted(group, key=lambda r: r.seed)), size_of) for group in groups.values()]
    order = ("last", "test-best", "held-out")
    return sorted(every, key=lambda s: (order.index(s.protocol), -s.size, s.words))


def _identity_of_chain(group: Sequence[Record]) -> str | None:
    """What runs have in common of which each started from a network of its own seed: their recipes differ in that
    name. None where they did not."""
    chains = [_chain(record.settings, record.seed) for record in group]
    return None if not chains or None in chains else json.dumps(chains[0], sort_keys=True)


def _chain(recipe: Recipe, seed: int) -> dict[str, Any] | None:
    """The settings of a run and of the runs that it starts from; None unless all have this seed."""
    if recipe.start is None or is_file(recipe.start):
        return recipe.settings() if recipe.start is None else None
    try:
        before = Command.parse(recipe.start).read()
    except UserError:  # words of another version
        return None
    chain = _chain(before, seed) if before.seed == seed else None
    return None if chain is None else recipe.settings() | {"start": chain}


def on_front(series: Series, others: Sequence[Series]) -> bool:
    """Whether it is Pareto-optimal: no other of its protocol is as small and as accurate, and better in one of both."""
    rivals = [other for other in others if other.protocol == series.protocol]
    return not any(
        r.size <= series.size
        and r.accuracy >= series.accuracy
        and (r.size, r.accuracy) != (series.size, series.accuracy)
        for r in rivals
    )
