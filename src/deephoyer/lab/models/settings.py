"""Checks that the models share on what users may set. The registry already refuses unknown names."""

from __future__ import annotations

from collections.abc import Sequence

from deephoyer.errors import UserError, unknown


def share(name: str, value: float) -> float:
    """A number from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UserError(f"{name} is {value!r}; it must be a number from 0 to below 1.")
    return float(value)


def choice(name: str, value: str, known: Sequence[str]) -> str:
    """One of the words in `known`."""
    if value not in known:
        raise unknown(name, value, known)
    return value
