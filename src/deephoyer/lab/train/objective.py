"""The training loss: the cross-entropy of a batch, or the distillation loss. The penalty is added as a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.lab.data.source import Source
from deephoyer.lab.methods import Method
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train import batches
from deephoyer.lab.train.batches import Batch, Draw
from deephoyer.lab.train.compiling import Compiled, repeated
from deephoyer.lab.train.distill import Teachers, inputs_of
from deephoyer.lab.train.memory_format import memory_format


def logits(model: Callable[[Tensor], Tensor], x: Tensor, recipe: Recipe) -> Tensor:
    """A model's outputs, computed in the recipe's precision and memory format."""
    if x.dim() == 4:
        x = x.contiguous(memory_format=memory_format(recipe, x.device))
    with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        outputs: Tensor = model(x)
    return outputs.float()


class Objective:
    """Called with a step's draw, returns the mean loss of its images.

    `parallel` is the model wrapped for several processes; a method may replace the model's parameters by other weights.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Source,
        recipe: Recipe,
        teachers: Teachers | None = None,
        parallel: nn.Module | None = None,
        method: Method | None = None,
    ):
        self.data, self.recipe, self.teachers = data, recipe, teachers
        self.network = partial(method or Method(), parallel or model)
        self.compiled = Compiled((repeated(model) or [model]) if recipe.compile == "blocks" else ())
        self.classifier = teachers.student(model, data.example()) if teachers else None
        if self.classifier is not None and recipe.compile == "blocks" and not repeated(model):
            raise UserError("distill.features: the network has no repeated blocks and is compiled whole; compile=off.")

    def __call__(self, step: Draw | Batch) -> Tensor:
        x, y = batches.images(self.data, step, self.recipe.shift)
        with self.compiled.on(), inputs_of(self.classifier) as given:
            outputs = logits(self.network, x, self.recipe)
        if self.teachers is None:
            # An image that could not be read counts as one whose loss is 0, whichever process has it.
            return F.cross_entropy(outputs, y, reduction="none").mean()
        features = given[-1] if given else None
        return self.teachers.losses(outputs, y, x, step if isinstance(step, Draw) else None, features).mean()
