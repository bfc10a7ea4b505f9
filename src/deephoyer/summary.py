"""The summary: what is left of a network, by three ways of counting that are never mixed, and how fast it is.

Counting is in `counting.py`, timing in `latency.py`; here they become one record that prints as a
table and goes to JSON and back. How the network was made is not known here.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import nn

from deephoyer.counting import Row, Total, count, structure
from deephoyer.errors import UserError
from deephoyer.inference import Examples, device_of
from deephoyer.latency import Latency, measure

WIDE = 130
"""Characters that a table with all columns needs."""


@dataclass(frozen=True)
class Summary:
    """A row a layer, the total, measured latencies, and the same of the network it is compared to."""

    rows: list[Row]
    total: Total
    structure: str | None = None
    latency: list[Latency] = field(default_factory=list)
    device: str = "cpu"
    accuracy: dict[str, float] = field(default_factory=dict)
    baseline: Summary | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dump`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Summary:
        """The summary again, from what `to_json` gave."""
        try:
            return cls(
                rows=[Row(**{**row, "shape": tuple(row["shape"])}) for row in data["rows"]],
                total=Total(**data["total"]),
                structure=data["structure"],
                latency=[Latency(**item) for item in data["latency"]],
                device=data["device"],
                accuracy=dict(data["accuracy"]),
                baseline=None if data["baseline"] is None else cls.from_json(data["baseline"]),
            )
        except (KeyError, TypeError, ValueError) as why:
            raise UserError(f"this is not a summary: {type(why).__name__} {why}.") from None

    def table(self, width: int = WIDE) -> Table:
        """A row a layer and the total; fewer columns where `width` does not allow all of them."""
        return _layers_table(self) if width >= WIDE else _narrow_table(self)

    def comparison(self) -> Table:
        """Before and after, one line a way of counting; without a baseline, this network alone."""
        return _comparison_table(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width)
        yield self.comparison()

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=140, color_system=None).print(self)
        return out.getvalue().rstrip()


def summary(
    model: nn.Module,
    example_inputs: Examples | None = None,
    baseline: nn.Module | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 64),
    latency: bool = True,
    seconds: float = 0.5,
    accuracy: Mapping[str, float] | None = None,
) -> Summary:
    """What is left of `model`: weights, MACs, bytes, milliseconds; next to `baseline` if there is one.

    MACs and latency need example inputs. Latencies of both networks are measured in turns, about
    `seconds` for each batch size, on the device where they are.

    >>> import torch
    >>> summary(nn.Linear(4, 2), torch.zeros(1, 4), latency=False).total.macs_there
    8
    """
    models = [model] if baseline is None else [model, baseline]
    timed: Iterable[list[Latency]] = [[] for _ in models]
    counted = [count(m, example_inputs) for m in models]
    if latency and example_inputs is not None:
        timed = measure(models, example_inputs, batch_sizes, seconds)
    parts = [
        Summary(rows, total, structure(rows), times, str(device_of(m)))
        for m, (rows, total), times in zip(models, counted, timed, strict=True)
    ]
    before = parts[1] if baseline is not None else None
    own = parts[0]
    return Summary(own.rows, own.total, own.structure, own.latency, own.device, dict(accuracy or {}), before)


def _layers_table(s: Summary) -> Table:
    table = Table(title="layers as they stand", title_justify="left")
    table.add_column("layer")
    table.add_column("shape")
    for title in ("weights", "nonzeros", "density", "live filters", "live channels"):
        table.add_column(title, justify="right")
    macs = s.total.macs_there is not None
    for title in ("MACs, zero filters\nand channels discounted", "MACs there") if macs else ():
        table.add_column(title, justify="right")
    table.add_column("bytes stored", justify="right")
    for r in s.rows:
        live = [_of(r.live_filters, r.filters), _of(r.live_channels, r.channels)]
        shape = "×".join(map(str, r.shape))
        table.add_row(r.name or "(model)", shape, *_counts(r), *live, *_macs(r), f"{r.bytes_stored:,}")
    table.add_section()
    table.add_row("total", s.structure or "", *_counts(s.total), "", "", *_macs(s.total), f"{s.total.bytes_stored:,}")
    return table


def _narrow_table(s: Summary) -> Table:
    """What matters most, for a terminal of eighty characters."""
    table = Table(title="layers as they stand", title_justify="left")
    table.add_column("layer")
    macs = s.total.macs_there is not None
    live = ("MACs without zero\nfilters, channels", "MACs there") if macs else ()
    for title in ("live filters ×\nchannels", "nonzeros", "density", *live):
        table.add_column(title, justify="right")
    for r in s.rows:
        table.add_row(r.name or "(model)", f"{r.live_filters} × {r.live_channels}", *_counts(r)[1:], *_macs(r))
    table.add_section()
    table.add_row("total", s.structure or "", *_counts(s.total)[1:], *_macs(s.total))
    return table


def _counts(r: Row | Total) -> list[str]:
    return [f"{r.weights:,}", f"{r.nonzeros:,}", f"{r.density:.2%}"]


def _macs(r: Row | Total) -> list[str]:
    return [] if r.macs_there is None else [f"{r.macs_paper:,}", f"{r.macs_there:,}"]


def _of(live: int, whole: int) -> str:
    return f"{live:,} of {whole:,}"


def _comparison_table(s: Summary) -> Table:
    b = s.baseline
    table = Table(title="the network" if b is None else "before and after", title_justify="left")
    table.add_column("")
    for title in ("",) if b is None else ("before", "after", "before ÷ after"):
        table.add_column(title, justify="right")
    for title, get in _LINES:
        table.add_row(title, *_line(get(s.total), None if b is None else get(b.total), b is not None))
    for i, own in enumerate(s.latency):
        other = b.latency[i] if b is not None and i < len(b.latency) else None
        ratio = _ratio(other.median_ms if other else None, own.median_ms)
        cells = [_ms(own)] if b is None else [_ms(other), _ms(own), ratio]
        table.add_row(f"ms a batch of {own.batch} on {s.device}, median (quartiles)", *cells)
    for stage, share in s.accuracy.items():
        table.add_row(f"accuracy, {stage}", *([""] if b is not None else []), f"{share:.2%}")
    return table


_LINES = [
    ("nonzero weights", lambda t: t.nonzeros),
    ("MACs, zero filters and channels discounted (the paper's counting)", lambda t: t.macs_paper),
    ("MACs there", lambda t: t.macs_there),
    ("parameters there", lambda t: t.parameters),
    ("bytes in memory", lambda t: t.bytes_dense),
    ("bytes stored (without the file's header)", lambda t: t.bytes_stored),
]


def _line(after: int | None, before: int | None, compared: bool) -> list[str]:
    if not compared:
        return [_number(after)]
    return [_number(before), _number(after), _ratio(before, after)]


def _number(n: int | None) -> str:
    return "not measured" if n is None else f"{n:,}"


def _ratio(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}×" if before is not None and after else ""


def _ms(t: Latency | None) -> str:
    return "" if t is None else f"{t.median_ms:.3f} ({t.low_ms:.3f}–{t.high_ms:.3f})"
