"""Finds a network that a recipe names by a file or by the run that makes it: in `./results` or `./runs`.

A recipe names the network it starts from, or a teacher, by recipe and overrides ("parts/resnet-56-dense seed=1"). It is
looked up by the digest of that recipe, not by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.export import provenance
from deephoyer.files import path_on_disk
from deephoyer.lab.choices import Choice
from deephoyer.lab.data import Source, load
from deephoyer.lab.recipe import Command
from deephoyer.lab.runs.folder import COMMAND, RunFolder
from deephoyer.lab.schema import Recipe, Teacher, is_file

RESULTS, RUNS = Path("results"), Path("runs")


@dataclass(frozen=True)
class Network:
    """The file of a network, its model, and how its epochs were selected, where that is known."""

    path: Path
    model: Choice | None
    epoch_selection: str | None


class NetworkMissing(UserError):
    """A network that has not been trained yet; `command` trains it."""

    def __init__(self, key: str, command: Command):
        self.command = command
        super().__init__(
            f"{key}: the network is neither in ./{RESULTS} nor in ./{RUNS}. Give a .safetensors file, or train it with:"
            f"\n{command}"
        )


def check_networks(networks: Sequence[tuple[str, str | Teacher]]) -> None:
    """Looks for every network, given with the recipe's key that names it; one error lists all that are missing."""
    missing: list[NetworkMissing] = []
    for key, named in networks:
        try:
            network(named, key)
        except NetworkMissing as why:
            missing.append(why)
    if not missing:
        return
    first, *rest = missing
    raise UserError("\n".join(dict.fromkeys([str(first), *(str(why.command) for why in rest)])))


def network(named: str | Teacher, key: str) -> Network:
    """The network that the recipe's `key` names."""
    if isinstance(named, Teacher):
        return _in_file(named.file, key, named.model)
    if is_file(named):
        return _in_file(named, key, None)
    from deephoyer.lab.report.stored_weights import find_stored_weights  # reports import runs, so not above

    command = Command.parse(named)
    recipe = command.read()
    path = find_stored_weights(
        recipe.digest(), recipe.seed, RESULTS, lambda images: _same_images(images, recipe)
    ) or _find_run(recipe, key, command)
    if path is None:
        raise NetworkMissing(key, command)
    return Network(path, recipe.model, recipe.epoch_selection)


def _in_file(file: str, key: str, model: Choice | None) -> Network:
    path = path_on_disk(file)
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}; paths are taken from the folder you are in.")
    recipe = recipe_of(path)
    return Network(path, model or recipe.get("model"), recipe.get("epoch_selection"))


def recipe_of(path: Path) -> dict[str, Any]:
    """The recipe of a file: from the file itself, or from the folder of its run."""
    with suppress(UserError):  # plain weights
        recipe = provenance(path).get("recipe")
        return recipe if isinstance(recipe, dict) else {}
    with suppress(UserError):
        run = RunFolder(path.parent).recipe() if (path.parent / COMMAND).exists() else None
        return run.model_dump(mode="json") if run else {}
    return {}


def _same_images(images: str | None, recipe: Recipe) -> bool:
    """Whether a run with this fingerprint may have had the images of a recipe: not if they are here and others."""
    if images is None:
        return True
    try:
        source: Source = load(recipe.data)
    except UserError:
        return True
    return source.fingerprint in (None, images)


def _find_run(recipe: Recipe, key: str, command: Command) -> Path | None:
    """The final network of a run with the recipe's identity and seed; one that is not finished is refused."""
    digest = recipe.digest()
    identity = {"digest": digest, "seed": recipe.seed}
    unfinished = None
    for path in sorted(RUNS.glob("*/command.json")):
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text) if digest in text else None  # few of thousands need parsing
        except (OSError, ValueError):
            continue
        if not isinstance(content, dict) or {k: content.get(k) for k in identity} != identity:
            continue
        if not _same_images(content.get("images"), recipe):
            continue
        if (path.parent / "summary.json").exists():
            return path.parent / recipe.result_file
        unfinished = unfinished or path.parent
    if unfinished:
        raise UserError(f"{key}: the run in {unfinished} is not finished; `{command}` finishes it.")
    return None
