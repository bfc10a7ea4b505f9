"""Finds what no longer depends on the input, and folds it into the biases of the layers that read it.

The proof is a forward pass with NaN for every input: NaN spreads to whatever depends on the input, also
where arithmetic would lose it (`taint.py`), and layers are made to spread it only through weights that
aren't zero. What is not NaN is a constant, and its value is at hand. A second witness is asked too: the
same channel must have been constant on real inputs, of other sizes too. A constant before zero padding can't be folded
exactly: of several that one layer reads, one is kept, and reported, which stands for the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import first_line
from deephoyer.inference import (
    Examples,
    UncheckedOneHot,
    call,
    plain_attention,
    same_numbers,
    state_kept,
    unchecked_distributions,
)
from deephoyer.structure.equality import Differs
from deephoyer.structure.inputs import drawn_like, other_sizes, random_like, tensors_in
from deephoyer.structure.layers import (
    CONV,
    EMBEDDING,
    LINEAR,
    NORM,
    WIRING,
    LayerKind,
    channel_dim,
    clear,
    kind_of,
    nonzero,
)
from deephoyer.structure.taint import Unknown
from deephoyer.weights import hookable_modules

LARGE = 1000.0
"""For the second witness: gates may open only beyond a bound (`torch.where(x > 4, …)`)."""


@dataclass
class Folded:
    """What was folded into each layer, what had to be kept and why, and what each still layer gives."""

    folded: dict[str, int] = field(default_factory=dict)
    kept: dict[str, tuple[int, str]] = field(default_factory=dict)
    still: dict[str, Tensor] = field(default_factory=dict)


def fold(model: nn.Module, inputs: Examples) -> Folded:
    """Folds constants into the layers of a model in eval mode, which is changed in place."""
    result = Folded()
    witness = _Witness(model)
    wirings = [module for module in model.modules() if kind_of(module) is WIRING]  # which are changed on the way
    others = (module for module in model.modules() if module not in wirings)
    with torch.no_grad(), plain_attention, same_numbers(model), state_kept(others):
        try:
            witness.run(inputs)
        except Exception as why:
            raise Differs(f"the smaller network fails: {first_line(why)}.", "") from why
        for seed, scale in ((3, 1.0), (5, LARGE), (5, -LARGE)):
            for drawn in drawn_like(inputs, seed, scale):
                with suppress(Exception):
                    witness.run(drawn)
                    break
        if not all(t.is_floating_point() for t in tensors_in(inputs)):
            with suppress(Exception):
                witness.run(random_like(inputs, 4, bold=True))
        witness.run_in_other_sizes(inputs)
        shared = shared_layers(model)
        unknown = Unknown(inputs)
        hooks = []
        for name, module in model.named_modules():
            kind = kind_of(module)
            if kind is not None:
                seen = None if name in shared or witness.calls.get(name, 0) != 1 else witness.range.get(name)
                spread = unknown.unseen(_spread(name, kind, seen, result))
                hooks.append(module.register_forward_hook(spread, with_kwargs=True))
        try:
            with unknown, unchecked_distributions, UncheckedOneHot():
                call(model, unknown.inputs)
        except Exception:
            result.kept[""] = (0, "the network can't be run on NaN, so constants were folded only in part")
        finally:
            for hook in hooks:
                hook.remove()
    return result


def shared_layers(model: nn.Module) -> set[str]:
    """Layers of which another one has a parameter too: what is done to one would be lost in the other, or undone."""
    owner: dict[int, str] = {}
    shared: set[str] = set()
    for name, module in model.named_modules():
        if kind_of(module) is not None:
            for parameter in module.parameters(recurse=False):
                first = owner.setdefault(id(parameter), name)
                if first != name:
                    shared |= {first, name}
    return shared


class _Witness:
    """The least and greatest value of each input channel of each layer, over real forward passes.

    `calls` says how often each module is called in one pass, at most.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.calls: dict[str, int] = {}
        self.range: dict[str, tuple[Tensor, Tensor]] = {}

    def run(self, inputs: Examples, model: nn.Module | None = None) -> None:
        """Nothing is noted of a pass that fails."""
        model = model or self.model
        calls: dict[str, int] = {}
        seen = dict(self.range)
        hooks = [
            m.register_forward_hook(self._look(n, calls, seen), with_kwargs=True) for n, m in hookable_modules(model)
        ]
        try:
            call(model, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        self.range = seen
        self.calls = {name: max(n, self.calls.get(name, 0)) for name, n in (self.calls | calls).items()}

    def run_in_other_sizes(self, inputs: Examples) -> None:
        """A sum over tokens or pixels, a table of positions: what is constant may still depend on how many there are.

        On a CPU, since on a GPU an index beyond the end of a shorter tensor would end the process.
        """
        on_cpu = all(t.device.type == "cpu" for t in (*self.model.parameters(), *self.model.buffers()))
        model = self.model if on_cpu else copy.deepcopy(self.model).cpu()
        for tries in other_sizes(inputs):
            for other in tries:
                with suppress(Exception):
                    self.run(other, model)
                    break

    def _look(self, name: str, calls: dict[str, int], seen: dict[str, tuple[Tensor, Tensor]]) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            kind = kind_of(module)
            if kind is None or kind is EMBEDDING:
                return
            rows = _rows(tensors_in((args, kwargs))[0], channel_dim(module, kind))
            if not rows.numel():  # an expert that nothing was sent to
                return
            there = rows.isfinite()  # large inputs may overflow, which says nothing
            low = rows.where(there, torch.inf).amin(1)
            high = rows.where(there, -torch.inf).amax(1)
            if name in seen:
                before = seen[name]
                low, high = low.to(before[0].device), high.to(before[0].device)
                low, high = torch.minimum(low, before[0]), torch.maximum(high, before[1])
            seen[name] = (low, high)

        return look


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).flatten(1) if x.dim() > 1 else x[:, None]


