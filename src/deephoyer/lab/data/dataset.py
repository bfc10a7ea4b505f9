"""Data in memory: images as bytes, labels as numbers.

Bytes take a quarter of the memory of floats, so that whole data sets stay on the device; `floats`
is applied a batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.lab.data.source import Images, Source, Split


@dataclass(frozen=True, eq=False)
class Dataset(Source):
    """Images are uint8 (count, channels, height, width), labels int64. The tensors are shared: don't write to them."""

    in_memory: ClassVar[bool] = True

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train_x.shape[1:])

    def count(self, split: Split) -> int:
        return len(self.split(split)[1])

    def split(self, split: Split) -> tuple[Tensor, Tensor]:
        return (self.train_x, self.train_y) if split == "train" else (self.test_x, self.test_y)

    def shown(self, images: Images, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.split(images.split)
        if images.index is None:
            for part, labels in zip(x.split(batch), y.split(batch), strict=True):
                yield self.floats(part), labels
        else:
            for index in images.index.to(x.device).split(batch):
                yield self.floats(x.index_select(0, index)), y.index_select(0, index)

    def in_floats(self) -> Dataset:
        """The same with its images as floats in [0, 1]: four times the memory, no conversion a step."""
        return replace(self, train_x=self.train_x.to(torch.float32) / 255, test_x=self.test_x.to(torch.float32) / 255)

    def to(self, device: torch.device | str) -> Dataset:
        parts = ("train_x", "train_y", "test_x", "test_y")
        return replace(self, **{part: getattr(self, part).to(device) for part in parts})


def first(limit: int | None, count: int) -> int:
    """How many of `count` training images a `limit` leaves; refuses what can't be meant."""
    if limit is None:
        return count
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= count:
        raise UserError(f"data: limit is {limit!r}; it must be a whole number of training images, from 1 to {count}.")
    return limit
