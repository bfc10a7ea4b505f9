"""How long networks take, measured here and now.

Several models are timed in turns, so that a busy machine hits all alike. How the time of a single layer depends on its
widths is measured in `layer_times.py`.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, unknown
from deephoyer.inference import Examples, arguments, at_rest, batch_of, call, device_of, moved, with_batch

MODES = ("eager", "cuda-graph", "compiled")
"""How a network is run when it is timed."""
KNOWN = 0.01
"""The standard error, as a share, at which a share of a time is known well enough."""

NOISY, NOISY_IF_OVERLAPPING = 1.5, 1.1
"""By which factor quartiles may leave a ratio of two times open before it is called noisy."""


@dataclass(frozen=True)
class Latency:
    """Median and quartiles of one call, in milliseconds, for a batch of this size."""

    batch: int
    median_ms: float
    low_ms: float
    high_ms: float
    runs: int


def noisy(before: Latency, after: Latency) -> bool:
    """Whether the quartiles leave open how much faster one is: by more than a half; or, where they overlap, so that it
    may be slower as well, by more than a tenth.

    >>> noisy(Latency(1, 2.0, 1.9, 2.1, runs=9), Latency(1, 1.0, 0.9, 1.1, runs=9))
    False
    """
    open_by = before.high_ms / before.low_ms * after.high_ms / after.low_ms
    overlap = before.low_ms <= after.high_ms and after.low_ms <= before.high_ms
    return open_by > (NOISY_IF_OVERLAPPING if overlap else NOISY)


def measure(
    models: Sequence[nn.Module],
    examples: Examples,
    batch_sizes: Sequence[int],
    seconds: float = 0.5,
    mode: str = "eager",
) -> list[list[Latency]]:
    """For each model, its latency at each batch size; about `seconds` are spent on a batch size.

    The models take turns, call by call. The first calls, which allocate, tune or compile, are not counted.
    """
    for size in batch_sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"summary: {size!r} is not a batch size; it must be a whole number of at least 1.")
    by_batch = [_at_batch(models, *batch, seconds, mode) for batch in _batches(models[0], examples, batch_sizes)]
    return [[at_size[i] for at_size in by_batch] for i in range(len(models))]


def _batches(model: nn.Module, examples: Examples, sizes: Sequence[int]) -> list[tuple[Examples, int]]:
    """The examples at each size; as they are where the model takes no other number of them: a graph with its edges."""
    batches = [(with_batch(examples, size), size) for size in sizes]
    try:
        with at_rest(model):
            for batch, _ in batches:
                call(model, batch)
    except Exception:
        return [(examples, batch_of(examples))]
    return batches


def _at_batch(models: Sequence[nn.Module], examples: Examples, size: int, seconds: float, mode: str) -> list[Latency]:
    times: list[list[float]] = [[] for _ in models]
    runs = [runner(model, examples, mode) for model in models]
    places = [device_of(model) for model in models]
    with ExitStack() as rest:
        for model, run, place in zip(models, runs, places, strict=True):
            rest.enter_context(at_rest(model))
            for _ in range(2):
                once(run, place)
        until = time.perf_counter() + seconds
        while len(times[0]) < 5 or (time.perf_counter() < until and len(times[0]) < 500):
            for run, place, taken in zip(runs, places, times, strict=True):
                taken.append(once(run, place, wall=True))
    return [_quartiles(size, taken) for taken in times]


def _quartiles(size: int, taken: list[float]) -> Latency:
    low, median, high = torch.tensor(taken, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return Latency(size, median.item(), low.item(), high.item(), len(taken))


def by_layer(model: nn.Module, examples: Examples, batch: int, seconds: float = 0.3) -> dict[str, float]:
    """For each layer with weights of its own its fastest milliseconds within the network; called twice, both together.

    >>> list(by_layer(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4), batch=2))
    ['0', '2']
    """
    place = device_of(model)
    clock = _clock(place)
    began: dict[str, float] = {}
    taken: dict[str, float] = {}
    best: dict[str, float] = {}

    def start(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            _wait(place)
            began[name] = clock()

        return hook

    def stop(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            _wait(place)
            taken[name] = taken.get(name, 0.0) + (clock() - began[name]) * 1e3

        return hook

    hooks = []
    for name, module in model.named_modules():
        if any(tensor.dim() >= 2 for tensor in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(start(name)))
            hooks.append(module.register_forward_hook(stop(name)))
    run = runner(model, with_batch(examples, batch))
    until, calls = time.perf_counter() + seconds, 0
    try:
        with at_rest(model):
            while calls < 2 or (calls < 100 and time.perf_counter() < until):
                taken.clear()
                run()
                calls += 1
                best = {name: min(ms, best.get(name, ms)) for name, ms in taken.items()}
    finally:
        for handle in hooks:
            handle.remove()
    return best


@dataclass(frozen=True)
class Share:
    """A time as a share of another, and how far off that may be (its standard error)."""

    value: float
    error: float


class Beside:
    """Times networks as shares of the time of one that stays, in turns with it.

    >>> whole = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    >>> small = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))
    >>> beside = Beside(whole, torch.zeros(1, 64), batch=64)
    >>> beside.share(small).value > 0, beside.whole_ms() > 0
    (True, True)
    """

    def __init__(
        self,
        whole: nn.Module,
        examples: Examples,
        batch: int = 1,
        mode: str = "eager",
        dtype: torch.dtype | None = None,
        seconds: float = 1.0,
    ):
        self.mode, self.dtype, self.seconds = mode, dtype, seconds
        self.whole, self.examples = in_precision(whole, with_batch(examples, batch), dtype)
        self._run = runner(self.whole, self.examples, mode)
        self._warm(self.whole, self._run)

    def whole_ms(self) -> float:
        """The fastest call of the whole network, in milliseconds."""
        return fastest(self.whole, self._run, self.seconds / 2)

    def share(self, small: nn.Module) -> Share:
        """The median over rounds in which both are called; more rounds, up to twice as long, where they differ."""
        small = in_precision(small, (), self.dtype)[0]
        run, place = runner(small, self.examples, self.mode), device_of(self.whole)
        self._warm(small, run)
        found: list[float] = []
        with at_rest(small), at_rest(self.whole):
            began = time.perf_counter()
            while True:
                first, second = (run, self._run) if len(found) % 2 else (self._run, run)
                pair = once(first, place), once(second, place)
                found.append(pair[0] / pair[1] if first is run else pair[1] / pair[0])
                share = _median(found)
                taken = time.perf_counter() - began
                enough = share.error <= KNOWN * share.value and taken > self.seconds / 4
                if len(found) >= 8 and (enough or taken > 2 * self.seconds):
                    return share

    def _warm(self, model: nn.Module, run: Callable[[], Any]) -> None:
        with at_rest(model):
            for _ in range(3):
                once(run, device_of(model))


def _median(values: Sequence[float]) -> Share:
    """The median and its standard error, from the median of the deviations: a few wild ones change neither."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return Share(middle, 1.2533 * deviation / math.sqrt(len(values)))


