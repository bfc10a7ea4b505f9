"""Calls in a network's code that name sizes: views, splits, slices, new tensors.

What sizes such a call asks for, the same call with others, and which call of a module it is. Not here: which are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

VIEWS: frozenset[Any] = frozenset([Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten])
_SPLITS: list[Any] = [Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes]
SPLITS = frozenset(_SPLITS)
_CREATES: list[Any] = [
    torch.zeros,
    torch.ones,
    torch.full,
    torch.empty,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_full,
]
CREATES = frozenset(_CREATES)
SLICES: frozenset[Any] = frozenset([Tensor.__getitem__])
ASKS = VIEWS | SPLITS | CREATES | SLICES
KINDS = {"view": VIEWS, "split": SPLITS, "create": CREATES, "slice": SLICES}
NUMBERS = (int, torch.SymInt)  # the second is a batch size that an exporter leaves open
Call = tuple[str, int]  # a module's name, and which of the calls within it


def kind_of_call(func: Any) -> str:
    return next(kind for kind, functions in KINDS.items() if func in functions)


def asked_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The sizes in a call of one of ASKS: one for each dimension of a view, −1 where it is left open; or each part's.

    >>> asked_sizes(Tensor.unflatten, (torch.zeros(2, 6), 1, (3, -1)), {})
    [2, 3, -1]
    """
    if func in SLICES:
        return [bound for _, start, stop in slices_of(*args) for bound in (start, stop)]
    if func in (torch.zeros, torch.ones, torch.full, torch.empty):
        args = (None, *args)
    x, *rest = args
    if func in (Tensor.unflatten, torch.unflatten):
        dim = kwargs.get("dim", rest[0] if rest else 0)
        sizes = kwargs.get("sizes", rest[1] if len(rest) > 1 else ())
        if not isinstance(dim, int):
            return []
        dim %= x.dim()
        return [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]]
    names = ("shape", "size", "split_size", "split_size_or_sections", "split_sizes")
    named = [kwargs[name] for name in names if name in kwargs]
    if not named and not rest:
        return []
    first = func in SPLITS or len(rest) == 1 or func in (torch.full, Tensor.new_full)
    given = named[0] if named else rest[0] if first else rest
    sizes = [given] if isinstance(given, NUMBERS) else list(given) if isinstance(given, (list, tuple)) else []
    sizes = [int(s) if isinstance(s, Tensor) and s.dim() == 0 and not s.is_floating_point() else s for s in sizes]
    return sizes if all(isinstance(size, NUMBERS) for size in sizes) else []


def slices_of(x: Tensor, index: Any) -> list[tuple[int, int, int]]:
    """The dimension, the start and the end of each slice in an index that has nothing else but single places.

    >>> slices_of(torch.zeros(2, 3, 8), (..., slice(2, -1)))
    [(2, 2, 7)]
    >>> slices_of(torch.zeros(2, 3, 8), (slice(None), 1, slice(4)))
    [(2, 0, 4)]
    """
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or _is_place(i) or (isinstance(i, slice) and i.step in (None, 1)) for i in index):
        return []
    found = []
    for dim, i in _by_dimension(x, index):
        if isinstance(i, slice) and (i.start is not None or i.stop is not None):
            size = x.shape[dim]
            if any(isinstance(n, torch.SymInt) for n in (size, i.start, i.stop)):
                start, stop = i.start or 0, size if i.stop is None else i.stop  # which no record is about
            else:
                # What the code gave, where it gave it: it may be an attribute.
                start = i.start if isinstance(i.start, int) and i.start >= 0 else _bound(i.start, size, 0)
                stop = i.stop if isinstance(i.stop, int) and 0 <= i.stop <= size else _bound(i.stop, size, size)
            found.append((dim, start, stop))
    return found


def _by_dimension(x: Tensor, index: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """What an index has for each dimension that it names."""
    here = sum(i is Ellipsis for i in index)
    before = index.index(Ellipsis) if here else len(index)
    behind = x.dim() - len(index)
    return [(place if place < before else behind + place, i) for place, i in enumerate(index) if i is not Ellipsis]


def _is_place(index: Any) -> bool:
    return isinstance(index, int) and not isinstance(index, bool)


def _bound(given: Any, size: int, default: int) -> int:
    """Where a slice begins or ends; not by `slice.indices`, nor with `int | Tensor`, which torch 2.9 can't compile.

    >>> [_bound(given, 8, 0) for given in (None, 3, -2, -9, 99)]
    [0, 3, 6, 0, 8]
    """
    if given is None:
        return default
    place = int(given)
    return min(max(place + size if place < 0 else place, 0), size)


def written_bounds(x: Tensor, index: Any) -> list[int | None]:
    """The bounds that `slices_of` gives as the code has them: counted from the end, beyond it, or none at all.

    >>> written_bounds(torch.zeros(2, 8), (slice(None, 1), slice(-4, 99)))
    [None, 1, -4, 99]
    """
    cuts = [i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, slice)]
    bounds = [n for i in cuts if i.start is not None or i.stop is not None for n in (i.start, i.stop)]
    return [int(n) if isinstance(n, (int, Tensor)) else None for n in bounds]


def split_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The dimension that a call of one of SPLITS is along."""
    return int(kwargs.get("dim", args[2] if len(args) > 2 else 0)) % int(args[0].dim())


def with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[int]) -> Any:
    """Calls one of ASKS with other sizes."""
    if func in VIEWS:
        return args[0].reshape(sizes)
    if func in SLICES:
        index: list[Any] = [slice(None)] * args[0].dim()  # in one call again: those around this one count it
        for dim, given in _by_dimension(args[0], args[1] if isinstance(args[1], tuple) else (args[1],)):
            index[dim] = given if _is_place(given) else slice(None)
        for i, (dim, _, _) in enumerate(slices_of(*args)):
            index[dim] = slice(sizes[2 * i], sizes[2 * i + 1])
        return args[0][tuple(index)]
    if func in CREATES:
        rest = args[1:] if func in (torch.full, torch.zeros, torch.ones, torch.empty) else args[2:]
        rest = rest if func in (torch.full, Tensor.new_full) else ()
        kwargs = {name: value for name, value in kwargs.items() if name != "size"}
        own = args[:1] if func in (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full) else ()
        return func(*own, sizes, *rest, **kwargs)
    dim = split_dim(args, kwargs)
    whole = not isinstance(kwargs.get("split_size", args[1] if len(args) > 1 else 0), int)
    return args[0].split(sizes if whole else sizes[0], dim)


class Asking(TorchFunctionMode):
    """Hands every call that names sizes to `do`, with the sizes and a way to do it."""

    def __init__(self, do: Callable[[Any, Any, Any, list[int]], Any]) -> None:
        super().__init__()
        self._do = do

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKS and (sizes := asked_sizes(func, args, kwargs)):
            return self._do(func, args, kwargs, sizes)
        return func(*args, **kwargs)


class CallCounter:
    """Which call that names sizes is being made, counted from the entry of each module on the way."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._calls: list[int] = []

    def enter(self, name: str) -> None:
        self.names.append(name)
        self._calls.append(0)

    def leave(self) -> None:
        self.names.pop()
        self._calls.pop()

    def next(self) -> Call:
        if not self.names:
            return ("", -1)
        number = self._calls[-1]
        self._calls = [count + 1 for count in self._calls]
        return self.names[-1], number
