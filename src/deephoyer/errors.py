"""What goes wrong through the user's input or the user's files, as opposed to a defect of ours.

The commands print a `UserError` in one or two lines and exit with status 2; in the library it is a
`ValueError` like any other.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """The message says what is wrong, where, and what to do; it is shown as it is."""


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> UserError:
    """'hoyer_sq' is not a penalty. Did you mean 'hoyer-square'?"""
    names = list(known)
    spelt = str(name).lower().replace("_", "-")
    near = [n for n in names if spelt and n.startswith(spelt)] or difflib.get_close_matches(
        spelt, names, n=1, cutoff=0.5
    )
    guess = f"Did you mean {near[0]!r}? " if near else ""
    article = "an" if kind[:1] in "aeiou" else "a"
    text = f"{name!r} is not {article} {kind}. {guess}"
    return UserError(text + (hint or "Known: " + ", ".join(names) + "."))


def not_negative(value: Any, what: str) -> float:
    """The value as a float, refused when it is negative or not a finite number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise UserError(f"{what} is {value!r}; it must be a finite number (int or float), 0 or more.")
    return float(value)
