"""The sizes that a network's code asks for when it sees a tensor in another shape: those it gives, those left open.

Below the level of Python these are plain numbers. Here calls are seen as they were written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

VIEWS: frozenset[Any] = frozenset([Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten])


def asked_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The sizes in a call of one of VIEWS, one for each dimension of what it gives; −1 is what is left open.

    >>> asked_sizes(Tensor.unflatten, (torch.zeros(2, 6), 1, (3, -1)), {})
    [2, 3, -1]
    """
    x, *rest = args
    if func in (Tensor.unflatten, torch.unflatten):
        dim = kwargs.get("dim", rest[0] if rest else 0)
        sizes = kwargs.get("sizes", rest[1] if len(rest) > 1 else ())
        if not isinstance(dim, int):
            return []
        dim %= x.dim()
        return [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]]
    given = kwargs.get("shape", kwargs.get("size", rest[0] if len(rest) == 1 else rest))
    if isinstance(given, torch.dtype):
        return []
    return [given] if isinstance(given, int) else list(given)


class Asking(TorchFunctionMode):
    """Tells of every view what sizes were asked for, before it is done and (with none) afterwards."""

    def __init__(self, tell: Callable[[list[int]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in VIEWS:
            return func(*args, **kwargs)
        self._tell(asked_sizes(func, args, kwargs))
        try:
            return func(*args, **kwargs)
        finally:
            self._tell([])
