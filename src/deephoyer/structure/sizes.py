"""Sizes that are written into a network's code: which of them change when channels go, and how the code is told.

A forward that sees a tensor in another shape names sizes: `x.view(b, n, self.heads, -1)`, `x.split(self.width)`. When
heads go, what is left open follows by itself, and so does what was read from a shape that follows. Other sizes are
found here, by a trial: those that are attributes of the module get their new value; others are set right at the call
(`narrowed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.structure.asked_sizes import SLICES, Asking, Call, CallCounter, with_sizes, written_bounds
from deephoyer.structure.layers import kind_of
from deephoyer.structure.narrowed import narrowed, set_size
from deephoyer.weights import hookable_modules


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
    """Makes every whole number among the modules' attributes a `Setting`; the model must be a copy.

    But those in which a layer says its own widths: they are its tensors', whatever else somebody's code asks them for.
    """
    for prefix, module in model.named_modules():
        kind = kind_of(module)
        own = () if kind is None else (kind.out_size, kind.in_size)
        for name, value in vars(module).items():
            if type(value) is int and value > 1 and name not in own:
                vars(module)[name] = Setting.of(value, prefix, name)


def counts_heads(name: str) -> bool:
    """Whether an attribute of this name says how many heads there are."""
    return "head" in name and not any(word in name for word in ("dim", "size", "width", "ch", "mask", "mul"))


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

    def leaves_open(self, position: int) -> bool:
        """Whether it is the end of a slice that has none, which follows by itself."""
        return bool(self.cuts) and self.cuts[position][0] is None

    def numbered(self, number: Callable[[Tensor], Tensor]) -> SizedCall:
        """The same with other numbers for the channels."""
        channels = [[number(nodes) for nodes in lying] for lying in self.channels]
        cuts = [(bound, dim, size, [number(nodes) for nodes in lying]) for bound, dim, size, lying in self.cuts]
        return replace(self, channels=channels, cuts=cuts)

    def record(self, position: int, dead: Tensor, asked: int | None = None) -> tuple[int | str, ...]:
        """What tells one of its sizes from others, where a forward takes another way and calls have other numbers.

        Code that computes what it asks for may have `asked` for something else than in the whole network.
        """
        if not self.cuts:
            before = self.sizes[position] if self.kind == "view" else int(self.asked[position])
            return position, before if asked is None else asked, self.kind
        bound, dim, size, lying = self.cuts[position]
        bound = self.sizes[position] if bound is None else bound
        return position, bound if asked is None else asked, self.kind, dim, _left(size, lying, dead)


def _left(size: int, lying: list[Tensor], dead: Tensor) -> int:
    alive = torch.ones(size, dtype=torch.bool)
    for channels in lying:  # one row for each index
        alive &= ((channels < 0) | ~dead[channels.clamp(min=0)]).any(1)
    return int(alive.sum())


Asked = dict[tuple[Call, int], int | None]
"""What a smaller network's code asks for at calls, at one place of each."""


Told = tuple[str, tuple[int | str, ...]]
"""A module, and what tells one of the sizes that its code asks for from others."""


@dataclass(frozen=True)
class SizeRule:
    """One size in one call does not follow by itself: it is an attribute of a module, or set at the call."""

    call: Call
    position: int
    attribute: tuple[str, str] | None = None


def learn_sizes(
    model: nn.Module, calls: dict[Call, SizedCall], dead: Tensor, run: Callable[[], Any], updated: Collection[str] = ()
) -> tuple[set[SizeRule], Asked]:
    """Runs a network that channels were taken out of, and notes the sizes that its code gets wrong, and asks for then.

    Attributes from which something else is computed stay as they are, but for those of the modules that are `updated`.
    """
    rules: set[SizeRule] = set()
    by_attribute: set[SizeRule] = set()
    asks: Asked = {}
    left_over = {call: known.expected(dead) for call, known in calls.items()}
    if all(left == calls[call].sizes for call, left in left_over.items()):
        return rules, asks

    def do(func: Any, args: Any, kwargs: Any, asked: list[int]) -> Any:
        call = counter.next()
        known, expected = calls.get(call), left_over.get(call)
        if known is None or expected is None or len(expected) != len(asked):
            return func(*args, **kwargs)
        wrong = [i for i, (size, left) in enumerate(zip(asked, expected, strict=True)) if size not in (left, -1)]
        if expected == known.sizes:  # which code may miss that computes what it asks for: half of what is left
            wrong = [i for i in wrong if known.channels[i]]
        if not wrong:
            return func(*args, **kwargs)
        written = written_bounds(args[0], args[1]) if func in SLICES else asked
        for i in wrong:
            setting = known.asked[i]
            if isinstance(setting, Setting) and (setting.module in updated or not setting.divides):
                # Now, since later calls are computed from it.
                set_size(model.get_submodule(setting.module), setting.name, expected[i])
                by_attribute.add(SizeRule(call, i, (setting.module, setting.name)))
            else:
                rules.add(SizeRule(call, i))
                asks[call, i] = written[i]
        return with_sizes(func, args, kwargs, [expected[i] if i in wrong else a for i, a in enumerate(asked)])

    while True:  # what was wrong before an attribute was known may have been computed from it
        known_before, counter = len(by_attribute), CallCounter()
        rules.clear()
        asks.clear()
        with _counted(model, counter), Asking(do), suppress(Exception):  # where it fails is for a comparison to say
            run()
        if len(by_attribute) == known_before:
            return rules | by_attribute, asks


