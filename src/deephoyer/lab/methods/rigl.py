"""RigL: a network that is sparse from the start, and whose smallest weights move to where the gradient is largest.

Evci, Gale, Menick, Castro, Elsen: Rigging the lottery: making all tickets winners; ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deephoyer.errors import positive_whole
from deephoyer.groups import Unit
from deephoyer.lab.methods.method import SPARE, Method, Stage, kept, portion, share
from deephoyer.masks import Masks
from deephoyer.scores import Magnitude, Score, sums


class RigL(Method):
    """trains a sparse network from scratch, moving weights to where gradients are large (Evci et al. 2020)

    It starts at random places, with the densities of Erdős and Rényi. After every `every` steps the share `move` of
    each layer's weights moves, on a cosine ever fewer; after three quarters of the training the places are final.
    """

    stages = ("pretrain",)
    knows_size = True

    def __init__(self, move: float = 0.3, every: int = 100):
        super().__init__()
        self.move = portion("rigl", "move", move) or 0.0
        self.every = positive_whole(every, "method rigl: every")

    def check(self, stage: Stage) -> None:
        share("rigl", stage)

    def begin(self, stage: Stage) -> None:
        self.stage, self.units, self.step = stage, stage.of_layers().units(), stage.steps_done
        self.last_epoch = min(math.ceil(0.75 * stage.epochs), max(1, stage.epochs - 1))  # then what is left trains
        self.last = self.last_epoch * stage.steps
        self.growth: list[Tensor] = []
        self.masks = stage.masks
        if self.masks is None:
            shares = densities(self.units, min(1.0, SPARE * share("rigl", stage)))
            draws = torch.Generator().manual_seed(stage.seed)
            keep = [at_random(unit, part, draws) for unit, part in zip(self.units, shares, strict=True)]
            self._hold(keep)

    def _hold(self, keep: list[Tensor]) -> None:
        self.masks = kept(self.units, keep, self.stage.model)
        self.stage.hold(self.masks)

    def before_epoch(self, epoch: int) -> None:
        if epoch == self.last_epoch:  # what is idle by now goes, and the network gets its final size
            self.stage.hold(self.stage.cut(1.0, Magnitude()))

    @property
    def moves(self) -> bool:
        """Whether weights move after the step that is under way."""
        return self.step + 1 < self.last and (self.step + 1) % self.every == 0

    def after_backward(self) -> None:
        if self.moves:
            grads = [[torch.zeros_like(t) if t.grad is None else t.grad for t in unit.tensors] for unit in self.units]
            self.growth = [sums(unit, [g.abs() for g in own]) for unit, own in zip(self.units, grads, strict=True)]

    @torch.no_grad()
    def after_step(self) -> None:
        moves, self.step = self.moves, self.step + 1
        if moves:
            part = self.move / 2 * (1 + math.cos(math.pi * self.step / self.last))
            assert self.masks is not None
            there = [groups_in(self.masks, unit) for unit in self.units]
            worth = [Magnitude().of(unit) for unit in self.units]
            self._hold([moved(a, r, g, part) for a, r, g in zip(there, worth, self.growth, strict=True)])

    def score(self, stage: Stage) -> Score:
        return Magnitude()


def moved(active: Tensor, worth: Tensor, growth: Tensor, part: float) -> Tensor:
    """Which groups are there after a share of the active ones has moved; new ones begin at zero.

    >>> there = torch.tensor([True, True, True, False, False])
    >>> worth, growth = torch.tensor([3.0, 1.0, 2.0, 0.0, 0.0]), torch.tensor([9.0, 0.1, 9.0, 0.2, 0.3])
    >>> moved(there, worth, growth, 0.34).tolist()
    [True, False, True, False, True]
    """
    count = int(active.sum())
    moving = min(round(part * count), count - 1)
    if moving <= 0:
        return active
    keep = torch.zeros_like(active)
    keep[worth.masked_fill(~active, -1.0).argsort(descending=True, stable=True)[: count - moving]] = True
    keep[growth.masked_fill(keep, -1.0).argsort(descending=True, stable=True)[:moving]] = True
    return keep


def groups_in(masks: Masks, unit: Unit) -> Tensor:
    """Which groups of a unit are there: a new one may still be zero, where no gradient has reached it."""
    stays = [masks[name].to(tensor) for name, tensor in zip(unit.names, unit.tensors, strict=True)]
    return sums(unit, stays) > 0


def densities(units: Sequence[Unit], total: float) -> list[float]:
    """The density of each layer, which make `total` of all: as its dimensions' sum over their product, at most 1."""
    counts = [float(unit.sizes().sum()) for unit in units]
    raw = [sum(unit.tensors[0].shape) / unit.tensors[0].numel() for unit in units]
    whole: set[int] = set()
    while True:
        rest = total * sum(counts) - sum(counts[i] for i in whole)
        free = [i for i in range(len(units)) if i not in whole]
        scale = rest / sum(counts[i] * raw[i] for i in free) if free else 0.0
        full = {i for i in free if scale * raw[i] > 1}
        if not full:
            return [1.0 if i in whole else max(0.0, scale * raw[i]) for i in range(len(units))]
        whole |= full


def at_random(unit: Unit, part: float, draws: torch.Generator) -> Tensor:
    """A share of a unit's groups, at least one."""
    number = len(unit.sizes())
    keep = torch.zeros(number, dtype=torch.bool)
    keep[torch.randperm(number, generator=draws)[: max(1, round(part * number))]] = True
    return keep.to(unit.tensors[0].device)
