"""Learning from trained networks: the mean of their softened predictions, in the place of labels.

Where shifts and flips are few, the teachers are asked once for every image in every position, and a step
costs a look-up. Where they are many, as for crops of photographs, they are asked for each batch in the
step itself; or once as well, if their answers are kept for other runs. Neither waits for the host, so
both can be captured.
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
from deephoyer.weights import LAYERS

Position = tuple[bool, int, int]
"""Whether an image is flipped, and how many rows and columns it is shifted."""

MOST_PASSES = 30
"""A table costs a pass over the training images for every position; beyond so many it does not pay."""


class Teachers:
    """Gives the distillation loss of a batch; made before training starts."""

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
                raise UserError("distill.keep: these images are cropped anew each time, so no answer can be kept.")
            say(f"reads what {who} said of every image in {len(positions)} positions, or asks in as many passes")
            self.table = self._table_on_disk(data, positions, flips, compiled, say)
        elif isinstance(data, Dataset) and len(positions) <= most_passes:
            say(f"asks {who} about every image in {len(positions)} positions; on a CPU that may take minutes")
            self.table = torch.stack([self._everywhere(self.teachers, data, at, half=False) for at in positions])
        else:
            say(f"asks {who} about each batch")
            self._make_ready(compiled)

    def _table_on_disk(
        self, data: Dataset, positions: list[Position], flips: bool, compiled: bool, say: Callable[[str], None]
    ) -> Tensor:
        """The mean of the teachers' tables, each asked for or read from where an earlier run has left it."""
        settings = (self.reach, flips, self.temperature, self.half, torch.get_float32_matmul_precision())
        names = [teacher_cache.digest(teacher, data, *settings) for teacher in self.teachers]
        self._make_ready(compiled)
        total = torch.zeros(())
        for name, teacher in zip(names, self.teachers, strict=True):
            asked = (self._everywhere([teacher], data, at, self.half) for at in positions)
            total = total + teacher_cache.kept(name, len(positions), asked, say).float()
        return (total / len(names)).half().to(data.train_x.device)

    def _make_ready(self, compiled: bool) -> None:
        """For many steps: weights are halved once and not at each call, which gives the same; blocks are compiled."""
        if self.half:
            for layer in (m for teacher in self.teachers for m in teacher.modules() if isinstance(m, LAYERS)):
                layer.to(torch.bfloat16)
        if compiled:
            self.compiled = Compiled([m for teacher in self.teachers for m in repeated(teacher) or [teacher]])

    def _everywhere(self, teachers: Sequence[nn.Module], data: Dataset, position: Position, half: bool) -> Tensor:
        """What teachers say of all training images in one position."""
        flip, rows, columns = position
        means = []
        for x in data.train_x.split(2000):
            if self.reach:
                x = moved(x, torch.tensor([[rows, columns]], device=x.device).expand(len(x), 2), self.reach)
            means.append(self._ask(teachers, data.floats(x.flip(3) if flip else x), half))
        return torch.cat(means)

    @torch.no_grad()
    def _ask(self, teachers: Sequence[nn.Module], x: Tensor, half: bool) -> Tensor:
        with self.compiled.on(), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            said = [teacher(x) for teacher in teachers]
        return torch.stack([F.softmax(one.float() / self.temperature, 1) for one in said]).mean(0)

    def losses(self, logits: Tensor, labels: Tensor, x: Tensor, step: Draw | None = None) -> Tensor:
        """For each image (1 − weight) × cross-entropy with the label + weight × T² × divergence from the teachers.

        `x` are the images as the network saw them: those of `step`, shifted and flipped, where they lie in memory.
        """
        if self.table is None:
            asked = self._ask(self.teachers, x, self.half)
        else:
            assert step is not None
            asked = self.table[place(step.numbers, step.shift, step.flip, self.reach), step.numbers].float()
        softened = F.log_softmax(logits / self.temperature, 1)
        far = F.kl_div(softened, asked, reduction="none").sum(1) * self.temperature**2
        far = torch.where(labels == UNREADABLE, 0.0, far)
        return (1 - self.weight) * F.cross_entropy(logits, labels, reduction="none") + self.weight * far


def teachers_of(recipe: Recipe, data: Source, device: torch.device, say: Callable[[str], None]) -> Teachers:
    """The teachers that a recipe names, ready to be asked where it runs."""
    settings = recipe.distill
    assert settings is not None
    made = []
    for network in (find.network(words, "distill.teachers") for words in settings.teachers):
        if network.model is None:
            raise UserError(
                f"distill.teachers: {network.path} does not say which model it is of; "
                "write {file: …, model: …} in its place."
            )
        teacher = built_for(network.path, network.model).to(device)
        checkpoint.fill(teacher, network.path, "distill.teachers")
        made.append(teacher.to(memory_format=torch.channels_last) if recipe.channels_last else teacher)
    return Teachers(
        made,
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
