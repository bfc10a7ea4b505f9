"""How long networks take, measured here and now; and how the time of each of their layers depends on its widths.

Several models are timed in turns, so that a busy machine hits all alike. A layer's times are measured on random weights
at a few widths and interpolated between them, once for each device, precision and shape in a process. Which
widths are then chosen is not known here.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, unknown
from deephoyer.inference import Examples, arguments, at_rest, call, device_of, with_batch
from deephoyer.structure import Coupled
from deephoyer.widths import CostTerm, Side, WidthCost, sides_of, widths_of

MODES = ("eager", "cuda-graph", "compiled")
"""How a network is run when it is timed."""
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Widths at which a layer is timed, as shares of its own."""
SECONDS_FOR_A_LAYER = 0.03
_TIMES: dict[tuple[object, ...], float] = {}
"""Milliseconds by device, precision, way of running and shape."""


@dataclass(frozen=True)
class Latency:
    """Median and quartiles of one call, in milliseconds, for a batch of this size."""

    batch: int
    median_ms: float
    low_ms: float
    high_ms: float
    runs: int


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
    by_batch = [_at_batch(models, with_batch(examples, size), size, seconds, mode) for size in batch_sizes]
    return [[at_size[i] for at_size in by_batch] for i in range(len(models))]


def fastest(
    models: Sequence[nn.Module], examples: Examples, batch: int, seconds: float = 1.0, mode: str = "eager"
) -> list[float]:
    """Each model's fastest call in milliseconds: what else a machine does only adds to a time."""
    return [min(taken) for taken in _taken(models, with_batch(examples, batch), seconds, mode)]


def _at_batch(models: Sequence[nn.Module], examples: Examples, size: int, seconds: float, mode: str) -> list[Latency]:
    return [_quartiles(size, taken) for taken in _taken(models, examples, seconds, mode)]


def _taken(models: Sequence[nn.Module], examples: Examples, seconds: float, mode: str) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in models]
    runs = [runner(model, examples, mode) for model in models]
    for model, run in zip(models, runs, strict=True):
        for _ in range(2):
            _timed(model, run)
    until = time.perf_counter() + seconds
    while len(times[0]) < 5 or (time.perf_counter() < until and len(times[0]) < 500):
        for model, run, taken in zip(models, runs, times, strict=True):
            taken.append(_timed(model, run))
    return times


def runner(model: nn.Module, examples: Examples, mode: str = "eager") -> Callable[[], Any]:
    """Something to call that runs the model on the examples, which stay where they are, in one of the `MODES`."""
    if mode not in MODES:
        raise unknown("mode of running a network", mode, MODES)
    place = device_of(model)
    args, kwargs = arguments(examples)
    args = tuple(_moved(a, place) for a in args)
    kwargs = {k: _moved(v, place) for k, v in kwargs.items()}
    if mode == "compiled":
        compiled = torch.compile(model)
        return lambda: compiled(*args, **kwargs)
    if mode == "cuda-graph":
        return _captured(model, args, kwargs, place)
    return lambda: model(*args, **kwargs)


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
            model(*args, **kwargs)
    return graph.replay


def _timed(model: nn.Module, run: Callable[[], Any]) -> float:
    place = device_of(model)
    with at_rest(model):
        _wait(place)
        start = time.perf_counter()
        run()
        _wait(place)
        return (time.perf_counter() - start) * 1e3


def _wait(place: torch.device) -> None:
    """Accelerators run behind the caller: the clock stops when they have finished."""
    if place.type != "cpu":
        torch.accelerator.synchronize(place)


