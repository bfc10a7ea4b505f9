"""From the folder of a finished run to a record: small, complete, and checked before it is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.export import save
from deephoyer.files import folder_at
from deephoyer.lab.report import record as records
from deephoyer.lab.report.measure import build, measure
from deephoyer.lab.report.origin import origin
from deephoyer.lab.report.record import WEIGHTS, Measured, Record, WeightsFile
from deephoyer.lab.report.timing import timings
from deephoyer.lab.runs import checkpoint, find
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.schema import STAGES, Recipe
from deephoyer.lab.train.result import recorded

LINES = 40
"""A record keeps at most so many lines of metrics."""
APART = 20
"""The run's own accuracy and ours may differ by so many images of 10,000: a GPU rounds more coarsely."""


def publish(
    run: str | Path,
    place: str | Path,
    *,
    row: str | None = None,
    tags: Sequence[str] = (),
    base: str | None = None,
) -> Record:
    """Writes `record.json` and `weights.safetensors` of a finished run into the folder `place`.

    `row` is the title of its row in the tables, `tags` what it is for (`ablation`, `front`), `base` the
    recipe it is a variant of, where the nearest one is not meant.
    """
    folder, place = RunFolder(run), Path(place)
    summary, recipe = finished(folder)
    base, overrides = origin(recipe, base)
    content = recipe.model_dump(mode="json", exclude_none=True)
    model = build(content)
    checkpoint.fill(model, folder / recipe.result_file, str(folder.path))
    measured = measure(model, content, "compact" in summary)
    _agree(folder, summary, measured)
    folder_at(place)
    command = records.command(base, overrides)
    save(model, place / WEIGHTS, provenance={"command": command, "recipe": content})
    made = Record(
        command=command,
        base=base,
        overrides=tuple(overrides),
        row=row,
        tags=tuple(tags),
        protocol=recipe.epoch_selection,
        selected=summary["selected"],
        accuracy=summary["accuracy"],
        prune_value=summary.get("prune_value"),
        measured=measured,
        latency=timings(summary, model, content),
        weights=described(place / WEIGHTS),
        seconds=summary["seconds"],
        environment=summary["environment"],
        recipe=content,
        metrics=tuple(thin(_metrics(folder), summary["selected"])),
    )
    records.write(made, place)
    return made


def name_of(run: str | Path, base: str | None = None) -> str:
    """The name that a run's record gets: its recipe and overrides, so that no run is published twice."""
    recipe = finished(RunFolder(run))[1]
    base, overrides = origin(recipe, base)
    name = re.sub(r"[_*]+", "_", ",".join(re.sub(r"[^\w.=+*-]", "_", part) for part in (base, *overrides)))
    if len(name) <= 120:
        return name
    return f"{base},{hashlib.sha256(name.encode()).hexdigest()[:8]},seed={recipe.seed}"


def finished(folder: RunFolder) -> tuple[dict[str, Any], Recipe]:
    """The summary and the recipe of a run that went to its end; any other is refused."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path}: there is no such folder.")
    recipe = folder.recipe()
    if recipe is None or not (folder / "summary.json").exists():
        raise UserError(f"{folder.path}: is not the folder of a finished run; the same `deephoyer run` finishes it.")
    summary = recorded(folder)
    if Recipe.model_validate(summary["recipe"]) != recipe:
        raise UserError(f"{folder.path}: recipe.yaml is not the recipe that summary.json was made by.")
    _no_files_of_this_machine(folder, recipe.model_dump(mode="json"))
    _no_test_images_behind(folder, recipe)
    return summary, recipe


def _no_test_images_behind(folder: RunFolder, recipe: Recipe) -> None:
    """A held-out run may build only on networks that say they were selected on held-out images, too."""
    if recipe.epoch_selection != "held-out":
        return
    for key, words in recipe.networks():
        if find.network(words, key).epoch_selection != "held-out":
            raise UserError(
                f"{folder.path}: builds on {words}, whose epochs were selected on test images or which does not say. "
                "A held-out record needs a network of a held-out run there."
            )


def _no_files_of_this_machine(folder: RunFolder, value: Any) -> None:
    """A path from the root leads nowhere on another machine: nobody could run the command again."""
    if isinstance(value, str) and re.match(r"/|~|[A-Za-z]:[/\\]", value):
        raise UserError(f"{folder.path}: its recipe names the file {value}, which others don't have.")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _no_files_of_this_machine(folder, inner)


def _agree(folder: RunFolder, summary: dict[str, Any], measured: Measured) -> None:
    """The weights must be those that the run measured."""
    then, now = summary["sparse"]["total"]["nonzeros"], measured.total.nonzeros
    if then != now:
        raise UserError(f"{folder.path}: summary.json has {then:,} nonzeros, the network {now:,}.")
    seen = next(reversed(summary["accuracy"].values()))
    if abs(seen - measured.accuracy) * 10_000 > APART:
        raise UserError(f"{folder.path}: summary.json has accuracy {seen}, the network {measured.accuracy}.")


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        return folder.metrics()
    except ValueError as why:
        raise UserError(f"{folder.metrics_path}: is damaged: {why}.") from None


def described(path: Path) -> WeightsFile:
    """Size and digest of a file."""
    try:
        content = path.read_bytes()
    except OSError as why:
        raise UserError(f"{path}: can't be read: {why.strerror}.") from None
    return WeightsFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def thin(lines: Sequence[dict[str, Any]], selected: dict[str, int]) -> list[dict[str, Any]]:
    """At most 40 lines: of each stage the first, the last and the selected one, and others evenly between."""
    stages = [s for s in STAGES if any(line["stage"] == s for line in lines)]
    kept = []
    for stage in stages:
        own = [line for line in lines if line["stage"] == stage]
        room = LINES // len(stages) - 1  # one for the selected epoch
        steps = max(1, min(room, len(own)) - 1)
        places = {round(i * (len(own) - 1) / steps) for i in range(steps + 1)}
        kept += [_short(x) for i, x in enumerate(own) if i in places or x["epoch"] == selected.get(stage)]
    return kept


def _short(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in line.items()
        if key != "seconds"
    }
