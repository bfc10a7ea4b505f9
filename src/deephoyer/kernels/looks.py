"""What tensors look like and where they are, read off all of them at once.

A step of a large model on a GPU is bound by what Python does for each tensor. So nothing is remembered
that could go stale: everything is read again at every step, but by `map` over attributes, without a
line of Python for each tensor, and compared as a whole with what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.kernels.plain import grad_of
from deephoyer.kernels.sharded import local

Pair = tuple[Tensor, Tensor | None]  # a weight and its gradient, on this process; None if it is frozen

_dtype, _device, _shape = attrgetter("dtype"), attrgetter("device"), attrgetter("shape")
_grad, _trained = attrgetter("grad"), attrgetter("requires_grad")
_PLAIN = {Tensor, nn.Parameter}


def pairs_of(tensors: Sequence[Tensor], grad: Callable[[Tensor], Tensor] = grad_of) -> list[Pair]:
    """Each tensor with its gradient; `grad` gives one that is not there yet."""
    grads = list(map(_grad, tensors))
    if all(map(_trained, tensors)) and {*map(type, tensors), *map(type, grads)} <= _PLAIN:
        return list(zip(tensors, grads, strict=True))
    return [(local(t), local(grad(t)) if t.requires_grad else None) for t in tensors]


def looks(pairs: Sequence[Pair]) -> tuple[Any, ...]:
    """All that a plan depends on; addresses are not among it."""
    weights, grads = zip(*pairs, strict=True) if pairs else ((), ())
    if None.__class__ in set(map(type, grads)):
        seen = tuple(None if g is None else (g.dtype, g.stride()) for g in grads)
    else:
        seen = (*map(_dtype, grads), *map(Tensor.stride, grads))
    return (
        tuple(map(_device, weights)), tuple(map(_dtype, weights)), tuple(map(_shape, weights)),
        tuple(map(Tensor.stride, weights)), seen,
    )  # fmt: skip


def places(tensors: Sequence[Tensor]) -> tuple[tuple[torch.device, torch.dtype], ...]:
    """The device and the type of each."""
    return tuple(zip(map(_device, tensors), map(_dtype, tensors), strict=True))


def addresses(pairs: Sequence[Pair]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the weights and of the gradients; 0 where there is none."""
    weights, grads = zip(*pairs, strict=True)
    if None.__class__ in set(map(type, grads)):
        return tuple(map(Tensor.data_ptr, weights)), tuple(0 if g is None else g.data_ptr() for g in grads)
    return tuple(map(Tensor.data_ptr, weights)), tuple(map(Tensor.data_ptr, grads))
