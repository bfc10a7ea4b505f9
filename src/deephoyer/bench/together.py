"""What `deephoyer sweep` gains on one device: N strengths of ResNet-56 at once against one.

What counts is the time of a steady epoch: the median of all but each run's first, which has the start, the
compilation and the capture in it. N at once take that long for N epochs, one of each network.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deephoyer.bench.epochs import recipe
from deephoyer.errors import UserError
from deephoyer.lab import sweep


def together(
    count: int, device: str, epochs: int, mps: bool = True, case: str = "resnet-56-eager", changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Seconds of a steady epoch, alone and `count` at once, and the wall clock of both sweeps."""
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{case}.yaml"
        file.write_text(recipe(case, device, epochs, bare_epochs=0).to_yaml())
        one, one_wall = _sweep(file, changes, 1, mps, notes)
        many, many_wall = _sweep(file, changes, count, mps, notes)
    return {
        "networks": count,
        "notes": notes,
        "one: seconds an epoch": one,
        "at once: seconds an epoch": many,
        "at once: seconds an epoch and network": many / count,
        "at once / one after the other": many / (count * one),
        "one: wall clock": one_wall,
        "at once: wall clock": many_wall,
    }


def _sweep(file: Path, changes: Sequence[str], count: int, mps: bool, notes: list[str]) -> tuple[float, float]:
    strengths = ",".join(f"{i + 1}e-4" for i in range(count))
    team = sweep.members(str(file), changes, [f"regularize.strength={strengths}"], file.parent / str(count))
    began = time.monotonic()
    sweep.run_all(str(file), changes, team, count, None, mps=mps, say=notes.append, module="deephoyer.bench")
    wall = time.monotonic() - began
    seconds: list[float] = []
    for member in team:
        if member.status != 0:
            raise UserError(f"bench: a run of the sweep failed: {member.log_tail()}")
        lines = (member.folder / "metrics.jsonl").read_text().splitlines()
        seconds += [json.loads(line)["seconds"] for line in lines[1:]]
    return statistics.median(seconds), wall


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    n = found["networks"]
    alone, each = found["one: seconds an epoch"], found["at once: seconds an epoch and network"]
    return [
        ("a steady epoch of ResNet-56", "a network", "÷ alone", "wall clock, start and all"),
        ("alone", f"{alone:.3f} s", "1.00", f"{found['one: wall clock']:.1f} s"),
        (f"{n} at once", f"{each:.3f} s", f"{each / alone:.2f}", f"{found['at once: wall clock']:.1f} s"),
    ]
