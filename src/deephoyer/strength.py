"""How strong a penalty is at each step: a number, a warm-up, or any callable of the step.

A schedule is a pure function of the step, so that a resumed run is as strong as one never cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deephoyer.errors import UserError, first_line, not_negative, positive_whole, shown, unknown

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """the same at every step"""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", not_negative(self.value, "strength"))

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class _Warmup:
    """From `start` to `value` over the first `steps`, then constant; a subclass says along which curve."""

    value: float
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", not_negative(self.value, "strength"))
        object.__setattr__(self, "start", not_negative(self.start, "strength at the start"))
        object.__setattr__(self, "steps", positive_whole(self.steps, "strength: steps of a warm-up"))

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.value
        return self.start + (self.value - self.start) * self.share(step / self.steps)

    def share(self, done: float) -> float:
        raise NotImplementedError


class Linear(_Warmup):
    """a straight line from `start` to `value` over the first `steps`, then constant

    >>> [Linear(1.0, steps=4)(s) for s in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """

    def share(self, done: float) -> float:
        return done


class Cosine(_Warmup):
    """half a cosine from `start` to `value` over the first `steps`, then constant"""

    def share(self, done: float) -> float:
        return (1 - math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Listed:
    """one value after the other, each for so many `steps`; the last stays

    >>> [Listed((1.0, 3.0), steps=2)(s) for s in (0, 1, 2, 9)]
    [1.0, 1.0, 3.0, 3.0]
    """

    values: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(not_negative(value, "strength") for value in self.values))
        object.__setattr__(self, "steps", positive_whole(self.steps, "strength: steps for each value of a list"))
        if not self.values:
            raise UserError("strength: a list needs a value.")

    def __call__(self, step: int) -> float:
        return self.values[min(step // self.steps, len(self.values) - 1)]


SCHEDULES: dict[str, type] = {"constant": Constant, "linear": Linear, "cosine": Cosine, "listed": Listed}


def schedule(choice: Any) -> Schedule:
    """A number, a schedule or a callable, as a schedule."""
    return choice if callable(choice) else Constant(not_negative(choice, "strength"))


def multiplied(made: Schedule, factor: float) -> Schedule:
    """A schedule of the same shape; a function of the user's own is for the user to multiply.

    >>> multiplied(Linear(1.0, steps=4), 2)
    Linear(value=2.0, steps=4, start=0.0)
    """
    if isinstance(made, Constant):
        return replace(made, value=made.value * factor)
    if isinstance(made, _Warmup):
        return replace(made, value=made.value * factor, start=made.start * factor)
    if isinstance(made, Listed):
        return replace(made, values=tuple(value * factor for value in made.values))
    raise UserError("strengthen: the strength is a function of your own; multiply what it gives there.")


def settled(made: Schedule, step: int) -> bool:
    """Whether the strength is the same from this step on, as far as can be told.

    >>> settled(Linear(1.0, steps=4), 3), settled(Linear(1.0, steps=4), 4)
    (False, True)
    """
    if isinstance(made, Listed):
        return step >= made.steps * (len(made.values) - 1)
    return isinstance(made, Constant) or (isinstance(made, _Warmup) and step >= made.steps)


def to_state(made: Schedule) -> dict[str, Any] | None:
    """What `state_dict` keeps of a schedule; a user's own callable can't be kept and is None."""
    for kind, cls in SCHEDULES.items():
        if type(made) is cls:
            return {"kind": kind, **vars(made)}
    return None


def from_state(state: Mapping[str, Any]) -> Schedule:
    settings = dict(state) if isinstance(state, Mapping) else {}
    kind = settings.pop("kind", None)
    if kind not in SCHEDULES:
        raise unknown("schedule", kind, SCHEDULES)
    try:
        made: Schedule = SCHEDULES[kind](**settings)
    except TypeError as why:
        raise UserError(f"strength: {shown(state)} is not the state of a schedule: {first_line(why)}.") from why
    return made
