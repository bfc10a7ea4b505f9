"""Publishes a finished run as a record: small, complete, and checked before it is written."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from deephoyer.errors import UserError
from deephoyer.export import load
from deephoyer.export.network_file import encode
from deephoyer.lab import models
from deephoyer.lab.choices import OF_THIS_MACHINE
from deephoyer.lab.open_network import input_shape
from deephoyer.lab.recipe import Command, title
from deephoyer.lab.report import record as records
from deephoyer.lab.report import stored_weights
from deephoyer.lab.report.measure import check_images, measure, timings
from deephoyer.lab.report.record import Measured, Provenance, Record, WeightsFile
from deephoyer.lab.runs import checkpoint, find
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.schema import TITLES, Recipe
from deephoyer.lab.train.result import COMPACT, read_record

ROUNDING_OF_GPU = 20 / 10_000
"""The share of test images by which the accuracy measured by the run and here may differ: a GPU rounds differently."""
ROUNDING = 2 / 10_000
"""The share of test images whose class may differ on another machine, or with matrices in half precision."""


def is_rounding(difference: int, images: int, share: float = ROUNDING) -> bool:
    """Whether rounding may explain a difference of so many correct images; a difference of one it always may.

    >>> is_rounding(2, 10_000), is_rounding(3, 10_000), is_rounding(-1, 30)
    (True, False, True)
    """
    return abs(difference) <= max(1.0, share * images)


PLACES = tuple(f"data.{key}=" for key in OF_THIS_MACHINE)
"""Overrides that are not part of a record, as they depend on the machine."""


def publish(
    run: str | Path,
    results: str | Path = stored_weights.RESULTS,
    *,
    row: str | None = None,
    tags: Sequence[str] = (),
    notes: Sequence[str] = (),
    keep_weights: bool = True,
    place: Mapping[str, Any] = {},
) -> Record:
    """Writes the record of a finished run into the folder `results`, and its weights into `results/weights`.

    `row` is the title of its row in the tables, `tags` say what it is for (`best`, `ablation`, `front`). Without
    `keep_weights` the record has only their digest. `place` has settings of the data on this machine, like their path.
    """
    folder, results = RunFolder(run), Path(results)
    summary, recipe, command = finished(folder)
    recipe = recipe.here(place)
    model = models.of(recipe.model)
    checkpoint.fill(model, folder / recipe.result_file, str(folder.path))
    compacted = "compact" in summary
    check_images(recipe, folder.images())
    measured = measure(model, recipe, compacted)
    _agree(folder, summary, measured, TITLES[recipe.stages()[-1]])
    settings = recipe.anywhere().model_dump(mode="json", exclude_defaults=True)
    right_in_float32 = measured.right
    content, measured, matrices = smallest(model, recipe, measured, origin_of(recipe.anywhere()))
    file, sha256 = (
        stored_weights.store(content, results) if keep_weights else (None, hashlib.sha256(content).hexdigest())
    )
    git = summary["environment"].get("git") or {}
    record = Record(
        base=command.base,
        overrides=command.overrides,
        row=row or title(command.base),
        tags=tuple(tags),
        protocol=recipe.epoch_selection,
        digest=recipe.digest(),
        recipe=settings,
        images=folder.images(),
        measured=measured,
        accuracy=summary["accuracy"],
        selected=summary["selected"],
        prune_value=summary.get("prune_value"),
        latency=_timings(folder, summary, recipe) if compacted else (),
        weights=WeightsFile(
            sha256=sha256,
            bytes=len(content),
            file=file,
            matrices=matrices,
            right_in_float32=None if right_in_float32 == measured.right else right_in_float32,
        ),
        seconds=summary["seconds"],
        environment={key: value for key, value in summary["environment"].items() if key != "git"},
        provenance=Provenance(commit=git.get("commit"), clean=None if not git else not git["changed"]),
        notes=tuple(notes),
        metrics=tuple(records.thin(folder.metrics(), summary["selected"])),
    )
    path = results / records.place(record)
    if path.exists() and records.read(path).digest != record.digest:  # another run of the same row
        path = results / records.place(record, taken=True)
    for other in records.read_all(results):
        if (other.digest, other.seed) == (record.digest, record.seed) and Path(other.path) != path:
            raise UserError(f"{run}: is published already, as {other.path}; delete that record to give it another row.")
    records.write(record, path)
    return record.model_copy(update={"path": path.as_posix()})


def origin_of(recipe: Recipe) -> dict[str, Any]:
    """The provenance that a stored network's file contains: its recipe, and how its epochs were selected."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    return {"recipe": {**content, "epoch_selection": recipe.epoch_selection}, "protocol": recipe.epoch_selection}


