"""What may stand in a recipe: a model, its data, and the stages that a run goes through.

Nothing is built or trained here; names are checked against the registries so that a slip shows
before anything starts. The registries bring torch, and are asked only when a recipe is checked.
Reading recipes from files is in `recipe.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deephoyer.errors import UserError, not_negative, shown, unknown

if TYPE_CHECKING:
    from deephoyer.rules import Rule, Threshold

STAGES = ("pretrain", "regularize", "prune", "finetune")
TITLES = {
    "start": "start",
    "pretrain": "dense",
    "regularize": "regularized",
    "prune": "pruned",
    "finetune": "finetuned",
}
"""What the network is called after each stage; its file in the run's folder bears that name."""
DESCRIPTIVE = ("about", "needs", "expect")
"""Keys that say something to a person and change nothing in a run."""

Choice = str | dict[str, Any]
"""A name, or a mapping with a name and settings."""

Choices = Choice | tuple[Choice, ...]
"""One or several; names alone may be joined by a plus, like filters+channels."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Training(_Part):
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


class Warmup(_Part):
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

    penalty: Choice = "hoyer-square"
    """The penalty on the magnitudes of groups, by name or with settings (`deephoyer list penalties`)."""
    groups: Choices = "elements"
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

    @field_validator("penalty")
    @classmethod
    def _known_penalty(cls, choice: Choice) -> Choice:
        from deephoyer.penalties import PENALTIES

        PENALTIES.make(**named(choice))
        return plain(choice)

    @field_validator("groups")
    @classmethod
    def _known_groups(cls, choice: Choices) -> Choices:
        return known_groups(choice)

    @field_validator("strength")
    @classmethod
    def _strength_is_a_size(cls, choice: Strength) -> Strength:
        for value in _numbers(choice):
            not_negative(value, "strength")
        return choice

    @model_validator(mode="after")
    def _one_strength_a_group(self) -> Regularize:
        kinds = [named(choice)["choice"] for choice in several(self.groups)]
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
        if self.effective_density is None:
            return self
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


class PruneTarget(_Part):
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

    @model_validator(mode="after")
    def _one_of_them(self) -> PruneTarget:
        if len(self.model_dump(exclude_none=True, exclude={"batch"})) != 1:
            raise UserError("a target is one of macs, density, live, accuracy, drop and latency, like {macs: 0.4}.")
        if self.batch is not None and self.latency is None:
            raise UserError("a batch goes with a latency, like {latency: 0.5, batch: 64}.")
        return self


class Prune(_Part):
    """A rule, by name or with settings, and its value, or a target that the value meets."""

    rule: Choice = "std-ratio"
    """Which groups go, by name or with settings (`deephoyer list rules`)."""
    value: float | None = None
    """The rule's own setting `value`, for rules that have one; short for `rule: {name: …, value: …}`."""
    target: PruneTarget | None = None
    """How small, or how good, instead of a value."""
    score: Choice | None = None
    """What groups are worth; without it what the method says, or the magnitude of their weights."""
    groups: Choices = "elements"
    """The groups that go or stay as wholes."""
    parameters: str | tuple[str, ...] | None = None
    """Globs of the parameters that are meant; without them, the weights of all layers."""
    allow_empty: bool = False
    """Whether a layer may lose everything."""
    multiple: int = Field(default=1, ge=1)
    """Widths are kept at multiples of this number."""

    @field_validator("groups")
    @classmethod
    def _known_groups(cls, choice: Choices) -> Choices:
        return known_groups(choice)

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, choice: Choice) -> Choice:
        from deephoyer.rules import RULES

        RULES[named(choice)["choice"]]
        return plain(choice)

    @field_validator("score")
    @classmethod
    def _known_score(cls, choice: Choice | None) -> Choice | None:
        from deephoyer.scores import SCORES

        if choice is None:
            return None
        SCORES.make(**named(choice))
        return plain(choice)

    @model_validator(mode="after")
    def _multiples_of_one_kind(self) -> Prune:
        if self.multiple > 1 and len(several(self.groups)) > 1:
            raise UserError(f"multiple goes with one kind of group, not {self.groups}; coupled has both sides in one.")
        return self

    @model_validator(mode="after")
    def _makes_a_rule(self) -> Prune:
        settings = named(self.rule)
        if self.target is None:
            self.make()
        elif self.value is not None or "value" in settings:
            raise UserError("give a value, or a target that finds one, not both (prune.value=null).")
        elif len(settings) > 1:
            raise UserError(f"a target goes with a rule that needs a value alone, not {self.rule}.")
        else:
            self.threshold()
        if self.target is not None and self.target.latency is not None and self.groups != "coupled":
            raise UserError(f"a latency goes with groups: coupled, not {self.groups}: whole channels must go.")
        return self

    def threshold(self) -> type[Threshold]:
        """The rule whose value a target finds."""
        from deephoyer.rules import Absolute, StdRatio

        known = {kind.title(): kind for kind in (StdRatio, Absolute)}
        if self.rule not in known:
            raise unknown("rule with a value to be found", self.rule, known)
        return known[str(self.rule)]

    def make(self) -> Rule:
        """The rule itself, where no target is to find its value."""
        from deephoyer.rules import RULES

        settings = named(self.rule)
        if self.value is not None and "value" in settings:
            raise UserError(f"the rule has a value of its own, {settings['value']}; leave out prune.value or that.")
        return RULES.make(**settings, **({} if self.value is None else {"value": self.value}))


