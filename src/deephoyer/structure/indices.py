"""Index tensors of joints as yes-or-no patterns: what a file needs to hold of them, a bit or less for each channel.

Two kinds: `chosen`, strictly rising indices, are a pattern over what they choose from; `ranks`, where each
place has its rank among those that live, or their number if it does not, are a pattern over the places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deephoyer.packing import OVERHEAD, pattern_size


def as_pattern(index: Tensor) -> tuple[str, Tensor] | None:
    """The kind and the pattern of an index tensor; None for other tensors, and where it saves nothing.

    >>> as_pattern(torch.arange(0, 100, 2))[0]
    'chosen'
    """
    dense = index.numel() * index.element_size()
    if index.dtype != torch.long or index.dim() != 1 or dense <= OVERHEAD:
        return None
    index = index.detach().cpu()
    for kind, pattern in (("chosen", _chosen(index)), ("ranks", _ranks(index))):
        if pattern is not None and pattern_size(pattern.numpy()) + OVERHEAD < dense:
            return kind, pattern
    return None


def from_pattern(kind: str, pattern: Tensor) -> Tensor:
    """The index tensor again.

    >>> from_pattern("ranks", torch.tensor([False, True, True]))
    tensor([2, 0, 1])
    """
    if kind == "chosen":
        return torch.nonzero(pattern).flatten()
    return torch.where(pattern, pattern.cumsum(0) - 1, pattern.sum())


def _chosen(index: Tensor) -> Tensor | None:
    # Beyond 64 times their number a bitmap is larger than the indices are.
    if index[0] < 0 or index[-1] >= 64 * len(index) or bool((index.diff() <= 0).any()):
        return None
    pattern = torch.zeros(int(index[-1]) + 1, dtype=torch.bool)
    pattern[index] = True
    return pattern


def _ranks(index: Tensor) -> Tensor | None:
    pattern = index != index.max()
    return pattern if pattern.any() and torch.equal(from_pattern("ranks", pattern), index) else None
