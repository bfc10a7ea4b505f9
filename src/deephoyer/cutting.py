"""Cuts a network to a target: which groups go so that it is as small, or as fast, as asked, and no smaller.

Coupled groups are chosen by what widths cost and channels are worth (`widths.py`), single weights for a density are the
largest of the whole network; any other grouping goes by the value of a threshold (`targets.py`). A latency is measured
on the cut network, and the choice corrected by it. When to cut, and what to train before and after, is for the caller.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deephoyer import targets
from deephoyer.counting import count
from deephoyer.errors import UserError, not_negative, positive_whole, shown
from deephoyer.groups import Elements, Grouping, Kinds, Unit, groupings, weights_for
from deephoyer.inference import Examples, device_of
from deephoyer.latency import Beside
from deephoyer.layer_times import latency_cost
from deephoyer.masks import Masks, cut, scored
from deephoyer.rules import Rule, Scores, StdRatio, Verdict
from deephoyer.scores import Loss, Score
from deephoyer.structure import CannotFollow, Coupled, compact
from deephoyer.structure.channels import ChannelSet
from deephoyer.targets import Target, restored
from deephoyer.weights import Weight, find_weights, patterns_of, unwrap
from deephoyer.widths import CLOSE, WidthCost, choose, macs_cost, parameters_cost, rows_of

LOOKS = 4
"""How often a choice is compared with what the compacted network really costs, where it soon comes out near."""
MOST_LOOKS = 10
"""The same, where costs have steps: measuring takes seconds, compiling minutes."""
STEPS = 8
"""How many bounds are gone through, from one look to the next, for a cut that is not known yet."""
CLOSE_IN_TIME = 0.1
"""How much faster than asked still counts as what was asked: times have steps, and never come out the same twice."""
LEAST_OF_WEIGHTS = 0.1
"""How much of the density asked for each layer keeps, however small its weights are beside those of other layers."""
MULTIPLES = {"cpu": 8, "cuda": 32}
"""Numbers of channels that processors compute in whole blocks."""


class Free(Grouping):
    """The coupled sets that may be cut: all but those that write a protected layer's outputs."""

    name = "coupled"
    needs_graph = True

    def __init__(self, coupled: Coupled, protected: Iterable[str]):
        self.coupled, self.protected = coupled, set(protected)

    def units(self, weights: Sequence[Weight] = ()) -> list[Unit]:
        units = [unit for unit in self.coupled.units() if unit.name not in self.protected]
        if not units:
            raise UserError("protect: nothing is left that could be cut; protect fewer layers.")
        return units


@dataclass(frozen=True)
class Given(Rule):
    """Keeps what was chosen elsewhere, unit by unit."""

    keeps: Sequence[Tensor]

    def judge(self, scores: Sequence[Scores]) -> list[Verdict]:
        return [Verdict(keep.to(s.score.device), 0.0) for keep, s in zip(self.keeps, scores, strict=True)]


class Choosing(TypedDict, total=False):
    """How channels are chosen, as `Plan`, `shrink` and `Cutter` take it; what is left out is as in `Cutter`."""

    protect: str | Iterable[str]
    """Layers whose outputs stay whole, by name or glob."""
    multiple: int | None
    """Widths are kept at multiples of this number; without it as many as processors like, where time is the target."""
    least: float
    """The share of a layer's channels that stays whatever they are worth."""
    by_cost: bool | None
    """Whether channels go by their worth for what they cost; by default where time is the target."""
    score: str | Score
    """What channels are worth."""
    loss: Loss | None
    """For scores that look at gradients: `loss(model, batch)`."""


@dataclass(frozen=True)
class Cut:
    """What is to stay, and what the network then costs as a share of what it did; which sets could give no more."""

    keeps: list[Tensor]
    share: float
    stuck: list[str]

    def kept(self) -> float:
        """The share of the groups that stay."""
        return sum(int(keep.sum()) for keep in self.keeps) / max(1, sum(keep.numel() for keep in self.keeps))


