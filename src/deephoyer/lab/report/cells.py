"""What stands in a table's cells, and the Markdown around them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from deephoyer.lab.report.rows import Row


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation.

    >>> spread([4600, 4700])
    '4,650 ± 71'
    """
    mean = f"{statistics.fmean(values):,.0f}"
    return f"{mean} ± {statistics.stdev(values):,.0f}" if len(values) > 1 else mean


def accuracy(row: Row) -> str:
    mean = f"{100 * row.accuracy:.2f}"
    return f"{mean} ± {100 * statistics.stdev(row.accuracies):.2f}" if len(row.records) > 1 else mean


def grid(titles: Sequence[str], lines: Sequence[Sequence[str]], text: int) -> str:
    """A Markdown table; the first `text` columns are words, the others numbers."""
    bars = ["---" if i < text else "---:" for i in range(len(titles))]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (titles, bars, *lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def again(own: Sequence[Row], size: Callable[[Row], str] = lambda row: "") -> str:
    """The commands that run the measured rows again; `size` tells rows of one method apart."""
    if not own:
        return "There are no records of ours in the results folder."
    lines = ["To run them again:", ""]
    for row in own:
        alone = f"; the best alone: `{row.best().command}`" if len(row.records) > 1 else ""
        lines.append(f"- {row.method}{size(row)}, {row.protocol}: `{row.command}`{alone}")
    return "\n".join(lines)
