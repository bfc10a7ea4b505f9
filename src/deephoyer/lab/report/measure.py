"""Measuring a network on the real test set: the numbers of a record, from nothing but weights.

Always on the CPU, in float32: a GPU's shorter formats move a few images from right to wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.counting import count, layer_widths
from deephoyer.lab import data as datasets
from deephoyer.lab import models
from deephoyer.lab.report.record import Compacted, Layer, Measured, Total
from deephoyer.lab.schema import named
from deephoyer.structure import compact

BATCH = 200  # what a convolution's output of this many images takes fits into a core's cache


def build(recipe: Mapping[str, Any]) -> nn.Module:
    """A fresh network of the recipe's kind."""
    return models.of(recipe["model"])


def measure(model: nn.Module, recipe: Mapping[str, Any], compacted: bool = True) -> Measured:
    """How many test images of the recipe's data the network gets right, and what is left of it.

    With `compacted`, what is dead is taken out first, and the images are shown to what is left.
    """
    x, y = _test_set(json.dumps(named(recipe["data"]), sort_keys=True))
    model = model.float().cpu().eval()
    rows, total = count(model, x[:1])
    small = compact(model, x[:2], joints=recipe.get("joints", "none")) if compacted else None
    return Measured(
        right=_right(model if small is None else small, x, y),
        images=len(x),
        structure=layer_widths(rows),
        total=Total(
            weights=total.weights,
            nonzeros=total.nonzeros,
            parameters=total.parameters,
            nonzero_parameters=sum(int(torch.count_nonzero(p)) for p in model.parameters()),
            macs_paper=total.macs_paper or 0,
            macs_there=total.macs_executed or 0,
        ),
        compact=None if small is None else _compacted(small, x[:1]),
        layers=tuple(Layer(**{field: getattr(row, field) for field in Layer.model_fields}) for row in rows),
    )


def _compacted(small: nn.Module, example: Tensor) -> Compacted:
    total = count(small, example)[1]
    return Compacted(macs=total.macs_executed or 0, parameters=total.parameters)


@torch.inference_mode()
def _right(model: nn.Module, x: Tensor, y: Tensor) -> int:
    model = model.to(memory_format=torch.channels_last)  # twice as fast on a CPU
    answers = (model(images).argmax(1) == labels for images, labels in zip(x.split(BATCH), y.split(BATCH), strict=True))
    return sum(int(right.sum()) for right in answers)


@cache
def _test_set(settings: str) -> tuple[Tensor, Tensor]:
    """Test images as floats, once a process: a tree of records is verified on the same few."""
    choice = json.loads(settings)
    found = datasets.load(choice.pop("choice"), **choice)
    return found.floats(found.test_x), found.test_y
