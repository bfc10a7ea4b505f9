"""What training and evaluation ask of data, whether it lies in memory or is read from a disk as it is needed.

A source is images of `classes` kinds in two splits. Batches for training are drawn in `train/batches.py`: a source in
memory has its images at hand by number, a streaming one reads and augments them in worker processes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deephoyer.errors import UserError

Split = Literal["train", "test"]

UNREADABLE = -100
"""The label of an image that could not be read: no class, and what torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Images:
    """Some images of a source: a whole split, or those of it that `index` numbers."""

    split: Split
    index: Tensor | None = None

    def share(self, source: Source, rank: int, count: int) -> Images:
        """The part of them that one of several processes looks at; each image is in exactly one part."""
        if count == 1:
            return self
        index = torch.arange(source.count(self.split)) if self.index is None else self.index
        return Images(self.split, index[rank::count])


TEST = Images("test")


class Source(ABC):
    """A data set.

    Each kind declares whether its images are `in_memory`, where captured steps can find them, and whether it `crops`
    and mirrors them by its own settings, or leaves that to a recipe's shift and flip.
    """

    in_memory: ClassVar[bool]
    crops: ClassVar[bool] = False
    name: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unreadable: dict[tuple[Split, int], str]
    skip_at_most: int
    passed_over: str | None = None
    """What a run tells at its start of files that are no images."""
    fingerprint: str | None = None
    """Tells folders of images apart whose recipes are the same; None where the name says which images they are."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """One image, without the batch dimension."""

    @abstractmethod
    def count(self, split: Split) -> int:
        """How many images a split has."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Source:
        """The same data, handed out on `device`."""

    @abstractmethod
    def shown(self, images: Images, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images as evaluation sees them, without augmentation: floats and labels, a batch at a time."""

    def first(self, images: Images, count: int) -> Tensor:
        """The first so many of some images, as floats."""
        index = images.index[:count] if images.index is not None else torch.arange(min(count, self.count(images.split)))
        return next(iter(self.shown(Images(images.split, index), count)))[0]

    def example(self, count: int = 1) -> Tensor:
        """Test images to trace and count a network with."""
        return self.first(TEST, count)

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

    def refuse(self, names: Sequence[str]) -> None:
        """Ends a run for which too many images could not be read."""
        images = "1 image" if len(names) == 1 else f"{len(names):,} images"
        more = ", …" if len(names) > 3 else ""
        raise UserError(
            f"data {self.name}: {images} can't be read ({', '.join(names[:3])}{more}). Mend or remove them, "
            f"or let more be left out: data.skip_at_most is {self.skip_at_most}."
        )


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One number a channel, copied to the device once: a copy in every batch would make it wait."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def seed_of(*parts: object) -> int:
    """A seed from anything printable, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")
