"""Measures a network: its accuracy on the real test set, its counts, and its time beside the dense one's.

Accuracy and counts are always measured on the CPU in float32: with a GPU's shorter formats a few images change class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.counting import count, layer_widths
from deephoyer.errors import UserError
from deephoyer.lab import data as datasets
from deephoyer.lab.data import TEST, Source
from deephoyer.lab.report.record import CompactRecord, LayerRecord, Measured, NetworkRecord, Timing
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train.evaluate import Correct, count_correct
from deephoyer.latency import Latency
from deephoyer.latency import measure as measure_latency
from deephoyer.structure import compact

BATCHES = (1, 64, 256)
"""The batch sizes at which a network is timed whose run did not time it."""
BATCH = 200  # a convolution's output for this many small images fits into a core's cache
LARGE = 50  # the same for large images


def measure(model: nn.Module, recipe: Recipe, compacted: bool = True) -> Measured:
    """How many test images of the recipe's data the network classifies correctly, and its counts.

    With `compacted`, it is compacted first, and the compacted network classifies the images.
    """
    source = _source_of(recipe)
    example = source.example(2)
    model = model.float().cpu().eval()
    rows, total = count(model, example[:1])
    small = compact(model, example, joints=recipe.joints) if compacted else None
    score = _score(model if small is None else small, source)
    return Measured(
        right=score.right,
        right5=score.right5,
        images=score.images,
        layer_widths=layer_widths(rows),
        total=NetworkRecord(
            weights=total.weights,
            nonzeros=total.nonzeros,
            parameters=total.parameters,
            nonzero_parameters=sum(int(torch.count_nonzero(p)) for p in model.parameters()),
            macs_paper=total.macs_paper or 0,
            macs_executed=total.macs_executed or 0,
        ),
        compact=None if small is None else _compacted(small, example[:1]),
        layers=tuple(LayerRecord(**{key: getattr(row, key) for key in LayerRecord.model_fields}) for row in rows),
    )


def _compacted(small: nn.Module, example: Tensor) -> CompactRecord:
    total = count(small, example)[1]
    return CompactRecord(macs=total.macs_executed or 0, parameters=total.parameters)


def _score(model: nn.Module, source: Source) -> Correct:
    model = model.to(memory_format=torch.channels_last)  # twice as fast on a CPU
    return Correct.read(count_correct(model, source, TEST, LARGE if source.crops else BATCH), source)


def check_images(recipe: Recipe, images: str | None) -> None:
    """Refuses to measure on images that do not have this fingerprint."""
    if images is not None and _source_of(recipe).fingerprint != images:
        raise UserError("the images are not those of the run: give the folder that it had as data.path=….")


def _source_of(recipe: Recipe) -> Source:
    return _source(json.dumps(recipe.data, sort_keys=True))


@cache
def _source(settings: str) -> Source:
    """The data, read once per process: many records are verified on the same images."""
    return datasets.load(json.loads(settings))


# Time


def timings(summary: Mapping[str, Any], small: nn.Module, dense: nn.Module, example: Tensor) -> tuple[Timing, ...]:
    """Milliseconds per batch of the compacted and the dense network: as the run measured them, and on this CPU."""
    compact, environment = summary["compact"], summary["environment"]
    fast, slow = ([Latency(**item) for item in part["latency"]] for part in (compact, compact["baseline"]))
    if fast and environment["device"] == compact["device"] == "cpu":
        return _paired("cpu", environment["threads"], slow, fast)
    times, dense_times = measure_latency([small, dense], example, [item.batch for item in fast] or BATCHES)
    on_cpu = _paired("cpu", torch.get_num_threads(), dense_times, times)
    timed_elsewhere = torch.device(compact["device"]).type != environment["device"]  # than it was trained
    if not fast or timed_elsewhere:
        return on_cpu
    return _paired(environment["device"], environment["device_name"], slow, fast) + on_cpu


def _paired(device: str, name: str | int, dense: list[Latency], small: list[Latency]) -> tuple[Timing, ...]:
    name = f"{name} CPU threads" if isinstance(name, int) else name
    return tuple(
        Timing(device=device, name=name, batch=d.batch, dense_ms=round(d.median_ms, 4), ms=round(s.median_ms, 4))
        for d, s in zip(dense, small, strict=True)
    )