def _close(a: Tensor, b: Tensor) -> Tensor:
    """Equal but for the last bits, which may depend on where in memory a value lies."""
    return (a - b).abs() <= 8 * torch.finfo(a.dtype).eps * b.abs()


def _spread(name: str, kind: LayerKind, seen: tuple[Tensor, Tensor] | None, result: Folded) -> Callable[..., Tensor]:
    """A hook that folds the constants a layer reads, and lets NaN pass only through weights that are there."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        x = tensors_in((args, kwargs))[0]
        if kind is EMBEDDING:
            return torch.full_like(output, float("nan"))
        if not x.numel():
            return output
        if kind is NORM:
            return _through_norm(name, module, x, output, seen, result)
        rows = _rows(x, channel_dim(module, kind))
        varied = rows.isnan().any(1)
        if seen is not None:
            _fold_into(name, module, kind, rows, varied, seen, result)
        if kind is WIRING:
            return module.forward(x)
        clean = module.forward(torch.where(x.isnan(), torch.zeros_like(x), x))
        if 1 in clean.shape[channel_dim(module, kind) + 1 :] and not _exact(module, kind):
            # With one place there are no borders to see, which larger inputs have.
            varied = varied | (rows[:, 0] != 0)
        return _mark(module, kind, clean, varied)

    return hook


def _through_norm(
    name: str, module: Any, x: Tensor, output: Tensor, seen: tuple[Tensor, Tensor] | None, result: Folded
) -> Tensor:
    if module.weight is not None and module.bias is not None:
        shape = [1, -1] + [1] * (x.dim() - 2)
        output = torch.where((module.weight == 0).view(shape), module.bias.view(shape).to(output.dtype), output)
    rows = _rows(output, 1)
    steady = torch.zeros(len(rows), dtype=torch.bool) if seen is None else _close(*seen).cpu()
    if module.weight is not None:
        steady |= (module.weight == 0).cpu()
    if bool(steady.all()) and bool(_close(rows, rows[:, :1]).all()):
        result.still[name] = rows[:, 0].clone()
    return output


def _mark(module: Any, kind: LayerKind, output: Tensor, varied: Tensor) -> Tensor:
    """NaN in the outputs that some input which varies is read by."""
    weight = module.weight
    groups = getattr(module, "groups", 1)
    if kind is LINEAR:
        reads = (weight != 0) & varied
    elif kind is CONV:
        ins = varied.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).flatten(0, 1)
        reads = (weight != 0).flatten(2).any(2) & ins
    else:
        reads = ((weight != 0).flatten(2).any(2) & varied[:, None]).T
    dim = channel_dim(module, kind)
    shape = [1] * output.dim()
    shape[dim] = -1
    return output.masked_fill(reads.any(1).view(shape), float("nan"))


def _fold_into(
    name: str, module: Any, kind: LayerKind, rows: Tensor, varied: Tensor, seen: tuple[Tensor, Tensor], result: Folded
) -> None:
    value = rows[:, 0].nan_to_num()
    low, high = seen
    read = nonzero(module, kind, "in").to(rows.device) & ~varied & _close(low, high)
    if not read.any():
        return
    even = _close(rows, rows[:, :1]).all(1)
    near = (low - value).abs() <= 1e-3 * (1 + value.abs())
    exact = _exact(module, kind) | (value == 0)
    good = read & even & near & exact
    if kind is CONV and module.groups == 1:
        good |= _merge(module, value, read & even & near & ~exact)
    kept = read & ~good
    if kept.any():
        why = "zero padding" if (kept & even).any() else "its constant differs from place to place"
        result.kept[name] = (int(kept.sum()), why)
    if not good.any():
        return
    if kind is not WIRING:
        _add_bias(module, kind, torch.where(good & exact, value, torch.zeros_like(value)))
    clear(module, kind, "in", good)
    result.folded[name] = int(good.sum())


def _merge(module: Any, value: Tensor, padded: Tensor) -> Tensor:
    """Lets one constant input of a padded convolution stand for all: they differ by a factor only, borders too."""
    if int(padded.sum()) < 2:
        return torch.zeros_like(padded)
    one = int((value.abs() * padded).argmax())
    others = padded.clone()
    others[one] = False
    share = torch.where(others, value / value[one], torch.zeros_like(value)).double()
    more = torch.einsum("oi...,i->o...", module.weight.detach().double(), share)
    module.weight[:, one] += more.to(module.weight.dtype)
    return others


def _exact(module: Any, kind: LayerKind) -> bool:
    """Whether a constant input makes a constant output everywhere."""
    if kind is CONV:
        padding = module.padding
        none = padding == "valid" or (not isinstance(padding, str) and not any(padding))
        return none or module.padding_mode != "zeros"
    return kind is LINEAR


def _add_bias(module: Any, kind: LayerKind, value: Tensor) -> None:
    if not value.any():
        return
    weight = module.weight.detach().double()
    if kind is CONV:
        groups = module.groups
        ins = value.double().view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).flatten(0, 1)
        more = (weight.flatten(2).sum(2) * ins).sum(1)
    else:
        more = weight @ value.double()
    if module.bias is None:
        module.bias = nn.Parameter(more.to(module.weight.dtype), requires_grad=module.weight.requires_grad)
    else:
        module.bias.copy_(module.bias.double() + more)
