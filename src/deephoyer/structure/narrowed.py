"""Modules whose code names sizes that they no longer have: what is recorded in them, and running with it.

A size that is an attribute gets its new value; others are set right at the call, by a forward that knows the sizes of
its calls. Which they are is learnt elsewhere (`sizes.py`), or read from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import prod
from typing import Any

from torch import nn

from deephoyer.errors import UserError
from deephoyer.structure.asked_sizes import Asking, kind_of_call, slices_of, split_dim, with_sizes, written_bounds

RECORD = "narrowed_sizes"
"""The attribute in which a module keeps the sizes that it was given, so that a file can hold them."""
LEARNS = "_learns_sizes"
"""The attribute of a module that is to put down what its code asks for now."""
PLACE = re.compile(r"\d+:\d+(:\d+(:(view|split|create))?|:\d+:split:\d+:\d+|:-?\d+:slice:\d+:\d+)?")
"""Where a size was set: which call, which of its sizes; what that was; what kind of call it is, and a part of what."""


def set_size(module: nn.Module, name: str, value: float) -> None:
    """Sets an attribute, and keeps that it was set."""
    if getattr(module, name) != value:
        setattr(module, name, value)
        sizes_of(module)[name] = value


def sizes_of(module: nn.Module) -> dict[str, Any]:
    """The sizes that a module was given: attributes by their names, those of calls as `PLACE` has it."""
    found: dict[str, Any] = vars(module).setdefault(RECORD, {})
    return found


def narrowed(module: nn.Module, place: str, value: int) -> None:
    """Makes a module's forward use another size at one of its calls, whatever it was told there before."""
    its = sizes_of(module)
    known = [key for key in its if key.split(":")[:2] == place.split(":")[:2] and key != place]
    its.pop(place, None)
    its |= {**dict.fromkeys(known, value), place: value}
    if not isinstance(module, Narrowed):
        kind = type(module)
        own = {"__module__": kind.__module__, "forward": _with_recorded_sizes(kind)}
        module.__class__ = type(kind.__name__, (Narrowed, kind), own)


class Narrowed(nn.Module):
    """A module whose code names sizes that it no longer has: its calls are made with those in its record."""


def _with_recorded_sizes(kind: type[nn.Module]) -> Callable[..., Any]:
    @wraps(kind.forward)  # exporters and trainers read the names of its arguments
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls = RecordedCalls(_recorded(self))

        def do(func: Any, args: Any, kwargs: Any, asked: list[int]) -> Any:
            sizes = calls.sizes_of_next(func, args, kwargs, asked, getattr(self, LEARNS, None))
            return func(*args, **kwargs) if sizes is None else with_sizes(func, args, kwargs, sizes)

        with Asking(do):
            return kind.forward(self, *args, **kwargs)

    return forward


@contextmanager
def asking_otherwise(model: nn.Module) -> Iterator[None]:
    """Within it the code of a network that was run before asks for other sizes: its configuration has new ones.

    It must take the same way. What it asks for at the calls that have a record is recorded too.
    """
    modules = [module for module in model.modules() if isinstance(module, Narrowed)]
    for module in modules:
        setattr(module, LEARNS, sizes_of(module))
    try:
        yield
    finally:
        for module in modules:
            delattr(module, LEARNS)


Change = tuple[int, int, tuple[int, ...], str | None, tuple[int, int] | None]
"""Of one size of a call: which it is, what is left, and what it was, in which kind of call, of what it is a bound.

By the network's configuration it may have been one or another; in old files nothing is said of it.
"""


def _recorded(module: nn.Module) -> dict[int, list[Change]]:
    found: dict[int, dict[int, Change]] = {}
    for key, value in getattr(module, RECORD, {}).items():  # not by `sizes_of`, which torch 2.9 can't compile
        if ":" in key:
            call, position, *rest = key.split(":")
            kind = rest[1] if len(rest) > 1 else None
            of = (int(rest[2]), int(rest[3])) if len(rest) > 2 else None
            its = found.setdefault(int(call), {})
            before = its[int(position)][2] if int(position) in its else ()
            its[int(position)] = (int(position), value, (*before, *map(int, rest[:1])), kind, of)
    return {call: list(its.values()) for call, its in found.items()}