def smallest(
    model: nn.Module, recipe: Recipe, measured: Measured, origin: dict[str, Any]
) -> tuple[bytes, Measured, Literal["float32", "float16"]]:
    """The network as it is stored, what is measured of that, and the type of its matrices.

    They are float16 if nothing is lost by it: all counts stay, and the number of correct images differs by no more than
    between machines.
    """
    half = in_float16(model)
    if all(bool(p.isfinite().all()) for p in half.parameters()):
        stored = measure(copy.deepcopy(half), recipe, measured.compact is not None)
        same = measured.model_copy(update={"right": stored.right, "right5": stored.right5}) == stored
        difference = max(abs(stored.right - measured.right), abs((stored.right5 or 0) - (measured.right5 or 0)))
        if same and difference <= ROUNDING * stored.images:
            return encode(half, {}, origin), stored, "float16"
    return encode(model, {}, origin), measured, "float32"


def in_float16(model: nn.Module) -> nn.Module:
    """A copy whose matrices are float16; no weight becomes zero: tiny ones become float16's smallest number."""
    half = copy.deepcopy(model)
    for parameter in half.parameters():
        if parameter.dim() > 1:
            exact, rounded = parameter.data, parameter.data.to(torch.float16)
            least = torch.full_like(rounded, 2.0**-24).copysign(rounded)
            parameter.data = torch.where((exact != 0) & (rounded == 0), least, rounded)
    return half


def finished(folder: RunFolder) -> tuple[dict[str, Any], Recipe, Command]:
    """The summary, the recipe and the command of a finished run; any other run is refused."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path}: there is no such folder.")
    recipe = folder.recipe()
    if recipe is None or not (folder / "summary.json").exists():
        raise UserError(f"{folder.path}: is not the folder of a finished run; repeat its `deephoyer run` to finish it.")
    summary = read_record(folder)
    if Recipe.model_validate(summary["recipe"]) != recipe:
        raise UserError(f"{folder.path}: recipe.yaml is not the recipe that summary.json was made by.")
    command = folder.command()
    if command is None:
        raise UserError(
            f"{folder.path}: does not say which command started it (command.json); "
            "only runs that `deephoyer run` or a search started can be published."
        )
    command = Command(command.base, tuple(word for word in command.overrides if not word.startswith(PLACES)))
    _no_files_of_this_machine(folder, [command.base, *command.overrides, recipe.anywhere().model_dump(mode="json")])
    _no_test_images_behind(folder, recipe)
    return summary, recipe, command


def _no_test_images_behind(folder: RunFolder, recipe: Recipe) -> None:
    """A held-out run may only build on networks whose epochs were also selected on held-out images."""
    if recipe.epoch_selection != "held-out":
        return
    for key, name in recipe.networks():
        if find.network(name, key).epoch_selection != "held-out":
            raise UserError(
                f"{folder.path}: builds on {name}, whose epochs were selected on test images or which does not say. "
                "A held-out record needs a network of a held-out run there."
            )


def _no_files_of_this_machine(folder: RunFolder, value: Any) -> None:
    """Refuses absolute paths: nobody else could run the command again."""
    if isinstance(value, str) and re.match(r"(\w[\w.]*=)?(/|~|[A-Za-z]:[/\\])", value):
        raise UserError(f"{folder.path}: its recipe names the file {value}, which others don't have.")
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            _no_files_of_this_machine(folder, inner)


def _agree(folder: RunFolder, summary: dict[str, Any], measured: Measured, last: str) -> None:
    """Refuses weights that are not those that the run measured after its last stage."""
    expected, nonzeros = summary["sparse"]["total"]["nonzeros"], measured.total.nonzeros
    if expected != nonzeros:
        raise UserError(f"{folder.path}: summary.json has {expected:,} nonzeros, its network {nonzeros:,}.")
    accuracy = summary["accuracy"][last]
    if not is_rounding(round(accuracy * measured.images) - measured.right, measured.images, ROUNDING_OF_GPU):
        raise UserError(f"{folder.path}: summary.json has accuracy {accuracy}, its network {measured.accuracy}.")


def _timings(folder: RunFolder, summary: dict[str, Any], recipe: Recipe) -> tuple[records.Timing, ...]:
    example = torch.randn(2, *input_shape(recipe.model, recipe.data))
    return timings(summary, load(folder / COMPACT, models.of(recipe.model)), models.of(recipe.model), example)
