"""The keys of a recipe: a model, its data, and the stages of a run.

Nothing is built or trained here. The stages' own keys are in `stages.py`, what is chosen by a name in `choices.py`;
reading recipes from files is in `recipe.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from deephoyer.errors import UserError
from deephoyer.lab.choices import DataChoice, MethodChoice, ModelChoice, named, plain, what_data
from deephoyer.lab.stages import Part, Prune, Regularize, Training

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
"""Keys that only describe a recipe and do not affect a run."""


TORCH_FILES = (".pt", ".pth", ".tar", ".ckpt", ".bin")
"""How files that `torch.save` wrote are called: weights.pth, model_best.pth.tar, last.ckpt, pytorch_model.bin."""
OVERRIDE = re.compile(r"\s'?[a-z_]+(\.[a-z_]+)*=")
"""What stands in the words of a run but in no usual name of a file."""


def is_file(words: str) -> bool:
    """Whether a network is given as a file, not as the run that makes it, whose last override may name a file, too.

    >>> is_file("my weights/resnet50.pth"), is_file("parts/resnet-50-tiny-dense start=resnet50.pth")
    (True, False)
    """
    return words.endswith((".safetensors", *TORCH_FILES)) and not OVERRIDE.search(words)


def ordered(words: str) -> str:
    """The words of a run with the overrides in order, so that the same words are written the same; a file as it is.

    They mean the same in that order: what changes a value further stays behind the override that sets it.

    >>> ordered("parts/lenet-5-teacher  seed=1 epoch_selection=test-best")
    'parts/lenet-5-teacher epoch_selection=test-best seed=1'
    >>> ordered("demo seed=1 data=folder data.path=flowers")
    'demo data=folder data.path=flowers seed=1'
    """
    if is_file(words):
        return words
    try:
        base, *overrides = shlex.split(words)
    except ValueError as why:
        raise UserError(f"{words!r} does not name a run, like 'parts/lenet-5-teacher seed=1': {why}.") from None
    places: list[tuple[tuple[str, ...], str]] = []
    for word in overrides:
        key = word.partition("=")[0]
        before = (place for place, other in reversed(places) if f"{key}.".startswith(f"{other}."))
        places.append(((*next(before, ()), word), key))
    return shlex.join([base, *(place[-1] for place, _ in sorted(places))])


def known_device(choice: str) -> str:
    """The device that a recipe or a command names, refused if there is none of that name."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", choice):
        raise UserError(f"{choice!r} is not a device: it is auto, cpu, cuda, or one GPU's number like cuda:0.")
    return choice


Words = Annotated[str, AfterValidator(ordered)]


class Teacher(Part):
    """A teacher whose file does not name its model."""

    file: str
    """The file with its weights."""
    model: ModelChoice
    """Its model."""


class Distill(Part):
    """Distillation from the mean prediction of trained networks, while regularizing and finetuning.

    Each teacher is a run ("parts/lenet-5-teacher seed=1") or a file. With `keep` its predictions for every image in
    every shifted position are computed once, in the recipe's precision, and cached on disk for later runs. That takes
    as many passes over the images as there are positions.
    """

    teachers: tuple[Words | Teacher, ...] = Field(min_length=1)
    """Each is a run ("parts/lenet-5-teacher seed=1") or a file."""
    temperature: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Softens the predictions of teachers and student."""
    weight: float = Field(default=0.7, ge=0, le=1)
    """The weight of the teachers in the loss; the labels have the rest."""
    features: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The weight of the squared distance to the teacher's features (what its last linear layer is given), relative."""
    keep: bool = False
    """Compute each teacher's predictions for every shifted image once, and cache them on disk for other runs."""

    @model_validator(mode="after")
    def _features_of_one(self) -> Distill:
        if self.features and len(self.teachers) > 1:
            raise UserError(f"features of one teacher can be learned, not of {len(self.teachers)}; name one teacher.")
        if self.features and self.keep:
            raise UserError("features are computed in each step and can't be kept (distill.keep=false).")
        return self


class Expect(Part):
    """The results of the recipe's records: means over their seeds."""

    accuracy: float = Field(gt=0, le=1)
    """Test accuracy."""
    nonzeros: int | None = None
    """Weights left."""
    macs: int | None = None
    """MACs left: by the paper's counting on MNIST, executed ones otherwise."""
    minutes: float | None = None
    """The duration of a run."""
    device: str | None = None
    """The device of that run."""


