"""Distillation from trained networks: the mean of their softened predictions, next to the labels; one's features.

Where shifts and flips are few, the teachers' predictions are computed once for every image in every position, and a
step looks them up in that table. Where they are many, as for crops of photographs, they are computed for each batch in
the step itself; or in a table that is cached on disk. Features, what the last linear layer is given, are too large for
a table. None of this waits for the host, so all of it can be captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.lab.data.dataset import Dataset
from deephoyer.lab.data.source import UNREADABLE, Source
from deephoyer.lab.open_network import built_for
from deephoyer.lab.runs import checkpoint, find
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train import teacher_cache
from deephoyer.lab.train.augment import place
from deephoyer.lab.train.batches import Draw, moved
from deephoyer.lab.train.compiling import Compiled, repeated
from deephoyer.lab.train.evaluate import count_outputs
from deephoyer.lab.train.memory_format import memory_format
from deephoyer.weights import LAYERS

Position = tuple[bool, int, int]
"""Whether an image is flipped, and how many rows and columns it is shifted."""

MOST_PASSES = 30
"""A table costs one pass over the training images per position; beyond this number it is not worth it."""


def classifier(network: nn.Module, example: Tensor, who: str = "network") -> tuple[nn.Linear, torch.Size]:
    """The linear layer that a network calls last, and the shape of what it is given: an image's features.

    >>> from deephoyer.lab import models
    >>> classifier(models.make("lenet-300-100"), torch.zeros(1, 1, 28, 28))
    (Linear(in_features=100, out_features=10, bias=True), torch.Size([100]))
    """
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    called: list[tuple[nn.Linear, torch.Size]] = []
    hooks = [m.register_forward_pre_hook(lambda m, given: called.append((m, given[0].shape[1:]))) for m in layers]
    was_training = network.training
    try:
        with torch.no_grad():
            network.eval()(example)
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    if not called:
        raise UserError(f"distill.features: the {who} calls no linear layer; set distill.features=0.")
    return called[-1]


@contextmanager
def inputs_of(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """What a layer is given while this lasts; nothing of no layer."""
    seen: list[Tensor] = []
    if layer is None:
        yield seen
        return
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()


class Teachers:
    """The distillation loss of a batch; a table of predictions is computed when this is created."""

    def __init__(
        self,
        teachers: Sequence[nn.Module],
        data: Source,
        reach: int,
        flips: bool,
        temperature: float,
        weight: float,
        half: bool = False,
        compiled: bool = False,
        most_passes: int = MOST_PASSES,
        keep: bool = False,
        say: Callable[[str], None] = lambda text: None,
        features: float = 0.0,
    ):
        self.teachers = [teacher.eval().requires_grad_(False) for teacher in teachers]
        self.reach, self.temperature, self.weight, self.half = reach, temperature, weight, half
        steps = range(-reach, reach + 1)
        positions = list(itertools.product((False, True) if flips else (False,), steps, steps))
        who = "the teacher" if len(self.teachers) == 1 else f"{len(self.teachers)} teachers"
        self.table: Tensor | None = None
        self.compiled = Compiled(())
        self.features = features
        self._classifier: nn.Linear | None = None
        self._shape = torch.Size()
        if features:
            self._classifier, self._shape = classifier(self.teachers[0], data.example(), "teacher")
        if keep:
            if not isinstance(data, Dataset):
                raise UserError(
                    "distill.keep: these images are cropped anew each time, so no prediction can be cached."
                )
            say(f"predictions of {who} for {len(positions)} positions of every image: from the cache, or computed now")
            self.table = self._table_on_disk(data, positions, flips, compiled, say)
        elif isinstance(data, Dataset) and len(positions) <= most_passes and not features:
            say(f"computes the predictions of {who} for {len(positions)} positions of every image: minutes on a CPU")
            self.table = torch.stack([self._predict_all(self.teachers, data, at, half=False) for at in positions])
        else:
            say(f"computes the predictions of {who} for each batch")
            self._prepare(compiled)

    def _table_on_disk(
        self, data: Dataset, positions: list[Position], flips: bool, compiled: bool, say: Callable[[str], None]
    ) -> Tensor:
        """The mean of the teachers' tables, each read from the cache or computed."""
        settings = (self.reach, flips, self.temperature, self.half, torch.get_float32_matmul_precision())
        names = [teacher_cache.digest(teacher, data, *settings) for teacher in self.teachers]
        self._prepare(compiled)
        total = torch.zeros(())
        for name, teacher in zip(names, self.teachers, strict=True):
            computed = (self._predict_all([teacher], data, at, self.half) for at in positions)
            total = total + teacher_cache.load_or_compute(name, len(positions), computed, say).float()
        return (total / len(names)).half().to(data.train_x.device)

    def _prepare(self, compiled: bool) -> None:
        """For many steps: casts weights to bfloat16 once, not at each call, which gives the same; compiles blocks."""
        if self.half:
            for layer in (m for teacher in self.teachers for m in teacher.modules() if isinstance(m, LAYERS)):
                layer.to(torch.bfloat16)
        if compiled:
            # A teacher whose features are looked at from within is not compiled whole.
            parts = [repeated(teacher) or ([] if self.features else [teacher]) for teacher in self.teachers]
            self.compiled = Compiled([module for own in parts for module in own])

    def _predict_all(self, teachers: Sequence[nn.Module], data: Dataset, position: Position, half: bool) -> Tensor:
        """The teachers' mean prediction for all training images in one position."""
        flip, rows, columns = position
        means = []
        for x in data.train_x.split(2000):
            if self.reach:
                x = moved(x, torch.tensor([[rows, columns]], device=x.device).expand(len(x), 2), self.reach)
            means.append(self._predict(teachers, data.floats(x.flip(3) if flip else x), half))
        return torch.cat(means)

    @torch.no_grad()
    def _predict(self, teachers: Sequence[nn.Module], x: Tensor, half: bool) -> Tensor:
        with self.compiled.on(), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            logits = [teacher(x) for teacher in teachers]
        return torch.stack([F.softmax(each.float() / self.temperature, 1) for each in logits]).mean(0)

    def student(self, network: nn.Module, example: Tensor) -> nn.Linear | None:
        """The layer of a network whose inputs are to be the teacher's features, where they are learned."""
        if self._classifier is None:
            return None
        own, shape = classifier(network, example)
        if shape != self._shape:
            raise UserError(
                f"distill.features: the network has {_times(shape)} features and its teacher {_times(self._shape)}; "
                "set distill.features=0."
            )
        return own

    def losses(
        self, logits: Tensor, labels: Tensor, x: Tensor, step: Draw | None = None, features: Tensor | None = None
    ) -> Tensor:
        """For each image (1 − weight) × cross-entropy with the label + weight × T² × divergence from the teachers, and
        the squared distance of its features to the teacher's, relative to their size.

        `x` are the images as the network saw them: those of `step`, shifted and flipped, where they lie in memory.
        """
        with inputs_of(self._classifier) as given:
            if self.table is None:
                targets = self._predict(self.teachers, x, self.half)
            else:
                assert step is not None
                targets = self.table[place(step.numbers, step.shift, step.flip, self.reach), step.numbers].float()
        softened = F.log_softmax(logits / self.temperature, 1)
        divergence = self.weight * F.kl_div(softened, targets, reduction="none").sum(1) * self.temperature**2
        if features is not None:
            goal = given[-1].float().flatten(1)
            distance = (features.float().flatten(1) - goal).square().sum(1) / goal.square().sum(1).clamp_min(1e-12)
            divergence = divergence + self.features * distance
        divergence = torch.where(labels == UNREADABLE, 0.0, divergence)
        return (1 - self.weight) * F.cross_entropy(logits, labels, reduction="none") + divergence


