"""Verification: a record is looked through, its network loaded, measured again and compared, number by number.

Counts must be the same. Of the test images, up to two in 10,000 (one in smaller test sets) may come out otherwise: the
order of float32 additions differs between machines, and an image whose two best classes are that close may fall to
either side.
Nothing is unpickled, and nothing but the record's own recipe is asked.
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
    """What was seen of one record; verified when nothing differs and there were weights to measure."""

    path: Path
    measured: Measured | None = None
    differences: list[str] = field(default_factory=list)
    kept: bool = True

    @property
    def verdict(self) -> str:
        return "FAILED" if self.differences else "ok" if self.kept else "weights not kept"

    def __str__(self) -> str:
        m = self.measured
        seen = "" if m is None else f": {m.accuracy:.2%}, {m.total.nonzeros:,} nonzeros, {m.total.macs_paper:,} MACs"
        if m is not None and m.compact is not None:
            seen += f", {m.compact.macs:,} executed"
        widths = f", {m.layer_widths}" if m is not None and m.layer_widths else ""
        return f"{self.verdict:6} {self.path}{seen}{widths}"


def verify(paths: Iterable[str | Path], place: Mapping[str, Any] = {}) -> Iterator[Outcome]:
    """An outcome for each record, as they come; a path is a record or a folder of many.

    `place` has settings of the data on this machine, like their path.
    """
    files = [file for path in paths for file in records.find(Path(path))]
    if not files:
        raise UserError("there are no records to verify there.")
    return (check(file, place) for file in dict.fromkeys(files))


def check(path: Path, place: Mapping[str, Any] = {}) -> Outcome:
    """One record; what can't be read at all is a difference, too, so that the others are still looked at."""
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
    """Checks without the weights: a record's numbers must be consistent."""
    lines, measured, total = [], record.measured, record.measured.total
    titles = [TITLES[stage] for stage in record.settings.stages() if stage != "start"]
    lines += [f"accuracy.{title}: the record says nothing" for title in titles if title not in record.accuracy]
    seen = record.accuracy.get(titles[-1])
    if seen is not None and not is_rounding(
        round(seen * measured.images) - measured.right, measured.images, ROUNDING_OF_GPU
    ):
        lines.append(_line(f"accuracy.{titles[-1]}", seen, measured.accuracy))
    for key in ("nonzeros", "macs_paper"):
        layers = sum(getattr(layer, key) for layer in measured.layers)
        if layers != getattr(total, key):
            lines.append(f"total.{key}: the record says {getattr(total, key)}, its layers come to {layers}")
    if measured.right > measured.images:
        lines.append(f"right: {measured.right} of {measured.images} images")
    return lines


def compare(said: Measured, seen: Measured) -> list[str]:
    """One line for every number that differs."""
    lines = []
    if said.images != seen.images or not is_rounding(said.right - seen.right, seen.images):
        lines.append(_line("test images right", f"{said.right} of {said.images}", f"{seen.right} of {seen.images}"))
    if said.right5 is not None and not is_rounding(said.right5 - (seen.right5 or 0), seen.images):
        lines.append(_line("test images right in five guesses", said.right5, seen.right5))
    if said.layer_widths != seen.layer_widths:
        lines.append(_line("layer_widths", said.layer_widths, seen.layer_widths))
    lines += _fields("total", said.total, seen.total)
    if said.compact is not None:
        lines += _fields("compact", said.compact, seen.compact)
    ours, theirs = ({layer.name: layer for layer in m.layers} for m in (said, seen))
    if list(ours) != list(theirs):
        return [*lines, _line("layers", " ".join(ours), " ".join(theirs))]
    return lines + [line for name in ours for line in _fields(name, ours[name], theirs[name])]


def _fields(where: str, said: Any, seen: Any) -> list[str]:
    ours, theirs = dict(said), dict(seen)
    return [_line(f"{where}.{key}", ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def _line(what: str, said: object, seen: object) -> str:
    return f"{what}: the record says {said}, measured {seen}"
