"""The closed-form gradient of every regularizer, fast. `choose` loads a backend; all of them give the same numbers.

| backend  | what it is                                                 | where                       |
|----------|------------------------------------------------------------|-----------------------------|
| plain    | the formula, term by term: the reference                    | everywhere, any penalty     |
| foreach  | plain PyTorch in blocks, two passes over the weights        | everywhere                  |
| triton   | all tensors of a model in a few launches                    | CUDA                        |
| auto     | triton on CUDA if it is installed, else foreach             |                             |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deephoyer.errors import unknown
from deephoyer.kernels.plain import Plain
from deephoyer.terms import Term

BACKENDS = ("auto", "plain", "foreach", "triton")


class Backend(Protocol):
    """Adds the gradients of the terms it was made for."""

    @property
    def name(self) -> str: ...

    def add_grad_(self, times: Tensor | None = None) -> None:
        """Adds `times` × the gradient of every term to the `.grad`s."""

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on: those a fast one can't take are left to the plain one."""


def choose(terms: Sequence[Term], backend: str = "auto", only: frozenset[int] | None = None) -> Backend:
    """The backend of that name, for these terms; gradients of no others than the tensors with the ids `only`."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "triton":
        from deephoyer.kernels.triton import Triton

        return Triton(terms, only)
    if backend == "foreach":
        from deephoyer.kernels.foreach import Foreach

        return Foreach(terms, only)
    return Auto(terms, only) if backend == "auto" else Plain(terms, only)


class Auto:
    """Triton where all weights are on CUDA and it is installed, else plain PyTorch; chosen anew when they moved."""

    def __init__(self, terms: Sequence[Term], only: frozenset[int] | None = None):
        self.terms, self.only = list(terms), only
        self._first: torch.device | None = None
        self._chosen: Backend | None = None

    @property
    def name(self) -> str:
        return self._now().name

    def add_grad_(self, times: Tensor | None = None) -> None:
        self._now().add_grad_(times)

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on."""
        return self._now().shares()

    def _now(self) -> Backend:
        first = self.terms[0].unit.tensors[0].device if self.terms else None
        if self._chosen is None or first != self._first:  # a model moves as a whole
            places = {t.device.type for term in self.terms for t in term.unit.tensors}
            on_cuda = places == {"cuda"} and importlib.util.find_spec("triton") is not None
            self._first, self._chosen = first, choose(self.terms, "triton" if on_cuda else "foreach", self.only)
        return self._chosen