def fastest(model: nn.Module, run: Callable[[], Any], seconds: float, at_least: int = 3, burst: int = 1) -> float:
    """The fastest call in milliseconds: what else a machine does only adds to a time."""
    place = device_of(model)
    taken: list[float] = []
    with at_rest(model):
        for _ in range(2):
            once(run, place)
        until = time.perf_counter() + seconds
        while len(taken) < at_least or (time.perf_counter() < until and len(taken) < 100):
            taken.append(once(run, place, burst=burst))
    return min(taken)


def once(run: Callable[[], Any], place: torch.device, wall: bool = False, burst: int = 1) -> float:
    """Milliseconds of a call.

    `wall` asks for the clock on the wall, by which people wait. With `burst`, so many calls are made before an
    accelerator is waited for, and the time is one call's part.
    """
    clock = time.perf_counter if wall else _clock(place)
    _wait(place)
    start = clock()
    for _ in range(burst):
        run()
    _wait(place)
    return (clock() - start) * 1e3 / burst


def _clock(place: torch.device) -> Callable[[], float]:
    """One thread on a CPU is timed by what it computes itself, not by the clock on the wall.

    What other processes of a busy machine take in between is not its own.
    """
    alone = place.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _wait(place: torch.device) -> None:
    """Accelerators run behind the caller: the clock stops when they have finished."""
    if place.type != "cpu":
        torch.accelerator.synchronize(place)


def runner(model: nn.Module, examples: Examples, mode: str = "eager") -> Callable[[], Any]:
    """Something to call that runs the model on the examples, which stay where they are, in one of the `MODES`."""
    if mode not in MODES:
        raise unknown("mode of running a network", mode, MODES)
    place = device_of(model)
    args, kwargs = moved(examples, place)
    if mode == "compiled":
        compiled = _compiled(model)
        return lambda: compiled(*args, **kwargs)
    if mode == "cuda-graph":
        return _captured(model, args, kwargs, place)
    return lambda: model(*args, **kwargs)


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """Compiled by itself: what is compiled is kept by the code it came from, and many networks share one `forward`.

    Past a handful of them torch would run the next one uncompiled.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    assert isinstance(forward, FunctionType)
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{id(model)}")
    return torch.compile(forward, dynamic=False)


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device
) -> Callable[[], Any]:
    """A replay of the model's kernels; they are warmed up on a stream of their own, as capturing asks for."""
    if place.type != "cuda":
        raise UserError(f"target: mode 'cuda-graph' needs the network on a CUDA device; it is on {place}.")
    with at_rest(model), torch.cuda.device(place):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(*args, **kwargs)

    def replay(held: Any = (model, args, kwargs)) -> Any:
        """What the graph reads must live as long as it does, so it is held here."""
        graph.replay()
        return output

    return replay


def in_precision(model: nn.Module, examples: Examples, dtype: torch.dtype | None) -> tuple[nn.Module, Examples]:
    """A copy of the model, and the examples, in the precision that is to be timed; as they are where none is said."""
    if dtype is None:
        return model, examples
    args, kwargs = arguments(examples)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    made = {k: cast(v) for k, v in kwargs.items()} if kwargs else tuple(cast(a) for a in args)
    return copy.deepcopy(model).to(dtype), made
