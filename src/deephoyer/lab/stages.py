"""The stages of a recipe: training, training with a penalty, pruning. The recipe around them is in `schema.py`.

Nothing is built or trained here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deephoyer.errors import UserError, not_negative, unknown
from deephoyer.lab.choices import GroupsChoice, PenaltyChoice, RuleChoice, ScoreChoice, named, several

if TYPE_CHECKING:
    from deephoyer.rules import OneNumber, Rule


class Part(BaseModel):
    """A part of a recipe: no key but those it has, each with what it says."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Training(Part):
    """A stage of ordinary training."""

    epochs: int = Field(ge=0)
    """How long the stage lasts."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """What takes the steps."""
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """The learning rate that the schedule begins with."""
    lr_warmup: int = Field(default=0, ge=0)
    """The epochs in which the rate rises to where its schedule has it."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """How the rate goes on: it stays, falls at milestones, or falls to 0 along a cosine."""
    milestones: tuple[int, ...] = ()
    """The epochs at which a rate with steps falls."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """What the rate is multiplied by at each milestone."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of sgd."""
    nesterov: bool = False
    """Of sgd: Nesterov's momentum."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Ordinary weight decay; decoupled for adamw."""

    @model_validator(mode="after")
    def _the_rate_goes_somewhere(self) -> Training:
        if (self.schedule == "step") != bool(self.milestones):
            raise UserError("schedule 'step' needs milestones, a list of epochs, and only that one takes them.")
        if list(self.milestones) != sorted(set(self.milestones)) or any(m < 1 for m in self.milestones):
            raise UserError(f"milestones {list(self.milestones)} must rise and start at 1 or later.")
        if self.lr_warmup > self.epochs:
            raise UserError(
                f"lr_warmup is {self.lr_warmup} epochs, but the stage has {self.epochs}; lr would not be reached."
            )
        return self


class Warmup(Part):
    """The strength rises from 0 over the first epochs."""

    kind: Literal["linear", "cosine"] = "linear"
    """The shape in which the strength rises."""
    epochs: int = Field(ge=1)
    """How many epochs it takes."""


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
    """How weights are cut into groups (`deephoyer list groups`); several are joined by a plus."""
    strength: Strength
    """What the penalty is multiplied by: a number, one for each kind of group, or a list with one for each epoch."""
    effective_density: float | None = Field(default=None, gt=0, lt=1)
    """The effective density to end at; the strength is then a first guess, and corrected after every epoch."""
    weigh: Literal["alike", "size"] = "alike"
    """`size` presses a weight in a large group as hard as one in a small group."""
    warmup: Warmup | None = None
    """A rise of the strength over the first epochs."""
    parameters: str | tuple[str, ...] | None = None
    """Globs of the parameters that are meant; without them, the weights of all layers."""

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
            raise UserError(f"strength has {sorted(self.strength)}, the groups are {sorted(kinds)}.")
        if isinstance(self.strength, tuple):
            if len(self.strength) != self.epochs:
                raise UserError(
                    f"strength lists {len(self.strength)} values for {self.epochs} epochs; give one for each."
                )
            if self.warmup is not None:
                raise UserError("a list of strengths says it all; leave out the warmup (regularize.warmup=null).")
        if self.effective_density is not None:
            if self.warmup is not None:
                raise UserError("give a warmup or an effective_density to end at, not both (regularize.warmup=null).")
            if isinstance(self.strength, tuple):
                raise UserError(
                    "give a list of strengths or an effective_density to end at, not both "
                    "(regularize.effective_density=null)."
                )
            if not all(_numbers(self.strength)):
                raise UserError("a strength of 0 can't be corrected; give a small one, like 1e-5.")
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
    """How small, or how good, instead of a value: one of these, as a share."""

    macs: float | None = Field(default=None, gt=0, le=1)
    """The share of the MACs that is left after compaction."""
    density: float | None = Field(default=None, gt=0, le=1)
    """The share of the weights that is left."""
    live: float | None = Field(default=None, gt=0, le=1)
    """As density, once the weights are gone that carry nothing of the input to an output."""
    accuracy: float | None = Field(default=None, ge=0, le=1)
    """The accuracy, on the images that select epochs, that pruning must leave."""
    drop: float | None = Field(default=None, ge=0, le=1)
    """The accuracy that pruning may cost."""
    latency: float | None = Field(default=None, gt=0, le=1)
    """The share of the network's own time on this machine; for coupled groups."""
    batch: int | None = Field(default=None, ge=1)
    """Images that are timed at once where the target is a latency; without it, one."""
    mode: Literal["eager", "cuda-graph", "compiled"] | None = None
    """How the network is run when it is timed; without it, eager."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The precision in which it is timed; without it, that of its weights."""

    @model_validator(mode="after")
    def _one_of_them(self) -> PruneTarget:
        about_time = {"batch", "mode", "dtype"}
        if len(self.model_dump(exclude_none=True, exclude=about_time)) != 1:
            raise UserError("a target is one of macs, density, live, accuracy, drop and latency, like {macs: 0.4}.")
        if self.latency is None and (given := self.model_dump(exclude_none=True, include=about_time)):
            raise UserError(f"a {min(given)} goes with a latency, like {{latency: 0.5, batch: 64}}.")
        return self


