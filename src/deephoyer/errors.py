"""What goes wrong through the user's input or the user's files, as opposed to a defect of ours.

The commands print a `UserError` in one or two lines and exit with status 2; in the library it is a
`ValueError` like any other.
"""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Iterable
from typing import Any

LARGEST = 3.4e38
"""What float32 can hold."""


class UserError(ValueError):
    """A mistake in the input; the message says what is wrong, where, and what to do."""


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> UserError:
    """'hoyer_sq' is not a penalty. Did you mean 'hoyer-square'?"""
    names = list(known)
    spelt = str(name)[:200].lower().replace("_", "-")
    near = [n for n in names if spelt and n.startswith(spelt)] or difflib.get_close_matches(
        spelt, names, n=1, cutoff=0.5
    )
    guess = f"Did you mean {near[0]!r}? " if near else ""
    article = "an" if kind[:1] in "aeiou" else "a"
    text = f"{shown(name)} is not {article} {kind}. {guess}"
    return UserError(text + (hint or "Known: " + ", ".join(names) + "."))


def not_negative(value: Any, what: str) -> float:
    """The value as a float, refused if negative or no finite number; NumPy's and torch's scalars are numbers."""
    number = _number(value)
    if number is None or not 0 <= number <= LARGEST:
        raise UserError(f"{what} is {shown(value)}; it must be a finite number (int or float), 0 or more.")
    return number


def score(value: Any, what: str) -> float:
    """How well a network does, as a float; NaN, which a network that diverged gives, is worse than any other.

    >>> score(float("nan"), "score") < score(-1e9, "score")
    True
    """
    number = _number(value)
    if number is None:
        raise UserError(f"{what} is {shown(value)}; it must be one number, higher for a better network.")
    return float("-inf") if number != number else number


def true_or_false(value: Any, what: str) -> bool:
    """The value as a bool; NumPy's are taken, too."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise UserError(f"{what} is {shown(value)}; it must be True or False.")
    return bool(value)


def one_of(kind: str, value: Any, known: Iterable[str]) -> str:
    """The value, which must be one of these words."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(kind, value, names)
    return value


def share(value: Any, what: str) -> float:
    """The value as a float, refused if it is no number from 0 to below 1."""
    number = not_negative(value, what)
    if number >= 1:
        raise UserError(f"{what} is {shown(value)}; it must be a number from 0 to below 1.")
    return number


def positive(value: Any, what: str, above: float = 0.0) -> float:
    """The value as a float, refused if it is no finite number above 0, or above another one."""
    number = not_negative(value, what)
    if number <= above:
        raise UserError(f"{what} is {shown(value)}; it must be a number above {above:g}.")
    return number


def positive_whole(value: Any, what: str) -> int:
    """The value as an int of 1 or more; NumPy's are taken, too."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise UserError(f"{what} is {shown(value)}; it must be a whole number, 1 or more.")
    return number


def _number(value: Any) -> float | None:
    try:
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, numbers.Real) and not isinstance(plain, bool) else None
    except (ValueError, TypeError, RuntimeError, OverflowError):  # several numbers, no number, none yet, too large
        return None


def first_line(why: object, most: int = 200) -> str:
    """What an exception, or a program, says, for a message: its first line, or its kind where it says nothing."""
    line = (str(why).strip().splitlines() or [type(why).__name__])[0]
    return line if len(line) <= most else line[: most - 1] + "…"


def shown(value: object, most: int = 60) -> str:
    """The value as a message shows it: whatever it is, in a few words."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"something of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
