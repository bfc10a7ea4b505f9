"""Sizes that are written into a network's code: which of them change when channels go, and how the code is told.

A forward that sees a tensor in another shape names sizes: `x.view(b, n, self.heads, -1)`, `x.split(self.width)`. When
heads go, what is left open follows by itself, and so does what was read from a shape that follows. Other sizes are
found here, by a trial: those that are attributes of the module get their new value; others are set right at the
call, by a forward that knows the sizes of its calls (`narrowed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deephoyer.errors import UserError

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
RECORD = "narrowed_sizes"
"""The attribute in which a module keeps the sizes that it was given, so that a file can hold them."""
LEARNS = "_learns_sizes"
"""The attribute of a module that is to put down what its code asks for now."""
PLACE = re.compile(r"\d+:\d+(:\d+(:(view|split|create))?|:\d+:split:\d+:\d+|:-?\d+:slice:\d+:\d+)?")
"""Where a size was set: which call, which of its sizes; what that was; what kind of call it is, and a part of what."""

Call = tuple[str, int]  # a module's name, and which of the calls within it


class Setting(int):
    """A whole number that is an attribute of a module, and still says so when it is handed on.

    `divides` becomes true where something is computed from it that a new value would change; `checked` where it was
    found equal to another number, as a forward does that checks its input.
    """

    module: str
    name: str
    divides: bool = False
    checked: bool = False

    @classmethod
    def of(cls, value: int, module: str, name: str) -> Setting:
        made = cls(value)
        made.module, made.name = module, name
        return made

    def __eq__(self, other: object) -> bool:
        equal = int.__eq__(self, other) if isinstance(other, int) else False
        self.checked |= equal is True
        return equal is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __add__(self, other: int) -> int:
        return Computed.of(int(self) + other, self.name)

    def __mul__(self, other: Any) -> Any:
        return self if type(other) is int and other == 1 else int(self) * other  # heads folded into a batch of one

    __rmul__ = __mul__

    def __rfloordiv__(self, other: int) -> int:
        self.divides = True
        return other // int(self)

    def __rtruediv__(self, other: float) -> float:
        self.divides = True
        return other / int(self)

    def __pow__(self, other: Any, mod: Any = None) -> Any:
        self.divides = True
        return int(self) ** other

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


class Computed(int):
    """A size that some are added to, and still says to what: heads of queries, keys and values in one (`heads + 2`)."""

    name: str

    @classmethod
    def of(cls, value: int, name: str) -> Computed:
        made = cls(value)
        made.name = name
        return made


def mark_settings(model: nn.Module) -> None:
    """Makes every whole number among the modules' attributes a `Setting`; the model must be a copy."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and value > 1:
                vars(module)[name] = Setting.of(value, prefix, name)


def counts_heads(name: str) -> bool:
    """Whether an attribute of this name says how many heads there are."""
    return "head" in name and not any(word in name for word in ("dim", "size", "width", "ch", "mask", "mul"))


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
    sizes = [given] if isinstance(given, NUMBERS) else list(given) if isinstance(given, list | tuple) else []
    sizes = [int(s) if isinstance(s, Tensor) and s.dim() == 0 and not s.is_floating_point() else s for s in sizes]
    return sizes if all(isinstance(size, NUMBERS) for size in sizes) else []


def slices_of(x: Tensor, index: Any) -> list[tuple[int, int, int]]:
    """The dimension, the start and the end of each slice in an index that is made of nothing else.

    >>> slices_of(torch.zeros(2, 3, 8), (..., slice(2, -1)))
    [(2, 2, 7)]
    """
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or (isinstance(i, slice) and i.step in (None, 1)) for i in index):
        return []
    found, here = [], sum(i is Ellipsis for i in index)
    before = index.index(Ellipsis) if here else len(index)
    for place, i in enumerate(index):
        if i is not Ellipsis and (i.start is not None or i.stop is not None):
            dim = place if place < before else x.dim() - len(index) + place
            size = x.shape[dim]
            if any(isinstance(n, torch.SymInt) for n in (size, i.start, i.stop)):
                start, stop = i.start or 0, size if i.stop is None else i.stop  # which no record is about
            else:
                start, stop, _ = i.indices(size)
                # What the code gave, where it gave it: it may be an attribute.
                start = i.start if isinstance(i.start, int) and i.start >= 0 else start
                stop = i.stop if isinstance(i.stop, int) and 0 <= i.stop <= size else stop
            found.append((dim, start, stop))
    return found


def written_bounds(x: Tensor, index: Any) -> list[int | None]:
    """The bounds that `slices_of` gives as the code has them: counted from the end, beyond it, or none at all.

    >>> written_bounds(torch.zeros(2, 8), (slice(None, 1), slice(-4, 99)))
    [None, 1, -4, 99]
    """
    cuts = [i for i in (index if isinstance(index, tuple) else (index,)) if i is not Ellipsis]
    bounds = [n for i in cuts if i.start is not None or i.stop is not None for n in (i.start, i.stop)]
    return [int(n) if isinstance(n, int | Tensor) else None for n in bounds]


