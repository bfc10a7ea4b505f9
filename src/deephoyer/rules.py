"""The rules: which groups are small enough to go.

A rule looks at scores (`scores.py`: by default the root mean square of each group's weights) and says which groups
stay. What a score means, and how the weights got small, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
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

    @cached_property
    def order(self) -> Tensor:
        """The groups from the largest to the smallest; a stable order, so that among equals the same ones go first."""
        return self.score.argsort(descending=True, stable=True)

    @cached_property
    def effective(self) -> float:
        """How many groups carry the unit, (Σs)² / Σs²: 1 where one has it all, all of them where they are equal."""
        score = self.score.double()
        squares = score.square().sum().item()
        return score.sum().item() ** 2 / squares if squares else 0.0

    def largest(self, count: int) -> Verdict:
        """Exactly `count` groups stay, fewer where some are zero already; the threshold is the least of them."""
        if not count:
            return Verdict(torch.zeros_like(self.score, dtype=torch.bool), math.inf)
        keep = torch.zeros_like(self.score, dtype=torch.bool)
        keep[self.order[:count]] = True
        return Verdict(keep & (self.score > 0), self.score[self.order[count - 1]].item())


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
class OneNumber(Rule):
    """A rule with one number, which a target can find (`targets.py`)."""

    value: float
    title: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", not_negative(self.value, f"rule {self.title}: the value"))

    @classmethod
    def candidates(cls, scores: Sequence[Scores]) -> Tensor:
        """A value for each verdict that there can be, from the one that keeps all to the one that keeps least."""
        raise NotImplementedError


@dataclass(frozen=True)
class Threshold(OneNumber):
    """Groups stay whose score is at least the value times a scale of their unit: the larger, the more go."""

    relative: ClassVar[bool] = False
    """Whether the scale is the unit's standard deviation, and not 1."""

    @classmethod
    def scale(cls, s: Scores) -> float:
        return s.std if cls.relative else 1.0

    @classmethod
    def candidates(cls, scores: Sequence[Scores]) -> Tensor:
        place = scores[0].score.device
        ratios = [s.score.double().to(place) / cls.scale(s) for s in scores if cls.scale(s) > 0]
        alive = torch.cat(ratios).unique() if ratios else torch.zeros(0)
        alive = alive[alive > 0]
        return torch.cat([alive.new_zeros(1), (alive[1:] + alive[:-1]) / 2])

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        bars = [self.value * self.scale(s) for s in scores]
        # What is zero already never stays, so that a threshold of 0 means: what is zero now.
        return [Verdict((s.score >= bar) & (s.score > 0), bar) for s, bar in zip(scores, bars, strict=True)]


class Absolute(Threshold):
    """prunes groups whose weights are smaller than a threshold"""

    title = "absolute"


class StdRatio(Threshold):
    """prunes groups whose weights are smaller than a multiple of the layer's standard deviation"""

    title, relative = "std-ratio", True


@dataclass(frozen=True)
class Effective(OneNumber):
    """keeps the largest groups of each layer: a multiple of its effective count (Σs)² / Σs², at least one

    It adapts to the effect of a penalty: a layer in which few weights matter keeps few, whatever its scale. Of weights
    with a Gaussian distribution, `Effective(1)` keeps 2/π.
    """

    title = "effective"

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        return [s.largest(self._count(s)) for s in scores]

    def _count(self, s: Scores) -> int:
        return min(s.score.numel(), max(1, math.floor(self.value * s.effective + 0.5))) if s.effective else 0

    @classmethod
    def candidates(cls, scores: Sequence[Scores]) -> Tensor:
        place = scores[0].score.device
        alive = [(int((s.score > 0).sum()), s.effective) for s in scores]
        # A unit's count changes where value × effective passes a half.
        steps = [(torch.arange(1, n, device=place, dtype=torch.float64) + 0.5) / e for n, e in alive if n]
        most = max((n / e for n, e in alive if n), default=0.0)
        found = torch.cat([*steps, torch.zeros(1, device=place, dtype=torch.float64)]).unique()
        middle = (found[1:] + found[:-1]) / 2
        return torch.cat([middle, found.new_full((1,), most)]).flip(0)


@dataclass(frozen=True)
class Density(Rule):
    """keeps the largest fraction of the groups: of each layer, at least one, or of the whole network (scope: global)"""

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
            return [s.largest(self._count(s)) for s in scores]
        every = Scores((), torch.cat([s.score.double().cpu() for s in scores]), 0.0)
        whole = every.largest(self._count(every))
        parts = whole.keep.split([s.score.numel() for s in scores])
        return [Verdict(k.to(s.score.device), whole.threshold) for k, s in zip(parts, scores, strict=True)]

    def _count(self, s: Scores) -> int:
        # Halves are kept, and of anything at all a little is left: a small layer is not cut through by rounding.
        count = s.score.numel()
        return max(1, math.floor(self.value * count + 0.5)) if self.value and count else 0


class PerLayer(Rule):
    """a different rule for each glob pattern of names; the first pattern that matches is used

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
RULES.add("effective", Effective)
RULES.add("density", Density)
RULES.add("per-layer", PerLayer)
