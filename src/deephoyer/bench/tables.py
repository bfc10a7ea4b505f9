"""Showing what was measured: rows as a table, a record as a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deephoyer.files import folder_at, write_atomically


def show(rows: Sequence[tuple[str, ...]], notes: Sequence[str] = ()) -> None:
    """Prints the rows; the first has the titles."""
    out = Console() if sys.stdout.isatty() else Console(width=160)
    titles, *lines = rows
    table = Table(box=None, padding=(0, 1))
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i and title != "groups" else "left")
    for line in lines:
        table.add_row(*line)
    out.print(table, highlight=False)
    for note in notes:
        out.print(note, highlight=False, markup=False)


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Writes the record, if there is a file to write it to."""
    if path is not None:
        folder_at(path.parent)
        write_atomically(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
