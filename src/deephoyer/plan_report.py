"""What a plan came to, as a table for people and as plain data for a log."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from deephoyer.structure.compact import idle_line
from deephoyer.targets import Target
from deephoyer.text_table import text_table

MOST_LINES = 30
"""Lines of a report's table of epochs before it is shortened."""


@dataclass(frozen=True)
class PlanReport:
    """What a plan came to: the share that was asked for and the one reached, the score, and every set's width.

    `idle` are layers that eval mode never calls (auxiliary heads): they are as they were, and may no longer fit what
    feeds them in training.
    """

    target: Target
    reached: float
    epoch: int
    score: float | None
    base: float | None
    widths: list[tuple[str, int, int, str]]
    notes: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a log of any kind."""
        return {
            "target": {self.target.kind: getattr(self.target, self.target.kind), "drop": self.target.drop},
            "reached": self.reached,
            "epoch": self.epoch,
            "score": self.score,
            "score_before": self.base,
            "widths": {name: [before, after] for name, before, after, _ in self.widths},
            "notes": self.notes,
            "idle": self.idle,
            "history": self.history,
        }

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [
            f"asked for: {self.target.title()}",
            f"reached:   {self.reached:.4f}, the weights of {self._unit()} {self.epoch}",
        ]
        word = "before the first prune" if self.target.drop is None else "is what the drop is measured from"
        before = "" if self.base is None else f"{self.base:.4f} {word}"
        if self.score is not None:
            lines.append(f"score:     {self.score:.4f}{before and ', '}{before}")
        elif before:
            lines.append(f"score:     none was given for these weights; {before}")
        lines += [f"note:      {note}" for note in self.notes]
        lines += [f"idle:      {idle_line(self.idle)}"] if self.idle else []
        if self.widths:
            cells = [[name, why, f"{before:,}", f"{after:,}"] for name, before, after, why in self.widths]
            lines.append(
                text_table("widths", ["channels or heads of", "kept because", "before", "after"], cells, words=2)
            )
        if self.history:
            lines.append(self._epochs())
        return "\n".join(lines)

    def _unit(self) -> str:
        return "step" if self.history and "step" in self.history[0] else "epoch"

    def _epochs(self) -> str:
        """What happened when; of many steps or epochs only those at which something changed, and the last."""
        shown = self.history
        if len(shown) > MOST_LINES:
            changes = [b for a, b in pairwise(shown) if a["stage"] != b["stage"] or a["share"] != b["share"]]
            shown = [self.history[0], *changes, *([] if changes and changes[-1] is shown[-1] else [shown[-1]])]
        unit = self._unit()
        cells = []
        for line in shown:
            strength = ", ".join(f"{s:.3g}" for s in line["strength"].values())
            score = f"{line['score']:.4f}" if "score" in line else ""
            cells.append([line["stage"], f"{line[unit]:,}", f"{line['share']:.4f}", strength, score])
        return text_table("stages", ["stage", unit, "share", "strength", "score"], cells)
