"""An epoch's draws and learning rates in tensors at fixed addresses, and a counter of the steps done.

A captured graph reads its steps from here and moves the counter itself. So one graph serves all epochs,
and nothing is copied from the host between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deephoyer.lab.train.batches import Epoch


class EpochTensors:
    """For epochs of the same shape as `drawn`; `fill` copies the next one in."""

    def __init__(self, drawn: Epoch, device: torch.device):
        self.drawn = drawn.each(lambda t: torch.empty_like(t, device=device))
        self.rates = torch.zeros(len(drawn), device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(len(drawn), device=device)

    def fit(self, drawn: Epoch) -> bool:
        """Whether an epoch has the shape that these were made for."""
        return _shapes(drawn) == _shapes(self.drawn)

    def fill(self, drawn: Epoch, rates: Sequence[float]) -> None:
        """An epoch from its first step on."""
        for table, values in zip(self.drawn.parts(), drawn.parts(), strict=True):
            if table is not None and values is not None:
                table.copy_(values, non_blocking=True)
        new = torch.tensor(rates, dtype=torch.float32)
        self.rates.copy_(new.pin_memory() if self.rates.is_cuda else new, non_blocking=True)
        self.at(0)

    def at(self, step: int) -> None:
        """The next step is this one."""
        self.counter.fill_(step)

    def next(self, count: int) -> tuple[Epoch, Tensor]:
        """The next steps' draws and rates; counts them as done. On the device alone, so it can be captured."""
        steps = self._offsets[:count] + self.counter
        block = self.drawn.each(lambda table: table.index_select(0, steps))
        rates = self.rates.index_select(0, steps)
        self.counter += count
        return block, rates


def _shapes(drawn: Epoch) -> list[torch.Size | None]:
    return [None if t is None else t.shape for t in drawn.parts()]
