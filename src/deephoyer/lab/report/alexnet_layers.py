"""The paper's table of AlexNet by layer: nonzero weights as others reported them, and beside them those of our records.

`deephoyer table alexnet-layers` prints it. The other tables of the paper are in `paper_tables.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deephoyer.lab.report.record import Record
from deephoyer.lab.report.table import Column, Table

NAME = "alexnet-layers"
METHODS = ("dense", "Han et al.", "Zhang et al. (ADMM)", "Ma et al. (transformed l1)", "Hoyer", "Hoyer-Square")
REPORTED = {
    "conv1": ("34.8K", "29.3K", "28.2K", "24.2K", "21.3K", "31.6K"),
    "conv2": ("307.2K", "116.7K", "61.4K", "109.9K", "77.2K", "148.4K"),
    "conv3": ("884.7K", "309.7K", "168.1K", "241.2K", "192.0K", "299.3K"),
    "conv4": ("663.5K", "245.5K", "132.7K", "207.4K", "182.6K", "275.6K"),
    "conv5": ("442.2K", "163.7K", "88.5K", "134.7K", "116.6K", "197.1K"),
    "fc1": ("37.7M", "3.40M", "1.06M", "0.763M", "1.566M", "0.781M"),
    "fc2": ("16.8M", "1.51M", "0.99M", "1.070M", "0.974M", "0.650M"),
    "fc3": ("4.10M", "1.02M", "0.38M", "0.505M", "0.490M", "0.472M"),
    "total": ("60.9M", "6.8M", "2.9M", "3.05M", "3.62M", "2.85M"),
}
"""From the paper's appendix, as printed there."""


def alexnet_layers(records: Iterable[Record]) -> Table[str]:
    """A row for each layer, a column for each method that was reported and for each of our AlexNets."""
    own = [record for record in records if record.network == "alexnet"]
    return Table("AlexNet by layer: nonzero weights", _columns(own), list(REPORTED))


def _columns(own: Sequence[Record]) -> list[Column[str]]:
    theirs = [_column(method, {row: cells[i] for row, cells in REPORTED.items()}) for i, method in enumerate(METHODS)]
    return [Column("layer", lambda row: row), *theirs, *(_column(_title(record), _nonzeros(record)) for record in own)]


def _column(header: str, cells: Mapping[str, str]) -> Column[str]:
    return Column(header, lambda row: cells.get(row, ""), "right")


def _title(record: Record) -> str:
    top5 = "" if record.measured.top5 is None else f", {record.measured.top5:.1%} top-5"
    where = "" if record.data == "imagenet" else f" on {record.data}"
    return f"ours: {record.row}{where}, {record.measured.accuracy:.1%} top-1{top5}"


def _nonzeros(record: Record) -> dict[str, str]:
    counts = {layer.name: layer.nonzeros for layer in record.measured.layers}
    return {name: f"{count:,}" for name, count in (counts | {"total": record.measured.total.nonzeros}).items()}
