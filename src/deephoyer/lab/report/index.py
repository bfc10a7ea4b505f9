"""`results/index.csv`: every record, one line each, generated and never edited."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from deephoyer.lab.report.record import Record
from deephoyer.lab.report.table import Column, Table

INDEX = "index.csv"


def index(records: Iterable[Record], results: Path) -> Table[Record]:
    """The table behind the file; paths are those in `results`."""
    columns: list[Column[Record]] = [
        Column("record", lambda r: Path(r.path).relative_to(results).as_posix()),
        Column("network", lambda r: r.network),
        Column("data", lambda r: r.settings.data),
        Column("row", lambda r: r.row),
        Column("tags", lambda r: " ".join(r.tags)),
        Column("epoch selection", lambda r: r.protocol),
        Column("seed", lambda r: r.seed),
        Column("accuracy", lambda r: f"{r.measured.accuracy:.4f}"),
        Column("weights", lambda r: r.measured.total.weights),
        Column("nonzeros", lambda r: r.measured.total.nonzeros),
        Column("MACs, the paper's counting", lambda r: r.measured.total.macs_paper),
        Column("MACs executed", lambda r: r.measured.macs_executed),
        Column("parameters left", lambda r: r.measured.parameters_left),
        Column("layer widths", lambda r: r.measured.layer_widths),
        Column("device", lambda r: r.environment.get("device_name")),
        Column("minutes", lambda r: f"{sum(r.seconds.values()) / 60:.1f}" if r.seconds else None),
        Column("weights file", lambda r: r.weights.file or "not kept"),
        Column("recipe digest", lambda r: r.digest[:16]),
        Column("command", lambda r: r.command),
    ]
    return Table("records", columns, sorted(records, key=lambda r: r.path))