def _times(shape: torch.Size) -> str:
    return "×".join(map(str, shape))


def teachers_of(recipe: Recipe, data: Source, device: torch.device, say: Callable[[str], None]) -> Teachers:
    """The teachers that a recipe names, on the run's device."""
    settings = recipe.distill
    assert settings is not None
    teachers, layout = [], memory_format(recipe, device)
    for network in (find.network(words, "distill.teachers") for words in settings.teachers):
        if network.model is None:
            raise UserError(
                f"distill.teachers: {network.path} does not say which model it is of; "
                "write {file: …, model: …} in its place."
            )
        teacher = built_for(network.path, network.model).to(device).to(memory_format=layout)
        checkpoint.fill(teacher, network.path, "distill.teachers")
        outputs = count_outputs(teacher.eval(), data.example(), f"distill.teachers: {network.path}")
        if outputs != data.classes:
            raise UserError(
                f"distill.teachers: {network.path} has {outputs} outputs, but the data has {data.classes} classes."
            )
        teachers.append(teacher)
    return Teachers(
        teachers,
        data,
        recipe.shift,
        recipe.flip,
        settings.temperature,
        settings.weight,
        half=recipe.precision == "bfloat16",
        compiled=recipe.compile == "blocks",
        keep=settings.keep,
        say=say,
        features=settings.features,
    )
