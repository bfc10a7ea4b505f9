"""Finding the network that words or a file name: among the published results, or among the runs, where one works.

A run that starts from another network, or learns from one, says by which words that is made
("parts/resnet-56-dense seed=1"); its identity, and not its name, is looked for in `./results` and `./runs`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.export import provenance
from deephoyer.files import path_on_disk
from deephoyer.lab.choices import Choice
from deephoyer.lab.recipe import Command, parse
from deephoyer.lab.schema import Recipe, Teacher, is_file

RESULTS, RUNS = Path("results"), Path("runs")


@dataclass(frozen=True)
class Network:
    """Where a network's weights are, which model they are of, and how its epochs were selected, where that is known."""

    path: Path
    model: Choice | None
    epoch_selection: str | None


class NotThere(UserError):
    """A network that has not been made yet; `command` makes it."""

    def __init__(self, key: str, command: Command):
        self.command = command
        super().__init__(
            f"{key}: a network is neither in ./{RESULTS} nor in ./{RUNS}. Make it, or give a .safetensors file:\n"
            f"{command}"
        )


def all_there(networks: Sequence[tuple[str, str | Teacher]]) -> None:
    """Looks for every network, each with the recipe's key that names it, and says of all at once how to make them."""
    missing: list[NotThere] = []
    for key, named in networks:
        try:
            network(named, key)
        except NotThere as why:
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
    from deephoyer.lab.report.stored_weights import find_weights  # records come after runs; only asked when needed

    command = Command.parse(named)
    recipe = command.read()
    path = find_weights(recipe.digest(), recipe.seed, RESULTS) or _run(recipe, key, command)
    if path is None:
        raise NotThere(key, command)
    return Network(path, recipe.model, recipe.epoch_selection)


def _in_file(file: str, key: str, model: Choice | None) -> Network:
    path = path_on_disk(file)
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}; paths are taken from the folder you are in.")
    said = _said_by(path)
    return Network(path, model or said.get("model"), said.get("epoch_selection"))


def _said_by(path: Path) -> dict[str, Any]:
    """The recipe that made a file: as the file itself says, or as its run's folder does."""
    try:
        recipe = provenance(path).get("recipe")
        return recipe if isinstance(recipe, dict) else {}
    except UserError:  # plain weights
        beside = path.parent / "recipe.yaml"
        if not beside.is_file():
            return {}
        return parse(beside.read_text(encoding="utf-8"), str(beside)).model_dump(mode="json")


def _run(recipe: Recipe, key: str, command: Command) -> Path | None:
    """The final network of a run with the recipe's identity and seed; one that is not finished is refused."""
    digest = recipe.digest()
    meant = {"digest": digest, "seed": recipe.seed}
    unfinished = None
    for path in sorted(RUNS.glob("*/command.json")):
        try:
            told = path.read_text(encoding="utf-8")
            content = json.loads(told) if digest in told else None  # of thousands few are worth parsing
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and {k: content.get(k) for k in meant} == meant:
            if (path.parent / "summary.json").exists():
                return path.parent / recipe.result_file
            unfinished = unfinished or path.parent
    if unfinished:
        raise UserError(f"{key}: the run in {unfinished} is not finished; `{command}` finishes it.")
    return None
