"""How a tensor lies in memory, as the fast paths need to know it: a flat run, or a matrix of slices.

Nothing here knows of penalties or groups, and nothing here touches a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def strides_that_count(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the dimensions longer than 1; those of the others are arbitrary."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order of dimensions."""
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in pairs if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def walks_alike(weight: Tensor, grad: Tensor) -> bool:
    """Whether walking both storages from their starts meets the same elements at the same time."""
    return is_dense(weight) and strides_that_count(weight) == strides_that_count(grad)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor as the run of memory it fills."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class Matrix:
    """A dense tensor as rows of columns: row = index in dimension 0, column = (outer, channel, inner).

    Contiguous weights have outer = 1, channels-last weights inner = 1. A grouped convolution has its
    rows in `groups` equal bands, each with channels of its own.
    """

    rows: int
    outer: int
    channels: int
    inner: int
    groups: int = 1

    @property
    def columns(self) -> int:
        return self.outer * self.channels * self.inner

    @property
    def band(self) -> int:
        """Rows in a group."""
        return self.rows // self.groups


def matrix(tensor: Tensor, groups: int = 1) -> Matrix | None:
    """The tensor as a matrix, or None if its storage order doesn't allow it."""
    rows = tensor.shape[0] if tensor.dim() else 1
    channels = tensor.shape[1] if tensor.dim() > 1 else 1
    rest = tensor.numel() // max(rows * channels, 1)
    if tensor.is_contiguous():
        return Matrix(rows, 1, channels, rest, groups)
    last = tensor.movedim(1, -1) if tensor.dim() > 2 else tensor
    return Matrix(rows, rest, channels, 1, groups) if last.is_contiguous() else None
