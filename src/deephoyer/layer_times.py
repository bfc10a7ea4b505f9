"""How the time of each layer depends on its widths, measured on the device at hand, and kept for the next time.

A layer is timed on random weights at a few widths; between them its time is interpolated. What was measured once on a
device, with a version of torch, in a precision and at a shape, is afterwards read from a file in the user's cache
folder (`forget_layer_times` empties it). Which widths are then chosen is not known here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.files import kept_in
from deephoyer.inference import Examples, at_rest, call, device_of
from deephoyer.latency import Beside, fastest, runner
from deephoyer.structure import Coupled
from deephoyer.structure.attention import NarrowAttention, narrow, opened
from deephoyer.widths import CostTerm, Side, WidthCost, sides_of, widths_of

FRACTIONS = (0.0625, 0.25, 0.5, 0.75, 1.0)
"""Widths at which a layer is timed, as shares of its own."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Sides = Mapping[str, Mapping[int, Side]]


def latency_cost(
    examples: Examples, groups: Coupled, batch: int = 1, mode: str = "eager", dtype: torch.dtype | None = None
) -> WidthCost:
    """Milliseconds by the widths of the coupled sets: each layer's own times, and what is left over by what it writes.

    What is left over (norms, activations, sums, and calling it all) is the time of the whole network less those of
    its layers. It is laid on the layers in proportion to their outputs.
    """
    beside, sides = Beside(groups.model, examples, batch, mode, dtype), sides_of(groups)
    calls = _calls(beside.whole, beside.examples, mode).values()
    rest = max(0.0, beside.whole_ms() - sum(seen.table.whole_ms * seen.count for seen in calls))
    written = sum(seen.written for seen in calls) or 1
    terms: list[CostTerm] = []
    constant = 0.0
    for seen in calls:
        after = rest * seen.written / written
        if any(name in sides for name in seen.weights):
            terms.append(seen.table.term(seen, sides, after))
        else:
            constant += seen.table.whole_ms * seen.count + after
    return WidthCost("milliseconds", widths_of(groups), terms, constant)


# What the network calls


@dataclass
class _Call:
    """How long a module takes, how often it is called, how much it writes, and which weights it multiplies by."""

    table: LayerTimes | ModuleTimes
    weights: list[str]
    written: int = 0
    count: int = 0


def _calls(model: nn.Module, examples: Examples, mode: str) -> dict[str, _Call]:
    """The layers of a network, and the modules that multiply by weights of their own, such as torch's attention."""
    names: set[str] = set()
    _watched(model, examples, dict(model.named_modules()), lambda name, *_: names.add(name))
    weights = _weights_by_call(model, names)
    found: dict[str, _Call] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name not in found:
            x = args[0] if args else kwargs.get("input")
            table: LayerTimes | ModuleTimes = ModuleTimes(module, args, kwargs, mode)
            if isinstance(module, LAYERS) and isinstance(x, Tensor):
                table = LayerTimes(module, tuple(x.shape), mode, _channels_last(x))
            found[name] = _Call(table, weights[name])
        outputs = output if isinstance(output, tuple | list) else [output]
        found[name].written += sum(tensor.numel() for tensor in outputs if isinstance(tensor, Tensor))
        found[name].count += 1

    _watched(model, examples, {name: model.get_submodule(name) for name in weights}, note)
    return found


def _weights_by_call(model: nn.Module, called: set[str]) -> dict[str, list[str]]:
    """For each module that is to be timed by itself the weights that it multiplies by.

    A layer that is never called (attention reads its projection's weights itself) counts to the module around it. That
    one is timed as a whole if such weights are most of what it has, and then what is inside it is not timed again.
    """
    found: dict[str, list[str]] = {}
    for name, tensor in model.named_parameters():
        if tensor.dim() >= 2:
            owner = name.rpartition(".")[0]
            while owner and owner not in called:
                owner = owner.rpartition(".")[0]
            found.setdefault(owner, []).append(name)
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    for owner in [o for o in found if not isinstance(model.get_submodule(o), LAYERS)]:
        inside = f"{owner}." if owner else ""
        own = found.pop(owner, [])
        if 2 * sum(sizes[n] for n in own) >= sum(size for n, size in sizes.items() if n.startswith(inside)):
            found = {o: names for o, names in found.items() if not o.startswith(inside)} | {owner: own}
    return found


