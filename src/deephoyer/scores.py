"""The scores: what a group of weights is worth. A rule (`rules.py`) then says which groups go.

A score sees units, so it works on every grouping: elements, filters, coupled channels, groups that a user lists.
Some look at the weights alone, some at gradients on batches that the caller gives. Which groups go, and how weights
got to be what they are, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, positive_whole, shown
from deephoyer.groups import Unit
from deephoyer.penalties import wide
from deephoyer.registry import Registry
from deephoyer.weights import LAYERS, find_weights, unwrap

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch, whatever a batch is: `lambda model, xy: cross_entropy(model(xy[0]), xy[1])`."""

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Calibration:
    """What a score may ask about besides the weights: the model, and its loss on the batches that the caller gave."""

    model: nn.Module
    batches: Iterable[Any] | None = None
    loss: Loss | None = None

    def gradients(self, score: str, tensors: Sequence[Tensor], count: int | None = None) -> Iterator[list[Tensor]]:
        """For each batch (the first `count`, or all) the loss's gradient by each tensor; zeros where there is none.

        The model is run in the mode it is in; its buffers and its parameters' `.grad` are left as they were.
        """
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        done = 0
        for loss in self._losses(score, count):
            found = torch.autograd.grad(loss, list(tensors), allow_unused=True)
            made = [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])
            if not all(g.isfinite().all() for g in made):
                raise UserError(f"score {score}: the gradients on batch {done} are not finite.")
            done += 1
            yield made
        if done < (count or 1):
            raise UserError(f"score {score}: asks for {count or 1} batches, but only {done} were given.")

    def _losses(self, score: str, count: int | None) -> Iterator[Tensor]:
        if self.batches is None or self.loss is None:
            missing = "batches= and loss=" if self.batches is None else "loss="
            raise UserError(
                f"score {score}: needs batches to look at. Pass {missing} to prune: batches as your loader gives them, "
                "and loss(model, batch) as a scalar."
            )
        with torch.enable_grad():
            for batch in islice(iter(self.batches), count):
                loss = self.loss(self.model, batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise UserError(f"score {score}: loss(model, batch) must give one number with a gradient.")
                yield loss.squeeze()

    def norms_after(self, score: str) -> dict[str, Tensor]:
        """For each layer's weight, by name, the scale of the norm that reads this layer's very output."""
        outputs: dict[int, tuple[str, Tensor]] = {}
        scales: dict[str, Tensor] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
                if isinstance(module, LAYERS):
                    outputs[id(output)] = name, output  # held, so that no id is given out twice
                elif inputs and id(inputs[0]) in outputs and isinstance(module.weight, Tensor):
                    layer = outputs[id(inputs[0])][0]
                    scales[f"{layer}.weight".removeprefix(".")] = module.weight.detach()

            return hook

        hooks = [
            module.register_forward_hook(note(name))
            for name, module in unwrap(self.model).named_modules()
            if isinstance(module, (*LAYERS, *NORMS))
        ]
        try:
            for _ in self.gradients(score, [find_weights(self.model)[0].tensor], 1):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        return scales


class Score:
    """Needs `of` (or `every`, where units are scored together), and a line in `SCORES` to have a name.

    Scores are 0 or more; a group that is all zero always has score 0.
    """

    def of(self, unit: Unit) -> Tensor:
        """The score of each group of the unit."""
        raise NotImplementedError

    def every(self, units: Sequence[Unit], calibration: Calibration) -> list[Tensor]:
        return [self.of(unit) for unit in units]

    def scale(self, unit: Unit, score: Tensor) -> float:
        """The scale for rules that are relative to a layer: the root mean square of its scores."""
        return score.double().square().mean().sqrt().item() if score.numel() else 0.0

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in vars(self).items())
        return f"{type(self).__name__}({settings})"


class Magnitude(Score):
    """the magnitude of a group's weights: their root mean square, or with norm 1 the mean of their absolute values

    Per weight, so that a threshold means the same for a single weight, a filter of nine and a row of a thousand.
    """

    def __init__(self, norm: int = 2):
        if norm not in (1, 2):
            raise UserError(f"score magnitude: norm is {norm!r}; it is 1 or 2.")
        self.norm = norm

    def of(self, unit: Unit) -> Tensor:
        if self.norm == 1:
            return sums(unit, [wide(t).abs() for t in unit.tensors]) / _sizes(unit)
        return unit.magnitudes() / _sizes(unit).sqrt()

    def scale(self, unit: Unit, score: Tensor) -> float:
        """The standard deviation of the unit's weights."""
        elements = torch.cat([wide(t).flatten().to(score) for t in unit.tensors])
        return elements.std(correction=0).item()