class RecordedCalls:
    """Finds, call by call, the sizes that a module's code must be given in one forward.

    It may take another way than when it was followed, with a cache or a longer text: then its calls have other numbers,
    and each is recognised by what it asks for.
    """

    def __init__(self, recorded: dict[int, list[Change]]) -> None:
        self._recorded = recorded
        self._number = -1
        self._used: list[int] = []
        self._other_way = False

    def sizes_of_next(
        self, func: Any, args: Any, kwargs: Any, asked: list[int], record: dict[str, Any] | None = None
    ) -> list[int] | None:
        """The sizes instead of those that the code asks for; None where these are right.

        With a `record` it takes the same way as before, and what it asks for now is put down there.
        """
        self._number += 1
        kind, its = kind_of_call(func), self._recorded.get(self._number, [])
        if record is not None:
            written = written_bounds(args[0], args[1]) if kind == "slice" else asked
            for position, value, _, known, of in its:
                if known is not None and isinstance(written[position], int):
                    place = (self._number, position, written[position], known, *(of or ()))
                    record[":".join(map(str, place))] = value
            return _with_changes(its, asked) if its else None
        if kind != "view" and its and its[0][3] is None:  # of a file that doesn't say more
            return _with_changes(its, asked)
        if kind == "view":
            if its and (sizes := _view(its, asked, args[0].numel(), any)):
                return sizes
            if any(not isinstance(size, int) or size < 0 for size in asked) or prod(asked) == args[0].numel():
                return None
            alike = [n for n, its in self._recorded.items() if _view(its, asked, args[0].numel(), all)]
        else:
            alike = [n for n, its in self._recorded.items() if _is_call(its, kind, args, kwargs, asked)]
        if not alike:
            self._other_way |= bool(its)
            return None
        chosen = self._chosen(alike)
        self._used.append(chosen)
        return _with_changes(self._recorded[chosen], asked)

    def _chosen(self, alike: list[int]) -> int:
        """Which of the recorded calls that ask for the same it is: that of its number, or else in their order."""
        if self._number in alike and not self._other_way:
            return self._number
        left = [[(position, value) for position, value, *_ in self._recorded[n]] for n in alike]
        unused = [n for n in sorted(alike) if n not in self._used]
        if not unused and any(one != left[0] for one in left):
            raise UserError(
                "a compacted module's code takes another way for these inputs than for the examples that it was "
                "compacted with, and which of its sizes is meant can't be told; give inputs like these as examples."
            )
        return (unused or alike)[0]


def _view(
    changes: list[Change], asked: list[int], elements: int, alike: Callable[[Iterator[bool]], bool]
) -> list[int] | None:
    """The sizes with these changes, if the view asks for what it asked for then (others it may have computed)."""
    if any(position >= len(asked) or kind not in (None, "view") for position, _, _, kind, _ in changes):
        return None
    if not alike(not before or asked[position] in before for position, _, before, _, _ in changes):
        return None
    sizes = _with_changes(changes, asked)
    fits = any(not isinstance(s, int) or s < 0 for s in sizes) or prod(sizes) == elements
    return sizes if fits else None


def _is_call(changes: list[Change], kind: str, args: Any, kwargs: Any, asked: list[int]) -> bool:
    """Whether a call that is no view is the one that these changes are of: it asks for the same, of the same."""
    if any(position >= len(asked) or its != kind for position, _, _, its, _ in changes):
        return False
    written = written_bounds(args[0], args[1]) if kind == "slice" else asked
    for position, _, before, _, of in changes:
        if not isinstance(written[position], int) or written[position] not in before:
            return False
        if of is not None:
            dim = slices_of(*args)[position // 2][0] if kind == "slice" else split_dim(args, kwargs)
            if of != (args[0].dim() - dim, args[0].shape[dim]):
                return False
    return True


def _with_changes(changes: list[Change], asked: list[int]) -> list[int]:
    sizes = list(asked)
    for position, value, *_ in changes:
        sizes[position] = value
    return sizes