class Cutter:
    """Knows what the network cost when it was whole, and cuts it to any share of that.

    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> cutter = Cutter(net, torch.zeros(1, 8), Target(macs=0.5))
    >>> cut = cutter.plan(0.5); cut.share, cut.kept()
    (0.5, 0.5)
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        target: Target,
        groups: Kinds | None = None,
        *,
        protect: str | Iterable[str] = (),
        multiple: int | None = None,
        least: float = 0.05,
        by_cost: bool | None = None,
        score: str | Score = "magnitude",
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
    ):
        self.model, self.examples, self.target = unwrap(model), examples, target
        if not isinstance(target, Target):
            raise UserError(f"{shown(target)} is not a target; Target(macs=0.5) is.")
        self.multiple = None if multiple is None else positive_whole(multiple, "multiple")
        self.least = not_negative(least, "least")
        if self.least > 1:
            raise UserError(f"least is {least!r}; it is the share of a layer's channels that stay, at most 1.")
        if isinstance(batches, Iterator):
            raise UserError(f"batches: {shown(batches)} can be read only once; give a list or a loader.")
        self.score, self.batches, self.loss = score, batches, loss
        self.by_cost = target.kind == "latency" if by_cost is None else by_cost
        patterns = patterns_of(protect, "protect") or []
        self.coupled: Coupled | None = None
        self.cost: WidthCost | None = None
        self.stuck: list[str] = []  # what could give no more when it was cut last
        self.parameters: list[str] | None = None
        if groups is None:
            groups = "elements" if target.kind == "density" else Coupled(self.model, examples)
        kinds = groupings(groups)
        if len(kinds) == 1 and isinstance(kinds[0], Coupled):
            self.coupled = kinds[0]
            self.groups: list[Grouping] = [Free(self.coupled, self._protected(patterns, self.coupled))]
            self.cost = self._cost(self.coupled)
            self.rows = rows_of(self.coupled)
        else:
            self.groups, self.parameters = kinds, self._selected(patterns)
            if target.kind == "latency":
                raise UserError("target: a latency needs coupled groups, which are the default; leave out groups=.")

    def _cost(self, coupled: Coupled) -> WidthCost:
        if self.target.kind == "macs":
            return macs_cost(self.examples, coupled)
        if self.target.kind == "latency":
            return latency_cost(self.examples, coupled, self.target.batch, self.target.mode, self.target.dtype)
        return parameters_cost(coupled)

    def _protected(self, patterns: Sequence[str], coupled: Coupled) -> list[str]:
        """The sets that write the outputs of a layer that is called so."""
        layers = {name for one in coupled.sets for name in one.layers}
        for pattern in patterns:
            if not any(_called(name, pattern) for name in layers):
                raise UserError(
                    f"protect: no layer is called {shown(pattern)}. There are {', '.join(sorted(layers)[:6])}, …"
                )
        written = {one.name: _written(coupled, one) for one in coupled.sets}
        return [set_ for set_, names in written.items() if any(_called(n, p) for n in names for p in patterns)]

    def _selected(self, patterns: Sequence[str]) -> list[str] | None:
        names = [weight.name for weight in find_weights(self.model)]
        for pattern in patterns:
            if not any(_called(name.removesuffix(".weight"), pattern) for name in names):
                raise UserError(f"protect: no layer is called {shown(pattern)}. There are {', '.join(names[:6])}, …")
        out = [f"!{p}{end}" for p in patterns for end in ("", ".weight")]
        return out or None

    # What it costs

    def share_now(self) -> float:
        """What the network would cost if what is zero in it were gone, as a share of the whole."""
        if self.target.kind == "density":
            return count(self.model)[1].density
        if self.cost is not None:
            live = {unit.name: int(alive.sum()) for unit, alive in self.alive()}
            return self.cost.share({**self.cost.widths, **live})
        return self._goal(1.0).measure()

    def share_of(self, small: nn.Module) -> float:
        """What a compacted network really costs, as a share of the whole one's."""
        if self.target.kind == "macs":
            whole = count(self.model, self.examples)[1].macs_executed or 1
            return (count(small, self.examples)[1].macs_executed or 0) / whole
        if self.target.kind == "parameters":
            return sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in self.model.parameters())
        if self.target.kind == "latency":
            return self.stopwatch().share(small).value
        return count(self.model)[1].density  # compaction takes idle weights as well: they are not part of the bargain

    def stopwatch(self) -> Beside:
        """What times networks beside the whole one, as the target says that they will be run."""
        return Beside(self.model, self.examples, self.target.batch, self.target.mode, self.target.dtype)

    # Cutting

    def scores(self) -> tuple[list[Unit], list[Scores]]:
        return scored(self.model, self.groups, self.parameters, self.score, self.batches, self.loss)

    @torch.no_grad()
    def alive(self) -> list[tuple[Unit, Tensor]]:
        """For each unit which of its groups are not zero."""
        weights = weights_for(self.model, self.groups, self.parameters)
        return [(unit, unit.magnitudes() > 0) for grouping in self.groups for unit in grouping.units(weights)]

    def plan(self, share: float) -> Cut:
        """What would stay at this share of the cost; nothing is changed. Sets that can't give more make it more."""
        units, scores = self.scores()
        if self.cost is None:
            goal = self._goal(share)
            if goal.kept(now := goal.measure()):
                return Cut([s.score > 0 for s in scores], now, [])
            single = self.target.kind == "density" and all(isinstance(kind, Elements) for kind in self.groups)
            return self._largest(goal, units, scores) if single else self._by_threshold(goal, units, scores)
        return self._by_widths(share, units, scores)

    def _by_widths(self, share: float, units: list[Unit], scores: list[Scores]) -> Cut:
        assert self.cost is not None
        made = choose(
            self.cost,
            [unit.name for unit in units],
            scores,
            share,
            multiple=self._multiples(units),
            least=self.least,
            by_cost=self.by_cost,
            rows=self.rows,
        )
        return Cut(made.keeps, made.share, made.at_least)

    def _multiples(self, units: Sequence[Unit]) -> dict[str, int]:
        """What each set's width is to be a multiple of: for a latency what processors like, less in narrow layers."""
        wide = MULTIPLES.get(device_of(self.model).type, 8) if self.target.kind == "latency" else 1
        found = {}
        for unit in units:
            narrow = 2 ** int(math.log2(max(1, len(unit.sizes()) // 8)))
            found[unit.name] = min(wide, narrow) if self.multiple is None else self.multiple
        return found

    def aim(self, share: float) -> Cut:
        """What is to stay so that the compacted network really costs this share: counted or timed, and corrected."""
        if self.cost is None:
            return self.plan(share)
        timed = self.target.kind == "latency"
        stopwatch = self.stopwatch() if timed else None  # the whole network is compiled or captured once

        def real(chosen: Cut) -> float:
            with restored(self.model):
                self.apply(chosen)
                small = self.compacted()
                return self.share_of(small) if stopwatch is None else stopwatch.share(small).value

        units, scores = self.scores()
        return search(
            lambda bound: self._by_widths(bound, units, scores), real, share, CLOSE_IN_TIME if timed else CLOSE
        )

    def apply(self, chosen: Cut) -> Masks:
        """Zeroes what is to go, in the network itself."""
        self.stuck = chosen.stuck
        units, scores = scored(self.model, self.groups, self.parameters)
        return cut(self.model, Given(chosen.keeps), units, scores)

    def _largest(self, goal: targets.Goal, units: list[Unit], scores: list[Scores]) -> Cut:
        """The single weights of the highest scores in the network, and of each layer a part of what is asked for.

        Multiples of each layer's standard deviation would cut wide layers as little as narrow ones; a threshold for all
        layers alone would empty those whose weights are small.
        """
        least = [s.largest(math.ceil(LEAST_OF_WEIGHTS * goal.bound * s.score.numel())).keep for s in scores]
        ranked = torch.cat([s.score.masked_fill(keep, math.inf).cpu() for s, keep in zip(scores, least, strict=True)])
        whole, there = count(self.model)[1], sum(int(alive.sum()) for _, alive in self.alive())
        most, fewest = int(goal.bound * whole.weights) - (whole.nonzeros - there), sum(int(k.sum()) for k in least)
        keeps = Scores((), ranked, 0.0).largest(max(most, fewest)).keep.split([s.score.numel() for s in scores])
        with restored(self.model):
            cut(self.model, Given(keeps), units, scores)
            reached = goal.measure()
        why = f"each layer keeps {LEAST_OF_WEIGHTS:g} of the density asked for; frozen and protected ones keep all"
        return Cut(list(keeps), reached, [why] if most < fewest else [])

    def _by_threshold(self, goal: targets.Goal, units: list[Unit], scores: list[Scores]) -> Cut:
        try:
            found, why = self._value(goal), []
        except targets.OutOfReach as too_far:  # as far as it goes, then
            found, why = too_far.nearest, [str(too_far)]
        with restored(self.model):
            cut(self.model, StdRatio(found.value), units, scores, multiple=self.multiple or 1)
            return Cut([alive for _, alive in self.alive()], found.number, why)

    def _value(self, goal: targets.Goal) -> targets.Found:
        return targets.value_for(
            goal,
            self.model,
            StdRatio,
            self.groups,
            self.parameters,
            multiple=self.multiple or 1,
            score=self.score,
            batches=self.batches,
            loss=self.loss,
        )

    def _goal(self, share: float) -> targets.Goal:
        if self.target.kind == "density":
            return targets.density(self.model, share)
        if self.target.kind == "macs":
            return targets.macs(self.model, self.examples, share)
        return targets.parameters(self.model, self.examples, share)

    def compacted(self) -> nn.Module:
        """The network without what is zero in it; one whose channels can't be followed is copied as it is."""
        try:
            return compact(self.model, self.examples, groups=self.coupled)
        except CannotFollow:
            if self.coupled is not None:
                raise
            return copy.deepcopy(self.model)

    def widths(self) -> list[tuple[str, int, int, str]]:
        """For each coupled set its channels, those that are not zero, and why it may not be cut where it may not."""
        if self.coupled is None:
            return []
        alive = {unit.name: int(those.sum()) for unit, those in self.alive()}
        why = self.fixed()
        named = [(one.name, len(one.channels)) for one in self.coupled.sets]
        return [(name, wide, alive.get(name, wide), why.get(name, "")) for name, wide in named]

    def why_not(self, reached: float) -> str | None:
        """What to say of a network that is not as small, or as fast, as was asked; nothing of one that is."""
        if self.target.open_ended:
            return None
        share, timed = self.target.share, self.target.kind == "latency"
        far = f"{reached:.3f} was reached, {share:g} was asked for"
        varies = "; or this machine's times vary" if timed else ""
        close = CLOSE_IN_TIME if timed else CLOSE
        if reached < share * (1 - close):
            several = timed if self.multiple is None else self.multiple > 1
            return f"{far}: nothing nearer was found{varies}{'; multiple=1 allows more widths' if several else ''}."
        if reached <= share * (1 + close):
            return None
        if self.cost is None:
            trained = "biases trained since then keep channels whose weights are zero; without groups= those go, too."
            return f"{far}: {'; '.join(self.stuck) or trained}"
        stuck = ", ".join(self.stuck) or "none"
        fixed = ", ".join(f"{name} ({why})" for name, why in self.fixed().items()) or "none"
        return f"{far}: at their least width: {stuck}; not to be cut: {fixed}{varies}."

    def fixed(self) -> dict[str, str]:
        """The sets that can't be cut at all, and why."""
        if self.coupled is None:
            return {}
        held = {one.name: one.reason for one in self.coupled.sets if one.reason}
        free = self.groups[0]
        assert isinstance(free, Free)
        cut = {unit.name for unit in free.units()}
        frozen = [one.name for one in self.coupled.sets if one.name not in cut | held.keys() | free.protected]
        return held | dict.fromkeys(frozen, "frozen") | dict.fromkeys(free.protected, "protected")


def _written(coupled: Coupled, one: ChannelSet) -> set[str]:
    """The layers whose outputs a set's channels are."""
    return {name.rpartition(".")[0] for name, dim in one.places if (name, dim) in coupled.graph.writes}


def search(plan: Callable[[float], Cut], real: Callable[[Cut], float], share: float, under: float = CLOSE) -> Cut:
    """The cut that really costs what is asked: no more than 2 % above it, and as little below it as can be found.

    `plan` gives a cut for a bound of the cost as it is estimated, `real` is what a cut costs. It is asked a few times;
    more often while all that is known costs too much, or less than is asked by more than the share `under`.
    """
    tried: list[tuple[float, Cut]] = []

    def misses(cut: Cut) -> tuple[bool, float]:
        return cut.share > share * (1 + CLOSE), abs(cut.share - share)  # too much is worse, by however little

    bound, chosen = share, plan(share)
    for look in range(1, MOST_LOOKS + 1):
        tried.append((bound, replace(chosen, share=real(chosen))))
        best = min((cut for _, cut in tried), key=misses)
        near = under if look >= LOOKS else min(under, CLOSE)
        if share * (1 - near) <= best.share <= share * (1 + CLOSE):
            break
        following = _following(plan, tried, share)
        if following is None:
            break
        bound, chosen = following
    return best


def _following(
    plan: Callable[[float], Cut], tried: Sequence[tuple[float, Cut]], share: float
) -> tuple[float, Cut] | None:
    """The bound to try next and its cut, which was not tried before; none where there is no other."""
    slow = min((pair for pair in tried if pair[1].share > share), key=lambda pair: pair[0], default=None)
    below = (pair for pair in tried if pair[1].share <= share and (slow is None or pair[0] < slow[0]))
    fast = max(below, key=lambda pair: pair[0], default=None)
    if slow is None or fast is None:
        bound, last = slow or fast or tried[-1]
        # Further each time: on a step of the time, in proportion is not far enough.
        factor = min(2.0, max(0.5, (share / last.share) ** len(tried))) if last.share else 2.0
        for _ in range(STEPS):  # estimates have steps as well
            bound = min(1.0, bound * factor)
            if _known(chosen := plan(bound), tried) is None:
                return bound, chosen
        return None
    low, high, part = fast[0], slow[0], 0.5
    if len(tried) == 2:  # the first guess between two is along the line; where costs have steps that would creep
        part = (share - fast[1].share) / (slow[1].share - fast[1].share)
    for _ in range(STEPS):
        bound, part = low + (high - low) * part, 0.5
        known = _known(chosen := plan(bound), tried)
        if known is None:
            return bound, chosen
        low, high = (low, bound) if known.share > share else (bound, high)
    chosen = _between(slow[1], fast[1])
    return None if _known(chosen, tried) else ((slow[0] + fast[0]) / 2, chosen)


def _between(slow: Cut, fast: Cut) -> Cut:
    """A cut between two that no bound lies between: of the sets in which they differ half are as in the faster one.

    Those that lose the smallest share of their channels by it.
    """
    lost = [1 - int((a & b).sum()) / max(1, int(a.sum())) for a, b in zip(slow.keeps, fast.keeps, strict=True)]
    differ = sorted((i for i, share in enumerate(lost) if share > 0), key=lambda i: lost[i])
    taken = set(differ[: len(differ) // 2])
    keeps = [fast.keeps[i] if i in taken else keep for i, keep in enumerate(slow.keeps)]
    return Cut(keeps, slow.share, [name for name in slow.stuck if name in fast.stuck])


def _known(chosen: Cut, tried: Sequence[tuple[float, Cut]]) -> Cut | None:
    """The one that was tried and keeps the same, if there is one."""
    return next((cut for _, cut in tried if all(map(torch.equal, chosen.keeps, cut.keeps))), None)


def _called(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f"{name}.weight", pattern)


def agreed(value: Any) -> Any:
    """What the first process says, in all of them: scores and times may differ between processes."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    return value
