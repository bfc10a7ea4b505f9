"""What training lowers: the cross-entropy of a batch, or the distillation loss. The penalty is added as a gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.lab.data import Dataset
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train import batches
from deephoyer.lab.train.compiling import Compiled, repeated
from deephoyer.lab.train.distill import Teachers


def logits(model: nn.Module, x: Tensor, recipe: Recipe) -> Tensor:
    """A model's outputs, computed in the recipe's precision and memory format."""
    if recipe.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        found: Tensor = model(x)
    return found.float()


class Objective:
    """Called with a step's draw, gives the loss; for stacked networks (index: networks × batch) one each."""

    def __init__(self, model: nn.Module, data: Dataset, recipe: Recipe, teachers: Teachers | None = None):
        self.model, self.data, self.recipe, self.teachers = model, data, recipe, teachers
        self.compiled = Compiled((repeated(model) or [model]) if recipe.compile == "blocks" else ())

    def __call__(self, index: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
        images, shifts, flips = (None if t is None else t.flatten(0, index.dim() - 1) for t in (index, shift, flip))
        assert images is not None
        x, y = batches.images(self.data, images, shifts, flips, self.recipe.shift)
        with self.compiled.on():
            found = logits(self.model, x, self.recipe)
        if self.teachers is None:
            losses = F.cross_entropy(found, y, reduction="none")
        else:
            losses = self.teachers.losses(found, y, x, images, shifts, flips)
        return losses.view(index.shape).mean(-1)
