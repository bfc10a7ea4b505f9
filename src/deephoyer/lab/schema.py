"""What may stand in a recipe: a model, its data, four stages.

Nothing is built or trained here; names are checked against the registries so that a slip shows
before anything starts. Reading recipes from files is in `recipe.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deephoyer.errors import UserError, not_negative, unknown
from deephoyer.groups import GROUPINGS
from deephoyer.lab import models
from deephoyer.lab.data import DATASETS
from deephoyer.penalties import PENALTIES
from deephoyer.rules import RULES, Absolute, Rule, StdRatio, Threshold
from deephoyer.strength import SCHEDULES, Listed

STAGES = ("pretrain", "regularize", "prune", "finetune")


Choice = str | dict[str, Any]
"""A name, or a mapping with a name and settings."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Training(_Part):
    """A stage of ordinary training."""

    epochs: int = Field(ge=0)
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    lr_warmup: int = Field(default=0, ge=0)
    """The epochs in which the rate rises to where its schedule has it."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = Field(default=0.1, gt=0, le=1)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _milestones_go_with_steps(self) -> Training:
        if (self.schedule == "step") != bool(self.milestones):
            raise UserError("schedule 'step' needs milestones, a list of epochs, and only that one takes them.")
        if list(self.milestones) != sorted(set(self.milestones)) or any(m < 1 for m in self.milestones):
            raise UserError(f"milestones {list(self.milestones)} must rise and start at 1 or later.")
        return self

    @model_validator(mode="after")
    def _the_rate_gets_there(self) -> Training:
        if self.lr_warmup > self.epochs:
            raise UserError(
                f"lr_warmup is {self.lr_warmup} epochs, but the stage has {self.epochs}; lr would not be reached."
            )
        return self


class Pretrain(Training):
    """Ordinary training from scratch, or the weights of a checkpoint instead."""

    epochs: int = Field(default=0, ge=0)
    checkpoint: str | None = None

    @model_validator(mode="after")
    def _something_to_start_from(self) -> Pretrain:
        if self.checkpoint and self.epochs:
            raise UserError("give epochs or a checkpoint, not both.")
        return self


class Warmup(_Part):
    """The strength rises from 0 over the first epochs."""

    kind: Literal["linear", "cosine"] = "linear"
    epochs: int = Field(ge=1)


Strength = float | dict[str, float] | tuple[float, ...]
"""One number, one for each kind of group, or one for each epoch."""


def _numbers(strength: Strength) -> Iterable[float]:
    if isinstance(strength, dict):
        return strength.values()
    return strength if isinstance(strength, tuple) else (strength,)


class Regularize(Training):
    """Training with a penalty on groups of weights."""

    penalty: Choice = "hoyer-square"
    groups: str = "elements"
    strength: Strength
    density: float | None = Field(default=None, gt=0, lt=1)
    """The effective density to end at; the strength is then a first guess, and corrected after every epoch."""
    weigh: Literal["alike", "size"] = "alike"
    warmup: Warmup | None = None
    select: str | tuple[str, ...] | None = None

    @field_validator("penalty")
    @classmethod
    def _known_penalty(cls, choice: Choice) -> Choice:
        PENALTIES.make(**named(choice))
        return choice

    @field_validator("groups")
    @classmethod
    def _known_groups(cls, choice: str) -> str:
        for name in choice.split("+"):
            GROUPINGS[name]
        return choice

    @field_validator("strength")
    @classmethod
    def _strength_is_a_size(cls, choice: Strength) -> Strength:
        for value in _numbers(choice):
            not_negative(value, "strength")
        return choice

    @model_validator(mode="after")
    def _one_strength_a_group(self) -> Regularize:
        kinds = self.groups.split("+")
        if isinstance(self.strength, dict) and set(self.strength) != set(kinds):
            raise UserError(f"strength has {sorted(self.strength)}, the groups are {sorted(kinds)}.")
        return self

    @model_validator(mode="after")
    def _one_strength_an_epoch(self) -> Regularize:
        if isinstance(self.strength, tuple):
            if len(self.strength) != self.epochs:
                raise UserError(
                    f"strength lists {len(self.strength)} values for {self.epochs} epochs; give one for each."
                )
            if self.warmup is not None:
                raise UserError("a list of strengths says it all; leave out the warmup (regularize.warmup=null).")
        return self

    @model_validator(mode="after")
    def _a_guess_can_be_corrected(self) -> Regularize:
        if self.density is None:
            return self
        if self.warmup is not None:
            raise UserError("give a warmup or a density to end at, not both (regularize.warmup=null).")
        if isinstance(self.strength, tuple):
            raise UserError("give a list of strengths or a density to end at, not both (regularize.density=null).")
        if not all(_numbers(self.strength)):
            raise UserError("a strength of 0 can't be corrected; give a small one, like 1e-5, with the density.")
        return self

    def schedules(self, steps_an_epoch: int) -> Any:
        """The strength as the regularizer takes it."""
        if isinstance(self.strength, tuple):
            return Listed(self.strength, steps_an_epoch)
        if self.warmup is None:
            return self.strength
        shape = SCHEDULES[self.warmup.kind]
        steps = self.warmup.epochs * steps_an_epoch
        if isinstance(self.strength, dict):
            return {kind: shape(value, steps) for kind, value in self.strength.items()}
        return shape(self.strength, steps)


class Target(_Part):
    """How small, or how good, instead of a value: one of these, as a share."""

    macs: float | None = Field(default=None, gt=0, le=1)
    density: float | None = Field(default=None, gt=0, le=1)
    accuracy: float | None = Field(default=None, ge=0, le=1)
    drop: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_of_them(self) -> Target:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise UserError("a target is one of macs, density, accuracy and drop, like {macs: 0.4}.")
        return self


class Prune(_Part):
    """A rule, by name, with its value (or `rules` a pattern, for per-layer), or with a target that its value meets."""

    rule: str = "std-ratio"
    value: float | None = None
    scope: Literal["layer", "global"] | None = None
    rules: dict[str, dict[str, Any]] | None = None
    target: Target | None = None
    groups: str = "elements"
    select: str | tuple[str, ...] | None = None
    allow_empty: bool = False
    multiple: int = Field(default=1, ge=1)

    _known_groups = field_validator("groups")(Regularize._known_groups.__func__)  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _multiples_of_one_kind(self) -> Prune:
        if self.multiple > 1 and "+" in self.groups:
            raise UserError(f"multiple goes with one kind of group, not {self.groups}; coupled has both sides in one.")
        return self

    @model_validator(mode="after")
    def _makes_a_rule(self) -> Prune:
        if self.target is None:
            self.make()
        elif self.value is not None:
            raise UserError("give a value, or a target that finds one, not both (prune.value=null).")
        elif self.scope is not None or self.rules is not None:
            raise UserError("scope and rules don't go with a target.")
        else:
            self.threshold()
        return self

    def threshold(self) -> type[Threshold]:
        """The rule whose value a target finds."""
        known = {kind.title(): kind for kind in (StdRatio, Absolute)}
        if self.rule not in known:
            raise unknown("rule with a value to be found", self.rule, known)
        return known[self.rule]

    def make(self) -> Rule:
        settings = {
            k: v for k, v in (("value", self.value), ("scope", self.scope), ("rules", self.rules)) if v is not None
        }
        return RULES.make(self.rule, **settings)


class Distill(_Part):
    """Learning from the mean prediction of trained networks besides the labels, while regularizing and finetuning.

    With `keep` each is asked once, about every image in every position, in the recipe's precision; the answers
    stay on disk for later runs. That is as many passes over the images as there are positions.
    """

    model: Choice | tuple[Choice, ...]
    checkpoints: tuple[str, ...] = Field(min_length=1)
    temperature: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    weight: float = Field(default=0.7, ge=0, le=1)
    keep: bool = False

    @field_validator("model")
    @classmethod
    def _known_models(cls, choice: Choice | tuple[Choice, ...]) -> Choice | tuple[Choice, ...]:
        for one in choice if isinstance(choice, tuple) else (choice,):
            models.MODELS[named(one)["choice"]]
        return choice

    @model_validator(mode="after")
    def _one_model_a_checkpoint(self) -> Distill:
        if isinstance(self.model, tuple) and len(self.model) != len(self.checkpoints):
            raise UserError(
                f"{len(self.model)} models are listed for {len(self.checkpoints)} checkpoints; "
                "list one for each, or write one without a list for all."
            )
        return self

    def teachers(self) -> list[tuple[Choice, str]]:
        """Each teacher's model and the checkpoint that holds its weights."""
        kinds = self.model if isinstance(self.model, tuple) else (self.model,) * len(self.checkpoints)
        return list(zip(kinds, self.checkpoints, strict=True))


