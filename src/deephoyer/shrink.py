"""Smaller at once, for those who cannot train: score, cut, recalibrate batch norms, compact; and what that loses, told.

A plan (`plan.py`) loses far less, for it trains before and after it cuts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from deephoyer.cutting import Choosing, Cutter
from deephoyer.errors import UserError, shown
from deephoyer.errors import score as score_of
from deephoyer.groups import Kinds
from deephoyer.inference import Examples, arguments, at_rest, call, try_call
from deephoyer.structure import Coupled
from deephoyer.structure.inputs import outputs_in
from deephoyer.targets import Target
from deephoyer.weights import with_values

HALVINGS = 6
"""How often the size is halved in on where a drop in score bounds it."""


@dataclass(frozen=True)
class ShrinkReport:
    """What shrinking left and lost: the share that was reached, the outputs' change, the score if one was asked for.

    `error` is the root mean square of what changed in the outputs, over that of the outputs; `same` the share of
    examples whose largest output is the same one, where outputs are scores of classes. Both on the batches given, or on
    the example inputs where there are none. `recalibrated` is None for a network without batch norms.
    """

    target: Target
    reached: float
    error: float
    same: float | None
    scores: tuple[float, float] | None
    recalibrated: int | None
    widths: list[tuple[str, int, int, str]]
    note: str = ""

    def __str__(self) -> str:
        lines = [f"asked for: {self.target.title()}; reached {self.reached:.4f}"]
        if self.scores is not None:
            lines.append(f"score:     {self.scores[1]:.4f}, {self.scores[0]:.4f} before")
        lines.append(f"outputs:   changed by {self.error:.1%} of their size")
        if self.same is not None:
            lines.append(f"           the same class for {self.same:.1%} of the examples")
        if self.recalibrated is not None:
            untouched = "as they were: they fit the whole network; give batches= to recalibrate them"
            lines.append(f"norms:     {f'{self.recalibrated} recalibrated' if self.recalibrated else untouched}")
        return "\n".join([*lines, *([self.note] if self.note else [])])


def shrink(
    model: nn.Module,
    example_inputs: Examples,
    target: Target,
    batches: Iterable[Any] | None = None,
    *,
    validate: Callable[[nn.Module], float] | None = None,
    groups: Kinds | None = None,
    **choosing: Unpack[Choosing],
) -> nn.Module:
    """A smaller copy of the model, pruned without training; `small.shrink_report` says how much its outputs changed.

    `batches` are inputs of the model, or what a loader yields: of a tuple or dict the model gets as many entries as the
    example inputs have, and labels are left out. Batch norms are recalibrated on them and outputs compared. A `drop` in
    the target needs `validate(model)`, higher is better: the network is then pruned as far as the drop allows. Scores
    that use gradients also need `loss(model, batch)`; `protect`, `multiple`, `least`, `by_cost` and `score` are as in
    `deephoyer.cutting.Choosing`.

    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> small = shrink(net, torch.randn(16, 8), Target(parameters=0.5))
    >>> small[0].out_features, small.shrink_report.reached
    (16, 0.5047619047619047)
    """
    if not isinstance(target, Target):
        raise UserError(f"shrink: {shown(target)} is not a target; Target(macs=0.5) is.")
    if target.drop is not None and validate is None:
        raise UserError("shrink: the target allows a drop, so it needs validate=: a function that scores a model.")
    given = [] if batches is None else list(batches)
    seen = [_inputs(batch, example_inputs) for batch in given]
    work = copy.deepcopy(with_values(model))
    frozen = not any(p.requires_grad for p in work.parameters())
    if frozen:  # for use, not against being cut
        work.requires_grad_(True)
    if seen:
        with at_rest(work):
            try_call(work, seen[0], "first of the batches")
    if isinstance(groups, Coupled):
        groups = type(groups)(work, example_inputs, groups.exact)  # the model itself stays as it is
    cutter = Cutter(work, example_inputs, target, groups, batches=None if batches is None else given, **choosing)
    before = None if validate is None else _scored(validate, model)
    whole = copy.deepcopy(work.state_dict())

    small, after, note = _cut(cutter, whole, target.share, seen), None, ""
    if validate is not None:
        after = _scored(validate, small)
        if target.drop is not None and before is not None and after < before - target.drop:
            small, after = _as_far_as_allowed(cutter, whole, seen, validate, before)
            if not target.open_ended:
                note = f"note:      at {target.share:g} more was lost than the drop of {target.drop:g} that is allowed."
    reached = cutter.share_of(small)
    if not note and (why := cutter.why_not(reached)) is not None:
        note = f"note:      {why}"
    error, same = _difference(model, small, seen or [example_inputs])
    small.shrink_report = ShrinkReport(  # type: ignore[assignment]
        target=target,
        reached=reached,
        error=error,
        same=same,
        scores=None if before is None or after is None else (before, after),
        recalibrated=(len(_norms(small)) if seen else 0) if _norms(small) else None,
        widths=cutter.widths(),
        note=note,
    )
    return small.requires_grad_(False) if frozen else small


def _scored(validate: Callable[[nn.Module], float], model: nn.Module) -> float:
    return score_of(validate(model), "shrink: what validate= gives")


def _cut(
    cutter: Cutter,
    whole: dict[str, Tensor],
    share: float,
    batches: list[Examples],
) -> nn.Module:
    cutter.model.load_state_dict(whole)
    if share < 1:
        cutter.apply(cutter.aim(share))
    small = cutter.compacted()
    if batches:
        recalibrate(small, batches)
    return small


def _as_far_as_allowed(
    cutter: Cutter,
    whole: dict[str, Tensor],
    batches: list[Examples],
    validate: Callable[[nn.Module], float],
    before: float,
) -> tuple[nn.Module, float]:
    """Halves, on a logarithmic scale, between what loses too much and the whole network."""
    low, high = cutter.target.share, 1.0
    best: tuple[nn.Module, float] | None = None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        small = _cut(cutter, whole, middle, batches)
        after = _scored(validate, small)
        if after >= before - (cutter.target.drop or 0.0):
            best, high = (small, after), middle
        else:
            low = middle
    if best is None:
        return _cut(cutter, whole, 1.0, []), before
    return best


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Examples]) -> int:
    """Takes the running statistics of batch norms anew, as the mean over these batches; says how many norms there are.

    A cut network's activations have other means and variances than those the norms remember.
    """
    norms = _norms(model)
    if not norms:
        return 0
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    try:
        for batch in batches:
            try_call(model, batch, "batches")
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode
    return len(norms)


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]


def _inputs(batch: Any, examples: Examples) -> Examples:
    """What of a batch the model takes: as much as the example inputs have, by name or by place. Labels are the rest."""
    args, kwargs = arguments(examples)
    if isinstance(batch, Mapping) and kwargs:
        return {name: value for name, value in batch.items() if name in kwargs}
    if isinstance(batch, tuple | list):
        return tuple(batch[: len(args) + len(kwargs)])
    arguments(batch)
    return batch


@torch.no_grad()
def _difference(model: nn.Module, small: nn.Module, batches: list[Examples]) -> tuple[float, float | None]:
    changed = size = right = count = 0.0
    classes = True
    for inputs in batches:
        with at_rest(model), at_rest(small):
            old, new = outputs_in(call(model, inputs)), outputs_in(call(small, inputs))
        for a, b in zip(old, new, strict=True):
            if a.is_floating_point():
                changed += float((a.double() - b.double()).square().sum())
                size += float(a.double().square().sum())
        first, second = old[0], new[0]
        classes = classes and first.dim() == 2 and first.shape[1] > 1 and first.is_floating_point()
        if classes:
            right += float((first.argmax(1) == second.argmax(1)).sum())
            count += len(first)
    return math.sqrt(changed / size) if size else 0.0, right / count if classes and count else None
