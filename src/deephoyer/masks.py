"""Masks: the one truth about which weights are zero.

`prune` makes them by a rule; they are applied to weights, held during training so that no optimizer
brings a weight back, and saved with the weights. How the weights got small is not known here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, positive_whole, shown, true_or_false
from deephoyer.groups import Kinds, Unit, groupings, weights_for
from deephoyer.kernels.zeroing import Zeroing, laid_like
from deephoyer.optimizers import Replaced, bare, closure_of, held_by, nested, with_closure
from deephoyer.rules import Rule, Scores
from deephoyer.scores import Calibration, Loss, Score, scores_of
from deephoyer.sharded import is_sharded, local, reshard, same_cut, share_of, whole
from deephoyer.weights import all_computed, directions, find_weights, left_out, named_parameters, told


@dataclass(frozen=True)
class Count:
    """How many of a parameter's weights stay."""

    total: int
    left: int

    @property
    def density(self) -> float:
        return self.left / max(1, self.total)


class Masks(Mapping[str, Tensor]):
    """Boolean tensors by parameter name: True is kept, False is zero.

    >>> masks = Masks({"weight": torch.tensor([[True, False]])})
    >>> model = nn.Linear(2, 1)
    >>> _ = masks.apply(model); model.weight[0, 1].item(), masks.density
    (0.0, 0.5)
    """

    def __init__(self, masks: Mapping[str, Tensor], model: nn.Module | None = None):
        if not isinstance(masks, Mapping):
            raise UserError(f"masks: {shown(masks)} is no mapping of parameter names to boolean tensors.")
        for name, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise UserError(f"masks: {name} is not a boolean tensor.")
        self._masks = dict(masks)
        self._model = model
        self.left_out: dict[str, str] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self) -> str:
        rest = f"; {told(self.left_out)}" if self.left_out else ""
        return f"Masks({len(self)} tensors, density {self.density:.4g}{rest})"

    @property
    def density(self) -> float:
        """The fraction of weights kept, over all masked parameters."""
        counts = self.counts().values()
        return sum(c.left for c in counts) / max(1, sum(c.total for c in counts))

    def counts(self) -> dict[str, Count]:
        """For each parameter its number of weights, and how many are kept."""
        return {name: Count(m.numel(), int(m.sum())) for name, m in self.items()}

    def __and__(self, other: Masks) -> Masks:
        """What stays in both; a parameter that only one of them masks keeps that mask."""
        return self._join(other, torch.logical_and)

    def __or__(self, other: Masks) -> Masks:
        """What stays in either; a parameter that only one of them masks is not masked."""
        return self._join(other, torch.logical_or)

    def _join(self, other: Masks, how: Any) -> Masks:
        joined = {}
        for name in [*self, *(n for n in other if n not in self)]:
            if name in self and name in other:
                if self[name].shape != other[name].shape:
                    raise UserError(f"masks: {name} has shapes {_shape(self[name])} and {_shape(other[name])}.")
                joined[name] = how(self[name], other[name].to(self[name].device))
            elif how is torch.logical_and:
                joined[name] = self[name] if name in self else other[name]
        return Masks(joined, self._model)

    @torch.no_grad()
    def apply(self, model: nn.Module | None = None) -> Masks:
        """Sets all weights that are not kept to exactly 0.0."""
        for tensor, drop in self._drops(model):
            local(tensor).masked_fill_(drop, 0)
        return self

    @torch.no_grad()
    def undone(self, model: nn.Module | None = None) -> list[str]:
        """The parameters in which something is not zero that these masks drop.

        >>> Masks({"weight": torch.tensor([[True, False]])}).undone(nn.Linear(2, 1))
        ['weight']
        """
        drops = zip(self, self._drops(model), strict=True)
        return [name for name, (tensor, drop) in drops if local(tensor).masked_select(drop).any()]

    def hold(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> Hold:
        """Keeps the zeros exactly zero after every step of the optimizer, in the weights and in its state.

        Momentum, Adam's moments and weight decay can't bring a weight back; a checkpoint saved
        between steps has the zeros in it. With several optimizers call it for each; one that has no masked
        parameter of the model has nothing to hold. State that an optimizer keeps in a few bits, or along axes of its
        own (SOAP, Shampoo), is left as it is; LBFGS forgets the steps in which it moved what is pruned now.
        `hold(...).release()` ends it.
        """
        whole_model, drops = self._of(model), self._drops(model)
        own = {id(tensor) for _, tensor in named_parameters(whole_model)}
        return Hold(bare(optimizer), drops, own, Replaced(whole_model, [tensor for tensor, _ in drops], "hold()"))

    def _of(self, model: nn.Module | None) -> nn.Module:
        model = self._model if model is None else model
        if model is None:
            raise UserError("masks: which model? These were not made by prune(); pass the model.")
        return model

    def _drops(self, model: nn.Module | None) -> list[tuple[Tensor, Tensor]]:
        """The masked parameters, and where this process's piece of each is to be zero."""
        model = self._of(model)
        reshard(model)
        parameters = dict(named_parameters(model))
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, mask in self.items():
            if name not in parameters:
                raise UserError(f"masks: the model has no parameter {name!r}.")
            if parameters[name].shape != mask.shape:
                raise UserError(f"masks: {name} is {_shape(parameters[name])}, its mask {_shape(mask)}.")
            if parameters[name].is_meta:
                raise UserError(f"masks: {name} is on the meta device and has no values yet: load the model first.")
            drop = ~mask.to(parameters[name].device)
            pairs.append((parameters[name], local(share_of(drop, parameters[name]))))
        return pairs

    def state_dict(self) -> dict[str, Tensor]:
        return {name: mask.clone() for name, mask in self.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], model: nn.Module | None = None) -> Masks:
        """Masks again, from what `state_dict` gave; with a model they are applied to it."""
        masks = cls(state, model)
        return masks if model is None else masks.apply()


