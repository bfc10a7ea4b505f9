"""The result of a finished run: accuracies, counts, the smaller network; a record, and tables to print.

The record is `summary.json` in the run's folder. Training is over when this is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.export import save
from deephoyer.lab.processes import is_untimed
from deephoyer.lab.runs import environment
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train.run import Run
from deephoyer.latency import by_layer
from deephoyer.masks import Masks
from deephoyer.structure import Coupled, compact, compact_report, tidy
from deephoyer.summary import Summary, summary

FORMAT = "deephoyer-result-2"
ALWAYS = ("recipe", "digest", "environment", "protocol", "accuracy", "sparse", "files")
"""What every record of a run has."""
COMPACT = "compact.safetensors"
BATCHES = (1, 64, 256)
"""Batch sizes at which the dense and the compacted network are timed."""
LAYER_BATCH = 64
"""The batch size at which single layers are timed."""


def read_record(folder: RunFolder) -> dict[str, Any]:
    """The record of a finished run."""
    record = folder.read_json("summary.json")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{folder.path}: summary.json was not written by this version of deephoyer.")
    missing = [key for key in ALWAYS if key not in record]
    if missing:
        raise UserError(f"{folder.path}: summary.json is damaged: it has no {missing[0]}. Delete it, and run it again.")
    return record


def finish(run: Run) -> dict[str, Any]:
    """Measures and compacts the final network, writes both and the record; an existing record is only read."""
    with run.folder.locked():  # a second command with this folder must not measure and write at the same time
        return read_record(run.folder) if (run.folder / "summary.json").exists() else _measured(run)


def _measured(run: Run) -> dict[str, Any]:
    example = run.data.example(2)
    graph = _graph(run, example)
    predicted = run.predictions(run.model)
    final, why_not = _tidied(run, example, graph, predicted)
    record: dict[str, Any] = {
        "format": FORMAT,
        "recipe": run.recipe.model_dump(mode="json"),
        "digest": run.recipe.digest(),
        "environment": _environment(run),
        "protocol": run.recipe.epoch_selection,
        "selected": run.state.selected,
        "accuracy": run.state.accuracy,
        **({"top5": run.state.top5} if run.state.top5 else {}),
        "seconds": {stage: round(s, 1) for stage, s in run.state.seconds.items()},
        "sparse": summary(final, example, latency=False).to_json(),
    }
    if why_not is not None:
        record["not_tidied"] = why_not
    for key in ("prune_value", "selection_accuracy"):
        if getattr(run.state, key) is not None:
            record[key] = getattr(run.state, key)
    # Files are given to others: where the data lie here is in the folder's recipe.yaml alone.
    recipe = run.recipe.anywhere().model_dump(mode="json")
    origin = {"recipe": recipe, "accuracy": run.state.accuracy, "protocol": run.recipe.epoch_selection}
    file = run.recipe.result_file
    files = record["files"] = {file: save(final, run.folder / file, masks=_zeros(final, run.masks), provenance=origin)}
    try:
        record |= _compacted(run, example, graph, predicted, origin, files)
    except UserError as why:
        # The run's weights and counts are good all the same.
        record["not_compacted"] = str(why)
    run.folder.write_json("summary.json", record)
    return record


def _environment(run: Run) -> Any:
    """Where the run took place; where that was lost, where it is finished."""
    if (run.folder / "environment.json").exists():
        return run.folder.read_json("environment.json")
    return environment.describe(run.device) | {"of": "the end alone: environment.json was lost"}


def _graph(run: Run, example: Tensor) -> Coupled | UserError:
    """The coupled channels of the final network, analysed once for all that follows; or why they can't be."""
    try:
        return Coupled(run.model, example)
    except UserError as why:
        return why


