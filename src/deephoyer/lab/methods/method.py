"""The base class of pruning methods: hooks into the training of a network.

What a penalty and a score can express needs no method. A method may train additional parameters, add a term to the
loss, or act before an epoch or after a step. Each is a file in this folder, with its paper cited at the top. Methods
know nothing of runs: they see a `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deephoyer.errors import UserError
from deephoyer.groups import Grouping, Unit, groupings
from deephoyer.masks import Masks
from deephoyer.scores import Score
from deephoyer.weights import find_weights

SPARE = 1.05
"""Methods that choose the places of weights by themselves keep a few more than the target: idle ones go in the end."""


def _not_here(*_: Any) -> Any:
    raise UserError("a method that prunes while it trains needs a run with a prune stage.")


@dataclass
class Stage:
    """The training stage, as a method sees it."""

    name: str
    """pretrain, regularize or finetune."""
    model: nn.Module
    groups: list[str | Grouping]
    """The groups that are pruned in the end."""
    parameters: str | Sequence[str] | None = None
    """Globs that select parameters."""
    epoch: int = 0
    """The first epoch to run: above 0 in a resumed run."""
    step: int = 0
    """The number of steps of that epoch that are already done, in a run resumed within an epoch."""
    epochs: int = 1
    steps: int = 1
    """Steps in an epoch."""
    examples: int = 1
    """The number of training examples."""
    seed: int = 0
    keep: float | None = None
    """The share of weights to keep, if the recipe has a target for it."""
    masks: Masks | None = None
    """The masks so far."""
    cut: Callable[[float, Score], Masks] = _not_here
    """Prunes like the recipe's prune stage, by a score: with 1 to its target, with 0.5 half of the way."""
    hold: Callable[[Masks], None] = _not_here
    """Holds masks from now on, in place of those held so far."""

    @property
    def fresh(self) -> bool:
        """Whether the stage starts at its beginning."""
        return self.epoch == 0 and self.step == 0

    @property
    def steps_done(self) -> int:
        return self.epoch * self.steps + self.step

    def of_layers(self) -> Stage:
        """The same without biases and norms among the parameters: a target's share of weights does not count them."""
        if self.parameters is None:
            return self
        weights = find_weights(self.model, self.parameters)
        return replace(self, parameters=[w.name for w in weights if w.tensor.dim() > 1])

    def units(self) -> list[Unit]:
        weights = find_weights(self.model, self.parameters)
        return [unit for grouping in groupings(self.groups) for unit in grouping.units(weights)]


class Method:
    """Override the hooks that are needed, and add a line to `METHODS`. State that must survive an epoch belongs into
    `tensors`, which every checkpoint contains, or into the parameters that the method trains."""

    stages: tuple[str, ...] = ()
    """The stages in which it acts."""
    knows_size = False
    """Whether training depends on the target size: then every size is a separate run."""
    capturable = False
    """Whether all that it does within a step (`weights`, `loss`, `after_backward`, `after_step`) is the device's alone,
    the same operations on the same tensors each time: nothing is read back, drawn or counted by the host. Then steps
    may be replayed as a CUDA graph. What changes from step to step is a tensor on the device; what changes from epoch
    to epoch is written in place by `before_epoch`, or held by `stage.hold`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    # Before training

    def check(self, stage: Stage) -> None:
        """Called before the first stage of a run: refuses a recipe that lacks what the method needs later."""

    def begin(self, stage: Stage) -> None:
        """Called when a stage begins, or is resumed at `stage.epoch`; `tensors` are then those of the checkpoint."""

    def parameters(self) -> list[nn.Parameter]:
        """Additional parameters for the optimizer; called after `begin`."""
        return []

    def before_epoch(self, epoch: int) -> None:
        """Called before every epoch, except one that is resumed in its middle."""

    # Within a step

    def weights(self) -> Mapping[str, Tensor]:
        """Tensors that replace the model's parameters in a forward pass, by name."""
        return {}

    def __call__(self, model: nn.Module, x: Any) -> Any:
        """The model's output, with its parameters replaced by `weights()`."""
        weights = dict(self.weights())
        return functional_call(model, weights, (x,)) if weights else model(x)

    def loss(self) -> Tensor | None:
        """A term that is added to the mean loss of a batch."""
        return None

    def after_backward(self) -> None:
        """Called between the backward pass and the optimizer's step."""

    # After a step, a stage

    def after_step(self) -> None:
        """Called after the optimizer's step, with masks applied."""

    def end(self) -> None:
        """Called at the end of the stage: afterwards the model's own parameters are the network."""

    def score(self, stage: Stage) -> Score | None:
        """The importance of groups for pruning; None uses the magnitude."""
        return None

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint, besides those of the model."""
        return self.tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned."""
        self.tensors = dict(tensors)


def share(method: str, stage: Stage, *own: float | None) -> float:
    """The share of groups that a method keeps: its own setting, where it has one, or the recipe's target."""
    keep = next((value for value in own if value is not None), stage.keep)
    if keep is None:
        setting = "Set its keep, the share of groups to keep, or use" if own else "Use"
        raise UserError(f"method {method}: needs the final size while it trains. {setting} prune.target.density.")
    return keep


def portion(method: str, name: str, value: float | None) -> float | None:
    """Checks a setting that is a share or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1):
        raise UserError(f"method {method}: {name} is {value!r}; it is a share, above 0 and at most 1.")
    return value


def factors(unit: Unit, z: Tensor) -> list[Tensor]:
    """One factor per group, expanded over the unit's tensors; 1 for weights in no group."""
    return [1 + laid for laid in unit.spread(z - 1)]


def multiplied(units: Sequence[Unit], gates: Sequence[Tensor]) -> dict[str, Tensor]:
    """Each parameter multiplied by the gates of all groups that contain its weights."""
    made: dict[str, Tensor] = {}
    for unit, z in zip(units, gates, strict=True):
        for name, tensor, factor in zip(unit.names, unit.tensors, factors(unit, z), strict=True):
            made[name] = made.get(name, tensor) * factor.to(tensor)
    return made


def kept(units: Sequence[Unit], keep: Sequence[Tensor], model: nn.Module) -> Masks:
    """The masks that leave the groups to keep, applied to the model."""
    masks: dict[str, Tensor] = {}
    for unit, groups in zip(units, keep, strict=True):
        for name, tensor, gone in zip(unit.names, unit.tensors, unit.spread((~groups).float()), strict=True):
            stays = (gone == 0).expand(tensor.shape)
            masks[name] = masks[name] & stays if name in masks else stays
    return Masks(masks, model).apply()


@torch.no_grad()
def write(stage_model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies the weights that replaced parameters into the parameters."""
    parameters = dict(stage_model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
