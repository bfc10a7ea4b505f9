"""Small modules between layers of different width: they pick channels, lay them out again, or stand still.

A `Gather` gives a layer only the inputs it reads and lays its outputs where the network wants them; a
`ConstantLayer` stands where a layer has no weights left, and does no arithmetic. Not here: who decides that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.structure.layers import CONV, LINEAR, LayerKind, Renewed, channel_dim, cut, kind_of, nonzero, put, size

NAMED = (1,) * 6
"""A shape that no layer's weight has."""


class Joint(nn.Module):
    """What stands where the network had a layer; that layer's own names are then no longer in the state dict."""

    def bear_name(self, like: Tensor) -> None:
        """Puts something under the name of the layer's weight that fits no layer.

        A library that finds nothing under a name may draw random numbers, and only warn of it. What doesn't fit it
        refuses.
        """
        self.register_buffer("weight", like.detach().new_zeros(NAMED))

    @property
    def bears_name(self) -> bool:
        return self._buffers.get("weight") is not None


class Gather(Joint):
    """A layer with index selection in front (`read`) and behind (`write`).

    `read[i]` is the channel that input i of the layer comes from. `write[j]` is the layer's output that
    channel j of the result is; its number of outputs stands for `fill[j]`, or zero without a fill.
    """

    read: Tensor | None
    write: Tensor | None
    place: Tensor | None
    fill: nn.Parameter | None

    def __init__(self, layer: Any, read: Tensor | None, write: Tensor | None, fill: Tensor | None, width: int) -> None:
        super().__init__()
        kind = kind_of(layer)
        assert kind is not None
        self.width = width  # channels of what it is given
        self.layer = layer
        self.dim = channel_dim(layer, kind)
        device = layer.weight.device
        self.register_buffer("read", None if read is None else read.to(device))
        self.register_buffer("write", None if write is None else write.to(device))
        self.register_buffer("place", self._places(), persistent=False)
        self.fill = None if fill is None else nn.Parameter(fill.to(device), layer.bias.requires_grad)

    def _places(self) -> Tensor | None:
        """The channel that each output of the layer becomes; None where one becomes none, or several."""
        if self.write is None or self.write.is_meta:
            return None
        outputs = len(self.layer.weight)
        place = torch.nonzero(self.write < outputs).flatten()
        order = self.write[place].argsort()
        ordered = torch.arange(outputs, device=order.device)
        return place[order] if torch.equal(self.write[place[order]], ordered) else None

    def _load_from_state_dict(self, *args: Any, **settings: Any) -> None:
        super()._load_from_state_dict(*args, **settings)
        self.find_places()

    def find_places(self) -> None:
        """What is known only once `write` has its values."""
        self.place = self._places()

    def forward(self, x: Tensor) -> Tensor:
        if self.read is not None:
            x = x.index_select(x.dim() + self.dim, self.read)
        y = self.layer(x)
        if self.write is None:
            return y
        # An exported graph picks, which is a single operator in ONNX.
        picks = self.place is None or torch.compiler.is_exporting()
        y = self._picked(y) if picks else self._copied(y)
        return y if self.fill is None else y + _laid_along(self.fill, -self.dim - 1)

    def _picked(self, y: Tensor) -> Tensor:
        assert self.write is not None
        dim = y.dim() + self.dim
        zero = [0, 0] * (y.dim() - 1 - dim) + [0, 1]  # one channel of zeros, behind the others
        return F.pad(y, zero).index_select(dim, self.write)

    def _copied(self, y: Tensor) -> Tensor:
        """The same in a third of the time on a CPU: nothing is copied but what is there."""
        assert self.write is not None and self.place is not None
        dim = y.dim() + self.dim
        shape = [*y.shape[:dim], len(self.write), *y.shape[dim + 1 :]]
        return y.new_empty(shape).zero_().index_copy_(dim, self.place, y)


