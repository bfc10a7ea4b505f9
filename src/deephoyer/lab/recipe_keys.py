"""All keys of a recipe, from the schema itself: for the docs and for `deephoyer list keys`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deephoyer.lab.schema import Recipe


def keys(part: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """The dotted name of each key with its type, default and description; nested parts included.

    >>> {key: default for key, _, default, _ in keys()}["regularize.penalty"]
    'hoyer-square'
    """
    for name, field in part.model_fields.items():
        inner = _part_in(field.annotation)
        default = "required" if field.default is PydanticUndefined else _value(field.default)
        yield prefix + name, "keys below" if inner else _kind(field.annotation), default, field.description or ""
        if inner:
            yield from keys(inner, f"{prefix}{name}.")


def reference() -> str:
    """All keys as a Markdown page, one table for each part of a recipe."""
    lines = [
        "# Recipe keys",
        "",
        "All keys of a recipe. On the command line, override a key by its dotted name: "
        "`deephoyer run demo regularize.strength=3e-4`. A stage that is missing is skipped. `extends: other/recipe` "
        "starts from another recipe; `null` removes one of its keys.",
    ]
    parts: dict[str, list[str]] = {}
    for key, kind, default, words in keys():
        cells = (f"`{key}`", kind, f"`{default}`" if default != "required" else default, words)
        row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        parts.setdefault(key.rpartition(".")[0], []).append(row)
    head = ["", "| key | type | default | description |", "|---|---|---|---|"]
    for part, rows in parts.items():
        lines += ["", f"## {part or 'The whole recipe'}", *head, *rows]
    return "\n".join(lines) + "\n"


def _part_in(annotation: Any) -> type[BaseModel] | None:
    """The part of a recipe that an annotation holds, if it is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for arg in get_args(annotation) if (found := _part_in(arg))), None)
    return None


_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(args[0])
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(arg) for arg in args if arg is not type(None)))
    if origin is dict:
        return "keys with values"
    if origin is tuple:
        return f"list of {_kind(args[0])}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", "anything").lower())


def _value(default: Any) -> str:
    """As one would write it in YAML."""
    if default is None or isinstance(default, bool):
        return "null" if default is None else str(default).lower()
    if default == ():
        return "[]"
    return f"{default:g}" if isinstance(default, float) else str(default)
