"""The rules: which groups are small enough to go.

A rule looks at scores (`scores.py`: by default the root mean square of each group's weights) and says which groups
stay. What a score means, and how the weights got small, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from deephoyer.errors import UserError, not_negative, shown
from deephoyer.registry import Registry


@dataclass(frozen=True)
class Scores:
    """What a rule sees of a unit: the tensors' names, a score for each group, and the scale that relative rules take
    them by: the standard deviation of its weights where the score is their magnitude."""

    names: Sequence[str]
    score: Tensor
    std: float


@dataclass(frozen=True)
class Verdict:
    """Which groups stay, and the threshold they were held against."""

    keep: Tensor
    threshold: float


class Rule:
    """Needs `judge`, and a line in `RULES` to have a name."""

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        raise NotImplementedError


@dataclass(frozen=True)
class Threshold(Rule):
    """A rule with one number that is multiplied by a scale of each unit: the larger, the more groups go."""

    value: float
    title: ClassVar[str]
    relative: ClassVar[bool] = False
    """Whether the scale is the unit's standard deviation, and not 1."""

    @classmethod
    def scale(cls, s: Scores) -> float:
        return s.std if cls.relative else 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", not_negative(self.value, f"rule {self.title}: the value"))

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        bars = [self.value * self.scale(s) for s in scores]
        # What is zero already never stays, so that a threshold of 0 means: what is zero now.
        return [Verdict((s.score >= bar) & (s.score > 0), bar) for s, bar in zip(scores, bars, strict=True)]


class Absolute(Threshold):
    """groups whose weights are smaller than a number go"""

    title = "absolute"


class StdRatio(Threshold):
    """groups whose weights are smaller than a multiple of the layer's standard deviation go"""

    title, relative = "std-ratio", True


@dataclass(frozen=True)
class Density(Rule):
    """the largest share of the groups stays: of each layer, at least one, or of the whole network (scope: global)"""

    value: float
    scope: str = "layer"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", not_negative(self.value, "rule density: the value"))
        if self.value > 1:
            raise UserError(f"rule density: {self.value!r} is more than all; a density lies between 0 and 1.")
        if self.scope not in ("layer", "global"):
            raise UserError(f"rule density: scope is {self.scope!r}; it is 'layer' or 'global'.")

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        if self.scope == "layer":
            return [self._largest(s.score) for s in scores]
        whole = self._largest(torch.cat([s.score.double().cpu() for s in scores]))
        parts = whole.keep.split([s.score.numel() for s in scores])
        return [Verdict(k.to(s.score.device), whole.threshold) for k, s in zip(parts, scores, strict=True)]

    def _largest(self, score: Tensor) -> Verdict:
        # Halves are kept, and of anything at all a little is left: a small layer is not cut through by rounding.
        count = max(1, math.floor(self.value * score.numel() + 0.5)) if self.value and score.numel() else 0
        if not count:
            return Verdict(torch.zeros_like(score, dtype=torch.bool), math.inf)
        # A stable order keeps exactly `count` even among equals, and the same ones each time.
        order = score.argsort(descending=True, stable=True)[:count]
        keep = torch.zeros_like(score, dtype=torch.bool)
        keep[order] = True
        return Verdict(keep & (score > 0), score[order[-1]].item())


class PerLayer(Rule):
    """another rule for each glob pattern of names; the first pattern that matches counts

    >>> _ = PerLayer({"conv*": Absolute(1e-4), "*": StdRatio(0.4)})
    """

    def __init__(self, rules: Mapping[str, Any]):
        if not isinstance(rules, Mapping):
            raise UserError(f"rule per-layer: {shown(rules)} is no mapping of name patterns to rules.")
        self.rules: dict[str, Rule] = {}
        for pattern, choice in rules.items():
            settings = dict(choice) if isinstance(choice, Mapping) else {"rule": choice}
            self.rules[pattern] = RULES.make(settings.pop("rule", None), **settings)
            if not isinstance(self.rules[pattern], Rule):
                raise UserError(f"rule per-layer: {pattern!r} has {choice!r}, which is no rule; Absolute(1e-4) is.")

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        chosen = [self._rule_for(s) for s in scores]
        verdicts: dict[int, Verdict] = {}
        for rule in {id(r): r for r in chosen}.values():
            # Each rule sees all that falls to it at once: a global density ranges over its own layers.
            mine = [i for i, r in enumerate(chosen) if r is rule]
            verdicts.update(zip(mine, rule.judge([scores[i] for i in mine]), strict=True))
        return [verdicts[i] for i in range(len(scores))]

    def _rule_for(self, s: Scores) -> Rule:
        for pattern, rule in self.rules.items():
            if any(fnmatchcase(name, pattern) for name in s.names):
                return rule
        raise UserError(f"rule per-layer: no pattern matches {s.names[0]!r}; add one ('*' matches all).")

    def __repr__(self) -> str:
        return f"PerLayer({self.rules})"


RULES: Registry[Rule] = Registry("rule", "rules")
RULES.add("absolute", Absolute)
RULES.add("std-ratio", StdRatio)
RULES.add("density", Density)
RULES.add("per-layer", PerLayer)
