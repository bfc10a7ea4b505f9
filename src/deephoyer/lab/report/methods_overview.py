"""The README's table of methods: what each keeps at every size of the comparisons on one network.

All numbers are in the page of methods, with their spread and their settings; here a method is a line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deephoyer.lab import comparison_protocol
from deephoyer.lab.report import methods_page
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


def overview(results: Path = methods_page.RESULTS) -> Table[Line]:
    """Mean test accuracy of the fresh seeds in percent; bold where it is significantly higher than all others'."""
    columns = [Column[Line]("LeNet-300-100, % correct, with …", lambda line: line.title)]
    columns += [_column(results, WEIGHTS, size, lambda line: line.weights) for size in _sizes(WEIGHTS)]
    columns += [_column(results, NEURONS, size, lambda line: line.neurons) for size in _sizes(NEURONS)]
    return Table("methods", columns, LINES)


def _sizes(name: str) -> tuple[float, ...]:
    return comparison_protocol.read(name).sizes


def _column(results: Path, name: str, size: float, method_of: Callable[[Line], str | None]) -> Column[Line]:
    protocol = comparison_protocol.read(name)
    content = methods_page.read(name, protocol, results)
    runs = {method: methods_page.finals(protocol, content, method, size) for method in protocol.methods}
    judged = methods_page.verdicts(runs)

    def cell(line: Line) -> str | None:
        method = method_of(line)
        if method is None or not runs[method]:
            return None
        mean = f"{statistics.fmean(100 * run.accuracy for run in runs[method]):.2f}"
        return f"**{mean}**" if judged[method] == methods_page.BEST else mean

    return Column(f"{100 * size:g} % of the {methods_page.counted(protocol)}", cell, "right")
