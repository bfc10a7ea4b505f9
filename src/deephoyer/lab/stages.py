"""The stages of a recipe: training, training with a penalty, pruning. The recipe around them is in `schema.py`.

Nothing is built or trained here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from deephoyer.errors import UserError, not_negative, shown, unknown
from deephoyer.lab.choices import GroupsChoice, PenaltyChoice, RuleChoice, ScoreChoice, named, several

if TYPE_CHECKING:
    from deephoyer.rules import OneNumber, Rule


class Part(BaseModel):
    """A part of a recipe: no key but those it has, each with what it says."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_yes(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes and on as true, which would count as 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if {int, float} & {kind, *get_args(kind)} and any(isinstance(part, bool) for part in within):
            raise UserError(f"should be a number; it is {shown(value)} (YAML reads yes and on as true, off as false).")
        return value


class Training(Part):
    """A stage of ordinary training."""

    epochs: int = Field(ge=0)
    """The length of the stage, in epochs."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer."""
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """The learning rate at the start of the schedule."""
    lr_warmup: int = Field(default=0, ge=0)
    """The number of epochs over which the learning rate rises from 0 to its schedule."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """The learning rate stays constant, is multiplied by `gamma` at milestones, or decays to 0 on a cosine."""
    milestones: tuple[int, ...] = ()
    """The epochs at which the `step` schedule lowers the learning rate."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """The factor of the learning rate at each milestone."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd."""
    nesterov: bool = False
    """Nesterov momentum for sgd."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay; decoupled for adamw."""

    @model_validator(mode="after")
    def _the_rate_goes_somewhere(self) -> Training:
        if (self.schedule == "step") != bool(self.milestones):
            raise UserError("milestones, a list of epochs, are required with schedule 'step' and only allowed there.")
        if list(self.milestones) != sorted(set(self.milestones)) or any(m < 1 for m in self.milestones):
            raise UserError(f"milestones {list(self.milestones)} must increase and start at 1 or later.")
        if self.lr_warmup > self.epochs:
            raise UserError(
                f"lr_warmup is {self.lr_warmup} epochs, but the stage has {self.epochs}; lr would never be reached."
            )
        return self


class Warmup(Part):
    """The strength rises from 0 over the first epochs."""

    kind: Literal["linear", "cosine"] = "linear"
    """The shape of the rise."""
    epochs: int = Field(ge=1)
    """The number of epochs of the rise."""


Strength = float | dict[str, float] | tuple[float, ...]
"""One number, one for each kind of group, or one for each epoch."""


def _numbers(strength: Strength) -> Iterable[float]:
    if isinstance(strength, dict):
        return strength.values()
    return strength if isinstance(strength, tuple) else (strength,)


class Regularize(Training):
    """Training with a penalty on groups of weights."""

    penalty: PenaltyChoice = "hoyer-square"
    """The penalty on the magnitudes of groups, by name or with settings (`deephoyer list penalties`)."""
    groups: GroupsChoice = "elements"
    """How weights are grouped (`deephoyer list groups`); join several with a plus."""
    strength: Strength
    """The factor of the penalty: a number, one for each kind of group, or a list with one for each epoch."""
    effective_density: float | None = Field(default=None, gt=0, lt=1)
    """The effective density to reach; the strength is then only an initial value, corrected after every epoch."""
    weigh: Literal["alike", "size"] = "alike"
    """`size` penalizes a weight in a large group as much as one in a small group."""
    warmup: Warmup | None = None
    """Raises the strength from 0 over the first epochs."""
    parameters: str | tuple[str, ...] | None = None
    """Globs that select parameters; without them, the weights of all layers."""

    @field_validator("strength")
    @classmethod
    def _strength_is_a_size(cls, choice: Strength) -> Strength:
        for value in _numbers(choice):
            not_negative(value, "strength")
        return choice

    @model_validator(mode="after")
    def _strength_fits(self) -> Regularize:
        kinds = [named(choice)[0] for choice in several(self.groups)]
        if isinstance(self.strength, dict) and set(self.strength) != set(kinds):
            raise UserError(f"strength has keys {sorted(self.strength)}, but the groups are {sorted(kinds)}.")
        if isinstance(self.strength, tuple):
            if len(self.strength) != self.epochs:
                raise UserError(
                    f"strength lists {len(self.strength)} values for {self.epochs} epochs; give one for each."
                )
            if self.warmup is not None:
                raise UserError(
                    "a list of strengths can't be combined with a warmup; remove it (regularize.warmup=null)."
                )
        if self.effective_density is not None:
            if self.warmup is not None:
                raise UserError("give a warmup or an effective_density, not both (regularize.warmup=null).")
            if isinstance(self.strength, tuple):
                raise UserError(
                    "give a list of strengths or an effective_density, not both (regularize.effective_density=null)."
                )
            if not all(_numbers(self.strength)):
                raise UserError("effective_density needs a positive initial strength, like 1e-5.")
        return self

    @property
    def penalizes(self) -> bool:
        """Whether there is a penalty at all: a strength of 0 is none."""
        return any(_numbers(self.strength))

    def schedules(self, steps_an_epoch: int) -> Any:
        """The strength as the regularizer takes it."""
        from deephoyer.strength import SCHEDULES, Listed

        if isinstance(self.strength, tuple):
            return Listed(self.strength, steps_an_epoch)
        if self.warmup is None:
            return self.strength
        shape = SCHEDULES[self.warmup.kind]
        steps = self.warmup.epochs * steps_an_epoch
        if isinstance(self.strength, dict):
            return {kind: shape(value, steps) for kind, value in self.strength.items()}
        return shape(self.strength, steps)


