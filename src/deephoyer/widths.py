"""How wide each layer is left: what widths cost, what their channels are worth, and which go to keep a bound.

A cost is a sum of terms, each of which depends on how many channels are left of the coupled sets that a layer writes
and reads: multiply-accumulates, parameters, or the milliseconds that `latency.py` measures. Channels go in blocks, the
one that is worth least (for what it costs) first. What a channel is worth is said by a score; here nothing is pruned.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from deephoyer.executed import executed
from deephoyer.inference import Examples
from deephoyer.rules import Scores
from deephoyer.structure import Coupled
from deephoyer.weights import all_weights, plain_name

Live = Mapping[str, int]
"""How many channels are left of each set, by the set's name."""


CLOSE = 0.02
"""A target is met when the network is no more than this share of it away."""


@dataclass(frozen=True)
class Side:
    """The inputs or the outputs of a layer: how many there are, and how many each channel of a set stands for."""

    total: int
    fixed: float
    of_sets: Mapping[str, float]

    def live(self, live: Live) -> float:
        return self.fixed + sum(live[name] * each for name, each in self.of_sets.items())


@dataclass(frozen=True)
class CostTerm:
    """What one layer costs at these numbers of live inputs and outputs."""

    sides: tuple[Side, ...]
    price: Callable[..., float]

    def value(self, live: Live) -> float:
        return self.price(*(side.live(live) for side in self.sides))

    @property
    def sets(self) -> set[str]:
        return {name for side in self.sides for name in side.of_sets}


@dataclass
class WidthCost:
    """What a network costs by the widths of its coupled sets; `constant` is what no width changes."""

    name: str
    widths: dict[str, int]
    terms: list[CostTerm]
    constant: float = 0.0
    _by_set: dict[str, list[CostTerm]] = field(init=False)

    def __post_init__(self) -> None:
        self._by_set = {name: [t for t in self.terms if name in t.sets] for name in self.widths}
        self.dense = self.value(self.widths)

    def value(self, live: Live) -> float:
        return self.constant + sum(term.value(live) for term in self.terms)

    def share(self, live: Live) -> float:
        """The cost as a share of that of the whole network."""
        return self.value(live) / self.dense if self.dense else 1.0

    def change(self, live: dict[str, int], name: str, by: int) -> float:
        """By how much the cost grows when a set has `by` channels more (or fewer)."""
        terms = self._by_set[name]
        before = sum(term.value(live) for term in terms)
        after = sum(term.value({**live, name: live[name] + by}) for term in terms)
        return after - before

    def neighbours(self, name: str) -> set[str]:
        """The sets that share a layer with this one: what theirs would save changes with it."""
        return set().union(*(term.sets for term in self._by_set[name])) | {name}


def sides_of(groups: Coupled) -> dict[str, dict[int, Side]]:
    """For each parameter the dimensions whose sizes depend on the sets that may go."""
    graph = groups.graph.wired()
    free = [one for one in groups.sets if one.reason is None]
    owner = torch.full((graph.count,), -1)
    for i, one in enumerate(free):
        owner[torch.tensor(one.channels)] = i
    found: dict[str, dict[int, Side]] = {}
    for (name, dim), channels in graph.places.items():
        owners = owner[channels]
        held = torch.bincount(owners[owners >= 0], minlength=len(free)).tolist()
        of_sets = {one.name: n / len(one.channels) for one, n in zip(free, held, strict=True) if n}
        if of_sets:
            found.setdefault(plain_name(name), {})[dim] = Side(len(channels), float((owners < 0).sum()), of_sets)
    return found


def rows_of(groups: Coupled) -> dict[str, float]:
    """How many rows of weights make a channel of each set: one for a plain channel, a head has many."""
    found = dict.fromkeys(widths_of(groups), 0.0)
    sides = sides_of(groups)
    matrices = {name for name, tensor in groups.model.named_parameters(remove_duplicate=False) if tensor.dim() >= 2}
    for name, dim in groups.graph.writes:
        if name in matrices and dim in sides.get(plain_name(name), {}):
            for one, each in sides[plain_name(name)][dim].of_sets.items():
                found[one] += each
    return {name: rows or 1.0 for name, rows in found.items()}


