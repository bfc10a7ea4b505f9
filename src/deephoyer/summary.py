"""The summary: what is left of a network, by three ways of counting that are never mixed, and how fast it is.

Counting is in `counting.py`, timing in `latency.py`; here they become one record that prints as a
table and goes to JSON and back. How the network was made is not known here.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from deephoyer.counting import LayerCounts, TotalCounts, count, layer_widths
from deephoyer.errors import UserError, true_or_false
from deephoyer.inference import Examples, device_of
from deephoyer.latency import Latency, measure, noisy
from deephoyer.text_table import text_table

WIDE = 130
"""Characters that a table with all columns needs."""


@dataclass(frozen=True)
class Summary:
    """A row a layer, the total, measured latencies, and the same of the network it is compared to."""

    rows: list[LayerCounts]
    total: TotalCounts
    layer_widths: str | None = None
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
                rows=[LayerCounts(**{**row, "shape": tuple(row["shape"])}) for row in data["rows"]],
                total=TotalCounts(**data["total"]),
                layer_widths=data["layer_widths"],
                latency=[Latency(**item) for item in data["latency"]],
                device=data["device"],
                accuracy=dict(data["accuracy"]),
                baseline=None if data["baseline"] is None else cls.from_json(data["baseline"]),
            )
        except (KeyError, TypeError, ValueError) as why:
            raise UserError(f"this is not a summary: {type(why).__name__} {why}.") from None

    def table(self, width: int = WIDE) -> str:
        """A row a layer and the total; fewer columns where `width` does not allow all of them."""
        return _layers_table(self) if width >= WIDE else _narrow_table(self)

    def comparison(self, width: int = WIDE) -> str:
        """Before and after, one line a way of counting; without a baseline, this network alone."""
        return _comparison_table(self, short=width < WIDE)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.comparison()}"


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
    """Counts `model`: weights, MACs, bytes, milliseconds; compared with `baseline` if given.

    MACs and latency need example inputs. The two networks are timed alternately, about `seconds` for each batch
    size, on their current device.

    >>> import torch
    >>> summary(nn.Linear(4, 2), torch.zeros(1, 4), latency=False).total.macs_executed
    8
    """
    true_or_false(latency, "summary: latency")
    models = [model] if baseline is None else [model, baseline]
    timed: Iterable[list[Latency]] = [[] for _ in models]
    counted = [count(m, example_inputs) for m in models]
    if latency and example_inputs is not None:
        timed = measure(models, example_inputs, batch_sizes, seconds)
    own, *before = (
        Summary(rows, total, layer_widths(rows), times, str(device_of(m)))
        for m, (rows, total), times in zip(models, counted, timed, strict=True)
    )
    return replace(own, accuracy=dict(accuracy or {}), baseline=before[0] if before else None)


def _layers_table(s: Summary) -> str:
    macs = ["MACs, zero filters\nand channels discounted", "MACs executed"] if s.total.macs_executed is not None else []
    counts = ["weights", "nonzeros", "density", "live filters", "live channels"]
    titles = ["layer", "shape", *counts, *macs, "bytes stored"]
    lines = []
    for r in s.rows:
        live = [f"{r.live_filters:,} of {r.filters:,}", f"{r.live_channels:,} of {r.channels:,}"]
        shape = "×".join(map(str, r.shape))
        lines.append([r.name or "(model)", shape, *_counts(r), *live, *_macs(r), f"{r.bytes_stored:,}"])
    stored = f"{s.total.bytes_stored:,}"
    total = ["total", s.layer_widths or "", *_counts(s.total), "", "", *_macs(s.total), stored]
    return text_table("layers as they stand", titles, lines, total, words=2)


def _narrow_table(s: Summary) -> str:
    """What matters most, for a terminal of eighty characters."""
    macs = ["MACs without zero\nfilters, channels", "MACs executed"] if s.total.macs_executed is not None else []
    titles = ["layer", "live filters ×\nchannels", "nonzeros", "density", *macs]
    lines = [[r.name or "(model)", f"{r.live_filters} × {r.live_channels}", *_counts(r)[1:], *_macs(r)] for r in s.rows]
    total = ["total", s.layer_widths or "", *_counts(s.total)[1:], *_macs(s.total)]
    return text_table("layers as they stand", titles, lines, total)


def _counts(r: LayerCounts | TotalCounts) -> list[str]:
    return [f"{r.weights:,}", f"{r.nonzeros:,}", f"{r.density:.2%}"]


def _macs(r: LayerCounts | TotalCounts) -> list[str]:
    return [] if r.macs_executed is None else [f"{r.macs_paper:,}", f"{r.macs_executed:,}"]


def _comparison_table(s: Summary, short: bool) -> str:
    b = s.baseline
    titles = ["", ""] if b is None else ["", "before", "after", "÷" if short else "before ÷ after"]
    lines = []
    for what, brief, get in _LINES:
        after, before = get(s.total), None if b is None else get(b.total)
        cells = [_number(after)] if b is None else [_number(before), _number(after), _ratio(before, after)]
        lines.append([brief if short else what, *cells])
    for i, own in enumerate(s.latency):
        other = b.latency[i] if b is not None and i < len(b.latency) else None
        vary = other is not None and noisy(other, own)
        ratio = _ratio(other.median_ms if other else None, own.median_ms)
        marked = f"~{ratio}{'' if short else ' (noisy)'}" if vary else ratio
        cells = [_ms(own)] if b is None else [_ms(other), _ms(own), marked]
        where = (", noisy" if vary else "") if short else f" on {s.device}, median (quartiles)"
        lines.append([f"ms per batch of {own.batch}{where}", *cells])
    for stage, share in s.accuracy.items():
        lines.append([f"accuracy, {stage}", *([f"{share:.2%}"] if b is None else ["", f"{share:.2%}", ""])])
    return text_table("the network" if b is None else "before and after", titles, lines)


_LINES: list[tuple[str, str, Callable[[TotalCounts], int | None]]] = [
    ("nonzero weights", "nonzero weights", lambda t: t.nonzeros),
    (
        "MACs, zero filters and channels discounted (the paper's counting)",
        "MACs, the paper's counting",
        lambda t: t.macs_paper,
    ),
    ("MACs executed", "MACs executed", lambda t: t.macs_executed),
    ("parameters", "parameters", lambda t: t.parameters),
    ("bytes in memory", "bytes in memory", lambda t: t.bytes_dense),
    ("bytes stored (without the file's header)", "bytes stored", lambda t: t.bytes_stored),
]


def _number(n: int | None) -> str:
    return "not measured" if n is None else f"{n:,}"


def _ratio(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}×" if before is not None and after else ""


def _ms(t: Latency | None) -> str:
    return "" if t is None else f"{t.median_ms:.3f} ({t.low_ms:.3f}–{t.high_ms:.3f})"