class Recipe(_Part):
    """The whole job: a model, its data, four stages; `rounds` repeats regularize and prune before finetuning."""

    model: Choice
    data: Choice
    seed: int = Field(default=0, ge=0)
    batch_size: int = Field(default=100, ge=1)
    device: str = "auto"
    select: Literal["held-out", "test-best"] = "held-out"
    held_out: float = Field(default=0.1, gt=0, lt=1)
    shift: int = Field(default=0, ge=0, le=16)
    flip: bool = False
    capture: Literal["auto", "off"] = "auto"
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    channels_last: bool = False
    compile: Literal["off", "blocks"] = "off"
    joints: Literal["none", "gather"] = "none"
    """What `compact` may add to leave out channels that are dead in one layer alone."""
    distill: Distill | None = None
    rounds: int = Field(default=1, ge=1)
    pretrain: Pretrain
    regularize: Regularize
    prune: Prune
    finetune: Training

    @field_validator("model")
    @classmethod
    def _known_model(cls, choice: Choice) -> Choice:
        models.MODELS[named(choice)["choice"]]
        return choice

    @field_validator("capture", "compile", mode="before")
    @classmethod
    def _off_is_a_word(cls, choice: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if choice is False else choice

    @field_validator("data")
    @classmethod
    def _known_data(cls, choice: Choice) -> Choice:
        DATASETS[named(choice)["choice"]]
        return choice

    @field_validator("device")
    @classmethod
    def _known_device(cls, choice: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", choice):
            raise unknown("device", choice, ("auto", "cpu", "cuda", "cuda:0"))
        return choice

    def files(self) -> list[tuple[str, str]]:
        """The networks that a run starts from or learns from, each with the key that names it."""
        start = [self.pretrain.checkpoint] if self.pretrain.checkpoint else []
        teachers = self.distill.checkpoints if self.distill else ()
        return [("pretrain.checkpoint", f) for f in start] + [("distill.checkpoints", f) for f in teachers]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)


def named(choice: str | Mapping[str, Any]) -> dict[str, Any]:
    """A name, or a mapping with a name and settings, as the arguments of `Registry.make`.

    >>> named({"name": "transformed-l1", "a": 2.0})
    {'choice': 'transformed-l1', 'a': 2.0}
    """
    if isinstance(choice, str):
        return {"choice": choice}
    settings = dict(choice)
    if not isinstance(settings.get("name"), str):
        raise UserError(f"{dict(choice)!r} has no name.")
    return {"choice": settings.pop("name"), **settings}


def type_at(path: list[str]) -> type[BaseModel]:
    """The part of a recipe that `path` leads to."""
    part: type[BaseModel] = Recipe
    inner: dict[str, type[BaseModel]] = {
        "pretrain": Pretrain,
        "regularize": Regularize,
        "prune": Prune,
        "finetune": Training,
        "warmup": Warmup,
        "target": Target,
        "distill": Distill,
    }
    for key in path:
        part = inner.get(key, part)
    return part
