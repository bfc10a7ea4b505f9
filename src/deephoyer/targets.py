"""How small instead of which threshold: the value of a rule at which a network is as small, or as good, as asked.

Along the values at which a group goes the network only shrinks (each removes all that those before it do), and halving
their list finds the one that is wanted. Every try prunes the network itself, measures it and puts the weights back.
What to do with the value is the caller's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from deephoyer.counting import count
from deephoyer.errors import UserError, not_negative, positive_whole, shown, unknown
from deephoyer.groups import Kinds
from deephoyer.inference import Examples
from deephoyer.latency import MODES
from deephoyer.masks import Empties, Masks, cut, scored
from deephoyer.rules import OneNumber
from deephoyer.scores import Loss, Score
from deephoyer.structure import Coupled, compact, tidy
from deephoyer.widths import macs_cost

SIZES = ("macs", "parameters", "density", "latency")
FEWEST = 0.01
"""The share that is gone for where as little as possible is asked for: networks lose their score long before."""


@dataclass(frozen=True)
class Target:
    """A size or time to reach, and the loss of score that is allowed.

    One of `macs`, `parameters`, `density` (nonzero weights) and `latency` (time of a forward pass) is a fraction of the
    network's original value: `latency=0.5` is half of its time for `batch` examples on this device. `drop` is how far
    the score may fall, in its own units (0.005 of an accuracy between 0 and 1); if both cannot be met, the drop has
    priority. With a drop the size may be 0, which means as little as the drop allows; without any size MACs are meant.
    `mode` (how the network will be run) and `dtype` (its precision) only affect latency.

    >>> Target(macs=0.4, drop=0.005).title()
    '0.4 of the MACs, losing at most 0.005'
    >>> Target(drop=0.005).title(), Target(latency=0, drop=0.005).title()
    ('as few MACs as possible, losing at most 0.005', 'as little time as possible, losing at most 0.005')
    """

    macs: float | None = None
    parameters: float | None = None
    density: float | None = None
    latency: float | None = None
    drop: float | None = None
    batch: int = 1
    mode: str = "eager"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.drop is not None:
            not_negative(self.drop, "target: drop")
            if all(getattr(self, name) is None for name in SIZES):
                object.__setattr__(self, "macs", 0.0)
        given = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        if len(given) != 1:
            raise UserError(
                f"target: give one of {', '.join(SIZES)}, as in Target(macs=0.4), or a drop; there are {len(given)}."
            )
        for name, share in given.items():
            if not_negative(share, f"target: {name}") > 1:
                raise UserError(f"target: {name} is {share!r}; it is a share of the network's, at most 1.")
            if not share and self.drop is None:
                raise UserError(
                    f"target: {name} is {share!r}, as little as possible: it needs a drop=, how far the score may fall."
                )
        positive_whole(self.batch, "target: batch")
        if self.mode not in MODES:
            raise unknown("mode of running a network", self.mode, MODES)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise UserError(f"target: dtype is {shown(self.dtype)}; it is a precision as torch.bfloat16 is one.")

    @property
    def kind(self) -> str:
        return next(name for name in SIZES if getattr(self, name) is not None)

    @property
    def open_ended(self) -> bool:
        """Whether as little as the drop allows is asked for."""
        return not getattr(self, self.kind)

    @property
    def share(self) -> float:
        """The share to go for."""
        share: float = getattr(self, self.kind)
        return share or FEWEST

    def size(self) -> str:
        whole = {"macs": "MACs", "parameters": "parameters", "density": "weights", "latency": "time"}[self.kind]
        if self.open_ended:
            return f"as {'little' if self.kind == 'latency' else 'few'} {whole} as possible"
        return f"{self.share:g} of the {whole}"

    def title(self) -> str:
        return self.size() + (f", losing at most {self.drop:g}" if self.drop is not None else "")


@dataclass(frozen=True)
class Goal:
    """A number that is measured after pruning, and its bound: sizes stay at or under it, accuracies at or over.

    An `estimate` of a size that takes less time says where to begin; what is measured decides.
    """

    name: str
    measure: Callable[[], float]
    bound: float
    is_size: bool = True
    estimate: Callable[[], float] | None = None

    def kept(self, number: float) -> bool:
        return number <= self.bound if self.is_size else number >= self.bound


@dataclass(frozen=True)
class Found:
    """The value of the rule, and what was measured with it."""

    value: float
    number: float


class OutOfReach(UserError):
    """No value of the rule meets the goal; `nearest` is the one that comes nearest."""

    def __init__(self, text: str, nearest: Found):
        super().__init__(text)
        self.nearest = nearest


def value_for(
    goal: Goal,
    model: nn.Module,
    rule: type[OneNumber],
    groups: Kinds = "elements",
    parameters: str | Iterable[str] | None = None,
    allow_empty: bool = False,
    multiple: int = 1,
    score: str | Score = "magnitude",
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
) -> Found:
    """Of sizes the first value that keeps the bound, of accuracies the last one; the model is left as it was.

    No layer is ever emptied, unless that is allowed: values that would do it are not tried. The rest as in `prune`.

    >>> from deephoyer.rules import Absolute
    >>> net = nn.Linear(10, 10)
    >>> value_for(density(net, 0.2), net, Absolute).number
    0.2
    """
    if not (isinstance(rule, type) and issubclass(rule, OneNumber)):
        raise UserError(f"value_for: {rule!r} has no value to be found; StdRatio, Absolute and Effective have.")
    units, scores = scored(model, groups, parameters, score, batches, loss)
    tries = _Tries(goal, model, lambda value: cut(model, rule(value), units, scores, allow_empty, multiple))
    values = rule.candidates(scores).cpu().numpy()  # no list: of a large network there are as many as weights
    values = values[: bisect_left(values, True, key=tries.empties)]
    if not len(values):
        raise Empties("prune.target: a layer is all zero before anything is pruned.")
    if goal.is_size:
        place = tries.first_kept(values)
    else:
        place = bisect_left(values, True, key=lambda v: not goal.kept(tries.number(v))) - 1
    if not 0 <= place < len(values):
        last = "next to nothing is left to prune" if allow_empty else "no layer may be emptied"
        end, where = (values[-1], last) if goal.is_size else (values[0], "nothing is pruned yet")
        nearest = Found(float(end), tries.number(end))
        raise OutOfReach(
            f"prune.target: {goal.name} can't be {goal.bound:.4g}: it is {nearest.number:.4g} "
            f"at {rule.title} {end:.4g}, where {where}.",
            nearest,
        )
    return Found(float(values[place]), tries.number(values[place]))


class _Tries:
    """Prunes with a value, measures, and puts the weights back; nothing is measured twice."""

    def __init__(self, goal: Goal, model: nn.Module, cut: Callable[[float], Masks]):
        self.goal, self.model, self.cut = goal, model, cut
        self.seen: dict[float, float] = {}

    def empties(self, value: float) -> bool:
        """Whether nothing would be left of a layer."""
        return self._pruned(value, lambda: 0.0) is None

    def number(self, value: float) -> float:
        if value not in self.seen:
            number = self._pruned(value, self.goal.measure)
            assert number is not None, "values that empty a layer were left out"
            self.seen[value] = number
        return self.seen[value]

    def first_kept(self, values: np.ndarray) -> int:
        """The place of the first value that keeps the bound; with an estimate, values around its guess are tried."""

        def kept(place: int) -> bool:
            return self.goal.kept(self.number(values[place]))

        low, high = 0, len(values)
        if self.goal.estimate is not None:
            low = high = bisect_left(values, True, key=lambda v: self.goal.kept(self._estimated(v)))
            step = 1
            while high < len(values) and not kept(high):
                low, high, step = high + 1, min(len(values), high + step), 2 * step
            if low == high:  # or something below the guess was found to be too large
                before, step = low - 1, 1
                while before >= 0 and kept(before):
                    high, before, step = before, before - step, 2 * step
                low = max(0, before + 1)
        return bisect_left(range(len(values)), True, low, high, key=kept)

    def _estimated(self, value: float) -> float:
        estimate = self.goal.estimate
        assert estimate is not None
        number = self._pruned(value, estimate)
        assert number is not None, "values that empty a layer were left out"
        return number

    def _pruned(self, value: float, measure: Callable[[], float]) -> float | None:
        with restored(self.model):
            try:
                self.cut(value)
                return measure()
            except Empties:
                return None


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Whatever is done to the parameters is undone afterwards."""
    before = [(tensor, tensor.detach().clone()) for tensor in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def macs(
    model: nn.Module, examples: Examples, share: float, groups: Coupled | None = None, joints: str = "none"
) -> Goal:
    """The multiply-accumulates that are left after compaction, as a share of the model's as it stands now.

    `joints` as in `compact`: with "gather", what is dead in one layer alone counts as gone.
    """
    dense = count(model, examples)[1].macs_executed or 1
    graph = groups or Coupled(model, examples)

    def left() -> float:
        return (count(compact(model, examples, groups=graph, joints=joints), examples)[1].macs_executed or 0) / dense

    if joints != "none":
        return Goal("the share of the MACs left", left, share)
    cost, units = macs_cost(examples, graph), graph.units()

    @torch.no_grad()
    def by_widths() -> float:
        """What channels that are zero leave, without the proof that they can go, which takes most of the time."""
        alive = {unit.name: int((unit.magnitudes() > 0).sum()) for unit in units}
        return cost.share({**cost.widths, **alive})

    return Goal("the share of the MACs left", left, share, estimate=by_widths)


def parameters(model: nn.Module, examples: Examples, share: float, groups: Coupled | None = None) -> Goal:
    """The parameters that are left after compaction, as a share of the model's as it stands now."""
    dense = sum(p.numel() for p in model.parameters()) or 1
    graph = groups or Coupled(model, examples)

    def left() -> float:
        return sum(p.numel() for p in compact(model, examples, groups=graph).parameters()) / dense

    return Goal("the share of the parameters left", left, share)


def density(model: nn.Module, share: float) -> Goal:
    """The share of the layers' weights that are not zero."""
    return Goal("the share of the weights left", lambda: count(model)[1].density, share)


def live(model: nn.Module, examples: Examples, share: float) -> Goal:
    """As `density`, once the weights are gone that carry nothing of the input to an output (`structure.tidy`)."""
    graph = Coupled(model, examples)
    return Goal("the share of the weights left, idle ones gone", lambda: _live(model, examples, graph), share)


def _live(model: nn.Module, examples: Examples, graph: Coupled) -> float:
    try:
        return count(tidy(model, examples, groups=graph))[1].density
    except UserError:  # nothing of the input reaches an output any more
        return 0.0


def accuracy(measure: Callable[[], float], least: float) -> Goal:
    """The accuracy right after pruning, measured by the caller's own means."""
    rounding = 1e-9  # 0.93 − 0.005 is a little more than 0.925
    return Goal("the accuracy", measure, least - rounding, is_size=False)
