"""Where a run comes from: the recipe of ours and the overrides that give exactly its settings.

A run's folder holds every setting but not the words that were typed; here they are found again, and
checked by reading them back. Which device a run used is no part of them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from deephoyer.errors import UserError, unknown
from deephoyer.lab import recipe as recipes
from deephoyer.lab.schema import Recipe

WHOLE = ("model", "data")
"""Settings with a name in them: given whole, or not at all."""


def origin(recipe: Recipe, base: str | None = None) -> tuple[str, list[str]]:
    """The recipe's name and the overrides, the seed always among them; the nearest recipe where none is named.

    >>> origin(recipes.read("demo", ["seed=3", "finetune.lr=2e-4"]))
    ('demo', ['finetune.lr=0.0002', 'seed=3'])
    """
    if base is not None and base not in recipes.names():
        raise unknown("recipe", base, recipes.names(), "A record's recipe comes with the package.")
    tried = [(name, overrides(recipes.read(name), recipe)) for name in ([base] if base else recipes.names())]
    name, changes = min(tried, key=lambda one: (len(one[1]), len(one[0]), one[0]))
    if settings(recipes.read(name, changes)) != settings(recipe):
        raise UserError(f"the run's settings can't be written as overrides of {name}: {' '.join(changes)}.")
    return name, changes


def settings(recipe: Recipe) -> dict[str, Any]:
    """All that decides what a run does; where it does it is left out."""
    content = recipe.model_dump(mode="json")
    del content["device"]
    return content


def overrides(base: Recipe, wanted: Recipe) -> list[str]:
    """What to say after the base's name to get `wanted`."""
    ours, theirs = settings(base), settings(wanted)
    said = [f"seed={theirs['seed']}"]
    for key, value in theirs.items():
        old = ours[key]
        if key == "seed" or value == old:
            continue
        if key not in WHOLE and isinstance(old, dict) and isinstance(value, dict):
            said += [f"{key}.{k}={_written(v)}" for k, v in value.items() if v != old[k]]
        else:
            said.append(f"{key}={_written(value)}")
    return sorted(said)


def _written(value: Any) -> str:
    """A value as it is typed after `key=`: bare where that is safe, JSON otherwise, which YAML reads too."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./+-]+", value):
        return value
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if v is not None}
    return json.dumps(value)
