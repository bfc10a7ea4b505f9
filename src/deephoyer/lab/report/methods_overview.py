"""The README's table of methods: what each keeps at the middle size of every comparison on MNIST.

All numbers are in the page of methods, with their spread, their settings and the other sizes; here a method is a line.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from deephoyer.lab import comparison_protocol
from deephoyer.lab.report import comparison_results
from deephoyer.lab.report.comparison_results import ComparisonResults
from deephoyer.lab.report.significance import BEST, verdicts
from deephoyer.lab.report.table import Column, Table

COMPARISONS = {
    "lenet-300-100": "LeNet-300-100",
    "lenet-5": "LeNet-5",
    "lenet-300-100-structure": "LeNet-300-100",
    "lenet-5-structure": "LeNet-5",
}


class Line(NamedTuple):
    """A method, under the names that it has where single weights and where groups are compared."""

    title: str
    weights: str | None
    groups: str | None


LINES = (
    Line("l1 (its groups: group lasso)", "l1, effective counts", "group lasso"),
    Line("Hoyer-Square (its groups: Group-HS)", "Hoyer-Square, effective counts", "Group-HS"),
    Line("transformed l1", "transformed l1", None),
    Line("sparse variational dropout", "sparse variational dropout", None),
    Line("soft filter pruning", None, "soft filter pruning"),
    Line("ADMM", "ADMM", "ADMM"),
    Line("l0", "l0", "l0"),
    Line("RigL", "RigL", None),
    Line("gradual magnitude", "gradual magnitude", None),
    Line("one cut by Taylor scores", "Taylor, one cut", "Taylor, one cut"),
    Line("one cut by magnitude (groups: l1 norms)", "magnitude, one cut", "l1 norm, one cut"),
    Line("at random", "random", "random"),
)


def overview(folder: Path = comparison_results.RESULTS) -> Table[Line]:
    """Mean test accuracy of the fresh seeds in percent; bold where it is significantly higher than all others'."""
    columns = [Column[Line]("% correct", lambda line: line.title)]
    for name, network in COMPARISONS.items():
        results = comparison_results.read(name, comparison_protocol.read(name), folder)
        if results is not None:
            columns.append(_column(network, results))
    return Table("methods", columns, LINES)


def _column(network: str, results: ComparisonResults) -> Column[Line]:
    protocol = results.protocol
    accuracies = results.accuracies(protocol.middle)
    judged = verdicts(accuracies)

    def cell(line: Line) -> str | None:
        method = line.weights if protocol.target == "live" else line.groups
        if method is None or not accuracies[method]:
            return None
        mean = f"{statistics.fmean(100 * a for a in accuracies[method].values()):.2f}"
        return f"**{mean}**" if judged[method] == BEST else mean

    return Column(f"{network}, {100 * protocol.middle:g} % of the {protocol.counts}", cell, "right")
