"""Learning from trained networks: the mean of their softened predictions, kept in a table.

Shifts and flips are few, so the teachers are asked once for every image in every position and never
again: a step then costs a look-up, and a captured step has no teacher in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.data import Dataset
from deephoyer.train.batches import moved
from deephoyer.train.places import place


class Teachers:
    """Gives the distillation loss of a batch; made before training starts."""

    def __init__(
        self, teachers: Sequence[nn.Module], data: Dataset, reach: int, flips: bool, temperature: float, weight: float
    ):
        self.reach, self.temperature, self.weight = reach, temperature, weight
        self.flips = flips
        steps = range(-reach, reach + 1)
        places = itertools.product((False, True) if flips else (False,), steps, steps)
        self.table = torch.stack([self._predict(teachers, data, *place) for place in places])

    @torch.inference_mode()
    def _predict(self, teachers: Sequence[nn.Module], data: Dataset, flip: bool, rows: int, columns: int) -> Tensor:
        means = []
        for x in data.train_x.split(2000):
            if self.reach:
                x = moved(x, torch.tensor([[rows, columns]], device=x.device).expand(len(x), 2), self.reach)
            x = data.floats(x.flip(3) if flip else x)
            softened = [F.softmax(teacher.eval()(x).float() / self.temperature, 1) for teacher in teachers]
            means.append(torch.stack(softened).mean(0))
        return torch.cat(means)

    def losses(
        self, logits: Tensor, labels: Tensor, index: Tensor, shift: Tensor | None, flip: Tensor | None
    ) -> Tensor:
        """For each image (1 − weight) × cross-entropy with the label + weight × T² × divergence from the teachers."""
        softened = F.log_softmax(logits / self.temperature, 1)
        far = (
            F.kl_div(softened, self.table[place(index, shift, flip, self.reach), index], reduction="none").sum(1)
            * self.temperature**2
        )
        return (1 - self.weight) * F.cross_entropy(logits, labels, reduction="none") + self.weight * far