def _watched(
    model: nn.Module, examples: Examples, modules: Mapping[str, nn.Module], note: Callable[..., object]
) -> None:
    """Runs the model, and tells of each call of these modules."""

    def hook(name: str) -> Callable[..., None]:
        def told(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            note(name, module, args, kwargs, output)

        return told

    hooks = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with at_rest(model):
            call(model, examples)
    finally:
        for handle in hooks:
            handle.remove()


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


# What single layers take


class LayerTimes:
    """A layer's milliseconds at any numbers of outputs and inputs: measured at a few, and interpolated.

    >>> table = LayerTimes(nn.Linear(64, 32), (8, 64))
    >>> table.at(32, 64) > 0, table.whole
    (True, (32, 64))
    """

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], mode: str = "eager", channels_last: bool = False):
        self.shape, self.mode, self.channels_last = shape, mode, channels_last
        self.convolution = not isinstance(layer, nn.Linear)
        self.groups = int(getattr(layer, "groups", 1))
        weight = layer.weight
        assert isinstance(weight, Tensor)
        self.device, self.dtype = weight.device, weight.dtype
        self.whole = (int(weight.shape[0]), int(weight.shape[1]))
        self.layer: Any = layer
        self.layer = self._narrowed(*self.whole)  # what is timed has no weights of the network's to hold on to
        self._seen: dict[tuple[int, int], float] = {}
        self._grids = tuple(sorted({max(1, round(n * f)) for f in FRACTIONS}) for n in self.whole)

    @property
    def whole_ms(self) -> float:
        return self.at(*self.whole)

    def term(self, seen: _Call, sides: Sides, after: float) -> CostTerm:
        """What it costs by the sets that its two sides belong to; `after` is what follows it, as much as it writes."""
        dims = next((sides[name] for name in seen.weights if name in sides), {})
        pair = tuple(dims.get(d, Side(n, float(n), {})) for d, n in enumerate(self.whole))
        return CostTerm(pair, lambda out, into: seen.count * self.at(out, into) + after * out / self.whole[0])

    def at(self, out: float, into: float) -> float:
        """Bilinear between the widths that were measured; below the least of them, on the line through zero and it."""
        (o0, o1, a), (i0, i1, b) = (self._cell(n, grid) for n, grid in zip((out, into), self._grids, strict=True))
        corners = ((o0, i0, (1 - a) * (1 - b)), (o0, i1, (1 - a) * b), (o1, i0, a * (1 - b)), (o1, i1, a * b))
        return sum(self._measured(o, i) * weight for o, i, weight in corners if weight)

    @staticmethod
    def _cell(n: float, grid: list[int]) -> tuple[int, int, float]:
        """The two measured widths around n, and how far it is between them; 0 costs nothing."""
        above = next((i for i, width in enumerate(grid) if width >= n), len(grid) - 1)
        under = grid[above - 1] if above else 0
        return under, grid[above], min(1.0, (n - under) / max(1, grid[above] - under))

    def _measured(self, out: int, into: int) -> float:
        if not out or not into:
            return 0.0
        if (out, into) not in self._seen:
            layer = self._narrowed(out, into)
            shape = list(self.shape)
            shape[1 - layer.weight.dim() if self.convolution else -1] = getattr(layer, "in_channels", into)
            what = f"{layer!r} of {shape} {self.dtype}{' channels last' if self.channels_last else ''}"
            made = functools.partial(self._made, layer, shape)
            self._seen[out, into] = _remembered(what, self.device, self.mode, made)
        return self._seen[out, into]

    def _made(self, layer: nn.Module, shape: list[int]) -> tuple[nn.Module, Examples]:
        """The layer with random weights, and inputs of this shape."""
        layer = layer.to_empty(device=self.device).to(self.dtype).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for tensor in layer.parameters():
                tensor.normal_()
            x = torch.randn(shape, device=self.device, dtype=self.dtype)
        if self.channels_last:
            layer, x = layer.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        return layer, x

    def _narrowed(self, out: int, into: int) -> Any:
        """A plain layer of these widths, without weights."""
        layer = self.layer
        if not self.convolution:
            return nn.Linear(into, out, bias=layer.bias is not None, device="meta")
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
            device="meta",
        )