class Teacher(_Part):
    """A teacher whose file does not say which model it is of."""

    file: str
    """The file with its weights."""
    model: Choice
    """The model that it is of."""

    @field_validator("model")
    @classmethod
    def _known_model(cls, choice: Choice) -> Choice:
        return known_model(choice)


class Distill(_Part):
    """Learning from the mean prediction of trained networks besides the labels, while regularizing and finetuning.

    Each teacher is the words of a run ("parts/lenet-5-teacher seed=1") or a file. With `keep` each is asked once, about
    every image in every position, in the recipe's precision; the answers stay on disk for later runs. That is as many
    passes over the images as there are positions.
    """

    teachers: tuple[str | Teacher, ...] = Field(min_length=1)
    """Each the words of a run ("parts/lenet-5-teacher seed=1") or a file."""
    temperature: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Softens the predictions of both sides."""
    weight: float = Field(default=0.7, ge=0, le=1)
    """The teachers' share of the loss; the labels have the rest."""
    keep: bool = False
    """Ask each teacher once about every image in every position, and keep the answers on disk for other runs."""

    @field_validator("teachers")
    @classmethod
    def _words_in_order(cls, teachers: tuple[str | Teacher, ...]) -> tuple[str | Teacher, ...]:
        return tuple(ordered(teacher) if isinstance(teacher, str) else teacher for teacher in teachers)


class Expect(_Part):
    """What the records of the recipe, as it is, came to: the mean over their seeds."""

    accuracy: float = Field(gt=0, le=1)
    """On the test images."""
    nonzeros: int | None = None
    """Weights left."""
    macs: int | None = None
    """MACs left, by the paper's counting."""
    minutes: float | None = None
    """How long a run took."""
    device: str | None = None
    """On what."""


