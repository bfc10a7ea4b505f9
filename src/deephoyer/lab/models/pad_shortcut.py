"""The parameter-free shortcut of the CIFAR ResNets: every other pixel, and zeros for the new channels.

It is a module, and not two lines in a block's `forward`, so that channels can be taken out on either
side of it. Output channel j is input channel `source[j]`, or zero where that is −1: the same as a
1 × 1 convolution whose weight is fixed at zeros and ones. So the two sides are *not* coupled: an
output channel that goes is struck from `source`, an input channel that goes leaves zeros behind.

For torch-pruning's dependency graph: without help its tracer sees the padding as element-wise and
pairs channel i with channel i, which is wrong when zeros come first. Registered in
`customized_pruners`, with *different* functions for the two sides that call `keep_inputs` and
`keep_outputs`, the tracer ends a group here on each side, as it does at a convolution:

    class PadPruner(tp.BasePruningFunc):
        def prune_in_channels(self, layer, idxs): layer.keep_inputs(others(layer.in_channels, idxs))
        def prune_out_channels(self, layer, idxs): layer.keep_outputs(others(layer.out_channels, idxs))
        def get_in_channels(self, layer): return layer.in_channels
        def get_out_channels(self, layer): return layer.out_channels
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import UserError


class PadShortcut(nn.Module):
    """Takes every `stride`-th pixel and lays the input channels where `source` says, zeros elsewhere.

    >>> PadShortcut(2, 4).source
    [-1, 0, 1, -1]
    """

    _index: Tensor

    def __init__(self, in_channels: int, out_channels: int, stride: int = 2, source: Sequence[int] | None = None):
        super().__init__()
        self.stride = stride
        before = (out_channels - in_channels) // 2
        middle = range(before, before + in_channels)
        self.arrange(in_channels, [j - before if j in middle else -1 for j in range(out_channels)])
        if source is not None:
            self.arrange(in_channels, source)

    @property
    def out_channels(self) -> int:
        return len(self.source)

    def arrange(self, in_channels: int, source: Sequence[int]) -> None:
        """Sets where each output channel comes from; −1 stands for zeros."""
        self.in_channels, self.source = int(in_channels), [int(s) for s in source]
        if not self.source or any(not -1 <= s < in_channels for s in self.source):
            raise UserError(f"shortcut: sources must lie in −1…{in_channels - 1}, one an output; got {self.source}.")
        # Kept out of the state dict: it is part of the net's shape, not of what it learnt.
        old = getattr(self, "_index", None)
        device = None if old is None else old.device
        self.register_buffer("_index", torch.tensor(self.source, device=device), persistent=False)
        taken = [j for j, s in enumerate(self.source) if s >= 0]
        whole = [self.source[j] for j in taken] == list(range(in_channels))
        solid = bool(taken) and taken == list(range(taken[0], taken[-1] + 1))
        self._before = taken[0] if whole and solid else None

    def keep_inputs(self, kept: Sequence[int]) -> None:
        """Only these input channels are still there, in this order; what read others reads zeros."""
        place = {old: new for new, old in enumerate(kept)}
        self.arrange(len(place), [place.get(s, -1) for s in self.source])

    def keep_outputs(self, kept: Sequence[int]) -> None:
        """Only these output channels are still wanted, in this order."""
        self.arrange(self.in_channels, [self.source[j] for j in kept])

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        if self._before is not None:
            return F.pad(x, (0, 0, 0, 0, self._before, self.out_channels - self.in_channels - self._before))
        # One channel of zeros at the end is what an index of −1 finds, whatever the number of inputs.
        index = torch.where(self._index < 0, self.in_channels, self._index)
        return F.pad(x, (0, 0, 0, 0, 0, 1)).index_select(1, index)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, stride={self.stride}"
