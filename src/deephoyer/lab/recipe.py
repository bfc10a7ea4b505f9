"""Reading recipes: YAML by name or file, `key=value` overrides, and errors that say what is wrong and where.

What may stand in one is in `schema.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deephoyer.errors import UserError, unknown
from deephoyer.lab.schema import Recipe, type_at


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, as people mean it, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.YAMLError(f"the key {twice[0]!r} stands twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

FOLDER = Path(__file__).parent / "recipes"
LONGEST_NAME = 200  # file systems end names at 255 bytes, and `.lock` or a number may follow


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def text_of(name: str) -> str:
    """The text of a recipe: one of ours by name, or a file's."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in names():
            raise unknown("recipe", name, names(), "`deephoyer list recipes` shows all; a file of yours ends in .yaml.")
        path = FOLDER / f"{name}.yaml"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise UserError(f"recipe {name}: can't be read: {getattr(why, 'strerror', None) or why}.") from None


def folder_name(name: str, overrides: Iterable[str]) -> str:
    """A folder for the runs of a recipe: other overrides, another folder; a digest where that gets too long.

    >>> folder_name("demo", ["seed=1"])
    'demo,seed=1'
    """
    overrides = list(overrides)
    whole = full_name(name, overrides)
    if len(whole.encode()) <= LONGEST_NAME:
        return whole
    seed = [change for change in overrides if re.fullmatch(r"seed=\d+", change)]
    return full_name(name, [hashlib.sha256(whole.encode()).hexdigest()[:8], *seed])


def full_name(name: str, overrides: Iterable[str]) -> str:
    """A recipe and its overrides as one word, however long."""
    parts = [Path(name).stem, *sorted(overrides)]
    return ",".join(re.sub(r"[^\w.=+*-]", "_", part) for part in parts)


def read(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of that name or file, with `key=value` overrides of anything in it.

    >>> read("lenet-300-100-hs", ["regularize.strength=3e-4"]).regularize.strength
    0.0003
    """
    return parse(text_of(name), name, overrides)


def parse(text: str, name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from its YAML text; `name` is for the errors."""
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as why:
        raise UserError(f"recipe {name}: is not YAML: {_yaml_trouble(why)}") from None
    if not isinstance(content, dict):
        raise UserError(f"recipe {name}: holds no keys; a recipe has model, data and the four stages.")
    for override in overrides:
        _set(content, override)
    try:
        return Recipe.model_validate(content)
    except ValidationError as why:
        raise UserError(_explain(name, why)) from None


def _yaml_trouble(why: yaml.YAMLError) -> str:
    mark = getattr(why, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + str(getattr(why, "problem", None) or why)


def _set(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is not an override; write key=value, like regularize.strength=3e-4.")
    try:
        parsed = yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise UserError(f"{override!r}: the value is not YAML.") from None
    *path, last = key.split(".")
    for step in path:
        content = content.setdefault(step, {})
        if not isinstance(content, dict):
            raise UserError(f"{override!r}: {step} has no keys in this recipe.")
    content[last] = parsed


def _explain(name: str, why: ValidationError) -> str:
    """The first trouble in one or two lines, with the place."""
    # A slip in a key makes another one missing; the slip is the cause.
    first = min(why.errors(), key=lambda error: error["type"] != "extra_forbidden")
    place = ".".join(str(p) for p in first["loc"] if not re.fullmatch(r"(dict|tuple)\[.*|float|str", str(p)))
    if first["type"] == "extra_forbidden":
        *outer, key = place.split(".")
        known = type_at(outer).model_fields
        text = str(unknown("key", key, known))
        place = ".".join(outer)
    elif first["type"] == "missing":
        text = "is missing."
    else:
        cause = first.get("ctx", {}).get("error")
        given = first["input"]
        shown = f"; it is {given!r}." if not isinstance(given, dict) else "."
        text = str(cause) if cause else first["msg"][0].lower() + first["msg"][1:] + shown
    more = f" ({len(why.errors()) - 1} more)" if len({e["loc"][:2] for e in why.errors()}) > 1 else ""
    return f"recipe {name}: {place + ': ' if place else ''}{text}{more}"
