"""What a data set is: images as bytes, labels as numbers, and how bytes become floats.

Bytes take a quarter of the memory of floats, so that whole data sets stay on the device; `floats`
is applied a batch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from deephoyer.errors import UserError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images are uint8 (count, channels, height, width), labels int64. The tensors are shared: don't write to them."""

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
        """One image, without the batch dimension."""
        return tuple(self.train_x.shape[1:])

    def floats(self, images: Tensor) -> Tensor:
        """Bytes as float32: in [0, 1] raw, or with the training set's mean 0 and variance 1 a channel.

        >>> from deephoyer.lab.data import load
        >>> load("mnist", limit=10).floats(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).tolist()
        [[[[0.0, 1.0]]]]
        """
        x = images if images.is_floating_point() else images.to(torch.float32) / 255
        if self.mean == (0.0,) and self.std == (1.0,):
            return x
        return (x - _channels(self.mean, x.device)) / _channels(self.std, x.device)

    def in_floats(self) -> Dataset:
        """The same with its images as floats in [0, 1]: four times the memory, no conversion a step."""
        return replace(self, train_x=self.train_x.to(torch.float32) / 255, test_x=self.test_x.to(torch.float32) / 255)

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set with its tensors on `device`."""
        parts = ("train_x", "train_y", "test_x", "test_y")
        return replace(self, **{part: getattr(self, part).to(device) for part in parts})


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One number a channel, copied to the device once: a copy in every batch would make it wait."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def first(limit: int | None, count: int) -> int:
    """How many of `count` training images a `limit` leaves; refuses what can't be meant."""
    if limit is None:
        return count
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= count:
        raise UserError(f"data: limit is {limit!r}; it must be a whole number of training images, from 1 to {count}.")
    return limit
