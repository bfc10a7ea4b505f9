"""The closed-form gradient of every regularizer, fast. `choose` picks a backend; all of them give the same numbers.

| backend  | what it is                                                 | where                       |
|----------|------------------------------------------------------------|-----------------------------|
| plain    | the formula, term by term: the reference                    | everywhere, any penalty     |
| foreach  | plain PyTorch in blocks, two passes over the weights        | everywhere                  |
| triton   | all tensors of a model in a few launches                    | CUDA                        |
| auto     | triton on CUDA if it is installed, else foreach             |                             |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from deephoyer.errors import unknown
from deephoyer.kernels.plain import Plain, Scale, Term

__all__ = ["BACKENDS", "Backend", "Scale", "Term", "choose"]

BACKENDS = ("auto", "plain", "foreach", "triton")


class Backend(Protocol):
    """Adds the gradients of the terms it was made for."""

    @property
    def name(self) -> str: ...

    def add_grad_(self, times: Tensor | None = None) -> None:
        """Adds `times` × the gradient of every term to the `.grad`s."""

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on: those a fast one can't take are left to the plain one."""


def choose(terms: Sequence[Term], backend: str = "auto") -> Backend:
    """The backend of that name, for these terms."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "plain":
        return Plain(terms)
    if backend == "auto":
        from deephoyer.kernels.auto import Auto

        return Auto(terms)
    if backend == "triton":
        from deephoyer.kernels.triton import Triton

        return Triton(terms)
    from deephoyer.kernels.foreach import Foreach

    return Foreach(terms)