class Hold:
    """A step-post hook that zeroes what the masks drop, in the parameters and in the optimizer's state."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, drops: list[tuple[Tensor, Tensor]], own: set[int], replaced: Replaced
    ):
        if drops and not held_by(optimizer) & own:
            raise UserError(
                "masks: the optimizer holds no parameter of this model. Is it another model's, or a copy's?"
            )
        self._optimizer, self._all = optimizer, drops
        self._zero, self._replaced = Zeroing(), replaced
        self._take()
        self._nested = nested(optimizer)  # each may move weights, and has a state of its own
        self.handles = [one.register_step_post_hook(lambda *_: self.zero_()) for one in self._nested]
        searching = [one for one in self._nested if isinstance(one, torch.optim.LBFGS)]
        self.handles += [one.register_step_pre_hook(self._search_without) for one in searching]
        for one in searching:
            self._forget(one)
        self.zero_()

    def _take(self) -> None:
        """What of the masked parameters the optimizer has now; others may be added to it later."""
        held = held_by(self._optimizer)
        mine = [(tensor, drop) for tensor, drop in self._all if id(tensor) in held]
        self._drops = [(tensor, laid_like(drop, local(tensor))) for tensor, drop in mine]
        self._lists = _lists(self._optimizer)

    @torch.no_grad()
    def zero_(self) -> None:
        if not torch.compiler.is_compiling():
            self._replaced.check()
            if _lists(self._optimizer) != self._lists:
                self._take()
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, (tensor, drop) in enumerate(self._drops):
            if drop.device != tensor.device:  # the model was moved
                drop = laid_like(drop, local(tensor))
                self._drops[i] = (tensor, drop)
            pairs.append((local(tensor), drop))
            for one in self._nested:
                state = one.state.get(tensor, {})
                if any(_along_other_axes(value, tensor) for value in state.values()):
                    continue
                for key, value in state.items():
                    # Adam's step count may have a parameter's shape, and Shampoo's preconditioner that of a square one.
                    if key == "step" or "precond" in str(key):
                        continue
                    if isinstance(value, Tensor) and value.shape == tensor.shape:
                        piece = local(value) if same_cut(tensor, value) else value
                        if type(piece) in (Tensor, nn.Parameter) and piece.shape == drop.shape:
                            pairs.append((piece, drop))
        self._zero(pairs)

    def _search_without(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """LBFGS moves weights and weighs losses within its step: what is pruned must have no part in its directions."""
        closure = closure_of(args, kwargs)

        def masked() -> Any:
            loss = closure()
            for tensor, drop in self._drops:
                if tensor.grad is not None:
                    local(tensor.grad).masked_fill_(drop, 0)
            return loss

        return with_closure(args, kwargs, masked)

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        """LBFGS that has moved what is pruned now begins anew: its history speaks of curvature along those weights."""
        drops = {id(tensor): local(drop) for tensor, drop in self._drops}
        for state in optimizer.state.values():
            held = [p for group in optimizer.param_groups for p in group["params"]]
            flat = torch.cat([drops.get(id(p), torch.zeros_like(p, dtype=torch.bool)).reshape(-1) for p in held])
            moves = [state.get("d"), *(state.get("old_stps") or [])]
            if any(move is not None and move.shape == flat.shape and move[flat].any() for move in moves):
                state["n_iter"] = 0

    def release(self) -> None:
        for handle in self.handles:
            handle.remove()


def _lists(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Its lists of parameters, as far as they can be told apart in next to no time."""
    return [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]