class Recipe(Part):
    """A complete run: a model, its data, the stages; `rounds` repeats regularize and prune before finetuning.

    A stage that is missing is skipped.
    """

    about: str | None = None
    """A description of the recipe, in a sentence."""
    needs: str | None = None
    """Requirements: data, other networks, a GPU."""
    expect: Expect | Literal["not yet run"] | None = None
    """The results of this recipe's records."""
    model: ModelChoice
    """The network, by name or with settings (`deephoyer list models`)."""
    data: DataChoice
    """The data set, by name or with settings (`deephoyer list data`)."""
    start: Words | None = None
    """The network to start from: another run or a file; without it, a new one."""
    seed: int = Field(default=0, ge=0)
    """The seed of all random numbers in the run."""
    batch_size: int = Field(default=100, ge=1)
    """Images per step."""
    device: str = "auto"
    """`auto` uses a GPU if there is one."""
    epoch_selection: Literal["held-out", "test-best", "last"] = "held-out"
    """Which epoch of a stage is kept: the best on held-out training images, the best on test images, or the last."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """The fraction of training images held out to select epochs."""
    shift: int = Field(default=0, ge=0, le=16)
    """Random shifts of training images, up to this many pixels."""
    flip: bool = False
    """Random horizontal flips of training images."""
    capture: Literal["auto", "off"] = "auto"
    """Captures whole training steps as CUDA graphs where possible."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """The precision of training."""
    channels_last: bool = False
    """Images and convolutions channels last in memory on a GPU; on a CPU they always are."""
    accumulate: int = Field(default=1, ge=1)
    """The number of parts of a batch whose gradients are computed in turn, for one step."""
    compile: Literal["off", "blocks"] = "off"
    """Compiles the repeated blocks of a network for training steps."""
    joints: Literal["none", "gather"] = "none"
    """`gather` lets `compact` remove channels that are dead in only one layer, with index selections around it."""
    distill: Distill | None = None
    """Distillation from trained networks."""
    rounds: int = Field(default=1, ge=1)
    """How often regularize and prune are repeated before finetuning."""
    method: MethodChoice = None
    """A method that acts in the stages, in addition to the penalty (a strength of 0 is no penalty)."""
    pretrain: Training | None = None
    """Ordinary training of the dense network."""
    regularize: Regularize | None = None
    """Training with a penalty."""
    prune: Prune | None = None
    """Sets the least important groups to zero."""
    finetune: Training | None = None
    """Training with the zeros fixed."""

    @field_validator("capture", "compile", mode="before")
    @classmethod
    def _off_is_a_word(cls, choice: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if choice is False else choice

    @field_validator("device")
    @classmethod
    def _known_device(cls, choice: str) -> str:
        return known_device(choice)

    @model_validator(mode="after")
    def _something_to_do(self) -> Recipe:
        if not any(getattr(self, stage) for stage in STAGES):
            raise UserError(f"there is no stage; a recipe needs at least one of {', '.join(STAGES)}.")
        if self.rounds > 1 and not (self.regularize and self.prune):
            raise UserError("rounds repeats regularize and prune; the recipe needs both (or rounds=1).")
        if self.distill and not (self.regularize or self.finetune):
            raise UserError("distill applies to regularize and finetune; the recipe has neither.")
        target = self.prune.target if self.prune else None
        if self.joints != "none" and target is not None and target.latency is not None:
            raise UserError("a latency target can't be combined with joints, which cost time; remove joints.")
        if self.epoch_selection == "last" and target is not None and (target.accuracy, target.drop) != (None, None):
            raise UserError(
                "epoch_selection: last holds no images out: a target of accuracy or drop would be met on test images. "
                "Use epoch_selection: held-out (or test-best, which says so)."
            )
        return self

    def stages(self) -> tuple[str, ...]:
        """The stages of the run, in order; "start" first if it starts from another network."""
        present = tuple(stage for stage in STAGES if getattr(self, stage) is not None)
        return ("start", *present) if self.start is not None else present

    @property
    def epochs(self) -> int:
        """The epochs of all stages and rounds."""
        each = {stage: getattr(getattr(self, stage), "epochs", 0) for stage in STAGES}
        return sum(each.values()) + (self.rounds - 1) * each["regularize"]

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
        """The settings that determine a run, as JSON: without seed, device, description, and keys at their default."""
        content = self.model_dump(mode="json", exclude_defaults=True, exclude={"seed", "device", *DESCRIPTIVE})
        content["data"] = what_data(content["data"])
        return dict(_whole(content))

    def anywhere(self) -> Recipe:
        """The same without settings of this machine, for publication."""
        return self.model_copy(update={"data": what_data(self.data)})

    def here(self, place: Mapping[str, Any]) -> Recipe:
        """The same with settings of this machine, like {"path": "/disk/flowers"}."""
        name, settings = named(self.data)
        return self.model_copy(update={"data": plain({"name": name, **settings, **place})})

    def digest(self) -> str:
        """The recipe's identity: the same for runs that differ only by seed or device, whatever its name."""
        text = json.dumps(self.settings(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)


def _whole(value: Any) -> Any:
    """1.0 as 1, everywhere, as they are the same setting."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
