"""How tensors lie in memory: a flat run, a matrix of slices; and weights with their gradients, all read at once.

A step of a large model on a GPU is bound by what Python does for each tensor. So nothing is remembered
that could go stale: everything is read again at every step, but by `map` over attributes, without a
line of Python for each tensor, and compared as a whole with what it was. Penalties and groups are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from deephoyer.kernels.plain import grad_of
from deephoyer.sharded import local

_dtype, _device, _shape = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")
_grad, _trained = attrgetter("grad"), attrgetter("requires_grad")
_PLAIN = {Tensor, nn.Parameter}


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


def matrix(tensor: Tensor, groups: int = 1, stacked: bool = False) -> Matrix | None:
    """The tensor as a matrix, or None if its storage order doesn't allow it.

    Matrices that are `stacked` along dimension 0 lie below one another, each a group.
    """
    if stacked:
        return matrix(tensor.flatten(0, 1), groups) if tensor.is_contiguous() else None
    rows = tensor.shape[0] if tensor.dim() else 1
    channels = tensor.shape[1] if tensor.dim() > 1 else 1
    rest = tensor.numel() // max(rows * channels, 1)
    if tensor.is_contiguous():
        return Matrix(rows, 1, channels, rest, groups)
    last = tensor.movedim(1, -1) if tensor.dim() > 2 else tensor
    return Matrix(rows, rest, channels, 1, groups) if last.is_contiguous() else None


@dataclass(frozen=True, eq=False)
class Pairs:
    """Weights and their gradients, on this process; a frozen weight has None."""

    weights: list[Tensor]
    grads: list[Any]
    frozen: bool  # whether any is

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor | None]:
        return self.weights[i], self.grads[i]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return zip(self.weights, self.grads, strict=True)

    def pick(self, at: list[int]) -> Pairs:
        """Those with the numbers `at`."""
        return Pairs([self.weights[i] for i in at], [self.grads[i] for i in at], self.frozen)

    def signature(self) -> tuple[Any, ...]:
        """All that a plan depends on; addresses are not among it."""
        weights, grads = self.weights, self.grads
        if self.frozen:
            seen: tuple[Any, ...] = tuple(None if g is None else (g.dtype, g.stride()) for g in grads)
        else:
            seen = (*map(_dtype, grads), *map(Tensor.stride, grads))
        return (
            tuple(map(_device, weights)), tuple(map(_dtype, weights)), tuple(map(_shape, weights)),
            tuple(map(Tensor.stride, weights)), seen,
        )  # fmt: skip

    def addresses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the weights and of the gradients; 0 where there is none."""
        weights = tuple(map(Tensor.data_ptr, self.weights))
        if self.frozen:
            return weights, tuple(0 if g is None else g.data_ptr() for g in self.grads)
        return weights, tuple(map(Tensor.data_ptr, self.grads))


def pairs_of(
    tensors: list[Tensor], grad: Callable[[Tensor], Tensor] = grad_of, only: frozenset[int] | None = None
) -> Pairs:
    """Each tensor with its gradient; `grad` gives one that is not there yet. Others than `only` count as frozen."""
    grads = list(map(_grad, tensors))
    if only is None and all(map(_trained, tensors)) and {*map(type, tensors), *map(type, grads)} <= _PLAIN:
        return Pairs(tensors, grads, False)
    meant = [t.requires_grad and (only is None or id(t) in only) for t in tensors]
    grads = [local(grad(t)) if its else None for t, its in zip(tensors, meant, strict=True)]
    return Pairs([local(t) for t in tensors], grads, any(g is None for g in grads))