class PruneTarget(Part):
    """A size, time or accuracy to reach, instead of a value: one of these, as a fraction."""

    macs: float | None = Field(default=None, gt=0, le=1)
    """The fraction of MACs left after compaction."""
    density: float | None = Field(default=None, gt=0, le=1)
    """The fraction of weights left."""
    live: float | None = Field(default=None, gt=0, le=1)
    """As density, after removing idle weights, which cannot affect the output."""
    accuracy: float | None = Field(default=None, ge=0, le=1)
    """The minimum accuracy after pruning, on the images that select epochs."""
    drop: float | None = Field(default=None, ge=0, le=1)
    """The maximum loss of accuracy by pruning."""
    latency: float | None = Field(default=None, gt=0, le=1)
    """The fraction of the network's time on this machine; for coupled groups."""
    batch: int | None = Field(default=None, ge=1)
    """The batch size for timing, with a latency target; one if not given."""
    mode: Literal["eager", "cuda-graph", "compiled"] | None = None
    """How the network is run for timing; eager if not given."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The precision for timing; that of the weights if not given."""

    @model_validator(mode="after")
    def _one_of_them(self) -> PruneTarget:
        about_time = {"batch", "mode", "dtype"}
        if len(self.model_dump(exclude_none=True, exclude=about_time)) != 1:
            raise UserError("a target is one of macs, density, live, accuracy, drop and latency, like {macs: 0.4}.")
        if self.latency is None and (given := self.model_dump(exclude_none=True, include=about_time)):
            raise UserError(f"{min(given)} is only allowed with latency, like {{latency: 0.5, batch: 64}}.")
        return self


class Prune(Part):
    """A rule, by name or with settings, and its value, or a target that the value meets."""

    rule: RuleChoice = "std-ratio"
    """The rule that decides which groups are pruned, by name or with settings (`deephoyer list rules`)."""
    value: float | None = None
    """The rule's own setting `value`, for rules that have one; short for `rule: {name: …, value: …}`."""
    target: PruneTarget | None = None
    """A size, time or accuracy to reach, instead of a value."""
    score: ScoreChoice = None
    """The importance of groups (`deephoyer list scores`); without it, the method's own score, or the magnitude."""
    groups: GroupsChoice = "elements"
    """The groups that are kept or pruned as a whole (`deephoyer list groups`)."""
    parameters: str | tuple[str, ...] | None = None
    """Globs that select parameters; without them, the weights of all layers."""
    allow_empty: bool = False
    """Whether a layer may lose all its weights."""
    multiple: int = Field(default=1, ge=1)
    """Prune widths to multiples of this number."""

    @model_validator(mode="after")
    def _makes_a_rule(self) -> Prune:
        if self.multiple > 1 and len(several(self.groups)) > 1:
            raise UserError(f"multiple needs a single kind of group, like coupled, not {self.groups}.")
        rule, settings = named(self.rule)
        if self.target is not None and self.target.latency is not None:
            if self.groups != "coupled":
                value = "" if self.value is None else " prune.value=null"
                raise UserError(f"a latency target removes whole channels: also set prune.groups=coupled{value}.")
            if self.parameters is not None or self.allow_empty:
                raise UserError("a latency target applies to all layers: remove parameters and allow_empty.")
        if self.target is None:
            self.make()
        elif self.value is not None:
            raise UserError("give a value or a target, not both (prune.value=null).")
        elif set(settings) == {"value"}:
            raise UserError(f"give a value or a target, not both (prune.rule={rule}).")
        elif settings:
            raise UserError(f"a target needs a rule without settings, not {rule} with its (prune.rule=std-ratio).")
        else:
            self.rule_of_target()
        return self

    def rule_of_target(self) -> type[OneNumber]:
        """The rule whose value a target finds."""
        from deephoyer.rules import Absolute, Effective, StdRatio

        known = {kind.title: kind for kind in (StdRatio, Absolute, Effective)}
        if self.rule not in known:
            raise unknown("rule that a target can use", self.rule, known)
        return known[str(self.rule)]

    def make(self) -> Rule:
        """The rule itself, where no target is to find its value."""
        from deephoyer.rules import RULES

        settings = named(self.rule)[1]
        if self.value is not None and "value" in settings:
            raise UserError(
                f"the value is given twice, in prune.value and in the rule ({settings['value']}); remove one."
            )
        return RULES.make(self.rule, **({} if self.value is None else {"value": self.value}))