def split_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The dimension that a call of one of SPLITS is along."""
    return int(kwargs.get("dim", args[2] if len(args) > 2 else 0)) % int(args[0].dim())


def with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[int]) -> Any:
    """Calls one of ASKS with other sizes."""
    if func in VIEWS:
        return args[0].reshape(sizes)
    if func in SLICES:
        out = args[0]
        for i, (dim, _, _) in enumerate(slices_of(*args)):
            out = out.narrow(dim, sizes[2 * i], sizes[2 * i + 1] - sizes[2 * i])
        return out
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


@dataclass
class SizedCall:
    """A call that named sizes while the network was followed: for each of them the channels that lie along it.

    Of a slice or a split also, for each bound or part: what the code asks for, and of what: a dimension, counted from
    the end, how long that is, and the channels along it.
    """

    kind: str
    asked: list[int]
    sizes: list[int]
    channels: list[list[Tensor]]
    cuts: list[tuple[int | None, int, int, list[Tensor]]] = field(default_factory=list)

    def expected(self, dead: Tensor) -> list[int]:
        """The sizes without the dead channels."""
        return [_left(size, lying, dead) for size, lying in zip(self.sizes, self.channels, strict=True)]

    def numbered(self, number: Callable[[Tensor], Tensor]) -> SizedCall:
        """The same with other numbers for the channels."""
        channels = [[number(nodes) for nodes in lying] for lying in self.channels]
        cuts = [(bound, dim, size, [number(nodes) for nodes in lying]) for bound, dim, size, lying in self.cuts]
        return replace(self, channels=channels, cuts=cuts)

    def record(self, position: int, dead: Tensor) -> tuple[int | str, ...]:
        """What tells one of its sizes from others, where a forward takes another way and calls have other numbers."""
        if not self.cuts:
            return position, self.sizes[position] if self.kind == "view" else int(self.asked[position]), self.kind
        bound, dim, size, lying = self.cuts[position]
        return position, self.sizes[position] if bound is None else bound, self.kind, dim, _left(size, lying, dead)


def _left(size: int, lying: list[Tensor], dead: Tensor) -> int:
    alive = torch.ones(size, dtype=torch.bool)
    for channels in lying:  # one row for each index
        alive &= ((channels < 0) | ~dead[channels.clamp(min=0)]).any(1)
    return int(alive.sum())


@dataclass(frozen=True)
class SizeRule:
    """One size in one call does not follow by itself: it is an attribute of a module, or set at the call."""

    call: Call
    position: int
    attribute: tuple[str, str] | None = None


def learn_sizes(
    model: nn.Module, calls: dict[Call, SizedCall], dead: Tensor, run: Callable[[], Any], updated: Collection[str] = ()
) -> set[SizeRule]:
    """Runs a network that channels were taken out of, and notes the sizes that its code gets wrong.

    Attributes from which something else is computed stay as they are, but for those of the modules that are `updated`.
    """
    rules: set[SizeRule] = set()
    by_attribute: set[SizeRule] = set()
    changed = {call: left for call, known in calls.items() if (left := known.expected(dead)) != known.sizes}
    if not changed:
        return rules

    def do(func: Any, args: Any, kwargs: Any, asked: list[int]) -> Any:
        call = counter.next()
        known, expected = calls.get(call), changed.get(call)
        if known is None or expected is None or len(expected) != len(asked):
            return func(*args, **kwargs)
        wrong = [i for i, (size, left) in enumerate(zip(asked, expected, strict=True)) if size not in (left, -1)]
        if not wrong:
            return func(*args, **kwargs)
        for i in wrong:
            setting = known.asked[i]
            if isinstance(setting, Setting) and (setting.module in updated or not setting.divides):
                # Now, since later calls are computed from it.
                set_size(model.get_submodule(setting.module), setting.name, expected[i])
                by_attribute.add(SizeRule(call, i, (setting.module, setting.name)))
            else:
                rules.add(SizeRule(call, i))
        return with_sizes(func, args, kwargs, [expected[i] if i in wrong else a for i, a in enumerate(asked)])

    while True:  # what was wrong before an attribute was known may have been computed from it
        known_before, counter = len(by_attribute), CallCounter()
        rules.clear()
        with _counted(model, counter), Asking(do), suppress(Exception):  # where it fails is for a comparison to say
            run()
        if len(by_attribute) == known_before:
            return rules | by_attribute


@contextmanager
def _counted(model: nn.Module, counter: CallCounter) -> Iterator[None]:
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            hooks.append(module.register_forward_pre_hook(lambda m, a, name=name: counter.enter(name)))
            hooks.append(module.register_forward_hook(lambda m, a, y: counter.leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def apply_sizes(model: nn.Module, rules: set[SizeRule], calls: dict[Call, SizedCall], dead: Tensor) -> None:
    """Tells a network's code the sizes that are left."""
    for rule in sorted(rules, key=lambda r: (r.call, r.position)):
        known = calls[rule.call]
        left = known.expected(dead)
        value = left[rule.position]
        if rule.attribute is not None:
            set_size(model.get_submodule(rule.attribute[0]), rule.attribute[1], value)
        elif left != known.sizes:
            place = (rule.call[1], *known.record(rule.position, dead))
            narrowed(model.get_submodule(rule.call[0]), ":".join(map(str, place)), value)


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
    """Makes a module's forward use another size at one of its calls."""
    sizes_of(module)[place] = value
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
    for key, value in sizes_of(module).items():
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
