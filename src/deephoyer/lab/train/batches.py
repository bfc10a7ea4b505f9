"""The batches of one epoch: the order of the images, and their random shifts, flips and crops.

Everything random comes from a seed of (seed, stage, epoch). So any epoch can be repeated after a kill.
For data in memory shifts and flips are drawn all at once, on the CPU, and a captured step has no random numbers in it.
Streamed images are cropped and mirrored by the workers that read them, each by its own seed.

Several processes draw the same epoch, and each takes its share of every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deephoyer.lab.data.dataset import Dataset
from deephoyer.lab.data.small_images import SmallImages
from deephoyer.lab.data.source import Source, seed_of
from deephoyer.lab.data.streaming import Request, Streaming
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train.augment import looked_up

__all__ = ["Batch", "Draw", "Epoch", "Streamed", "cropped", "draw", "images", "moved", "of_epoch", "seed_of"]


class Draw(NamedTuple):
    """The images of a step, by index, with their shifts, flips and crop boxes."""

    numbers: Tensor
    shift: Tensor | None
    flip: Tensor | None
    box: Tensor | None = None

    def parts(self, count: int) -> list[Draw]:
        """The step split into `count` equal parts."""
        return [Draw(*pieces) for pieces in _cut(self, count)]


class Batch(NamedTuple):
    """The images of a step as bytes, and their labels."""

    x: Tensor
    y: Tensor

    def parts(self, count: int) -> list[Batch]:
        return [Batch(*pieces) for pieces in _cut(self, count)]


def _cut(tensors: tuple[Tensor | None, ...], count: int) -> list[tuple[Any, ...]]:
    pieces = [[None] * count if t is None else t.chunk(count) for t in tensors]
    return list(zip(*pieces, strict=True))


@dataclass(frozen=True)
class Epoch:
    """All steps of an epoch: indices of images, with their shifts, flips and crop boxes."""

    index: Tensor
    shift: Tensor | None
    flip: Tensor | None
    box: Tensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.index, self.shift, self.flip, self.box

    def step(self, i: int) -> Draw:
        return Draw(self.index[i], *(None if t is None else t[i] for t in self.parts()[1:]))

    def steps(self, numbers: range) -> Iterator[Draw]:
        """The draws of these steps."""
        return (self.step(i) for i in numbers)

    def share(self, rank: int, count: int) -> Epoch:
        """The share of one of several processes in every step."""
        mine = _share(self.index.shape[1], rank, count)
        return self.each(lambda tensor: tensor[:, mine]) if count > 1 else self

    def to(self, device: torch.device) -> Epoch:
        """The same on a device; a copy to CUDA is asynchronous."""
        return self.each(lambda tensor: _sent(tensor, device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Epoch:
        """The same with `change` applied to every tensor."""
        return Epoch(change(self.index), *(None if t is None else change(t) for t in self.parts()[1:]))


class Streamed:
    """An epoch over images that are read during training; in the same order as those of `draw`."""

    def __init__(self, source: Streaming, pool: Tensor, batch_size: int, seed: int, rank: int = 0, count: int = 1):
        self.source, self.seed = source, seed
        order = _order(pool, batch_size, torch.Generator().manual_seed(seed))
        self.index = order[:, _share(order.shape[1], rank, count)]

    def __len__(self) -> int:
        return len(self.index)

    def steps(self, numbers: range) -> Iterator[Batch]:
        """The batches of these steps."""
        requests = [Request("train", self.index[i].tolist(), self.seed) for i in numbers]
        return (Batch(x, y) for x, y in self.source.stream(requests))


def _order(pool: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """The indices of each step's images; an incomplete last batch is left out."""
    batch = min(batch_size, len(pool))
    steps = len(pool) // batch
    return pool.cpu()[torch.randperm(len(pool), generator=generator)[: steps * batch]].view(steps, batch)


def _share(batch: int, rank: int, count: int) -> slice:
    return slice(rank * batch // count, (rank + 1) * batch // count)


def draw(pool: Tensor, batch_size: int, shift: int, flip: bool, seed: int) -> Epoch:
    """An epoch over the images in `pool`; an incomplete last batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    order = _order(pool, batch_size, generator)
    steps, batch = order.shape
    shifts = torch.randint(-shift, shift + 1, (steps, batch, 2), generator=generator) if shift else None
    flips = torch.randint(0, 2, (steps, batch), generator=generator).bool() if flip else None
    return Epoch(order, shifts, flips).to(pool.device)


def cropped(data: SmallImages, pool: Tensor, batch_size: int, seed: int) -> Epoch:
    """An epoch over small images in memory; the crop of an image does not depend on the pool or the batch size."""
    order = _order(pool, batch_size, torch.Generator().manual_seed(seed))
    box, flip = data.crops_of(seed)
    return Epoch(order, None, None if flip is None else flip[order], None if box is None else box[order])


def of_epoch(data: Source, pool: Tensor, recipe: Recipe, seed: int, rank: int = 0, count: int = 1) -> Epoch | Streamed:
    """The batches of an epoch with this seed, or one process's share of them."""
    if isinstance(data, Streaming):
        return Streamed(data, pool, recipe.batch_size, seed, rank, count)
    if isinstance(data, SmallImages):
        return cropped(data, pool, recipe.batch_size, seed).share(rank, count)
    return draw(pool, recipe.batch_size, recipe.shift, recipe.flip, seed).share(rank, count)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def images(data: Source, step: Draw | Batch, reach: int) -> tuple[Tensor, Tensor]:
    """Training images as floats, and labels; `reach` is the largest shift, for the padding."""
    if isinstance(step, Batch):
        return data.floats(step.x), step.y
    index, shift, flip, box = step
    if isinstance(data, SmallImages):
        return data.cropped(index, box, flip)
    assert isinstance(data, Dataset)
    if data.train_x.is_cuda:
        return looked_up(data, index, shift, flip, reach), data.train_y.index_select(0, index)
    x = data.train_x.index_select(0, index)
    if shift is not None:
        x = moved(x, shift, reach)
    if flip is not None:
        x = torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)
    return data.floats(x), data.train_y.index_select(0, index)


def moved(x: Tensor, shift: Tensor, reach: int) -> Tensor:
    """Each image shifted by its own (rows, columns), padded with zeros.

    >>> moved(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[0, 1]]), 1).tolist()
    [[[[0, 1], [0, 3]]]]
    """
    n, channels, height, width = x.shape
    padded = F.pad(x, (reach,) * 4)
    rows = torch.arange(height, device=x.device) + reach - shift[:, :1]
    columns = torch.arange(width, device=x.device) + reach - shift[:, 1:]
    flat = (rows.unsqueeze(2) * (width + 2 * reach) + columns.unsqueeze(1)).view(n, 1, -1)
    return padded.flatten(2).gather(2, flat.expand(-1, channels, -1)).view(x.shape)
