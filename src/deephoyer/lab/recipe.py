"""Reading recipes: YAML by name or file, `extends`, `key=value` overrides, and errors that say what is wrong and where.

What may stand in one is in `schema.py`. Names and texts are read without torch.
"""

from __future__ import annotations

import copy
import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deephoyer.errors import UserError, shown, unknown
from deephoyer.files import plain_file
from deephoyer.lab import bounded_yaml
from deephoyer.lab.recipe_keys import keys
from deephoyer.lab.schema import DESCRIPTIVE, STAGES, Recipe, is_file

FOLDER = Path(__file__).parent / "recipes"
LONGEST_MESSAGE = 600
MERGED = (*STAGES, "distill")
"""Parts that `extends` merges key by key; any other value is replaced whole."""


@dataclass(frozen=True)
class Command:
    """What was typed after `deephoyer run`: a recipe and overrides of anything in it."""

    base: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: str) -> Command:
        """
        >>> Command.parse("parts/lenet-5-teacher seed=1").overrides
        ('seed=1',)
        """
        base, *overrides = shlex.split(words)
        return cls(base, tuple(overrides))

    def __str__(self) -> str:
        return shlex.join(["deephoyer", "run", self.base, *self.overrides])

    def read(self) -> Recipe:
        return read(self.base, self.overrides)


def names() -> list[str]:
    """The recipes that come with the package, with their folder: paper/lenet-5."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def text_of(name: str) -> str:
    """The text of a recipe: one of ours by name, or a file's."""
    path = _path(name)
    try:
        return plain_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as why:
        line = why.object.count(b"\n", 0, why.start) + 1
        raise UserError(f"recipe {name}: line {line} is not UTF-8; save the file in that encoding.") from None
    except OSError as why:
        raise UserError(f"recipe {name}: can't be read: {why.strerror}.") from None


def _path(name: str) -> Path:
    if is_own(name):
        return Path(name)
    if name not in names():
        if name in renamed()["recipes"]:
            raise UserError(f"recipe {name} was renamed: deephoyer run {renamed()['recipes'][name]}")
        alike = [n for n in names() if n.rpartition("/")[2] == name]
        if alike:
            meant = " or ".join(", ".join(map(repr, alike)).rsplit(", ", 1))
            raise UserError(f"{name!r} is not a recipe. Did you mean {meant}? `deephoyer list` shows all.")
        if (Path(name) / "recipe.yaml").is_file():
            raise UserError(
                f"{name} is the folder of a run: its recipe is {name}/recipe.yaml, its networks are "
                f"{name}/*.safetensors."
            )
        raise unknown("recipe", name, names(), "`deephoyer list` shows all; your own file must end in .yaml.")
    return FOLDER / f"{name}.yaml"


@cache
def renamed() -> dict[str, dict[str, str]]:
    """Names of earlier versions and their new names: `recipes` and `keys`."""
    content: dict[str, dict[str, str]] = bounded_yaml.load((FOLDER / "renamed.yml").read_text(encoding="utf-8"))
    return content


def folder_name(base: str, overrides: Iterable[str] = ()) -> str:
    """The name of a run's folder, by the recipe's digest and seed.

    >>> folder_name("demo", ["seed=1"])
    'demo-s1'
    """
    as_it_is, recipe = read(base), read(base, overrides)
    name = re.sub(r"[^\w.-]+", "-", title(base))
    digest = f"-{recipe.digest()[:8]}" if recipe.digest() != as_it_is.digest() else ""
    return f"{name}{digest}-s{recipe.seed}"


def title(base: str) -> str:
    """A file's own name, or a recipe's with its folder."""
    return Path(base).stem if is_own(base) else base


def is_own(name: str) -> bool:
    """Whether a recipe is a file of the user's, not one of ours by its name."""
    return Path(name).suffix in (".yaml", ".yml")