def _quartiles(size: int, taken: list[float]) -> Latency:
    low, median, high = torch.tensor(taken, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return Latency(size, median.item(), low.item(), high.item(), len(taken))


def _moved(value: Any, place: torch.device) -> Any:
    return value.to(place) if isinstance(value, Tensor) else value


# What widths cost


def in_precision(model: nn.Module, examples: Examples, dtype: torch.dtype | None) -> tuple[nn.Module, Examples]:
    """A copy of the model, and the examples, in the precision that is to be timed; as they are where none is said."""
    if dtype is None:
        return model, examples
    args, kwargs = arguments(examples)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    made = {k: cast(v) for k, v in kwargs.items()} if kwargs else tuple(cast(a) for a in args)
    return copy.deepcopy(model).to(dtype), made


def latency_cost(
    examples: Examples, groups: Coupled, batch: int = 1, mode: str = "eager", dtype: torch.dtype | None = None
) -> WidthCost:
    """Milliseconds by the widths of the coupled sets: each layer's own times, and what is left over by what it writes.

    What is left over (norms, activations, sums, and calling it all) is the time of the whole network less those of
    its layers. It is laid on the layers in proportion to their outputs.
    """
    model, examples = in_precision(groups.model, with_batch(examples, batch), dtype)
    layers = _layers_called(model, examples)
    sides = sides_of(groups)
    tables = {name: LayerTimes(layer, shape, mode) for name, (layer, shape, _) in layers.items()}
    own = {name: table.at(*table.whole) for name, table in tables.items()}
    (whole,) = fastest([model], examples, batch, mode=mode)
    rest = max(0.0, whole - sum(own.values()))
    written = sum(size for _, _, size in layers.values()) or 1
    terms: list[CostTerm] = []
    constant = 0.0
    for name, (_, _, size) in layers.items():
        table, dims = tables[name], sides.get(f"{name}.weight".removeprefix("."), {})
        out, into = table.dims
        pair = tuple(dims.get(d, Side(n, float(n), {})) for d, n in ((out, table.whole[0]), (into, table.whole[1])))
        after = rest * size / written
        if dims:
            terms.append(CostTerm(pair, _price(table, after)))
        else:
            constant += own[name] + after
    return WidthCost("milliseconds", widths_of(groups), terms, constant)


def _price(table: LayerTimes, after: float) -> Callable[[float, float], float]:
    return lambda out, into: table.at(out, into) + after * out / table.whole[0]


def _layers_called(model: nn.Module, examples: Examples) -> dict[str, tuple[nn.Module, tuple[int, ...], int]]:
    """The layers whose times are known by themselves, the shape each reads, and how much it writes."""
    found: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):

            def note(layer: nn.Module, inputs: tuple[Any, ...], output: Any, name: str = name) -> None:
                found[name] = (layer, tuple(inputs[0].shape), output.numel())

            hooks.append(module.register_forward_hook(note))
    try:
        with at_rest(model):
            call(model, examples)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class LayerTimes:
    """A layer's milliseconds at any numbers of outputs and inputs: measured at a few, and interpolated.

    >>> table = LayerTimes(nn.Linear(64, 32), (8, 64))
    >>> table.at(32, 64) > 0, table.whole
    (True, (32, 64))
    """

    dims = (0, 1)

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], mode: str = "eager"):
        self.layer, self.shape = layer, shape
        self.mode = "cuda-graph" if mode != "eager" and device_of(layer).type == "cuda" else "eager"
        self.convolution = not isinstance(layer, nn.Linear)
        self.groups = int(getattr(layer, "groups", 1))
        weight = layer.weight
        assert isinstance(weight, Tensor)
        self.whole = (int(weight.shape[0]), int(weight.shape[1]))
        self._grids = tuple(sorted({max(1, round(n * f)) for f in FRACTIONS}) for n in self.whole)

    def at(self, out: float, into: float) -> float:
        """Bilinear between the widths that were measured; below the least of them, on the line through zero and it."""
        (o0, o1, a), (i0, i1, b) = (self._cell(n, grid) for n, grid in zip((out, into), self._grids, strict=True))
        low = self._measured(o0, i0) * (1 - b) + self._measured(o0, i1) * b
        high = self._measured(o1, i0) * (1 - b) + self._measured(o1, i1) * b
        return low * (1 - a) + high * a

    @staticmethod
    def _cell(n: float, grid: list[int]) -> tuple[int, int, float]:
        """The two measured widths around n, and how far it is between them; 0 costs nothing."""
        above = next((i for i, width in enumerate(grid) if width >= n), len(grid) - 1)
        under = grid[above - 1] if above else 0
        return under, grid[above], min(1.0, (n - under) / max(1, grid[above] - under))

    def _measured(self, out: int, into: int) -> float:
        if not out or not into:
            return 0.0
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        where = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else str(weight.device)
        settings = (self.layer.extra_repr(),) if self.convolution else ()  # kernel, stride, padding: all but widths
        threads = torch.get_num_threads()
        key = (where, threads, str(weight.dtype), self.mode, self.whole, self.shape, settings, out, into)
        if key not in _TIMES:
            _TIMES[key] = self._time(out, into, weight)
        return _TIMES[key]

    def _time(self, out: int, into: int, weight: Tensor) -> float:
        layer = self._narrowed(out, into).to(weight.device, weight.dtype).eval()
        shape = list(self.shape)
        channel = -(weight.dim() - 1) if self.convolution else -1
        shape[channel] = layer.in_channels if self.convolution else into  # type: ignore[assignment]
        x = torch.randn(shape, device=weight.device, dtype=weight.dtype)
        if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and weight.shape[1] > 1:
            layer, x = layer.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        run = runner(layer, x, self.mode)
        taken = [_timed(layer, run) for _ in range(2)]
        until = time.perf_counter() + SECONDS_FOR_A_LAYER
        taken = []
        while len(taken) < 3 or (time.perf_counter() < until and len(taken) < 100):
            taken.append(_timed(layer, run))
        return min(taken)  # what else the machine does only adds to it

    def _narrowed(self, out: int, into: int) -> nn.Module:
        layer: Any = self.layer
        if not self.convolution:
            return nn.Linear(into, out, bias=layer.bias is not None)
        groups = max(1, round(self.groups * out / self.whole[0])) if self.groups > 1 else 1
        out = max(1, out // groups) * groups
        plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[layer.weight.dim() - 3]  # a class of its own may ask for other things
        return plain(
            into * groups,
            out,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            groups,
            layer.bias is not None,
            layer.padding_mode,
        )
