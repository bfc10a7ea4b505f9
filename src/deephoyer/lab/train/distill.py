"""Distillation from trained networks: the mean of their softened predictions, next to the labels.

Where shifts and flips are few, the teachers' predictions are computed once for every image in every position, and a
step looks them up in that table. Where they are many, as for crops of photographs, they are computed for each batch in
the step itself; or in a table that is cached on disk. Neither waits for the host, so both can be captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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
from deephoyer.lab.train.memory_format import memory_format
from deephoyer.weights import LAYERS

Position = tuple[bool, int, int]
"""Whether an image is flipped, and how many rows and columns it is shifted."""

MOST_PASSES = 30
"""A table costs one pass over the training images per position; beyond this number it is not worth it."""


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
    ):
        self.teachers = [teacher.eval().requires_grad_(False) for teacher in teachers]
        self.reach, self.temperature, self.weight, self.half = reach, temperature, weight, half
        steps = range(-reach, reach + 1)
        positions = list(itertools.product((False, True) if flips else (False,), steps, steps))
        who = "the teacher" if len(self.teachers) == 1 else f"{len(self.teachers)} teachers"
        self.table: Tensor | None = None
        self.compiled = Compiled(())
        if keep:
            if not isinstance(data, Dataset):
                raise UserError(
                    "distill.keep: these images are cropped anew each time, so no prediction can be cached."
                )
            say(f"predictions of {who} for {len(positions)} positions of every image: from the cache, or computed now")
            self.table = self._table_on_disk(data, positions, flips, compiled, say)
        elif isinstance(data, Dataset) and len(positions) <= most_passes:
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
            self.compiled = Compiled([m for teacher in self.teachers for m in repeated(teacher) or [teacher]])

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

    def losses(self, logits: Tensor, labels: Tensor, x: Tensor, step: Draw | None = None) -> Tensor:
        """For each image (1 − weight) × cross-entropy with the label + weight × T² × divergence from the teachers.

        `x` are the images as the network saw them: those of `step`, shifted and flipped, where they lie in memory.
        """
        if self.table is None:
            targets = self._predict(self.teachers, x, self.half)
        else:
            assert step is not None
            targets = self.table[place(step.numbers, step.shift, step.flip, self.reach), step.numbers].float()
        softened = F.log_softmax(logits / self.temperature, 1)
        divergence = F.kl_div(softened, targets, reduction="none").sum(1) * self.temperature**2
        divergence = torch.where(labels == UNREADABLE, 0.0, divergence)
        return (1 - self.weight) * F.cross_entropy(logits, labels, reduction="none") + self.weight * divergence


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
    )