def _along_other_axes(value: Any, tensor: Tensor) -> bool:
    """Whether what an optimizer keeps for a parameter says that it works in other axes than the parameter's own.

    SOAP's second moments are those of rotated gradients: no element of them belongs to one weight.
    """
    if isinstance(value, list | tuple):
        return any(isinstance(part, Tensor) and part.dim() > 1 for part in value)
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape != tensor.shape


class Empties(UserError):
    """A rule that would leave nothing of a layer."""


@torch.no_grad()
def prune(
    model: nn.Module,
    rule: Rule,
    groups: Kinds = "elements",
    parameters: str | Iterable[str] | None = None,
    allow_empty: bool = False,
    multiple: int = 1,
    score: str | Score = "magnitude",
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
) -> Masks:
    """Zeroes the groups that the rule selects, in place, and returns the masks.

    `score` is the importance of a group: the magnitude of its weights or, given `batches` and
    `loss(model, batch)`, the estimated effect of its removal on the loss (`"snip"`, `"taylor"`).
    A weight is kept if all its groups are kept. A rule that would empty a layer raises an error and changes
    nothing, unless `allow_empty` is set; the one channel of gray images stays where filters are pruned as well.
    `multiple` rounds the number of groups kept in a unit to the nearest multiple: processors compute channels in
    blocks of 8 or 16. It needs a single kind of group (two kinds would break each other's multiples), and does not
    change units that the rule keeps whole or that have fewer groups.

    >>> from deephoyer.rules import Density
    >>> masks = prune(nn.Linear(10, 10), Density(0.2)); masks.density
    0.2
    """
    if not isinstance(rule, Rule):
        raise UserError(f"prune: {shown(rule)} is not a rule; Absolute(1e-4), StdRatio(0.03) and Density(0.02) are.")
    true_or_false(allow_empty, "prune: allow_empty")
    kinds = groupings(groups)
    multiple = positive_whole(multiple, "prune: multiple")
    if multiple > 1 and len(kinds) > 1:
        raise UserError(
            f"prune: multiple goes with one kind of group, not {' and '.join(k.name for k in kinds)}: what one of them "
            "leaves is cut by the other. Coupled(model, example_inputs) has both sides of a channel in one."
        )
    units, scores = scored(model, kinds, parameters, score, batches, loss)
    _tell_frozen(model, parameters)
    return cut(model, rule, units, scores, allow_empty, multiple)