class Snip(Score):
    """Σ|g·w| over a group: how much the loss depends on its weights, on one batch (Lee et al. 2019)"""

    def __init__(self, batches: int = 1):
        self.batches = positive_whole(batches, "score snip: batches")

    def every(self, units: Sequence[Unit], calibration: Calibration) -> list[Tensor]:
        tensors = _tensors(units)
        total = {key: torch.zeros_like(wide(t)) for key, t in tensors.items()}
        for found in calibration.gradients("snip", list(tensors.values()), self.batches):
            for key, g in zip(tensors, found, strict=True):
                total[key] += g
        return [sums(unit, [(total[id(t)] * wide(t)).abs() for t in unit.tensors]) for unit in units]


class Taylor(Score):
    """(Σg·w)² over a group: squared first-order change of the loss without it, mean over batches (Molchanov 2019)"""

    def __init__(self, batches: int | None = None):
        self.batches = None if batches is None else positive_whole(batches, "score taylor: batches")

    def every(self, units: Sequence[Unit], calibration: Calibration) -> list[Tensor]:
        tensors = _tensors(units)
        total: list[Tensor] = []
        count = 0
        for found in calibration.gradients("taylor", list(tensors.values()), self.batches):
            by = dict(zip(tensors, found, strict=True))
            squares = [sums(u, [wide(by[id(t)]) * wide(t) for t in u.tensors]).square() for u in units]
            total = [a + b for a, b in zip(total, squares, strict=True)] if total else squares
            count += 1
        return [t / count for t in total]


class GeometricMedian(Score):
    """the distance of a group to the others of its layer: redundant groups are pruned (FPGM, He et al. 2019)"""

    def of(self, unit: Unit) -> Tensor:
        x = vectors(unit)
        if len(x) < 2:
            return Magnitude().of(unit)
        distances = _distances_of_numbers(x[:, 0]) if x.shape[1] == 1 else torch.cdist(x, x).sum(1)
        # Twins lie on each other, and one of them is still needed: never quite worthless.
        return (distances / (len(x) - 1) / x.shape[1] ** 0.5).clamp(min=torch.finfo(x.dtype).tiny)


class NormScale(Score):
    """the scale that the norm after a filter applies to it (network slimming, Liu et al. 2017)

    Coupled groups include their norms; for filters, channels and elements a batch shows which norm follows.
    """

    def every(self, units: Sequence[Unit], calibration: Calibration) -> list[Tensor]:
        norms = {
            f"{name}.weight".removeprefix(".")
            for name, module in unwrap(calibration.model).named_modules(remove_duplicate=False)
            if isinstance(module, NORMS)
        }
        if all(norms.intersection(unit.names) for unit in units):
            return [means(u, [wide(t).abs() if n in norms else None for n, t in _named(u)])[0] for u in units]
        after = calibration.norms_after("norm-scale")
        out_dims = {w.name: w.out_dim for w in find_weights(calibration.model, "*")}
        found = []
        for unit in units:
            values: list[Tensor | None] = []
            for name, tensor in _named(unit):
                scale = tensor if name in norms else after.get(name)
                if scale is None:
                    values.append(None)
                    continue
                shape = [1] * tensor.dim()
                shape[out_dims[name] if name not in norms else 0] = -1
                values.append(wide(scale).abs().view(shape).expand(tensor.shape))
            if all(v is None for v in values):
                raise UserError(
                    f"score norm-scale: no norm reads the output of {unit.names[0]}; leave it out with parameters=, "
                    "or take groups=Coupled(model, example_inputs)."
                )
            found.append(means(unit, values)[0])
        return found


