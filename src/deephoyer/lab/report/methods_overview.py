"""The README's table of methods: what each keeps at every size of the comparisons on one network.

All numbers are in the page of methods, with their spread and their settings; here a method is a line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from deephoyer.lab import comparison_protocol
from deephoyer.lab.report import comparison_results
from deephoyer.lab.report.significance import BEST, verdicts
from deephoyer.lab.report.table import Column, Table

WEIGHTS, NEURONS = "lenet-300-100", "lenet-300-100-structure"


class Line(NamedTuple):
    """A method under the names that it has in the two comparisons."""

    title: str
    weights: str | None
    neurons: str | None


LINES = (
    Line("l1 (its groups: group lasso)", "l1, effective counts", "group lasso"),
    Line("Hoyer-Square (its groups: Group-HS)", "Hoyer-Square, effective counts", "Group-HS"),
    Line("transformed l1", "transformed l1", None),
    Line("sparse variational dropout", "sparse variational dropout", None),
    Line("soft filter pruning", None, "soft filter pruning"),
    Line("ADMM", "ADMM", "ADMM"),
    Line("l0", "l0", "l0"),
    Line("one cut by Taylor scores", "Taylor, one cut", "Taylor, one cut"),
    Line("one cut by magnitude", "magnitude, one cut", "l1 norm, one cut"),
    Line("at random", "random", "random"),
)


def overview(folder: Path = comparison_results.RESULTS) -> Table[Line]:
    """Mean test accuracy of the fresh seeds in percent; bold where it is significantly higher than all others'."""
    columns = [
        Column[Line]("LeNet-300-100, % correct, with …", lambda line: line.title),
        *_columns(folder, WEIGHTS, lambda line: line.weights),
        *_columns(folder, NEURONS, lambda line: line.neurons),
    ]
    return Table("methods", columns, LINES)


def _columns(folder: Path, name: str, method_of: Callable[[Line], str | None]) -> list[Column[Line]]:
    """One for each size of a comparison."""
    protocol = comparison_protocol.read(name)
    results = comparison_results.read(name, protocol, folder)
    if results is None:
        return []
    titles = {size: f"{100 * size:g} % of the {protocol.counts}" for size in protocol.sizes}
    return [_column(title, results.accuracies(size), method_of) for size, title in titles.items()]


def _column(
    title: str, accuracies: Mapping[str, Mapping[int, float]], method_of: Callable[[Line], str | None]
) -> Column[Line]:
    judged = verdicts(accuracies)

    def cell(line: Line) -> str | None:
        method = method_of(line)
        if method is None or not accuracies[method]:
            return None
        mean = f"{statistics.fmean(100 * a for a in accuracies[method].values()):.2f}"
        return f"**{mean}**" if judged[method] == BEST else mean

    return Column(title, cell, "right")