@torch.no_grad()
def cut(
    model: nn.Module,
    rule: Rule,
    units: Iterable[Unit],
    scores: list[Scores],
    allow_empty: bool = False,
    multiple: int = 1,
) -> Masks:
    """Zeroes what the rule says of scores that are known already; `prune` is this with scores taken now."""
    masks: dict[str, Tensor] = {}
    thresholds: dict[str, list[str]] = {}
    zero: set[str] = set()
    units = list(units)
    divided = {name for unit, score in zip(units, scores, strict=True) if len(score.score) > 1 for name in unit.names}
    for unit, score, verdict in zip(units, scores, rule.judge(scores), strict=True):
        keep = verdict.keep if multiple == 1 else rounded(verdict.keep, score.score, multiple)
        if len(keep) == 1 and not allow_empty and divided.issuperset(unit.names):
            keep = torch.ones_like(keep)  # the one channel of gray images: its filters are there to be pruned
        gone = unit.spread((~keep).float())
        zero.update(() if score.score.any() else unit.names)
        for name, tensor, dead in zip(unit.names, unit.tensors, gone, strict=True):
            stays = (dead == 0).expand(tensor.shape)
            masks[name] = masks[name] & stays if name in masks else stays.clone()
            thresholds.setdefault(name, []).append(f"{verdict.threshold:.4g}")
    if not allow_empty:
        for name, mask in masks.items():
            if not mask.any() and mask.dim() > 1:  # biases and norms may vanish whole
                why = "all of it is under" if multiple == 1 else f"fewer than half of {multiple} groups reach"
                why, advice = f"{why} its threshold {' and '.join(thresholds[name])}", "Lower the threshold, or allow"
                if name in zero:
                    why, advice = "all of it is zero already", "Allow"
                raise Empties(
                    f"prune: {rule} would leave nothing of {name}: {why}. "
                    f"{advice} it: allow_empty=True, in a recipe prune.allow_empty=true."
                )
    _refuse_lost_directions(model, masks)
    made = Masks(masks, model)
    made.left_out = left_out(model, masks)
    return made.apply()


def _refuse_lost_directions(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Weight norm divides by the length of each row, which must not be zero: the row that it scales may be."""
    for name, (lengths, dim) in directions(model).items():
        if name in masks:
            rows = masks[name].flatten() if dim < 0 else masks[name].movedim(dim, 0).flatten(1).T
            if not rows.any(0).all():
                raise UserError(
                    f"prune: a whole row of {name} would be zero, and weight norm divides by its length. "
                    f"Prune {lengths!r} instead (parameters=), by which the rows are scaled, or use dh.Coupled."
                )


def _tell_frozen(model: nn.Module, parameters: str | Iterable[str] | None) -> None:
    if parameters is None and all_computed(model):
        return
    meant, trained = ([w.name for w in find_weights(model, parameters, frozen)] for frozen in (True, False))
    frozen = [name for name in meant if name not in trained]
    if frozen:
        some = ", ".join(frozen[:3]) + (", …" if len(frozen) > 3 else "")
        warnings.warn(
            f"prune: what is frozen keeps all of its weights: {some}. "
            "requires_grad_(True) lets them be pruned; parameters= without them says that this is meant.",
            stacklevel=4,
        )


def rounded(keep: Tensor, score: Tensor, multiple: int) -> Tensor:
    """Which groups stay when their number is taken to the nearest multiple: those with the largest scores.

    >>> rounded(torch.tensor([True, False, False, True]), torch.tensor([4.0, 1.0, 2.0, 3.0]), 3)
    tensor([ True, False,  True,  True])
    """
    if keep.all() or len(keep) < multiple:  # three input channels are not none because blocks are of 16
        return keep
    wanted = min(len(keep), (int(keep.sum()) + multiple // 2) // multiple * multiple)
    best = torch.zeros_like(keep)
    # A stable order: among equals, what a larger value keeps is a part of what a smaller one keeps.
    best[score.argsort(descending=True, stable=True)[:wanted]] = True
    return best & (score > 0)


def scored(
    model: nn.Module,
    groups: Kinds,
    parameters: str | Iterable[str] | None = None,
    score: str | Score = "magnitude",
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
) -> tuple[list[Unit], list[Scores]]:
    """What a rule is asked about: the units of these groups, and the scores of each."""
    reshard(model)
    kinds = groupings(groups)
    weights = weights_for(model, kinds, parameters)
    units = [unit for grouping in kinds for unit in grouping.units(weights)]
    if batches is not None and any(is_sharded(t) for unit in units for t in unit.tensors):
        raise UserError(
            "prune: scores from batches need whole weights; prune before sharding, or by score='magnitude'."
        )
    units = [whole(unit) for unit in units]
    found = scores_of(units, score, Calibration(model, batches, loss))
    return units, [Scores(unit.names, worth, scale) for unit, (worth, scale) in zip(units, found, strict=True)]


def _shape(t: Tensor) -> str:
    return "×".join(str(n) for n in t.shape)