class Prune(Part):
    """A rule, by name or with settings, and its value, or a target that the value meets."""

    rule: RuleChoice = "std-ratio"
    """Which groups go, by name or with settings (`deephoyer list rules`)."""
    value: float | None = None
    """The rule's own setting `value`, for rules that have one; short for `rule: {name: …, value: …}`."""
    target: PruneTarget | None = None
    """How small, or how good, instead of a value."""
    score: ScoreChoice = None
    """What groups are worth; without it what the method says, or the magnitude of their weights."""
    groups: GroupsChoice = "elements"
    """The groups that go or stay as wholes."""
    parameters: str | tuple[str, ...] | None = None
    """Globs of the parameters that are meant; without them, the weights of all layers."""
    allow_empty: bool = False
    """Whether a layer may lose everything."""
    multiple: int = Field(default=1, ge=1)
    """Widths are kept at multiples of this number."""

    @model_validator(mode="after")
    def _makes_a_rule(self) -> Prune:
        if self.multiple > 1 and len(several(self.groups)) > 1:
            raise UserError(f"multiple goes with one kind of group, not {self.groups}; coupled has both sides in one.")
        settings = named(self.rule)[1]
        if self.target is not None and self.target.latency is not None:
            if self.groups != "coupled":
                value = "" if self.value is None else " prune.value=null"
                raise UserError(f"a latency takes whole channels away: say prune.groups=coupled{value}, too.")
            if self.parameters is not None or self.allow_empty:
                raise UserError("a latency is of all layers: leave out parameters and allow_empty.")
        if self.target is None:
            self.make()
        elif self.value is not None or "value" in settings:
            raise UserError("give a value, or a target that finds one, not both (prune.value=null).")
        elif settings:
            raise UserError(f"a target goes with a rule that needs a value alone, not {self.rule}.")
        else:
            self.rule_of_target()
        return self

    def rule_of_target(self) -> type[OneNumber]:
        """The rule whose value a target finds."""
        from deephoyer.rules import Absolute, Effective, StdRatio

        known = {kind.title: kind for kind in (StdRatio, Absolute, Effective)}
        if self.rule not in known:
            raise unknown("rule with a value to be found", self.rule, known)
        return known[str(self.rule)]

    def make(self) -> Rule:
        """The rule itself, where no target is to find its value."""
        from deephoyer.rules import RULES

        settings = named(self.rule)[1]
        if self.value is not None and "value" in settings:
            raise UserError(f"the rule has a value of its own, {settings['value']}; leave out prune.value or that.")
        return RULES.make(self.rule, **({} if self.value is None else {"value": self.value}))
