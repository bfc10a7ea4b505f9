"""The reference: one term after the other, as the formula reads. Every fast path must agree with it.

It takes any penalty on any unit, and makes temporaries as large as the weights. Sharded weights are
gathered one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deephoyer.sharded import share_of
from deephoyer.terms import Term


class Plain:
    """Term by term."""

    name = "plain"

    def __init__(self, terms: Sequence[Term], only: frozenset[int] | None = None):
        self.terms, self.only = list(terms), only

    def add_grad_(self, times: Tensor | None = None) -> None:
        for term in self.terms:
            for tensor, gradient in zip(term.unit.tensors, term.gradients(), strict=True):
                if tensor.requires_grad and (self.only is None or id(tensor) in self.only):
                    gradient = gradient if times is None else gradient * times.to(gradient.device)
                    grad_of(tensor).add_(share_of(gradient, tensor))

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on."""
        return {self.name: len(self.terms)}


def grad_of(tensor: Tensor) -> Tensor:
    """The tensor's gradient, made of zeros if there is none yet; a sparse one, of an embedding, is made dense."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor, dtype=getattr(tensor, "grad_dtype", None))
    elif tensor.grad.layout != torch.strided:
        tensor.grad = tensor.grad.to_dense()
    return tensor.grad
