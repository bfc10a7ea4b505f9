"""Shifted and flipped images by table look-up, for CUDA: a few kernel launches per batch instead of a dozen.

The images are padded and made floats once, and kept for as long as their data set. Where each pixel of a
moved image comes from is a row in a table, one for each shift and flip. `batches.moved` is the plain twin.
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from deephoyer.lab.data import Dataset

_ready: WeakKeyDictionary[Dataset, dict[int, Tensor]] = WeakKeyDictionary()


def looked_up(data: Dataset, index: Tensor, shift: Tensor | None, flip: Tensor | None, reach: int) -> Tensor:
    """Training images as floats, shifted and flipped."""
    reach = reach if shift is not None else 0
    ready = _padded(data, reach)
    if shift is None and flip is None:
        return ready.index_select(0, index)
    channels, height, width = data.input_shape
    sources, channel = _sources(height, width, reach, flip is not None, index.device, channels)
    pixels = sources.index_select(0, place(index, shift, flip, reach)).unsqueeze(1)
    return ready.flatten(2)[index.view(-1, 1, 1), channel, pixels].view(-1, channels, height, width)


def place(index: Tensor, shift: Tensor | None, flip: Tensor | None, reach: int) -> Tensor:
    """The index of each image's position (shift and flip) among all positions.

    >>> place(torch.tensor([7]), torch.tensor([[-1, 1]]), torch.tensor([True]), 1).tolist()
    [11]
    """
    side = 2 * reach + 1
    if shift is None:
        found = torch.zeros_like(index)
    else:
        found = torch.add(shift[:, 1], shift[:, 0], alpha=side) + (side**2 // 2)
    return found if flip is None else torch.add(found, flip, alpha=side**2)


def _padded(data: Dataset, reach: int) -> Tensor:
    kept = _ready.setdefault(data, {})
    if reach not in kept:
        kept[reach] = data.floats(F.pad(data.train_x, (reach,) * 4) if reach else data.train_x)
    return kept[reach]


@cache  # never dropped: a captured graph may go on reading it
def _sources(
    height: int, width: int, reach: int, flips: bool, device: torch.device, channels: int
) -> tuple[Tensor, Tensor]:
    """For each position, the indices of the padded image's pixels that make up the shifted one; and channel indices."""
    steps = torch.arange(-reach, reach + 1)
    rows = (torch.arange(height) + reach - steps.unsqueeze(1)).view(1, -1, 1, height, 1)
    columns = torch.arange(width) + reach - steps.unsqueeze(1)
    both = torch.stack([columns, columns.flip(1)]) if flips else columns.unsqueeze(0)
    table = rows * (width + 2 * reach) + both.view(len(both), 1, len(steps), 1, width)
    return table.view(-1, height * width).to(device), torch.arange(channels, device=device).view(1, -1, 1)
