"""What training lowers: the cross-entropy of a batch, or the distillation loss. The penalty is added as a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.data import Dataset
from deephoyer.train import batches
from deephoyer.train.distill import Teachers
from deephoyer.train.schema import Recipe


@dataclass(eq=False)
class Objective:
    """Called with a step's draw, gives the loss; for stacked networks (index: networks × batch) one each."""

    model: nn.Module
    data: Dataset
    recipe: Recipe
    teachers: Teachers | None = None

    def __call__(self, index: Tensor, shift: Tensor | None, flip: Tensor | None) -> Tensor:
        flat = [None if t is None else t.flatten(0, index.dim() - 1) for t in (index, shift, flip)]
        recipe, device = self.recipe, index.device.type
        x, y = batches.images(self.data, flat[0], flat[1], flat[2], recipe.shift)  # type: ignore[arg-type]
        if recipe.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            logits = self.model(x)
        logits = logits.float()
        if self.teachers is None:
            losses = F.cross_entropy(logits, y, reduction="none")
        else:
            losses = self.teachers.losses(logits, y, flat[0], flat[1], flat[2])  # type: ignore[arg-type]
        return losses.view(index.shape).mean(-1)
