"""How many images of a source a network gets right, among its first and among its first five guesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.lab.data.source import UNREADABLE, Images, Source

MANY_CLASSES = 10
"""With more classes than this, it is also asked whether the right one is among the first five."""


@dataclass(frozen=True)
class Score:
    """Counts over images; those that could not be read are not among them."""

    right: int
    right5: int | None
    images: int

    @property
    def accuracy(self) -> float:
        return self.right / self.images

    @property
    def top5(self) -> float | None:
        return None if self.right5 is None else self.right5 / self.images

    @classmethod
    def read(cls, counts: Tensor, source: Source) -> Score:
        """From the counts that `counted` gave; waits for the device."""
        right, right5, images = (int(n) for n in counts.tolist())
        if not images:
            raise UserError(f"data {source.name}: there is no image to evaluate on.")
        return cls(right, right5 if source.classes > MANY_CLASSES else None, images)


@torch.inference_mode()
def counted(forward: Callable[[Tensor], Tensor], source: Source, images: Images, batch: int) -> Tensor:
    """How many are right, right within five guesses, and looked at; stays on the device and does not wait for it."""
    total: Tensor | None = None
    for x, y in source.shown(images, batch):
        guesses = forward(x).topk(min(5, source.classes) if source.classes > MANY_CLASSES else 1, 1).indices
        hits = guesses == y.unsqueeze(1)
        counts = torch.stack([hits[:, 0].sum(), hits.sum(), (y != UNREADABLE).sum()])
        total = counts if total is None else total + counts
    return torch.zeros(3, dtype=torch.int64) if total is None else total