class Recipe(_Part):
    """The whole job: a model, its data, the stages; `rounds` repeats regularize and prune before finetuning.

    A stage that is not there is not run.
    """

    about: str | None = None
    """What the recipe is about, in a sentence."""
    needs: str | None = None
    """What must be there first: data, other networks, a GPU."""
    expect: Expect | Literal["not yet run"] | None = None
    """What the records of this recipe came to."""
    model: Choice
    """The network, by name or with settings (`deephoyer list models`)."""
    data: Choice
    """The data set, by name or with settings (`deephoyer list data`)."""
    start: str | None = None
    """The network that the run begins with, as the words of another run or a file; without it, a new one."""
    seed: int = Field(default=0, ge=0)
    """Of everything that is random in the run."""
    batch_size: int = Field(default=100, ge=1)
    """Images in a step."""
    device: str = "auto"
    """`auto` is a GPU where there is one."""
    epoch_selection: Literal["held-out", "test-best"] = "held-out"
    """Which epoch of a stage is kept: the best on images held out of training, or on the test images themselves."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """The share of the training images that is held out where epochs are selected on it."""
    shift: int = Field(default=0, ge=0, le=16)
    """Random shifts of training images by up to so many pixels."""
    flip: bool = False
    """Random mirror images."""
    capture: Literal["auto", "off"] = "auto"
    """Whole training steps as CUDA graphs where that is possible."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """In what training computes."""
    channels_last: bool = False
    """The memory format of images and convolutions."""
    accumulate: int = Field(default=1, ge=1)
    """The parts of a batch whose gradients are computed one after the other, for one step."""
    compile: Literal["off", "blocks"] = "off"
    """Compile the blocks that a network repeats, for training steps."""
    joints: Literal["none", "gather"] = "none"
    """What `compact` may add to leave out channels that are dead in one layer alone."""
    distill: Distill | None = None
    """Learning from trained networks besides the labels."""
    rounds: int = Field(default=1, ge=1)
    """How often regularize and prune are repeated before finetuning."""
    method: Choice | None = None
    """A method that takes part in the stages, besides the penalty; a strength of 0 is no penalty."""
    pretrain: Training | None = None
    """Ordinary training of the dense network."""
    regularize: Regularize | None = None
    """Training with a penalty."""
    prune: Prune | None = None
    """What is small becomes zero."""
    finetune: Training | None = None
    """Training on, with the zeros fixed."""

    @field_validator("model")
    @classmethod
    def _known_model(cls, choice: Choice) -> Choice:
        return known_model(choice)

    @field_validator("method")
    @classmethod
    def _known_method(cls, choice: Choice | None) -> Choice | None:
        from deephoyer.lab.methods import METHODS

        if choice is None:
            return None
        METHODS.make(**named(choice))
        return plain(choice)

    @field_validator("start")
    @classmethod
    def _words_in_order(cls, words: str | None) -> str | None:
        return None if words is None else ordered(words)

    @field_validator("capture", "compile", mode="before")
    @classmethod
    def _off_is_a_word(cls, choice: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if choice is False else choice

    @field_validator("data")
    @classmethod
    def _known_data(cls, choice: Choice) -> Choice:
        from deephoyer.lab.data import DATASETS

        DATASETS[named(choice)["choice"]]
        return plain(choice)

    @field_validator("device")
    @classmethod
    def _known_device(cls, choice: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", choice):
            raise unknown("device", choice, ("auto", "cpu", "cuda", "cuda:0"))
        return choice

    @model_validator(mode="after")
    def _something_to_do(self) -> Recipe:
        if not any(getattr(self, stage) for stage in STAGES):
            raise UserError(f"there is no stage; a run has at least one of {', '.join(STAGES)}.")
        if self.rounds > 1 and not (self.regularize and self.prune):
            raise UserError("rounds repeats regularize and prune; both must be there (or rounds=1).")
        if self.distill and not (self.regularize or self.finetune):
            raise UserError("distill teaches while regularizing and finetuning; neither is there.")
        return self

    def stages(self) -> tuple[str, ...]:
        """What the run goes through, in order; "start" where it begins with another network."""
        present = tuple(stage for stage in STAGES if getattr(self, stage) is not None)
        return ("start", *present) if self.start is not None else present

    @property
    def result_file(self) -> str:
        """The file of the final network in the run's folder."""
        return f"{TITLES[self.stages()[-1]]}.safetensors"

    def networks(self) -> list[tuple[str, str | Teacher]]:
        """The networks that a run starts from or learns from, each with the key that names it."""
        start = [self.start] if self.start is not None else []
        teachers = self.distill.teachers if self.distill else ()
        return [("start", one) for one in start] + [("distill.teachers", one) for one in teachers]

    def settings(self) -> dict[str, Any]:
        """What a run does, as JSON has it: without seed, device, words to a person, and keys at their default."""
        content = self.model_dump(mode="json", exclude_defaults=True, exclude={"seed", "device", *DESCRIPTIVE})
        content["data"] = what_data(content["data"])
        return dict(_whole(content))

    def anywhere(self) -> Recipe:
        """The same without what is this machine's alone, as others get to see it."""
        return self.model_copy(update={"data": what_data(self.data)})

    def digest(self) -> str:
        """The recipe's identity: the same for runs that differ by seed or device alone, whatever it is called."""
        text = json.dumps(self.settings(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)


def _whole(value: Any) -> Any:
    """1.0 as 1, everywhere: they are the same setting."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def named(choice: str | Mapping[str, Any]) -> dict[str, Any]:
    """A name, or a mapping with a name and settings, as the arguments of `Registry.make`.

    >>> named({"name": "transformed-l1", "a": 2.0})
    {'choice': 'transformed-l1', 'a': 2.0}
    """
    if isinstance(choice, str):
        return {"choice": choice}
    settings = dict(choice)
    if not isinstance(settings.get("name"), str):
        raise UserError(f"{shown(dict(choice))} has no name.")
    for word in ("self", "choice"):
        if word in settings:
            raise UserError(f"{shown(dict(choice))}: {word!r} is not a setting.")
    return {"choice": settings.pop("name"), **settings}


def plain(choice: Choice) -> Choice:
    """A mapping that holds nothing but a name as that name."""
    return choice["name"] if isinstance(choice, dict) and set(choice) == {"name"} else choice


def what_data(choice: Choice) -> Choice:
    """A choice of data without what is this machine's alone: where it lies, how many workers read it.

    >>> what_data({"name": "folder", "path": "/disk/flowers", "size": 224})
    {'name': 'folder', 'size': 224}
    """
    if isinstance(choice, str):
        return choice
    return plain({key: value for key, value in choice.items() if key not in ("path", "workers")})


def several(choices: Choices) -> list[Choice]:
    """One or several choices as a list.

    >>> several("filters+channels")
    ['filters', 'channels']
    """
    if isinstance(choices, str):
        return [name.strip() for name in choices.split("+")]
    return list(choices) if isinstance(choices, tuple) else [choices]


def known_model(choice: Choice) -> Choice:
    """A model's name, checked."""
    from deephoyer.lab.models import maker

    maker(named(choice)["choice"])
    return plain(choice)


def known_groups(choices: Choices) -> Choices:
    """Groupings, checked; one that needs the network's graph gets that from the run."""
    from deephoyer.groups import GROUPINGS

    for choice in several(choices):
        settings = named(choice)
        kind = GROUPINGS[settings["choice"]]
        if not getattr(kind, "needs_graph", False):
            GROUPINGS.make(**settings)
            continue
        taken = list(inspect.signature(kind).parameters)[2:]
        for key in [key for key in settings if key != "choice" and key not in taken]:
            raise UserError(f"group {settings['choice']!r} has no setting {key!r}; its settings: {taken or 'none'}.")
    return choices if isinstance(choices, tuple) else plain(choices)


def is_file(words: str) -> bool:
    """Whether a network is named by its file, and not by the words of the run that makes it."""
    return words.endswith((".safetensors", ".pt", ".pth"))


def ordered(words: str) -> str:
    """The words of a run with the overrides in order, so that the same words are written the same; a file as it is.

    >>> ordered("parts/lenet-5-teacher  seed=1 epoch_selection=test-best")
    'parts/lenet-5-teacher epoch_selection=test-best seed=1'
    """
    if is_file(words):
        return words
    try:
        base, *overrides = shlex.split(words)
    except ValueError as why:
        raise UserError(f"{words!r} are not the words of a run, like 'parts/lenet-5-teacher seed=1': {why}.") from None
    return shlex.join([base, *sorted(overrides)])


def keys() -> dict[str, type[BaseModel]]:
    """Every key that may stand in a recipe, dotted, with the part it belongs to."""
    return dict(_keys_of(Recipe, ""))


_INNER: dict[str, type[BaseModel]] = {
    "pretrain": Training,
    "regularize": Regularize,
    "prune": Prune,
    "finetune": Training,
    "warmup": Warmup,
    "target": PruneTarget,
    "distill": Distill,
    "expect": Expect,
}


def _keys_of(part: type[BaseModel], prefix: str) -> Iterable[tuple[str, type[BaseModel]]]:
    for key in part.model_fields:
        yield prefix + key, part
        if key in _INNER:
            yield from _keys_of(_INNER[key], f"{prefix}{key}.")
