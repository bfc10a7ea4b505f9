"""What a file says about its tensors: which are packed, which are one and the same, masks, shape, provenance.

Read from a file, everything is checked here, entry by entry; whether it fits the tensors is for the readers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deephoyer.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """A tensor stored as the places of its nonzeros and their values; or indices, stored as a pattern alone."""

    shape: list[int]
    form: str
    holds: str = "values"

    def parts(self, name: str) -> list[str]:
        """The names under which the tensor lies in the file."""
        return [f"{name}:where", f"{name}:values"] if self.holds == "values" else [f"{name}:where"]


@dataclass(frozen=True)
class MaskForm:
    """A mask: the nonzeros of its tensor, or a pattern of its own."""

    form: str


@dataclass(frozen=True)
class Manifest:
    """`same` gives, for each further name of a tied tensor, the name it is stored under.

    `versions` are those that modules give to the meaning of their state, by name, other than 1.
    """

    version: int = 1
    packed: dict[str, Packed] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    masks: dict[str, MaskForm] = field(default_factory=dict)
    structure: dict[str, Any] | None = None
    versions: dict[str, int] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        inner = {key: {name: vars(form) for name, form in getattr(self, key).items()} for key in ("packed", "masks")}
        return {**vars(self), **inner}


def validate(path: str | os.PathLike[str], data: dict[str, Any]) -> Manifest:
    """The manifest, or an error that says which entry is wrong."""
    if data.get("version", 1) != 1 or isinstance(data.get("version"), bool):
        raise UserError(f"{path} was written by a newer deephoyer than this one, which reads version 1.")
    try:
        content = _fields("the whole", data, Manifest)
        for key, read in _READERS.items():
            if key in content:
                content[key] = read(key, content[key])
        return Manifest(**content)
    except _Wrong as why:
        raise UserError(f"{path}: its manifest is wrong at {why}.") from None


class _Wrong(ValueError):
    """An entry, and what it is not."""

    def __init__(self, where: str, what: str):
        super().__init__(f"{where[:100]}: {what}")


def _fields(where: str, data: Any, cls: type) -> dict[str, Any]:
    known = cls.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(data, dict) or not set(data) <= set(known):
        raise _Wrong(where, f"not an object with the keys {', '.join(known)}")
    return dict(data)


def _packed(where: str, data: Any) -> Packed:
    content = _fields(where, data, Packed)
    shape = content.get("shape")
    sizes = isinstance(shape, list) and len(shape) <= 16 and all(type(n) is int and 0 <= n < 2**62 for n in shape)
    if not sizes:
        raise _Wrong(f"{where}.shape", "not a list of up to 16 sizes")
    _word(where, content, "form", ("bitmap", "gaps"))
    _word(where, content, "holds", ("values", "chosen", "ranks"), "values")
    return Packed(**content)


def _mask(where: str, data: Any) -> MaskForm:
    content = _fields(where, data, MaskForm)
    _word(where, content, "form", ("nonzeros", "bitmap", "gaps"))
    return MaskForm(**content)


def _word(where: str, content: Mapping[str, Any], key: str, known: tuple[str, ...], default: str = "") -> None:
    if content.get(key, default) not in known:
        raise _Wrong(f"{where}.{key}", f"not one of {', '.join(known)}")


def _name(where: str, data: Any) -> str:
    if not isinstance(data, str) or not 1 <= len(data) <= 1000:
        raise _Wrong(where, "not a name of 1 to 1000 characters")
    return data


def _by_name(read: Callable[[str, Any], T]) -> Callable[[str, Any], dict[str, T]]:
    def each(where: str, data: Any) -> dict[str, T]:
        return {_name(where, name): read(f"{where}.{name}", entry) for name, entry in _object(where, data).items()}

    return each


def _object(where: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Wrong(where, "not an object")
    return data


def _version(where: str, data: Any) -> int:
    if type(data) is not int or not 0 <= data < 2**31:
        raise _Wrong(where, "not a version")
    return data


def _module_versions(where: str, data: Any) -> dict[str, int] | None:
    """The whole model's name is empty."""
    if data is None:
        return None
    return {name: _version(f"{where}.{name}", entry) for name, entry in _object(where, data).items()}


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "packed": _by_name(_packed),
    "same": _by_name(_name),
    "masks": _by_name(_mask),
    "structure": lambda where, data: None if data is None else _object(where, data),
    "versions": _module_versions,
    "provenance": _object,
}
