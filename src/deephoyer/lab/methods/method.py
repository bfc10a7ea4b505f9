"""What a method is: hooks into the training of a network that is to lose weights.

A penalty and a score go by themselves; a method is what needs more: weights of its own, a term of the loss, a say
before an epoch or after a step. Each lies in a file beside this one, with its paper on top. How a run is organised is
not known here: a method sees a `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deephoyer.errors import UserError
from deephoyer.groups import Grouping, Unit, groupings
from deephoyer.masks import Masks
from deephoyer.scores import Score
from deephoyer.weights import find_weights


def _not_here(*_: Any) -> Any:
    raise UserError("a method that prunes while it trains needs a run with a prune stage.")


@dataclass
class Stage:
    """What a method may know of the training it takes part in, and what it may ask for."""

    name: str
    """pretrain, regularize or finetune."""
    model: nn.Module
    groups: list[str | Grouping]
    """The groups that are pruned in the end."""
    parameters: str | Sequence[str] | None = None
    """Globs of the parameters that are meant."""
    epoch: int = 0
    """The first epoch that is to be run: above 0 where a run is taken up again."""
    step: int = 0
    """How many steps of that epoch are done already: where streamed images were cut off within it."""
    epochs: int = 1
    steps: int = 1
    """Steps in an epoch."""
    examples: int = 1
    """How many training examples there are."""
    seed: int = 0
    keep: float | None = None
    """The share of the weights that may stay in the end, where the recipe says it."""
    masks: Masks | None = None
    """What is zero already."""
    cut: Callable[[float, Score], Masks] = _not_here
    """Prunes as the recipe's prune stage does, by a score: with 1 to its target, with 0.5 half of the way there."""
    hold: Callable[[Masks], None] = _not_here
    """Holds masks from now on, in place of those held so far."""

    @property
    def fresh(self) -> bool:
        """Whether it has just begun."""
        return self.epoch == 0 and self.step == 0

    @property
    def steps_done(self) -> int:
        return self.epoch * self.steps + self.step

    def units(self) -> list[Unit]:
        weights = find_weights(self.model, self.parameters)
        return [unit for grouping in groupings(self.groups) for unit in grouping.units(weights)]


class Method:
    """A new one overrides what it needs, and has a line in `METHODS`. All that lasts from one epoch to the next lies in
    `tensors`, which are in every checkpoint, or in the parameters it trains."""

    stages: tuple[str, ...] = ()
    """The stages in which it takes part."""
    knows_size = False
    """Whether it must know while it trains how much may stay: then a size is a run of its own."""
    capturable = False
    """Whether all that it does within a step (`weights`, `loss`, `after_backward`, `after_step`) is the device's alone,
    the same operations on the same tensors each time: nothing is read back, drawn or counted by the host. Then steps
    may be replayed as a CUDA graph. What changes from step to step is a tensor on the device; what changes from epoch
    to epoch is written in place by `before_epoch`, or held by `stage.hold`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    # Before

    def begin(self, stage: Stage) -> None:
        """A stage begins, or is taken up again at `stage.epoch`; `tensors` are then those of the checkpoint."""

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer trains besides the model's own; known once a stage has begun."""
        return []

    def before_epoch(self, epoch: int) -> None:
        """An epoch is about to start; on a run that is taken up, its first one."""

    # In

    def weights(self) -> Mapping[str, Tensor]:
        """Tensors that take the place of the model's parameters in a forward pass, by their names."""
        return {}

    def __call__(self, model: nn.Module, x: Any) -> Any:
        """The model's output, with the weights that the method puts in place of its parameters."""
        weights = dict(self.weights())
        return functional_call(model, weights, (x,)) if weights else model(x)

    def loss(self) -> Tensor | None:
        """What is added to the mean loss of a batch."""
        return None

    def after_backward(self) -> None:
        """Gradients are there, the optimizer's step is not done."""

    # After

    def after_step(self) -> None:
        """The optimizer's step is done, and zeros are held."""

    def end(self) -> None:
        """The stage is over: from here on the model's parameters are the network."""

    def score(self, stage: Stage) -> Score | None:
        """What groups are worth to this method when the network is pruned; None leaves it to the recipe."""
        return None

    # The checkpoint

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps besides the model's own."""
        return self.tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up what `state` gave."""
        self.tensors = dict(tensors)


def share(method: str, value: float | None, stage: Stage) -> float:
    """The share of the groups that a method keeps: its own setting, or what the recipe's target says."""
    keep = stage.keep if value is None else value
    if keep is None:
        raise UserError(
            f"method {method}: needs the final size while it trains. Set its keep, the share of groups to keep, or use "
            "prune.target.density."
        )
    return keep


def portion(method: str, name: str, value: float | None) -> float | None:
    """A setting that is a share, or left out."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1):
        raise UserError(f"method {method}: {name} is {value!r}; it is a share, above 0 and at most 1.")
    return value


def factors(unit: Unit, z: Tensor) -> list[Tensor]:
    """One factor a group, laid over the unit's tensors: what is in no group keeps its 1."""
    return [1 + laid for laid in unit.spread(z - 1)]


def multiplied(units: Sequence[Unit], gates: Sequence[Tensor]) -> dict[str, Tensor]:
    """Each parameter times the gates of all groups that its weights are in."""
    made: dict[str, Tensor] = {}
    for unit, z in zip(units, gates, strict=True):
        for name, tensor, factor in zip(unit.names, unit.tensors, factors(unit, z), strict=True):
            made[name] = made.get(name, tensor) * factor.to(tensor)
    return made


@torch.no_grad()
def write(stage_model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Makes weights that took the place of parameters the parameters themselves."""
    parameters = dict(stage_model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
