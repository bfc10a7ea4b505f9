"""What a run's folder says, for its HTML page: headline, epochs, layers, magnitudes, what was kept and why.

Files that are missing or damaged are named in `missing`, and the rest is shown nevertheless. Nothing is measured here:
times are those that the run recorded.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError

BINS = 40
COUNTED = ("filters", "channels", "live_filters", "live_channels", "weights", "nonzeros")


@dataclass(frozen=True)
class Change:
    """A number before and after."""

    title: str
    before: str
    after: str
    ratio: str = ""


@dataclass
class RunFacts:
    """The parts of a run folder that could be read."""

    folder: Path
    missing: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    recipe: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    def headline(self) -> list[Change]:
        """Accuracy, size, arithmetic and time, before and after."""
        changes = []
        accuracy = self.summary.get("accuracy") or {}
        if accuracy:
            first, last = next(iter(accuracy.values())), list(accuracy.values())[-1]
            changes.append(Change("test accuracy", f"{first:.2%}", f"{last:.2%}", points(last - first)))
        sparse, compact = self.summary.get("sparse"), self.summary.get("compact")
        if sparse:
            changes.append(_counted("nonzero weights", sparse["total"]["weights"], sparse["total"]["nonzeros"]))
        if compact and compact.get("baseline"):
            before, after = compact["baseline"]["total"], compact["total"]
            changes.append(_counted("parameters", before["parameters"], after["parameters"]))
            if before.get("macs_executed") is not None:
                changes.append(_counted("MACs executed", before["macs_executed"], after["macs_executed"]))
            for then, now in zip(compact["baseline"]["latency"], compact["latency"], strict=False):
                changes.append(_timed(then, now, compact["device"]))
        return changes

    def layers(self) -> list[dict[str, Any]]:
        """One row per layer: widths, weights, MACs, milliseconds, before and after."""
        compact = self.summary.get("compact") or {}
        left = {row["name"]: row for row in compact.get("rows", ())}
        dense = {row["name"]: row for row in (compact.get("baseline") or {}).get("rows", ())}
        times = self.summary.get("layer_ms") or {}
        layers = []
        for row in (self.summary.get("sparse") or {}).get("rows", ()):
            now, then = left.get(row["name"]), dense.get(row["name"], row)
            layers.append(
                {
                    **{key: row[key] for key in COUNTED},
                    "name": row["name"] or "(model)",
                    "filters_left": None if now is None else now["filters"],
                    "channels_left": None if now is None else now["channels"],
                    "macs": then.get("macs_executed"),
                    "macs_left": None if now is None else now.get("macs_executed"),
                    "ms": (times.get("dense") or {}).get(row["name"]),
                    "ms_left": (times.get("compact") or {}).get(row["name"]),
                }
            )
        return layers

    def sets(self) -> list[dict[str, Any]]:
        """The sets of coupled channels, how many of each were removed, and why the rest were kept."""
        return list((self.summary.get("compact_report") or {}).get("sets", ()))

    def heads(self) -> list[tuple[str, list[bool]]]:
        """For each attention layer, which of its heads were kept."""
        return [(coupled["name"], coupled["heads"]) for coupled in self.sets() if coupled.get("heads")]

    def stages(self) -> list[tuple[str, int, int]]:
        """Each stage with the first and the last of its epochs, numbered over the whole run."""
        stages: list[tuple[str, int, int]] = []
        for epoch, line in enumerate(self.metrics, 1):
            title = line["stage"] + (f" {line['round']}" if "round" in line else "")
            if stages and stages[-1][0] == title:
                stages[-1] = title, stages[-1][1], epoch
            else:
                stages.append((title, epoch, epoch))
        return stages


def read(folder: str | Path) -> RunFacts:
    """Reads as much of a run's folder as there is; refuses a folder without anything of a run."""
    facts = RunFacts(Path(folder))
    if not facts.folder.is_dir():
        raise UserError(f"{facts.folder}: there is no such folder.")
    facts.summary = _json(facts, "summary.json", "the run has not finished, or this file was lost")
    facts.environment = _json(facts, "environment.json", "the machine and versions are not known")
    words = _json(facts, "command.json", "the command is not known")
    if words.get("base"):
        facts.command = shlex.join(["deephoyer", "run", str(words["base"]), *map(str, words.get("overrides") or [])])
    facts.recipe = _text(facts, "recipe.yaml", "the recipe is not known")
    facts.metrics = _metrics(facts)
    if not (facts.summary or facts.metrics or facts.recipe):
        raise UserError(f"{facts.folder}: is not the folder of a run: it has no summary, metrics or recipe.")
    return facts


