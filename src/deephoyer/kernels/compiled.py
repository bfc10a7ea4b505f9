"""The passes through `torch.compile`: each operation on a block is one fused loop, for the price of compiling it.

It takes a C++ compiler and ten seconds or more, once for each type of weights, and pays in long
trainings of large networks on CPUs; small ones are as fast with `foreach`. The sums over slices are
left as they are: compiled they are slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deephoyer.kernels.foreach import Foreach
from deephoyer.penalties import Penalty, wide


class Compiled(Foreach):
    """Plain PyTorch, compiled."""

    name = "compiled"

    def block_sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = _compiled(_block_sums)(x)
        return made

    def add_line_(self, x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor) -> None:
        line = (torch.as_tensor(n, dtype=wide(x).dtype) for n in (a, b))  # a number would be compiled in
        _compiled(_add_line_)(x, y, *line)

    def add_slope_(self, x: Tensor, y: Tensor, penalty: Penalty, scale: Tensor) -> None:
        _compiled(_add_slope_)(x, y, penalty, scale)

    def add_tile_(self, x: Tensor, y: Tensor, by_row: Tensor, by_column: Tensor) -> None:
        _compiled(_add_tile_)(x, y, by_row, by_column)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _block_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    x = wide(x)
    return x.abs().sum(), x.square().sum()


def _add_line_(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> None:
    x = wide(x)
    y.add_(a * x.sign() - b * x)


def _add_slope_(x: Tensor, y: Tensor, penalty: Penalty, scale: Tensor) -> None:
    x = wide(x)
    y.add_(penalty.slope(x.abs()) * x.sign() * scale)


def _add_tile_(x: Tensor, y: Tensor, by_row: Tensor, by_column: Tensor) -> None:
    x = wide(x)
    y.add_((by_row + by_column).to(x.dtype) * x)