def _tidied(run: Run, example: Tensor, graph: Coupled | UserError, predicted: Tensor) -> tuple[nn.Module, str | None]:
    """The network without idle weights; or as it was trained, and why, where they can't be determined.

    `predicted` are the trained network's classes for the test images, which must stay the same.
    """
    if isinstance(graph, UserError):
        return run.model, str(graph)
    try:
        tidied = tidy(run.model, example, groups=graph)
    except UserError as why:
        return run.model, str(why)
    if _same_tensors(run.model, tidied):
        return run.model, None
    differing = int((run.predictions(tidied) != predicted).sum())
    if differing:
        return run.model, f"without them it {_differs(differing, len(predicted))}."
    return tidied, None


def _same_tensors(model: nn.Module, other: nn.Module) -> bool:
    one, two = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, other))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _zeros(model: nn.Module, masks: Masks | None) -> Masks | None:
    """Masks of the final zeros in pruned parameters: idle weights too, but no bias that absorbed a constant."""
    if masks is None:
        return None
    left = {name: p.detach() != 0 for name, p in model.named_parameters() if name in masks}
    return Masks({n: left[n] | masks[n].to(left[n].device) if left[n].dim() < 2 else left[n] for n in left})


def _compacted(
    run: Run,
    example: Tensor,
    graph: Coupled | UserError,
    predicted: Tensor,
    origin: dict[str, Any],
    files: dict[str, int],
) -> dict[str, Any]:
    """The smaller network: saved, measured against the dense one, and compared image by image with what the trained
    one `predicted`."""
    if isinstance(graph, UserError):
        raise graph
    small = compact(run.model, example, groups=graph, joints=run.recipe.joints)
    files[COMPACT] = save(small, run.folder / COMPACT, provenance=origin)
    dense = run.fresh_model()
    timed = not is_untimed()
    record = {
        "compact": summary(small, example, baseline=dense, batch_sizes=BATCHES, latency=timed).to_json(),
        "changed_predictions": int((run.predictions(small) != predicted).sum()),
        "test_images": len(predicted),
        "compact_report": asdict(compact_report(small)),
    }
    if timed:
        layers = {kind: by_layer(m, example, LAYER_BATCH) for kind, m in (("dense", dense), ("compact", small))}
        record["layer_ms"] = {"batch": LAYER_BATCH, **layers}
    return record


PROTOCOLS = {
    "held-out": "the epoch best on held-out images",
    "test-best": "the epoch best on the test images themselves (the paper's way)",
    "last": "the last epoch",
}


def tables(record: dict[str, Any], width: int) -> list[Table | str]:
    """The record as tables and sentences."""
    parts: list[Table | str] = [Summary.from_json(record["sparse"]).table(width), _accuracies(record)]
    if "not_tidied" in record:
        parts.append(f"idle weights were left in: {record['not_tidied']}")
    if "compact" in record:
        parts.append(Summary.from_json(record["compact"]).comparison(width))
        parts.append(f"the compacted network {_differs(record['changed_predictions'], record['test_images'])}")
    else:
        parts.append(f"not compacted: {record['not_compacted']}")
    parts.append(", ".join(f"{name} {size:,} bytes" for name, size in record["files"].items()))
    return parts


def _differs(count: int, images: int) -> str:
    return f"differs on {count:,} of {images:,} test images"


def _accuracies(record: Mapping[str, Any]) -> Table:
    table = Table(title=f"test accuracy; {PROTOCOLS[record['protocol']]} is selected", title_justify="left")
    accuracy: dict[str, float] = record["accuracy"]
    cells = {stage: f"{value:.2%}".replace("%", " %") for stage, value in accuracy.items()}
    if len(accuracy) > 1:
        change = list(accuracy.values())[-1] - next(iter(accuracy.values()))
        cells["gained" if change > 0 else "lost"] = f"{100 * abs(change):.2f} points"
    for title in cells:
        table.add_column(title, justify="right")
    table.add_row(*cells.values())
    if "top5" in record:
        guesses = {stage: f"top-5: {value:.2%}".replace("%", " %") for stage, value in record["top5"].items()}
        table.add_row(*(guesses.get(title, "") for title in cells))
    return table
