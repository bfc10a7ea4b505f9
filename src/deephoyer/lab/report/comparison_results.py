"""The results file of a comparison, `results/methods/NAME.json`: writing it, reading it, and what tables need of it.

Which runs a comparison takes is decided in `lab/comparison.py`; the page is made in `methods_page.py`.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.files import folder_at, write_atomically
from deephoyer.lab import comparison_protocol
from deephoyer.lab.comparison import FORMAT, ComparedRun, Comparison, near
from deephoyer.lab.comparison_protocol import Protocol

RESULTS = Path("results") / "methods"
TAG = "one-protocol"
"""That of the records of comparisons."""
TABLES = ("chosen", "outcomes", "failed")
"""The keys of a results file whose values are tables: a line of names, then one line for each run or setting."""


@dataclass(frozen=True)
class ComparisonResults:
    """The content of a results file, with the protocol that its runs follow."""

    protocol: Protocol
    content: dict[str, Any]

    def finals(self, method: str, size: float) -> list[ComparedRun]:
        """The runs of a method's chosen setting on the fresh seeds."""
        setting = (method, size, self.chosen_setting(method, size))
        runs = [ComparedRun(**o) for o in self.content["outcomes"] if (o["method"], o["size"], o["value"]) == setting]
        return sorted((run for run in runs if run.seed >= self.protocol.choose), key=lambda run: run.seed)

    def accuracies(self, size: float) -> dict[str, dict[int, float]]:
        """The test accuracy of every fresh seed, by method; methods that were not run have none."""
        return {m: {run.seed: run.accuracy for run in self.finals(m, size)} for m in self.protocol.methods}

    def failures(self, method: str, size: float) -> list[dict[str, Any]]:
        """The settings and seeds whose run failed, and why."""
        return [f for f in self.content["failed"] if (f["method"], f["size"]) == (method, size)]

    def chosen_setting(self, method: str, size: float) -> float | None:
        """The setting that was chosen on held-out images."""
        chosen = (c["value"] for c in self.content["chosen"] if (c["method"], c["size"]) == (method, size))
        return next(chosen, None)

    def is_at_an_open_end(self, method: str, size: float) -> bool:
        """Whether the chosen setting is the last one of a grid that was extended as often as the protocol allows: a
        better one may lie beyond."""
        entry, size = self.protocol.methods[method], size if self.protocol.chooses_at(size) else self.protocol.middle
        chosen, values = self.chosen_setting(method, size), list(entry.values)
        if chosen is None or values[0] < chosen < values[-1]:
            return False
        end = 0 if chosen <= values[0] else -1
        for extensions in range(self.protocol.extensions + 1):
            following = entry.beyond(values, end)
            if chosen == values[end]:
                return extensions == self.protocol.extensions and following is not None
            if following is None:
                break
            values.insert(0 if end == 0 else len(values), following)
        return False

    def best_strength(self, method: str) -> float | None:
        """The strength of a penalty that was chosen for the middle size; None for other methods."""
        penalizes = self.protocol.methods[method].penalizes
        return self.chosen_setting(method, self.protocol.middle) if penalizes else None

    def held_out_by_setting(self, method: str) -> dict[float, list[float]]:
        """The held-out accuracies, in percent, of a method's settings at the middle size, on the seeds that choose."""
        accuracies: dict[float, list[float]] = {}
        for o in self.content["outcomes"]:
            if (o["method"], o["size"]) == (method, self.protocol.middle) and o["seed"] < self.protocol.choose:
                accuracies.setdefault(o["value"], []).append(100 * o["held_out"])
        return dict(sorted(accuracies.items()))

    def losses_near_best(self, method: str) -> dict[float, list[float]]:
        """For each strength of a penalty within a decade of the chosen one, as a factor of it: the held-out accuracy
        that its seeds lose, in points."""
        best = self.best_strength(method)
        if best is None:
            return {}
        accuracies = self.held_out_by_setting(method)
        top = statistics.fmean(accuracies[best])
        return {value / best: [top - a for a in seeds] for value, seeds in accuracies.items() if near(value / best)}


def read(name: str, protocol: Protocol, results: Path = RESULTS) -> ComparisonResults | None:
    """The results of a comparison; None if it was not run, or if those of that name are of another protocol.

    Results of methods that are run differently now, or no longer, are left out.
    """
    content = read_content(results / f"{name}.json")
    if content is None or content["protocol"] != protocol.digest():
        return None
    same = {m for m, entry in protocol.methods.items() if content["methods"].get(m) == entry.digest()}
    tables = {key: [row for row in content[key] if row["method"] in same] for key in TABLES}
    return ComparisonResults(protocol, content | tables)


def read_content(path: Path) -> dict[str, Any] | None:
    """All that a results file says, its tables as lists of objects; None where there is no file."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: not a comparison written by this version of deephoyer.")
    for key in TABLES:
        names, rows = content[key][:1], content[key][1:]
        content[key] = [dict(zip(names[0], row, strict=True)) for row in rows]
    return content


def write(comparison: Comparison) -> Path:
    """Writes the results of a comparison to its file, unless that belongs to another."""
    refuse_another(comparison)
    path = folder_at(RESULTS) / f"{comparison.name}.json"
    write_atomically(path, _one_line_per_run(comparison.content()).encode())
    return path


def refuse_another(comparison: Comparison) -> None:
    """Raises where the results file of this comparison's name belongs to another protocol."""
    path, protocol = RESULTS / f"{comparison.name}.json", comparison.protocol
    if comparison.name in comparison_protocol.names() and _without_title(protocol) != _without_title(
        comparison_protocol.read(comparison.name)
    ):
        raise UserError(
            f"compare: {path} is for the comparison {comparison.name!r} that comes with deephoyer, and "
            f"{comparison.source} says something else: give your file another name."
        )
    content = read_content(path)
    if content is None:
        return
    if content["protocol"] != protocol.digest() or not set(content["methods"]) <= set(protocol.methods):
        raise UserError(
            f"compare: {path} has the results of another protocol than {comparison.source}: rename or delete that "
            "file, or give this comparison another name."
        )
    if not comparison.has_settings_of(content):
        if content.get("recipe") != (comparison.own_digest or None):
            raise UserError(
                f"compare: {path} has the results of what {protocol.base} was before it was changed: rename or delete "
                "that file, or give this comparison another name."
            )
        settings = [*(f"{stage}.epochs={n}" for stage, n in content["epochs"].items()), *content["words"]]
        raise UserError(
            f"compare: {path} has the results of other settings ({' '.join(settings)}): rename or delete that file."
        )


def _without_title(protocol: Protocol) -> Protocol:
    return protocol.model_copy(update={"about": ""})


def _one_line_per_run(content: dict[str, Any]) -> str:
    """JSON in which each run is a line: a difference of two files then names the runs that differ."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value)
        if key in TABLES:
            lines = [list(value[0]), *(list(row.values()) for row in value)] if value else []
            text = "[\n  " + ",\n  ".join(map(json.dumps, lines)) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
