"""How fast the compacted network is beside the dense one: what the run measured where it ran, and on this CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deephoyer.lab import models
from deephoyer.lab.report.measure import build
from deephoyer.lab.report.record import Timing
from deephoyer.lab.schema import named
from deephoyer.lab.train.result import BATCHES
from deephoyer.latency import Latency, measure
from deephoyer.structure import compact


def timings(summary: Mapping[str, Any], model: nn.Module, recipe: Mapping[str, Any]) -> tuple[Timing, ...]:
    """Milliseconds a batch, dense and compacted, measured in turns; none where the run could not compact."""
    if "compact" not in summary:
        return ()
    own, where = summary["compact"], summary["environment"]
    if torch.device(own["device"]).type != where["device"]:  # trained there, but finished and timed elsewhere
        return _here(model, recipe)
    small, dense = ([Latency(**item) for item in part["latency"]] for part in (own, own["baseline"]))
    if where["device"] == "cpu":
        return _paired("cpu", _cpu(where["threads"]), dense, small)
    return _paired(where["device"], where["device_name"], dense, small) + _here(model, recipe)


def _here(model: nn.Module, recipe: Mapping[str, Any]) -> tuple[Timing, ...]:
    example = torch.randn(2, *models.input_shape(named(recipe["model"])["choice"]))
    small = compact(model, example, joints=recipe.get("joints", "none"))
    timed, dense = measure([small, build(recipe)], example, BATCHES)
    return _paired("cpu", _cpu(torch.get_num_threads()), dense, timed)


def _cpu(threads: int) -> str:
    return f"{threads} CPU threads"


def _paired(device: str, name: str, dense: list[Latency], small: list[Latency]) -> tuple[Timing, ...]:
    return tuple(
        Timing(device=device, name=name, batch=d.batch, dense_ms=round(d.median_ms, 4), ms=round(s.median_ms, 4))
        for d, s in zip(dense, small, strict=True)
    )
