"""Verification: a record is checked for contradictions, its network is loaded, measured again and compared.

Counts must be equal. Two of 10,000 test images (one in smaller test sets) may be classified differently: the order of
float32 additions differs between machines, which decides where the scores of two classes are nearly equal.
Nothing is unpickled, and everything that is needed is in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.export import load
from deephoyer.lab.open_network import built_for
from deephoyer.lab.report import record as records
from deephoyer.lab.report.measure import check_images, measure
from deephoyer.lab.report.publish import ROUNDING_OF_GPU, is_rounding
from deephoyer.lab.report.record import Measured, Record
from deephoyer.lab.report.stored_weights import read_weights
from deephoyer.lab.schema import TITLES


@dataclass
class Outcome:
    """What the verification of one record found: `ok` if nothing differs and there were weights to measure."""

    path: Path
    measured: Measured | None = None
    differences: list[str] = field(default_factory=list)
    kept: bool = True

    @property
    def verdict(self) -> str:
        return "FAILED" if self.differences else "ok" if self.kept else "weights not kept"

    def __str__(self) -> str:
        m = self.measured
        text = f"{self.verdict:6} {self.path}"
        if m is not None:
            text += f": {m.accuracy:.2%}, {m.total.nonzeros:,} nonzeros, {m.total.macs_paper:,} MACs"
            text += f", {m.compact.macs:,} executed" if m.compact is not None else ""
            text += f", {m.layer_widths}" if m.layer_widths else ""
        return text


def verify(paths: Iterable[str | Path], place: Mapping[str, Any] = {}) -> Iterator[Outcome]:
    """One outcome for each record, as soon as it is known; a path is a record or a folder of records.

    `place` has settings of the data on this machine, like their path.
    """
    files = [file for path in paths for file in records.find(Path(path))]
    if not files:
        raise UserError("there are no records to verify there.")
    return (check(file, place) for file in dict.fromkeys(files))


def check(path: Path, place: Mapping[str, Any] = {}) -> Outcome:
    """Verifies one record; one that can't be read counts as a difference, so that the others are still verified."""
    outcome = Outcome(path)
    try:
        record = records.read(path)
        outcome.differences += contradictions(record)
        outcome.kept = record.weights.file is not None
        if record.weights.file is not None:
            file = read_weights(records.results_of(path), record.weights.file, record.weights.sha256)
            model = load(file, built_for(file, record.settings.model))
            recipe = record.settings.here(place)
            check_images(recipe, record.images)
            outcome.measured = measure(model, recipe, record.measured.compact is not None)
            outcome.differences += compare(record.measured, outcome.measured)
    except UserError as why:
        outcome.differences.append(str(why))
    return outcome


def contradictions(record: Record) -> list[str]:
    """What is inconsistent in a record, without its weights: one line each."""
    lines, measured, total = [], record.measured, record.measured.total
    titles = [TITLES[stage] for stage in record.settings.stages() if stage != "start"]
    lines += [f"accuracy.{title}: the record says nothing" for title in titles if title not in record.accuracy]
    last = record.accuracy.get(titles[-1])
    if last is not None and not is_rounding(
        round(last * measured.images) - measured.right, measured.images, ROUNDING_OF_GPU
    ):
        lines.append(_line(f"accuracy.{titles[-1]}", last, measured.accuracy))
    for key in ("nonzeros", "macs_paper"):
        layers = sum(getattr(layer, key) for layer in measured.layers)
        if layers != getattr(total, key):
            lines.append(f"total.{key}: the record says {getattr(total, key)}, its layers come to {layers}")
    if measured.right > measured.images:
        lines.append(f"right: {measured.right} of {measured.images} images")
    return lines


def compare(recorded: Measured, measured: Measured) -> list[str]:
    """One line for every number that differs."""
    lines, images = [], measured.images
    if recorded.images != images or not is_rounding(recorded.right - measured.right, images):
        right = [f"{m.right} of {m.images}" for m in (recorded, measured)]
        lines.append(_line("test images right", *right))
    if recorded.right5 is not None and not is_rounding(recorded.right5 - (measured.right5 or 0), images):
        lines.append(_line("test images right in five guesses", recorded.right5, measured.right5))
    if recorded.layer_widths != measured.layer_widths:
        lines.append(_line("layer_widths", recorded.layer_widths, measured.layer_widths))
    lines += _fields("total", recorded.total, measured.total)
    if recorded.compact is not None:
        lines += _fields("compact", recorded.compact, measured.compact)
    before, now = ({layer.name: layer for layer in m.layers} for m in (recorded, measured))
    if list(before) != list(now):
        return [*lines, _line("layers", " ".join(before), " ".join(now))]
    return lines + [line for name in before for line in _fields(name, before[name], now[name])]


def _fields(part: str, recorded: Any, measured: Any) -> list[str]:
    before, now = dict(recorded), dict(measured)
    return [_line(f"{part}.{key}", before[key], now[key]) for key in before if before[key] != now[key]]


def _line(what: str, recorded: object, measured: object) -> str:
    return f"{what}: the record says {recorded}, measured {measured}"