def macs_cost(examples: Examples, groups: Coupled) -> WidthCost:
    """Multiply-accumulates that are executed; products of attention go with the heads that are left."""
    used, other = executed(groups.model, examples, {w.name: w.tensor for w in all_weights(groups.model)})
    sides = sides_of(groups)
    terms = [_product(macs, list(sides[name].values())) for name, macs in used.items() if macs and name in sides]
    constant = float(sum(macs for name, macs in used.items() if name not in sides))
    for module, macs in other.items():
        heads = _heads_in(module, groups)
        if heads is None:
            constant += macs
        else:
            terms.append(_product(macs, (heads,)))
    return WidthCost("MACs", widths_of(groups), terms, constant)


def parameters_cost(groups: Coupled) -> WidthCost:
    """Parameters, those of norms and loose tensors included."""
    sides = sides_of(groups)
    terms, constant = [], 0.0
    for name, tensor in groups.model.named_parameters():
        if (plain := plain_name(name)) in sides:
            terms.append(_product(tensor.numel(), list(sides[plain].values())))
        else:
            constant += tensor.numel()
    return WidthCost("parameters", widths_of(groups), terms, constant)


def widths_of(groups: Coupled) -> dict[str, int]:
    """How many channels each set has that may go."""
    return {one.name: len(one.channels) for one in groups.sets if one.reason is None}


def _heads_in(module: str, groups: Coupled) -> Side | None:
    for one in groups.sets:
        inside = any(not module or layer == module or layer.startswith(f"{module}.") for layer in one.layers)
        if one.heads and one.reason is None and inside:
            return Side(len(one.channels), 0.0, {one.name: 1.0})
    return None


def _product(cost: float, sides: Sequence[Side]) -> CostTerm:
    each = cost / math.prod(side.total for side in sides)
    return CostTerm(tuple(sides), lambda *live: each * math.prod(live))


@dataclass(frozen=True)
class Choice:
    """Which groups of each unit stay, what the network then costs, and the sets that could not give more."""

    keeps: list[Tensor]
    share: float
    live: dict[str, int]
    at_least: list[str]


@dataclass
class _Blocks:
    """One set's channels, best first; `live` of them stay."""

    name: str
    order: Tensor
    worth: list[float]
    live: int
    least: int
    multiple: int
    sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = [0.0, *accumulate(self.worth)]

    def step(self) -> int:
        """How many channels go next: to the next multiple below, and never under the least width."""
        below = (self.live - 1) // self.multiple * self.multiple
        return self.live - below if below >= self.least else 0

    def back(self) -> int:
        """How many come back with the block that went last."""
        return min(self.multiple - self.live % self.multiple, len(self.worth) - self.live)

    def thinned(self) -> float:
        """How many times what is left of the set's worth it had in the beginning."""
        return self.sums[-1] / max(self.sums[self.live], 1e-300)

    def worth_of_next(self, number: int) -> float:
        return self.sums[self.live] - self.sums[self.live - number]


