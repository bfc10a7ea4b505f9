"""Batches for one epoch: the order of the images and their random shifts and flips, drawn all at once.

Everything random comes from a generator seeded by (seed, stage, epoch), on the CPU. So an epoch can be
replayed on its own after a kill, and a captured step has no random numbers in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deephoyer.lab.data import Dataset
from deephoyer.lab.train.augment import looked_up


def seed_of(*parts: object) -> int:
    """A seed from anything printable, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Epoch:
    """For each step the images' indices, and how far each is shifted and whether it is flipped."""

    index: Tensor
    shift: Tensor | None
    flip: Tensor | None

    def __len__(self) -> int:
        return len(self.index)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.index, self.shift, self.flip

    def step(self, i: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        pick = [None if t is None else t[i] for t in (self.shift, self.flip)]
        return self.index[i], pick[0], pick[1]

    def to(self, device: torch.device) -> Epoch:
        """The same on a device; a copy to CUDA is only begun, behind what the device has to do already."""
        return self.each(lambda tensor: _sent(tensor, device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Epoch:
        """The same with every tensor changed."""
        shift, flip = (None if t is None else change(t) for t in (self.shift, self.flip))
        return Epoch(change(self.index), shift, flip)


def draw(pool: Tensor, batch_size: int, shift: int, flip: bool, seed: int) -> Epoch:
    """An epoch over the images in `pool`; a last batch that would not be full is left out."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch_size, len(pool))
    steps = len(pool) // batch
    order = pool.cpu()[torch.randperm(len(pool), generator=generator)[: steps * batch]].view(steps, batch)
    shifts = torch.randint(-shift, shift + 1, (steps, batch, 2), generator=generator) if shift else None
    flips = torch.randint(0, 2, (steps, batch), generator=generator).bool() if flip else None
    return Epoch(order, shifts, flips).to(pool.device)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def side_by_side(epochs: Sequence[Epoch]) -> Epoch:
    """The epochs of several networks as one: a step's tensors get a first dimension for the network."""
    parts = ([getattr(e, part) for e in epochs] for part in ("index", "shift", "flip"))
    return Epoch(*(None if p[0] is None else torch.stack(p, 1) for p in parts))  # type: ignore[arg-type]


def images(
    data: Dataset, index: Tensor, shift: Tensor | None, flip: Tensor | None, reach: int
) -> tuple[Tensor, Tensor]:
    """Training images and labels; `reach` is the largest shift, for the padding."""
    if data.train_x.is_cuda:
        return looked_up(data, index, shift, flip, reach), data.train_y.index_select(0, index)
    x = data.train_x.index_select(0, index)
    if shift is not None:
        x = moved(x, shift, reach)
    if flip is not None:
        x = torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)
    return data.floats(x), data.train_y.index_select(0, index)


def moved(x: Tensor, shift: Tensor, reach: int) -> Tensor:
    """Each image moved by its own (rows, columns), zeros coming in at the edge.

    >>> moved(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([[0, 1]]), 1).tolist()
    [[[[0, 1], [0, 3]]]]
    """
    n, channels, height, width = x.shape
    padded = F.pad(x, (reach,) * 4)
    rows = torch.arange(height, device=x.device) + reach - shift[:, :1]
    columns = torch.arange(width, device=x.device) + reach - shift[:, 1:]
    flat = (rows.unsqueeze(2) * (width + 2 * reach) + columns.unsqueeze(1)).view(n, 1, -1)
    return padded.flatten(2).gather(2, flat.expand(-1, channels, -1)).view(x.shape)