class ModuleTimes:
    """The milliseconds of a module with weights of its own; of torch's attention with half of its heads, too.

    Between and below them, and for any other module, its time goes with its width.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str = "eager"):
        self.module, self.args, self.kwargs, self.mode = module, args, kwargs, mode

    @functools.cached_property
    def whole_ms(self) -> float:
        return self._measured(self.module)

    def term(self, seen: _Call, sides: Sides, after: float) -> CostTerm:
        widest = max(
            (n for n in seen.weights if n in sides), key=lambda n: math.prod(s.total for s in sides[n].values())
        )
        cost = seen.count * self.whole_ms + after
        fixed = seen.count * self._without_heads() / cost if cost else 0.0
        own = tuple(sides[widest].values())
        return CostTerm(own, lambda *live: cost * (fixed + (1 - fixed) * _share(own, live)))

    def _without_heads(self) -> float:
        """What would be left of the time with no head at all, on the line through all of them and half of them."""
        heads = getattr(self.module, "num_heads", 1)
        half = _with_heads(self.module, heads // 2)
        if half is None:
            return 0.0
        return max(0.0, self.whole_ms - (self.whole_ms - self._measured(half)) * heads / (heads - heads // 2))

    def _measured(self, module: nn.Module) -> float:
        shapes = [tuple(p.shape) for p in module.parameters()]
        given = [_about(value) for value in self.args] + [f"{k}={_about(v)}" for k, v in self.kwargs.items()]
        what = f"{type(module).__name__}{shapes} of {', '.join(given)}"
        return _remembered(what, device_of(module), self.mode, lambda: (_Given(module, self.kwargs), self.args))


class _Given(nn.Module):
    """A module with its keyword arguments."""

    def __init__(self, module: nn.Module, kwargs: dict[str, Any]):
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args, **self.kwargs)


def _with_heads(module: nn.Module, heads: int) -> nn.Module | None:
    """A copy of torch's attention with fewer heads; nothing for any other module."""
    if not opened(module) or not heads:
        return None
    assert isinstance(module, nn.MultiheadAttention)
    if not (module.fused if isinstance(module, NarrowAttention) else module._qkv_same_embed_dim):
        return None
    made = copy.deepcopy(module)
    wide = heads * made.head_dim
    with torch.no_grad():
        made.in_proj_weight = nn.Parameter(made.in_proj_weight[: 3 * wide].clone())
        if made.in_proj_bias is not None:
            made.in_proj_bias = nn.Parameter(made.in_proj_bias[: 3 * wide].clone())
        made.out_proj.weight = nn.Parameter(made.out_proj.weight[:, :wide].clone())
    narrow(made, heads)
    return made


def _share(sides: Sequence[Side], live: Sequence[float]) -> float:
    return math.prod(n / side.total for n, side in zip(live, sides, strict=True))


def _about(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


# What was measured before


_KNOWN: dict[Path, dict[str, float]] = {}
"""What the files hold, as far as this process has read or written them."""


def forget_layer_times() -> None:
    """Forgets all measured times of layers, those on disk too: the next latency target measures anew.

    Worth it after the machine itself has changed (a driver, a power limit), or was very busy when they were measured.
    """
    _KNOWN.clear()
    for path in kept_in("layer-times").glob("*.jsonl"):
        path.unlink(missing_ok=True)


def _remembered(what: str, place: torch.device, mode: str, make: Callable[[], tuple[nn.Module, Examples]]) -> float:
    """The milliseconds of `what` on this device: from the file, or measured and written to it."""
    mode = "cuda-graph" if mode != "eager" and place.type == "cuda" else "eager"  # compiling each would take minutes
    path = _file(place)
    if path not in _KNOWN:
        _KNOWN[path] = _read(path)
    key = f"{mode}: {what}"
    if key not in _KNOWN[path]:
        module, examples = make()
        on_cpu = place.type == "cpu"
        run = runner(module, examples, mode)
        _KNOWN[path][key] = fastest(module, run, 0.03 if on_cpu else 0.01, burst=1 if on_cpu else 10)
        _append(path, {key: _KNOWN[path][key]})
    return _KNOWN[path][key]


def _file(place: torch.device) -> Path:
    """One for each device, version of torch, and whatever of the process's settings times depend on."""
    settings = [torch.__version__, f"{torch.get_num_threads()} threads"]
    if place.type == "cuda":
        settings = [torch.__version__, torch.get_float32_matmul_precision()]
        settings += ["tf32"] * torch.backends.cudnn.allow_tf32 + ["benchmark"] * torch.backends.cudnn.benchmark
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else _processor()
    return kept_in("layer-times") / (re.sub(r"[^A-Za-z0-9.+]+", "-", " ".join([name, *settings])) + ".jsonl")


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, float]:
    """All whole lines of the file; a line that was cut off is measured again."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                found.update({str(key): float(ms) for key, ms in json.loads(line).items() if ms > 0})
    return found


def _append(path: Path, times: dict[str, float]) -> None:
    """A whole line in one write at the file's end, wherever other processes have taken that by now.

    Where the folder can't be written, times are measured again in the next process: that costs seconds, no more.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, (json.dumps(times) + "\n").encode())
        finally:
            os.close(handle)
