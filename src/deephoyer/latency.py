"""How long models take, measured here and now: several of them interleaved, so that a busy machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deephoyer.errors import UserError
from deephoyer.inference import Examples, at_rest, call, device_of, with_batch

MODES = ("eager", "cuda-graph", "compiled")
"""How a network is run when it is timed."""


@dataclass(frozen=True)
class Latency:
    """Median and quartiles of one call, in milliseconds, for a batch of this size."""

    batch: int
    median_ms: float
    low_ms: float
    high_ms: float
    runs: int


def measure(
    models: Sequence[nn.Module], examples: Examples, batch_sizes: Sequence[int], seconds: float = 0.5
) -> list[list[Latency]]:
    """For each model, its latency at each batch size; about `seconds` are spent on a batch size.

    The models take turns, call by call. The first calls, which allocate and tune, are not counted.
    """
    for size in batch_sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"summary: {size!r} is not a batch size; it must be a whole number of at least 1.")
    by_batch = [_at_batch(models, with_batch(examples, size), size, seconds) for size in batch_sizes]
    return [[at_size[i] for at_size in by_batch] for i in range(len(models))]


def _at_batch(models: Sequence[nn.Module], examples: Examples, size: int, seconds: float) -> list[Latency]:
    times: list[list[float]] = [[] for _ in models]
    for model in models:
        for _ in range(2):
            _timed(model, examples)
    until = time.perf_counter() + seconds
    while len(times[0]) < 5 or (time.perf_counter() < until and len(times[0]) < 500):
        for model, taken in zip(models, times, strict=True):
            taken.append(_timed(model, examples))
    return [_quartiles(size, taken) for taken in times]


def _timed(model: nn.Module, examples: Examples) -> float:
    place = device_of(model)
    with at_rest(model):
        _wait(place)
        start = time.perf_counter()
        call(model, examples)
        _wait(place)
        return (time.perf_counter() - start) * 1e3


def _wait(place: torch.device) -> None:
    """Accelerators run behind the caller: the clock stops when they have finished."""
    if place.type != "cpu":
        torch.accelerator.synchronize(place)


def _quartiles(size: int, taken: list[float]) -> Latency:
    low, median, high = torch.tensor(taken, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return Latency(size, median.item(), low.item(), high.item(), len(taken))