def choose(
    cost: WidthCost,
    names: Sequence[str],
    scores: Sequence[Scores],
    share: float,
    *,
    multiple: int | Mapping[str, int] = 1,
    least: float = 0.05,
    by_cost: bool = False,
    rows: Mapping[str, float] | None = None,
) -> Choice:
    """The groups that stay so that the cost is at most `share` of the whole network's, and near it as blocks allow.

    Channels go one block of `multiple` after the other: the one whose channels are worth least. With `by_cost` it is
    the one whose worth for each unit of cost it saves is least, where a channel counts by the `rows` of weights that
    make it, and for more the less is left of its set: the last of a set are the dearest. A set keeps the share
    `least` of its channels, one at least.
    """
    of = multiple if isinstance(multiple, Mapping) else dict.fromkeys(names, multiple)
    blocks = {n: _blocks(n, s, of[n], least) for n, s in zip(names, scores, strict=True)}
    live = {**cost.widths, **{n: b.live for n, b in blocks.items()}}
    bound = share * cost.dense
    now = cost.value(live)

    def key(name: str) -> tuple[float, int]:
        block = blocks[name]
        number = block.step()
        if not number:
            return math.inf, 0
        worth = block.worth_of_next(number)
        if not by_cost:
            return worth / number, number
        worth *= (rows or {}).get(name, 1.0) * block.thinned()
        saved = -cost.change(live, name, -number)  # measured times may say that less takes longer: such go last
        return worth / max(saved, 1e-6 * (cost.dense or 1.0)), number

    keys = {name: key(name) for name in blocks}
    while now > bound:
        name = min(keys, key=lambda n: keys[n][0])
        value, number = keys[name]
        if not number or math.isinf(value):
            break
        now += cost.change(live, name, -number)
        live[name] -= number
        blocks[name].live -= number
        for other in cost.neighbours(name) if by_cost else {name}:
            if other in keys:
                keys[other] = key(other)
    _fill(cost, blocks, live, bound)
    if cost.value(live) < bound * (1 - CLOSE):  # a little too large is nearer than much too small
        _fill(cost, blocks, live, bound * (1 + CLOSE))
    if cost.value(live) < bound * (1 - CLOSE):
        _swap(cost, blocks, live, bound)
    keeps = []
    for name, s in zip(names, scores, strict=True):
        keep = torch.zeros(s.score.numel(), dtype=torch.bool)
        keep[blocks[name].order[: blocks[name].live]] = True
        keeps.append(keep.to(s.score.device) & (s.score > 0))
    stuck = [name for name, block in blocks.items() if not block.step()]
    return Choice(keeps, cost.value(live) / cost.dense if cost.dense else 1.0, live, stuck)


def _fill(cost: WidthCost, blocks: Mapping[str, _Blocks], live: dict[str, int], bound: float) -> None:
    """Takes back, best first, what still fits under the bound: the last block to go may have been a large one."""
    now = cost.value(live)
    while now <= bound:
        best, worth = None, 0.0
        for name, block in blocks.items():
            number = block.back()
            if number <= 0:
                continue
            mean = sum(block.worth[block.live : block.live + number]) / number
            if mean > worth and now + cost.change(live, name, number) <= bound:
                best, worth = name, mean
        if best is None:
            return
        number = blocks[best].back()
        now += cost.change(live, best, number)
        live[best] += number
        blocks[best].live += number


def _swap(cost: WidthCost, blocks: Mapping[str, _Blocks], live: dict[str, int], bound: float) -> None:
    """One block of one set comes back and some of another go, where that ends near the bound and loses least worth."""
    best: tuple[float, dict[str, int]] | None = None
    start = cost.value(live)
    for to, back in ((name, block.back()) for name, block in blocks.items() if block.back() > 0):
        with_more = start + cost.change(live, to, back)
        for of in (name for name in blocks if name != to):
            changed, rest, now = {**live, to: live[to] + back}, copy.copy(blocks[of]), with_more
            while now > bound * (1 + CLOSE) and (number := rest.step()):
                now += cost.change(changed, of, -number)
                rest.live = changed[of] = rest.live - number
            if abs(now - bound) > CLOSE * bound:
                continue
            lost = blocks[of].worth_of_next(live[of] - rest.live)
            gain = sum(blocks[to].worth[live[to] : changed[to]]) - lost
            if best is None or gain > best[0]:
                best = gain, changed
    if best is not None:
        live.update(best[1])
        for name, block in blocks.items():
            block.live = live[name]


def _blocks(name: str, s: Scores, multiple: int, least: float) -> _Blocks:
    score = s.score.detach().double().cpu()
    order = score.argsort(descending=True, stable=True)
    alive = int((score > 0).sum())
    relative = score[order[:alive]] / (s.std if s.std > 0 else 1.0)
    floor = min(alive, max(1, math.ceil(least * len(score))))
    if multiple > 1:
        floor = min(alive, max(floor, multiple))
    return _Blocks(name, order, relative.square().tolist(), alive, floor, multiple)