def points(difference: float) -> str:
    """A difference of accuracies in words.

    >>> points(0.0129), points(-0.002), points(0.0)
    ('gained 1.29 points', 'lost 0.20 points', 'the same')
    """
    if round(abs(difference), 6) == 0:
        return "the same"
    return f"{'gained' if difference > 0 else 'lost'} {abs(100 * difference):.2f} points"


def magnitudes(facts: RunFacts) -> list[dict[str, Any]]:
    """For each layer a histogram of its group magnitudes before pruning, kept and pruned ones separately.

    [] if the weights before pruning or the final ones are missing.
    """
    from deephoyer.lab import models
    from deephoyer.lab.report.magnitudes import histograms_of
    from deephoyer.lab.runs import checkpoint
    from deephoyer.lab.runs.folder import RunFolder
    from deephoyer.weights import find_weights

    try:
        recipe = RunFolder(facts.folder).recipe()
    except UserError as why:
        facts.missing.append(str(why))
        return []
    if recipe is None or recipe.regularize is None or recipe.prune is None:
        return []
    states = []
    for name in ("regularized.safetensors", recipe.result_file):
        if not (facts.folder / name).exists():
            facts.missing.append(f"{name}: magnitudes before pruning can't be shown")
            return []
        try:
            model = models.of(recipe.model)
            checkpoint.fill(model, facts.folder / name, name)
        except UserError as why:
            facts.missing.append(str(why))
            return []
        states.append({w.name: w.tensor.detach() for w in find_weights(model)})
    return histograms_of(states[0], states[1], BINS)


def _counted(title: str, before: int, after: int) -> Change:
    return Change(title, f"{before:,}", f"{after:,}", f"{before / after:.2f} × fewer" if after else "none left")


def _timed(then: dict[str, Any], now: dict[str, Any], device: str) -> Change:
    from deephoyer.latency import Latency, noisy

    title = f"ms for a batch of {now['batch']} on {device}"
    ratio = then["median_ms"] / now["median_ms"]
    words = f"{ratio:.2f} × faster" if ratio >= 1 else f"{1 / ratio:.2f} × slower"
    words = f"~{words} (noisy)" if noisy(Latency(**then), Latency(**now)) else words
    return Change(title, f"{then['median_ms']:.3g}", f"{now['median_ms']:.3g}", words)


def _text(facts: RunFacts, name: str, consequence: str) -> str:
    try:
        return (facts.folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        facts.missing.append(f"{name}: {consequence}")
    except (OSError, UnicodeDecodeError) as why:
        facts.missing.append(f"{name}: can't be read ({why})")
    return ""


def _json(facts: RunFacts, name: str, consequence: str) -> dict[str, Any]:
    text = _text(facts, name, consequence)
    if not text:
        return {}
    try:
        content = json.loads(text)
    except ValueError as why:
        facts.missing.append(f"{name}: is damaged ({why})")
        return {}
    if not isinstance(content, dict):
        facts.missing.append(f"{name}: is not what a run writes")
        return {}
    return content


def _metrics(facts: RunFacts) -> list[dict[str, Any]]:
    lines, damaged = [], 0
    for text in _text(facts, "metrics.jsonl", "what happened in each epoch is not known").splitlines():
        try:
            line = json.loads(text)
            lines.append({**line, "stage": str(line["stage"]), "epoch": int(line["epoch"])})
        except (ValueError, KeyError, TypeError):
            damaged += 1
    if damaged:
        facts.missing.append(f"metrics.jsonl: {damaged} of its lines are damaged")
    return lines