def read(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of that name or file, with `key=value` overrides of anything in it.

    >>> read("paper/lenet-300-100", ["regularize.strength=3e-4"]).regularize.strength
    0.0003
    """
    content = _extended(name)
    for override in overrides:
        _set(content, override)
    recipe = _checked(content, name)
    for key, words in recipe.networks():
        if isinstance(words, str) and not is_file(words):
            try:
                Command.parse(words).read()
            except UserError as why:
                raise UserError(f"recipe {name}: {key}: {words}: {why}") from None
    return recipe


def parse(text: str, name: str) -> Recipe:
    """A recipe from complete YAML text, as in a run's folder; `name` is for error messages."""
    return _checked(_content(text, name), name)


def choices(words: Iterable[str]) -> dict[str, Any]:
    """Words like `data=mnist` or `model={name: resnet-50, stride: conv1}` as they stand in a recipe.

    >>> choices(["data=imagenet", "data.workers=4"])
    {'data': {'name': 'imagenet', 'workers': 4}}
    """
    content: dict[str, Any] = {}
    for word in words:
        _set(content, word)
    return content


def values_in(text: str) -> list[str]:
    """The values that a list of them names; commas within brackets and quotes are a value's own.

    >>> values_in("1e-4,2e-4"), values_in("{name: l0, strength: 1},{name: admm, every: 1}")
    (['1e-4', '2e-4'], ['{name: l0, strength: 1}', '{name: admm, every: 1}'])
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (depth or not values[-1]):
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0 and not quote:
            values.append("")
        else:
            values[-1] += letter
    if not all(values):
        raise UserError(f"{shown(text)}: there is nothing between two commas, or at an end.")
    return values


def describe(name: str) -> dict[str, Any]:
    """The description of one of our recipes: about, needs, expect; not validated."""
    content = _content(text_of(name), name)
    return {key: content.get(key) for key in DESCRIPTIVE}


def _content(text: str, name: str) -> dict[str, Any]:
    return copy.deepcopy(_parsed(text, name))


@lru_cache(64)
def _parsed(text: str, name: str) -> dict[str, Any]:
    """Cached: lists of hundreds of runs read the same few texts thousands of times."""
    try:
        content = bounded_yaml.load(text)
    except yaml.YAMLError as why:
        raise UserError(f"recipe {name}: not valid YAML: {bounded_yaml.explain(why)}") from None
    if not isinstance(content, dict):
        raise UserError(f"recipe {name}: has no keys; a recipe needs model, data and at least one stage.")
    return content


def _extended(name: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe's content on top of what it extends."""
    if any(_same_file(name, other) for other in before):
        raise UserError(f"recipe {before[0]}: extends itself: {' → '.join((*before, name))}.")
    content = _content(text_of(name), name)
    base = content.pop("extends", None)
    if base is None:
        return {key: value for key, value in content.items() if value is not None}
    if not isinstance(base, str):
        raise UserError(f"recipe {name}: extends: {base!r} is not the name of a recipe.")
    if is_own(base) and is_own(name):
        base = str(Path(name).parent / base)
    try:
        under = _extended(base, (*before, name))
    except UserError as why:
        text = str(why)
        raise UserError(text if text.startswith("recipe ") else f"recipe {name}: extends: {text}") from None
    return _merged({key: value for key, value in under.items() if key not in DESCRIPTIVE}, content)


def _same_file(name: str, other: str) -> bool:
    """Whether two names stand for one recipe; a file has several, like a.yaml and ../here/a.yaml."""
    return name == other or (is_own(name) and Path(name).resolve() == Path(other).resolve())


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`: null removes a key, stages merge key by key, all else is replaced."""
    made = dict(under)
    for key, value in over.items():
        if value is None:
            made.pop(key, None)
        elif key in MERGED and isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = _merged(made[key], value)
        else:
            made[key] = value
    return made


def _checked(content: dict[str, Any], name: str) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as why:
        raise UserError(_explain(name, why)) from None
    except (RecursionError, OverflowError) as why:
        raise UserError(f"recipe {name}: a value in it is too large or too deep ({why}).") from None


NAMED = ("model", "data", "method", "penalty", "groups", "rule", "score")
"""Keys whose value is a name, possibly with settings."""


def _set(content: dict[str, Any], override: str) -> None:
    """Puts `key=value` into a recipe's content; null removes the key."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is not an override; write key=value, like regularize.strength=3e-4.")
    try:
        parsed = bounded_yaml.load(value)
    except yaml.YAMLError:
        raise UserError(f"{shown(override)}: the value is not valid YAML.") from None
    *path, last = key.split(".")
    for step in path:
        if isinstance(content.get(step), str) and step in NAMED:
            content[step] = {"name": content[step]}
        content = content.setdefault(step, {})
        if not isinstance(content, dict):
            raise UserError(f"{override!r}: {step} has no keys in this recipe.")
    if parsed is None:
        if key not in {known for known, *_ in keys()}:  # a slip would go unnoticed
            raise UserError(_unknown_key(key))
        content.pop(last, None)
    else:
        content[last] = parsed


def _unknown_key(key: str) -> str:
    """The error for an unknown key, with the most similar one, wherever it is nested."""
    if key in renamed()["keys"]:
        return f"{key!r} is no longer a recipe key: use {renamed()['keys'][key]}."
    if ":" in key:
        return f"{key!r} is not a key; YAML takes a space after a colon, as in {{macs: 0.5}}."
    outer, _, last = key.rpartition(".")
    places: dict[str, list[str]] = {}
    for one, *_ in keys():
        places.setdefault(one.rpartition(".")[2], []).append(one)
    near = difflib.get_close_matches(last.replace("-", "_"), places, n=1)
    if not near:
        return str(unknown("key", last, [name for name, there in places.items() if _within(outer, there)]))
    here = _within(outer, places[near[0]])
    *most, final = here or places[near[0]]
    meant = f"{', '.join(most)} or {final}" if most else final
    return f"{last!r} is not a key{' of ' + outer if outer else ''}. Did you mean {meant}?"


def _within(outer: str, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[0] == outer]


PLAINLY = {
    "model_type": "should have keys and values, like {epochs: 3}",
    "tuple_type": "should be a list, like [a, b]",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_type": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "string_type": "should be a word",
}
"""Pydantic's findings in the words of somebody who writes YAML."""


def _explain(name: str, why: ValidationError) -> str:
    """The first error in one or two lines, with its place."""
    # A slip in a key makes another one missing; the slip is the cause.
    # Of what has several forms, the one that was meant says most.
    first = min(why.errors(), key=lambda e: (e["type"] != "extra_forbidden", "error" not in e.get("ctx", {})))
    kinds = r"(dict|tuple|literal|function)\b.*\[.*|float|int|str|\w*[A-Z]\w*"  # pydantic's words for what it tried
    place = ".".join(str(p) for p in first["loc"] if not re.fullmatch(kinds, str(p)))
    if first["type"] == "extra_forbidden":
        text = _unknown_key(place)
        place = place.removesuffix(str(first["loc"][-1])).removesuffix(".")
    elif first["type"] == "missing":
        text = "is missing."
    else:
        cause = first.get("ctx", {}).get("error")
        given = first["input"]
        value = f"; it is {shown(given)}." if not isinstance(given, dict) else "."
        asked = PLAINLY.get(first["type"]) or first["msg"][0].lower() + first["msg"][1:]
        text = str(cause) if cause else asked + value
    more = f" ({len(why.errors()) - 1} more)" if len({e["loc"][:2] for e in why.errors()}) > 1 else ""
    text = text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"
    return f"recipe {name}: {place[:200] + ': ' if place else ''}{text}{more}"