@contextmanager
def _counted(model: nn.Module, counter: CallCounter) -> Iterator[None]:
    hooks = []
    for name, module in hookable_modules(model):
        hooks.append(module.register_forward_pre_hook(lambda m, a, name=name: counter.enter(name)))
        hooks.append(module.register_forward_hook(lambda m, a, y: counter.leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def apply_sizes(
    model: nn.Module, rules: set[SizeRule], calls: dict[Call, SizedCall], dead: Tensor, asks: Asked | None = None
) -> None:
    """Tells a network's code the sizes that are left.

    An attribute that names several sizes (two parts of a split) stays if others are left of each: all calls of the
    modules that ask for it are then told theirs.
    """
    told: set[Told] = set()
    named = _named(calls, {rule.attribute for rule in rules if rule.attribute is not None})
    uneven = {attribute for attribute, its in named.items() if len({calls[c].expected(dead)[i] for c, i in its}) > 1}
    for rule in sorted(rules, key=lambda r: (r.call, r.position)):
        if rule.attribute is None:
            told |= _tell(model, rule.call, rule.position, calls, dead, (asks or {}).get((rule.call, rule.position)))
        elif rule.attribute not in uneven:
            _set(model, rule.attribute, calls[rule.call].expected(dead)[rule.position])
    for attribute in sorted(uneven):
        first, position = named[attribute][0]
        _set(model, attribute, int(calls[first].asked[position]))
        askers = {call[0] for call, _ in named[attribute]}
        for call, known in calls.items():
            if call[0] in askers and known.kind != "check":
                for i, (before, left) in enumerate(zip(known.sizes, known.expected(dead), strict=True)):
                    if before != left and not known.leaves_open(i):
                        told |= _tell(model, call, i, calls, dead)
    _tell_apart(model, calls, dead, told)


def _tell_apart(model: nn.Module, calls: dict[Call, SizedCall], dead: Tensor, told: set[Told]) -> None:
    """Parts that are as long as before, but would be taken for others that are not, get their own length."""
    modules = {module for module, _ in told}
    for call, known in calls.items():
        if call[0] in modules and known.cuts:
            for i, (before, left) in enumerate(zip(known.sizes, known.expected(dead), strict=True)):
                record = known.record(i, dead)
                if before == left and (call[0], record) in told and not known.leaves_open(i):
                    narrowed(model.get_submodule(call[0]), _place(call, record), left)


def _named(
    calls: dict[Call, SizedCall], attributes: set[tuple[str, str]]
) -> dict[tuple[str, str], list[tuple[Call, int]]]:
    """The calls, and which of their sizes, that ask for attributes."""
    found: dict[tuple[str, str], list[tuple[Call, int]]] = {}
    for call, known in calls.items():
        for i, size in enumerate(known.asked if known.kind != "check" else ()):
            if isinstance(size, Setting) and (size.module, size.name) in attributes and known.channels[i]:
                found.setdefault((size.module, size.name), []).append((call, i))
    return found


def _set(model: nn.Module, attribute: tuple[str, str], value: int) -> None:
    set_size(model.get_submodule(attribute[0]), attribute[1], value)


def _place(call: Call, record: tuple[int | str, ...]) -> str:
    return ":".join(map(str, (call[1], *record)))


def _tell(
    model: nn.Module,
    call: Call,
    position: int,
    calls: dict[Call, SizedCall],
    dead: Tensor,
    asked: int | None = None,
) -> set[Told]:
    known = calls[call]
    left = known.expected(dead)
    if left == known.sizes and asked is None:
        return set()
    record = known.record(position, dead, asked)
    narrowed(model.get_submodule(call[0]), _place(call, record), left[position])
    return {(call[0], record)}