class Random(Score):
    """random numbers drawn from a seed: a baseline"""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def every(self, units: Sequence[Unit], calibration: Calibration) -> list[Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        return [(1 - torch.rand(len(s := unit.sizes()), generator=draw)).to(s.device) for unit in units]


SCORES: Registry[Score] = Registry("score", "scores")
SCORES.add("magnitude", Magnitude)
SCORES.add("snip", Snip)
SCORES.add("taylor", Taylor)
SCORES.add("geometric-median", GeometricMedian)
SCORES.add("norm-scale", NormScale)
SCORES.add("random", Random)


@torch.no_grad()
def scores_of(units: Sequence[Unit], score: str | Score, calibration: Calibration) -> list[tuple[Tensor, float]]:
    """For each unit the scores of its groups, and the scale that relative rules take them by."""
    chosen = SCORES.make(score)
    if not isinstance(chosen, Score):
        raise UserError(f"prune: {shown(score)} is neither a score nor the name of one; 'magnitude' and Taylor() are.")
    for unit in units:
        for name, tensor in _named(unit):
            if not tensor.isfinite().all():
                raise UserError(f"prune: {name} holds weights that are not finite.")
    found = []
    for unit, raw in zip(units, chosen.every(units, calibration), strict=True):
        if not raw.isfinite().all():
            raise UserError(f"prune: {chosen} gives scores that are not finite for {unit.name}.")
        worth = raw if isinstance(chosen, Magnitude) else torch.where(unit.magnitudes() > 0, raw, torch.zeros_like(raw))
        found.append((worth, chosen.scale(unit, worth)))
    return found


def sums(unit: Unit, values: Sequence[Tensor]) -> Tensor:
    """For each group the sum of its elements' values; one tensor of values for each of the unit's tensors.

    It is the transpose of `spread`, which is linear, so autograd has it for every grouping there will ever be.
    """
    first = unit.tensors[0]
    dtype = torch.promote_types(torch.float32, values[0].dtype)
    with torch.enable_grad():
        c = torch.zeros(len(unit.sizes()), dtype=dtype, device=first.device, requires_grad=True)
        laid = unit.spread(c)
        total = torch.stack([(s * v.to(s)).sum().to(c) for s, v in zip(laid, values, strict=True)]).sum()
    return torch.autograd.grad(total, c)[0]


def vectors(unit: Unit) -> Tensor:
    """Each group's weights as a row, in the order they have in their tensors; shorter rows end in zeros."""
    count, device = len(unit.sizes()), unit.tensors[0].device
    covered = unit.spread(torch.ones(count, device=device))
    if any((c > 1).any() for c in covered) or len({id(t) for t in unit.tensors}) < len(unit.tensors):
        laid = [[s > 0 for s in unit.spread(one)] for one in torch.eye(count, device=device)]
        parts = [[wide(t)[s.expand(t.shape)] for s, t in zip(one, unit.tensors, strict=True)] for one in laid]
        rows = [torch.cat([part.to(device) for part in one]) for one in parts]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)
    # Groups that share nothing: one spread numbers them all.
    numbers = unit.spread(torch.arange(1, count + 1, dtype=torch.float64, device=device))
    number = torch.cat([n.expand(t.shape).flatten().to(device) for n, t in zip(numbers, unit.tensors, strict=True)])
    weight = torch.cat([wide(t).flatten().to(device) for t in unit.tensors])
    order = number.argsort(stable=True)
    lengths = torch.bincount(number.long(), minlength=count + 1).tolist()
    rows = list(weight[order].split(lengths)[1:])  # number 0 is in no group
    if len(set(lengths[1:])) == 1:
        return torch.cat(rows).view(count, -1)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _distances_of_numbers(x: Tensor) -> Tensor:
    """Σ_j |x_i − x_j| for each i, by sorting: a layer has too many single weights for all pairs."""
    ordered, order = x.double().sort()
    i = torch.arange(len(x), device=x.device, dtype=torch.float64)
    below = ordered.cumsum(0) - ordered
    above = ordered.sum() - below - ordered
    return torch.empty_like(ordered).scatter(0, order, ordered * (2 * i + 1 - len(x)) - below + above).to(x)


def means(unit: Unit, values: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """For each group the mean of its elements' values, over the tensors that have some, and how many those are."""
    there = [torch.zeros_like(wide(t)) if v is None else v for v, t in zip(values, unit.tensors, strict=True)]
    counted = [torch.full_like(wide(t), float(v is not None)) for v, t in zip(values, unit.tensors, strict=True)]
    count = sums(unit, counted)
    return sums(unit, there) / count.clamp(min=1), count


def _named(unit: Unit) -> Iterable[tuple[str, Tensor]]:
    return zip(unit.names, unit.tensors, strict=True)


def _sizes(unit: Unit) -> Tensor:
    return unit.sizes().to(wide(unit.tensors[0]))


def _tensors(units: Sequence[Unit]) -> dict[int, Tensor]:
    return {id(t): t for unit in units for t in unit.tensors}
