"""What a recipe chooses by a name, and may give settings: a model, data, a penalty, groups, a rule, a score, a method.

Names are checked against the registries so that a slip shows before anything starts. The registries bring torch, and
are loaded only when a recipe is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator

from deephoyer.errors import UserError, shown

Choice = str | dict[str, Any]
"""A name, or a mapping with a name and settings."""

Choices = Choice | tuple[Choice, ...]
"""One or several; names alone may be joined by a plus, like filters+channels."""


def named(choice: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name, and the settings.

    >>> named({"name": "transformed-l1", "a": 2.0})
    ('transformed-l1', {'a': 2.0})
    """
    settings = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{shown(choice)} needs a name.")
    return name, settings


def plain(choice: Any) -> Any:
    """A mapping with only a name is replaced by the name."""
    return choice["name"] if isinstance(choice, dict) and set(choice) == {"name"} else choice


def several(choices: Choices) -> list[Choice]:
    """One or several choices as a list.

    >>> several("filters+channels")
    ['filters', 'channels']
    """
    if isinstance(choices, str):
        return [name.strip() for name in choices.split("+")]
    return list(choices) if isinstance(choices, tuple) else [choices]


OF_THIS_MACHINE = ("path", "workers")
"""Settings of data that say nothing of what they are."""


def what_data(choice: Choice) -> Choice:
    """A choice of data without settings of this machine: its path and the number of workers.

    >>> what_data({"name": "folder", "path": "/disk/flowers", "size": 224})
    {'name': 'folder', 'size': 224}
    """
    if isinstance(choice, str):
        return choice
    kept: Choice = plain({key: value for key, value in choice.items() if key not in OF_THIS_MACHINE})
    return kept


def _checked_by(place: str, check: Callable[[Any, Any], object]) -> AfterValidator:
    """Validates a choice with the registry or function at `module:name`."""

    def checked(choice: Any) -> Any:
        module, _, name = place.partition(":")
        if choice is not None:
            check(getattr(import_module(f"deephoyer.{module}"), name), choice)
        return plain(choice)

    return AfterValidator(checked)


def _makes(registry: Any, choice: Choice) -> None:
    registry.make(choice)


def _has(registry: Any, choice: Choice) -> None:
    """Checks only the name; settings are checked when it is made."""
    registry[named(choice)[0]]


def _groups(registry: Any, choices: Choices) -> None:
    """A grouping that needs the network's graph can't be made yet: only the names of its settings are checked."""
    kinds = [named(choice)[0] for choice in several(choices)]
    if len(set(kinds)) < len(kinds) or not kinds:
        raise UserError(f"{shown(choices)} must name at least one kind of group, and each once.")
    for choice in several(choices):
        name, settings = named(choice)
        if not getattr(registry[name], "needs_graph", False):
            registry.make(choice)
            continue
        taken = list(inspect.signature(registry[name]).parameters)[2:]
        for key in settings:
            if key not in taken:
                raise UserError(f"group {name!r} has no setting {key!r}; its settings: {taken or 'none'}.")


ModelChoice = Annotated[Choice, _checked_by("lab.models:maker", lambda maker, choice: maker(named(choice)[0]))]
DataChoice = Annotated[Choice, _checked_by("lab.data:DATASETS", _has)]
PenaltyChoice = Annotated[Choice, _checked_by("penalties:PENALTIES", _makes)]
GroupsChoice = Annotated[Choices, _checked_by("groups:GROUPINGS", _groups)]
RuleChoice = Annotated[Choice, _checked_by("rules:RULES", _has)]
ScoreChoice = Annotated[Choice | None, _checked_by("scores:SCORES", _makes)]
MethodChoice = Annotated[Choice | None, _checked_by("lab.methods:METHODS", _makes)]