class ConstantLayer(Joint):
    """What a layer gives that has no weights left: its bias at every place, in the shape the layer gave."""

    value: Tensor

    def __init__(self, layer: nn.Module, value: Tensor, trained: bool):
        super().__init__()
        self.kind = (kind_of(layer) or LINEAR).name
        self.places: list[dict[str, int]] | None = None
        if kind_of(layer) is CONV:
            self.places = _windows(layer)
        if trained:
            self.value = nn.Parameter(value.detach().clone())
        else:
            self.register_buffer("value", value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        # A copy, because what comes next may write in place.
        if self.kind == "linear":
            return self.value.expand(*x.shape[:-1], -1).clone()
        if self.places is None:
            return _laid_along(self.value, x.dim() - 2).expand(x.shape[0], -1, *x.shape[2:]).clone()
        n = len(self.places)
        shape = [(x.shape[d - n] + w["pad"] - w["reach"]) // w["stride"] + 1 for d, w in enumerate(self.places)]
        return _laid_along(self.value, n).expand(*x.shape[: -n - 1], -1, *shape).clone()

    def extra_repr(self) -> str:
        return f"{self.value.numel()}, for a {self.kind} layer"


def _laid_along(channels: Tensor, places: int) -> Tensor:
    """One number for each channel, with so many dimensions behind them."""
    for _ in range(places):
        channels = channels.unsqueeze(-1)
    return channels


def _windows(layer: Any) -> list[dict[str, int]]:
    """How many places a convolution has along each dimension: (size + pad − reach) // stride + 1."""
    windows = []
    for d, (k, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        reach = dilation * (k - 1) + 1
        named = {"same": reach - 1, "valid": 0}
        pad = named[layer.padding] if isinstance(layer.padding, str) else 2 * layer.padding[d]
        windows.append({"pad": pad, "reach": reach, "stride": stride})
    return windows


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Puts a module in another's place, wherever the model has it."""
    old = model.get_submodule(name)
    new.train(old.training)
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[attribute] = new


def gather(layer: nn.Module, inputs: bool = True, outputs: bool = True) -> Gather | None:
    """The layer with only its live inputs and outputs, behind a joint; None where all are live, or none."""
    kind = kind_of(layer)
    if kind not in (LINEAR, CONV):
        return None
    assert kind is not None
    keep: dict[str, Tensor] = {}
    for side, wanted in (("in", inputs), ("out", outputs)):
        live = _fullest(nonzero(layer, kind, side), int(getattr(layer, "groups", 1)))
        if wanted and not live.all() and live.any():
            keep[side] = torch.nonzero(live).flatten()
    if not keep:
        return None
    write, fill = _layout(layer, kind, keep)
    width = size(layer, kind, "in")
    _narrow(layer, kind, keep)
    return Gather(layer, keep.get("in"), write, fill, width)


def around(model: nn.Module, name: str) -> tuple[str, Gather] | None:
    """The joint that a layer is inside of, from an earlier compaction."""
    parent, _, last = name.rpartition(".")
    joint = model.get_submodule(parent)
    return (parent, joint) if last == "layer" and isinstance(joint, Gather) else None


def merged(outer: Gather, inner: Gather) -> Gather:
    """One joint for two, the inner of which stands where the outer has its layer."""
    read = inner.read if outer.read is None else outer.read
    if outer.read is not None and inner.read is not None:
        read = outer.read[inner.read]
    if outer.write is None or inner.write is None:
        one = inner if outer.write is None else outer
        return Gather(inner.layer, read, one.write, one.fill, outer.width)
    write = laid_out(outer, inner.write, len(inner.layer.weight))
    fill = torch.zeros(len(write), dtype=inner.layer.weight.dtype, device=write.device)
    for part in (outer.fill, None if inner.fill is None else laid_out(outer, inner.fill.detach(), 0)):
        fill += 0 if part is None else part.detach()
    return Gather(inner.layer, read, write, fill if bool(fill.any()) else None, outer.width)


def laid_out(joint: Gather, values: Tensor, missing: float) -> Tensor:
    """Values of the layer's outputs, one for each channel that the joint gives; `missing` where it has none."""
    if joint.write is None:
        return values
    return torch.cat([values, values.new_full((1,), missing)])[joint.write]


def _fullest(live: Tensor, groups: int) -> Tensor:
    """Groups of a convolution stay equally wide: each keeps as many channels as the fullest needs."""
    rows = live.view(groups, -1)
    most = int(rows.sum(1).max())
    first = rows.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return torch.zeros_like(rows).scatter(1, first, True).flatten()


def _narrow(layer: Any, kind: LayerKind, keep: dict[str, Tensor]) -> None:
    """Cuts a layer; in a grouped convolution each group may lose other channels than the next."""
    groups = getattr(layer, "groups", 1)
    if groups > 1 and "in" in keep:
        per = layer.in_channels // groups
        columns = (keep["in"] % per).view(groups, 1, -1, *([1] * (layer.weight.dim() - 2)))
        blocks = layer.weight.detach().unflatten(0, (groups, -1))
        index = columns.expand(-1, blocks.shape[1], -1, *blocks.shape[3:])
        put(layer, "weight", blocks.gather(2, index).flatten(0, 1), Renewed())
        layer.in_channels = len(keep["in"])
        keep = {side: index for side, index in keep.items() if side == "out"}
    cut(layer, kind, keep, Renewed())


def _layout(layer: nn.Module, kind: LayerKind, keep: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    if "out" not in keep:
        return None, None
    live = keep["out"]
    write = torch.full((size(layer, kind, "out"),), len(live), device=live.device)
    write[live] = torch.arange(len(live), device=live.device)
    bias = layer.bias
    if bias is None:
        return write, None
    assert isinstance(bias, Tensor)
    fill = bias.detach().clone()
    fill[live] = 0
    return write, fill if bool(fill.any()) else None
