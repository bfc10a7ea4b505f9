"""A run: pretrain, regularize, prune, finetune, as a recipe says, resumable after a kill at any moment.

One loop serves all stages. Which model, which data and which penalty are names in the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer import data as datasets
from deephoyer import models, targets
from deephoyer.data import Dataset
from deephoyer.errors import UserError
from deephoyer.files import write_atomically
from deephoyer.groups import Grouping
from deephoyer.masks import Masks, prune
from deephoyer.penalties import PENALTIES
from deephoyer.regularizer import Regularizer
from deephoyer.rules import Rule
from deephoyer.structure import Coupled
from deephoyer.train import batches, checkpoint, environment
from deephoyer.train.distill import Teachers
from deephoyer.train.folder import RunFolder
from deephoyer.train.progress import Silent
from deephoyer.train.rates import make_optimizer, rate_at, set_rate
from deephoyer.train.schema import STAGES, Prune, Recipe, Regularize, Target, Training, named
from deephoyer.train.step import CapturedStep, Forward, PlainStep

SAVE_SECONDS = 5.0
"""A checkpoint is written at the end of an epoch when the last one is older than this."""


@dataclass
class State:
    """Where a run stands: all that a checkpoint holds besides tensors."""

    stage: str = STAGES[0]
    epoch: int = 0
    best: float = -1.0
    best_epoch: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)
    selected: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    prune_value: float | None = None
    metrics_size: int = 0
    regularizer: dict[str, Any] | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> State:
        """Of a checkpoint; what an older version did not write has its default."""
        strange = [key for key in content if key not in {f.name for f in fields(cls)}]
        if strange:
            raise UserError(f"the checkpoint is of another version of deephoyer: it has {strange[0]!r} in it.")
        return cls(**content)


class Run:
    """Takes a recipe through its stages in a folder. `execute()` starts or resumes."""

    def __init__(self, recipe: Recipe, folder: str | Path, progress: Silent | None = None):
        self.recipe, self.folder = recipe, RunFolder(folder)
        self.progress = progress or Silent()
        self.state = State()
        self.masks: Masks | None = None
        self._best: dict[str, Tensor] = {}
        self._saved = time.monotonic()

    def execute(self) -> Run:
        """Runs what is left to run; afterwards `model`, `masks` and `state` are the final ones."""
        self.folder.open()
        try:
            with self.progress:
                resumed = self._prepare()
                while self.state.stage in STAGES:
                    self._stage(self.state.stage, resumed)
                    resumed = {}
        finally:
            self.folder.close()
        return self

    def finished(self) -> bool:
        return self.state.stage not in STAGES

    # Starting and resuming

    def _prepare(self) -> dict[str, Tensor]:
        """Builds everything, and takes up the newest checkpoint: returns its tensors."""
        found = checkpoint.newest(self.folder.checkpoints)
        if found:
            self.state = State.read(found[1])
            for trouble in found[2]:
                self.progress.note(f"{trouble} The one before it is used.")
        self.folder.check(self.recipe, self.state.stage, self.state.epoch)
        self.device = environment.pick_device(self.recipe.device)
        self._build()
        if not self.finished():
            write_atomically(self.folder / "recipe.yaml", self.recipe.to_yaml().encode())
            self.folder.write_json("environment.json", environment.describe(self.device))
        self.folder.cut_metrics(self.state.metrics_size)
        return self._restore(found[0]) if found else {}

    def _build(self) -> None:
        self.data: Dataset = datasets.load(**_renamed(named(self.recipe.data))).to(self.device).in_floats()
        torch.manual_seed(batches.seed_of(self.recipe.seed, "weights"))
        self.model = self.fresh_model()
        if self.recipe.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        count = len(self.data.train_x)
        everything = torch.arange(count)
        if self.recipe.select == "held-out":
            # The same images for every seed, so that runs can be compared on them.
            everything = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        held = round(self.recipe.held_out * count) if self.recipe.select == "held-out" else 0
        self.held_out = everything[:held].to(self.device)
        self.pool = everything[held:].sort().values.to(self.device)
        if len(self.pool) < 1:
            raise UserError(f"held_out: {self.recipe.held_out} of {count} images leaves none to train on.")

    def _restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "masks": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        self._best = {n: t.to(self.device) for n, t in parts["best"].items()}
        if parts["masks"]:
            self.masks = Masks.from_state_dict(parts["masks"], self.model)
        if self.state.stage in STAGES and self.state.epoch:
            self.progress.note(f"resumes {self.folder.path} in stage {self.state.stage} after epoch {self.state.epoch}")
        return parts["optimizer"]

    # Stages

    def _stage(self, stage: str, resumed: dict[str, Tensor]) -> None:
        began = time.monotonic()
        spent = self.state.seconds.get(stage, 0.0)
        if stage == "prune":
            self._prune(self.recipe.prune)
            title = "pruned"
        else:
            settings = getattr(self.recipe, stage)
            if stage == "pretrain" and settings.checkpoint:
                checkpoint.fill(self.model, Path(settings.checkpoint), "pretrain.checkpoint")
            else:
                self._train(stage, settings, resumed, began - spent)
            title = {"pretrain": "dense", "regularize": "regularized", "finetune": "finetuned"}[stage]
            if stage != "finetune":
                checkpoint.write_weights(self.folder / f"{title}.safetensors", self.model)
        self.state.accuracy[title] = self.accuracy(self.data.test_x, self.data.test_y)
        self.state.seconds[stage] = time.monotonic() - began + spent
        self._advance()

    def _prune(self, settings: Prune) -> None:
        groups = self._groups(settings.groups)
        rule = settings.make() if settings.target is None else self._aimed(settings, settings.target, groups)
        self.masks = prune(self.model, rule, groups, settings.select)

    def _aimed(self, settings: Prune, target: Target, groups: list[str | Grouping]) -> Rule:
        """The rule with the value that meets the target; images that this run may select by decide on accuracy."""
        x, y = self.data.test_x, self.data.test_y
        if self.recipe.select == "held-out":
            x, y = self.data.train_x[self.held_out], self.data.train_y[self.held_out]
        example = self.data.floats(self.data.test_x[:1])
        if target.macs is not None:
            goal = targets.macs(self.model, example, target.macs)
        elif target.density is not None:
            goal = targets.density(self.model, target.density)
        else:
            least = self.accuracy(x, y) - target.drop if target.drop is not None else target.accuracy
            assert least is not None
            goal = targets.accuracy(lambda: self.accuracy(x, y), least)
        found = targets.value_for(goal, self.model, settings.threshold(), groups, settings.select)
        self.state.prune_value = found.value
        self.progress.note(f"prune: {settings.rule} {found.value:.4g}, where {goal.name} is {found.number:.4g}")
        return settings.threshold()(found.value)

    def _advance(self) -> None:
        following = STAGES.index(self.state.stage) + 1
        self.state.stage = STAGES[following] if following < len(STAGES) else "done"
        self.state.epoch, self.state.best, self.state.best_epoch = 0, -1.0, 0
        self.state.regularizer, self.state.optimizer = None, {}
        self._best = {}
        self._save({})

    def _train(self, stage: str, settings: Training, resumed: dict[str, Tensor], began: float) -> None:
        steps = max(1, len(self.pool) // min(self.recipe.batch_size, len(self.pool)))
        captured = self._captures()
        regularizer = self._regularizer(settings, steps) if isinstance(settings, Regularize) else None
        optimizer = make_optimizer(settings, self.model.parameters(), captured)
        if resumed or self.state.optimizer:
            checkpoint.refill(optimizer, resumed, self.state.optimizer)
        if self.masks is not None:
            self.masks.hold(optimizer, self.model)
        teachers = self._teachers() if self.recipe.distill and stage != "pretrain" else None
        step = (CapturedStep if captured else PlainStep)(self._loss_with(teachers), optimizer, regularizer, self.device)
        self.progress.stage(stage, settings.epochs, self.state.epoch)
        for epoch in range(self.state.epoch, settings.epochs):
            line = self._epoch(stage, settings, epoch, step)
            self.state.seconds[stage] = time.monotonic() - began
            self.folder.add_metrics(line)
            self.progress.epoch(line)
            if time.monotonic() - self._saved > SAVE_SECONDS and epoch + 1 < settings.epochs:
                self._save_within(optimizer, regularizer)
        if self._best and stage != "regularize":
            self.model.load_state_dict(self._best)
            self.state.selected[stage] = self.state.best_epoch

    def _epoch(self, stage: str, settings: Training, epoch: int, step: PlainStep) -> dict[str, Any]:
        began = time.monotonic()
        recipe = self.recipe
        seed = batches.seed_of(recipe.seed, stage, epoch)
        torch.manual_seed(seed)  # for dropout
        drawn = batches.draw(self.pool, recipe.batch_size, recipe.shift, recipe.flip, seed)
        self.model.train()
        step.restart()
        now = None
        for i in range(len(drawn)):
            rate = rate_at(settings, epoch * len(drawn) + i, len(drawn))
            if rate != now:
                set_rate(step.optimizer, rate)
                now = rate
            step(drawn.step(i))
        loss = step.loss.item() / len(drawn)
        if not math.isfinite(loss):
            raise UserError(
                f"{stage}: the loss is {loss} in epoch {epoch + 1}; the last good checkpoint is in "
                f"{self.folder.checkpoints}. A lower lr or strength may help."
            )
        self.state.epoch = epoch + 1
        line = {
            "stage": stage,
            "epoch": epoch + 1,
            "loss": loss,
            "lr": rate_at(settings, epoch * len(drawn), len(drawn)),
        }
        line |= self._watch(stage)
        if step.regularizer is not None:
            line["penalty"] = step.regularizer.loss().item()
            line["effective_density"] = step.regularizer.effective_density().item()
        return line | {"seconds": round(time.monotonic() - began, 3)}

    def _watch(self, stage: str) -> dict[str, float]:
        """The accuracy that this run may select by, after an epoch; keeps the weights of the best one."""
        if self.recipe.select == "held-out":
            key, now = "held_out", self.accuracy(self.data.train_x[self.held_out], self.data.train_y[self.held_out])
        else:
            key, now = "test", self.accuracy(self.data.test_x, self.data.test_y)
        if now > self.state.best and stage != "regularize":
            self.state.best, self.state.best_epoch = now, self.state.epoch
            self._best = {n: t.clone() for n, t in self.model.state_dict().items()}
        return {key: now}

    # Parts of a step

    def _loss_with(self, teachers: Teachers | None) -> Forward:
        half = self.recipe.precision == "bfloat16"

        def loss(index: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
            x, y = batches.images(self.data, index, shift, flip, self.recipe.shift)
            if self.recipe.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                logits = self.model(x)
            logits = logits.float()
            return teachers.loss(logits, y, x, index, shift, flip) if teachers else F.cross_entropy(logits, y)

        return loss

    def _teachers(self) -> Teachers:
        settings = self.recipe.distill
        assert settings is not None
        made = []
        for path in settings.checkpoints:
            teacher = models.make(**_renamed(named(settings.model))).to(self.device)
            checkpoint.fill(teacher, Path(path), "distill.checkpoints")
            if self.recipe.channels_last:
                teacher = teacher.to(memory_format=torch.channels_last)
            made.append(teacher)
        recipe, half = self.recipe, self.recipe.precision == "bfloat16"
        teachers = Teachers(made, self.data, recipe.shift, recipe.flip, settings.temperature, settings.weight, half)
        when = "each batch" if teachers.table is None else "every image"
        self.progress.note(f"{'the teacher is' if len(made) == 1 else f'{len(made)} teachers are'} asked for {when}")
        return teachers

    def _captures(self) -> bool:
        return self.device.type == "cuda" and self.recipe.capture == "auto"

    def _regularizer(self, settings: Regularize, steps_an_epoch: int) -> Regularizer:
        made = Regularizer(
            self.model,
            PENALTIES.make(**named(settings.penalty)),
            self._groups(settings.groups),
            settings.schedules(steps_an_epoch),
            settings.select,
            weigh=settings.weigh,
        )
        if self.state.regularizer:
            made.load_state_dict(self.state.regularizer)
        return made

    def _groups(self, names: str) -> list[str | Grouping]:
        """The groupings of a recipe's words; coupled groups need the network's graph."""
        return [self._coupled() if name == "coupled" else name for name in names.split("+")]

    def _coupled(self) -> Coupled:
        return Coupled(self.model, self.data.floats(self.data.test_x[:1]))

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """The share of images that the model gets right, in eval mode."""
        return int((self.predictions(self.model, x) == y).sum()) / len(x)

    @torch.inference_mode()
    def predictions(self, model: nn.Module, x: Tensor, batch: int = 1000) -> Tensor:
        """The class that a model takes each image for, in eval mode."""
        model.eval()
        return torch.cat([model(self.data.floats(part)).argmax(1) for part in x.split(batch)])

    def fresh_model(self) -> nn.Module:
        """A newly made network of the recipe's kind, where the run takes place."""
        return models.make(**_renamed(named(self.recipe.model))).to(self.device)

    # Saving

    def _save_within(self, optimizer: torch.optim.Optimizer, regularizer: Regularizer | None) -> None:
        tensors, self.state.optimizer = checkpoint.flatten(optimizer.state_dict())
        self.state.regularizer = regularizer.state_dict() if regularizer else None
        self._save(tensors)

    def _save(self, optimizer: Mapping[str, Tensor]) -> None:
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.model.state_dict(),
            "best": self._best,
            "masks": self.masks or {},
            "optimizer": optimizer,
        }
        tensors = {f"{part}.{name}": tensor for part, content in parts.items() for name, tensor in content.items()}
        self.state.metrics_size = self.folder.metrics_size()
        checkpoint.save(self.folder.checkpoints, tensors, asdict(self.state))
        self._saved = time.monotonic()


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """`named`'s mapping as keyword arguments of `models.make` and `data.load`."""
    return {"name": settings["choice"], **{k: v for k, v in settings.items() if k != "choice"}}
