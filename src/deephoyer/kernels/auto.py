"""`backend="auto"`: Triton where the weights are on CUDA and Triton is installed, plain PyTorch elsewhere.

The choice is made again when the weights have moved. Compiling is never chosen by itself: it takes
many seconds and a C++ compiler, for less than what the blocks of `foreach` gain.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import Tensor

from deephoyer.kernels.foreach import Foreach
from deephoyer.kernels.passes import Passes
from deephoyer.kernels.plain import Term


class Auto:
    """Asks where the weights are, then hands over."""

    def __init__(self, terms: Sequence[Term]):
        self.terms = list(terms)
        self._made: dict[str, Passes] = {}

    @property
    def name(self) -> str:
        return self._now().name

    def add_grad_(self, times: Tensor | None = None) -> None:
        self._now().add_grad_(times)

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on."""
        return self._now().shares()

    def _now(self) -> Passes:
        places = {t.device.type for term in self.terms for t in term.unit.tensors}
        name = "triton" if places == {"cuda"} and _HAS_TRITON else "foreach"
        if name not in self._made:
            self._made[name] = _make(name, self.terms)
        return self._made[name]


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _make(name: str, terms: list[Term]) -> Passes:
    if name == "foreach":
        return Foreach(terms)
    from deephoyer.kernels.triton import Triton

    return Triton(terms)
