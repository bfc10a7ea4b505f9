"""Verification: a published network is loaded, measured again, and compared to its record, number by number.

Counts must be the same. Of the test images, up to two in 10,000 may come out otherwise: the order of
float32 additions differs between machines, and an image whose two best classes are that close may fall
to either side. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.export import load
from deephoyer.lab import recipe as recipes
from deephoyer.lab.report import record as records
from deephoyer.lab.report.measure import build, measure
from deephoyer.lab.report.origin import settings
from deephoyer.lab.report.publish import described
from deephoyer.lab.report.record import WEIGHTS, Measured, Record

TOLERANCE = 2 / 10_000
"""The share of test images that may come out otherwise on another machine."""


@dataclass
class Outcome:
    """What was found for one record; verified when nothing differs."""

    folder: Path
    measured: Measured | None = None
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        word = "FAILED" if self.differences else "ok"
        m = self.measured
        found = "" if m is None else f": {m.accuracy:.2%}, {m.total.nonzeros:,} nonzeros, {m.total.macs_paper:,} MACs"
        if m is not None and m.compact is not None:
            found += f", {m.compact.macs:,} executed"
        shape = f", {m.structure}" if m is not None and m.structure else ""
        return f"{word:6} {self.folder}{found}{shape}"


def verify(paths: Iterable[str | Path]) -> Iterator[Outcome]:
    """An outcome a record, as they come; a path is a record or a folder of many."""
    folders = [folder for path in paths for folder in records.find(Path(path))]
    if not folders:
        raise UserError("there are no records to verify there.")
    return (check(folder) for folder in dict.fromkeys(folders))


def check(folder: Path) -> Outcome:
    """One record; what can't be read at all is a difference, too, so that the others are still looked at."""
    outcome = Outcome(folder)
    try:
        record = records.read(folder)
        file = described(folder / WEIGHTS)
        if file != record.weights:
            outcome.differences.append(f"{WEIGHTS} is not the file that was published: its sha256 is {file.sha256}")
        model = load(folder / WEIGHTS, build(record.recipe))
        outcome.measured = measure(model, record.recipe, record.measured.compact is not None)
        outcome.differences += compare(record.measured, outcome.measured)
        outcome.differences += _command(record)
    except UserError as why:
        outcome.differences.append(str(why))
    return outcome


def compare(said: Measured, found: Measured) -> list[str]:
    """A line for every number that differs."""
    lines = []
    if said.images != found.images or abs(said.right - found.right) > TOLERANCE * found.images:
        lines.append(_line("test images right", f"{said.right} of {said.images}", f"{found.right} of {found.images}"))
    if said.structure != found.structure:
        lines.append(_line("structure", said.structure, found.structure))
    lines += _fields("total", said.total, found.total)
    if said.compact is not None:
        lines += _fields("compact", said.compact, found.compact)
    ours, theirs = ({layer.name: layer for layer in m.layers} for m in (said, found))
    if list(ours) != list(theirs):
        return [*lines, _line("layers", " ".join(ours), " ".join(theirs))]
    return lines + [line for name in ours for line in _fields(name, ours[name], theirs[name])]


def _fields(where: str, said: Any, found: Any) -> list[str]:
    ours, theirs = dict(said), dict(found)
    return [_line(f"{where}.{key}", ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def _command(record: Record) -> list[str]:
    """The command must still give the recorded settings: a recipe may have been edited since."""
    now = settings(recipes.read(record.base, record.overrides))
    then = settings(record.settings)
    return [_line(f"recipe of the command, {key}", then[key], now[key]) for key in then if then[key] != now[key]]


def _line(what: str, said: object, found: object) -> str:
    return f"{what}: the record says {said}, measured {found}"
