"""`backend="auto"`: Triton where the weights are on CUDA and Triton is installed, plain PyTorch elsewhere.

The choice is made again when the weights have moved. Compiling is never chosen by itself: it takes
many seconds and a C++ compiler, and not everyone trains for long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from deephoyer.kernels.foreach import Foreach
from deephoyer.kernels.passes import Passes
from deephoyer.kernels.plain import Term


class Auto:
    """Asks where the weights are, then hands over."""

    def __init__(self, terms: Sequence[Term]):
        self.terms = list(terms)
        self._first: torch.device | None = None
        self._chosen: Passes | None = None

    @property
    def name(self) -> str:
        return self._now().name

    def add_grad_(self, times: Tensor | None = None) -> None:
        self._now().add_grad_(times)

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on."""
        return self._now().shares()

    def _now(self) -> Passes:
        first = self.terms[0].unit.tensors[0].device if self.terms else None
        if self._chosen is None or first != self._first:  # a model moves as a whole
            self._first, self._chosen = first, self._choose()
        return self._chosen

    def _choose(self) -> Passes:
        places = {t.device.type for term in self.terms for t in term.unit.tensors}
        if places == {"cuda"} and _HAS_TRITON:
            from deephoyer.kernels.triton import Triton

            return Triton(self.terms)
        return Foreach(self.terms)


_HAS_TRITON = importlib.util.find_spec("triton") is not None
