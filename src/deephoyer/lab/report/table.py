"""A table: a title, columns and rows; Markdown and CSV are renderings of it.

A column is a header and a function of a row, so that a new column is one line where the table is made.
What stands in our tables is known to `paper_tables.py` and `index.py`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Column(Generic[R]):
    """A header, what stands below it for each row, and the side it keeps to; None is an empty cell."""

    header: str
    cell: Callable[[R], object]
    align: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Table(Generic[R]):
    """Rows of any kind, seen through columns.

    >>> squares = Table("squares", [Column("n", lambda n: n), Column("n²", lambda n: n * n, "right")], [2, 3])
    >>> print(squares.markdown())
    | n | n² |
    |---|---:|
    | 2 | 4 |
    | 3 | 9 |
    >>> squares.csv()
    'n,n²\\n2,4\\n3,9\\n'
    """

    title: str
    columns: Sequence[Column[R]]
    rows: Sequence[R]

    def cells(self) -> list[list[str]]:
        """The text of every cell, row by row."""
        values = [[column.cell(row) for column in self.columns] for row in self.rows]
        return [["" if value is None else str(value) for value in line] for line in values]

    def markdown(self) -> str:
        """The table alone, without its title; columns that are empty in every row are left out."""
        cells = self.cells()
        shown = [i for i in range(len(self.columns)) if not cells or any(line[i] for line in cells)]
        headers = [self.columns[i].header for i in shown]
        bars = "|".join("---:" if self.columns[i].align == "right" else "---" for i in shown)
        lines = [[line[i] for i in shown] for line in cells]
        return "\n".join([markdown_row(headers), f"|{bars}|", *map(markdown_row, lines)])

    def csv(self) -> str:
        """Headers and cells, a line for each row."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.header for column in self.columns])
        writer.writerows(self.cells())
        return text.getvalue()


def markdown_row(cells: Sequence[str]) -> str:
    safe = (cell.replace("|", "\\|") for cell in cells)
    return "|" + "|".join(f" {cell} " if cell else "" for cell in safe) + "|"
