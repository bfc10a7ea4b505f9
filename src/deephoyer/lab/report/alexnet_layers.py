"""The paper's table of AlexNet by layer: nonzero weights as its appendix prints them, and beside them our records'.

`deephoyer table alexnet-layers` prints it. The other tables of the paper are in `paper_tables.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from deephoyer.lab.report.record import Record
from deephoyer.lab.report.table import Column, Table

NAME = "alexnet-layers"
Row = dict[str, str]


def alexnet_layers(records: Iterable[Record]) -> Table[Row]:
    """A row for each layer, a column for each method that was reported and for each of our AlexNets."""
    with open(Path(__file__).with_suffix(".csv"), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    layer, *methods = (Column[Row](title, lambda row, t=title: row[t], "right") for title in rows[0])  # type: ignore[misc]
    own = [_column(record) for record in records if record.network == "alexnet"]
    return Table("AlexNet by layer: nonzero weights", [Column("layer", layer.cell), *methods, *own], rows)


def _column(record: Record) -> Column[Row]:
    measured = record.measured
    top5 = "" if measured.top5 is None else f", {measured.top5:.1%} top-5"
    counts = {layer.name: layer.nonzeros for layer in measured.layers} | {"total": measured.total.nonzeros}
    where = "" if record.data == "imagenet" else f" on {record.data}"
    title = f"ours: {record.row}{where}, {measured.accuracy:.1%} top-1{top5}"
    return Column(title, lambda row: f"{counts[row['layer']]:,}" if row["layer"] in counts else "", "right")
