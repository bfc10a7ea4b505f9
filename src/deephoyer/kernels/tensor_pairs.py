"""What tensors look like and where they are, read off all of them at once.

A step of a large model on a GPU is bound by what Python does for each tensor. So nothing is remembered
that could go stale: everything is read again at every step, but by `map` over attributes, without a
line of Python for each tensor, and compared as a whole with what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from deephoyer.kernels.plain import grad_of
from deephoyer.kernels.sharded import local

_dtype, _device, _shape = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")
_grad, _trained = attrgetter("grad"), attrgetter("requires_grad")
_PLAIN = {Tensor, nn.Parameter}


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

    def looks(self) -> tuple[Any, ...]:
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


def pairs_of(tensors: list[Tensor], grad: Callable[[Tensor], Tensor] = grad_of) -> Pairs:
    """Each tensor with its gradient; `grad` gives one that is not there yet."""
    grads = list(map(_grad, tensors))
    if all(map(_trained, tensors)) and {*map(type, tensors), *map(type, grads)} <= _PLAIN:
        return Pairs(tensors, grads, False)
    grads = [local(grad(t)) if t.requires_grad else None for t in tensors]
    return Pairs([local(t) for t in tensors], grads, any(g is None for g in grads))
