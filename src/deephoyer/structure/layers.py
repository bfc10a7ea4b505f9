"""The layers whose channels can be cut, and along which dimension each of their tensors is cut.

One table for convolutions, linear layers, embeddings and batch norms. A layer has an `out` side and an
`in` side; a norm's sides are one and the same. A wiring is a layer without weights that lays channels
elsewhere (`models.PadShortcut`): anything with `source`, `arrange`, `keep_inputs`, `keep_outputs`.
Not here: which channels go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deephoyer.structure.narrowed import RECORD
from deephoyer.weights import CONVOLUTIONS, TRANSPOSED

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class LayerKind:
    """What a sort of layer is made of: its tensors with the dimension of each side, and its size attributes."""

    name: str
    out: dict[str, int]
    into: dict[str, int]
    out_size: str
    in_size: str | None

    def sides(self) -> tuple[str, ...]:
        return ("out",) if self.in_size in (None, self.out_size) else ("out", "in")

    def tensors(self, side: str) -> dict[str, int]:
        return self.out if side == "out" else self.into


LINEAR = LayerKind("linear", {"weight": 0, "bias": 0}, {"weight": 1}, "out_features", "in_features")
CONV = LayerKind("conv", {"weight": 0, "bias": 0}, {"weight": 1}, "out_channels", "in_channels")
TRANSPOSED_CONV = LayerKind("transposed-conv", {"weight": 1, "bias": 0}, {"weight": 0}, "out_channels", "in_channels")
EMBEDDING = LayerKind("embedding", {"weight": 1}, {}, "embedding_dim", None)
NORM = LayerKind(
    "norm", {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}, {}, "num_features", "num_features"
)
WIRING = LayerKind("wiring", {}, {}, "out_channels", "in_channels")

_TYPES: tuple[tuple[tuple[type[nn.Module], ...], LayerKind], ...] = (
    ((nn.Linear,), LINEAR),
    (CONVOLUTIONS, CONV),
    (TRANSPOSED, TRANSPOSED_CONV),
    ((nn.Embedding,), EMBEDDING),
    (NORMS, NORM),
)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The layer's kind; None where it isn't one, has a forward of its own, or computes its weight."""
    for types, kind in _TYPES:
        for base in types:
            if isinstance(module, base) and type(module).forward is base.forward:
                plain = "weight" in module._parameters and not hasattr(module, "parametrizations")
                grouped = kind is TRANSPOSED_CONV and (module.groups != 1 or "groups" in vars(module).get(RECORD, ()))
                still = kind is not EMBEDDING or module.max_norm is None
                return kind if plain and not grouped and still else None
    wired = all(hasattr(module, name) for name in ("source", "arrange", "keep_inputs", "keep_outputs"))
    return WIRING if wired else None


def channel_dim(module: nn.Module, kind: LayerKind) -> int:
    """The dimension of the layer's input and output that holds the channels."""
    if kind is LINEAR or kind is EMBEDDING:
        return -1
    if kind is NORM or kind is WIRING:
        return 1
    return -(module.weight.dim() - 1)  # type: ignore[operator]


def size(module: nn.Module, kind: LayerKind, side: str) -> int:
    name = kind.out_size if side == "out" else kind.in_size
    return int(getattr(module, name))  # type: ignore[arg-type]


def place(module: nn.Module, kind: LayerKind, side: str, tensor: Tensor, dim: int) -> Tensor:
    """A view of one of the layer's tensors whose dimension 0 is the channel of `side`."""
    groups = getattr(module, "groups", 1)
    if side == "in" and groups > 1:  # input c of a grouped convolution is column c % k of block c // k
        blocks = tensor.unflatten(0, (groups, -1)).transpose(1, 2)
        return blocks.reshape(-1, *blocks.shape[2:])
    return tensor.movedim(dim, 0)


def nonzero(module: nn.Module, kind: LayerKind, side: str) -> Tensor:
    """For each channel of a side, whether the layer's weight has anything but zeros there."""
    if kind is WIRING:
        source = torch.tensor(module.source)
        return source >= 0 if side == "out" else torch.isin(torch.arange(size(module, kind, "in")), source)
    weight = module.weight
    assert isinstance(weight, Tensor)
    moved = place(module, kind, side, weight.detach(), kind.tensors(side)["weight"])
    return filled(moved, 0)


def filled(tensor: Tensor, dim: int) -> Tensor:
    """For each index along a dimension, whether the tensor has anything but zeros there.

    By the largest and the smallest number: nothing of the tensor's size is made.

    >>> filled(torch.tensor([[0.0, 2.0], [0.0, -1.0]]), 1)
    tensor([False,  True])
    """
    if not tensor.numel():
        return torch.zeros(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
    high = low = tensor
    if dim:
        before = tuple(range(dim))
        high, low = high.amax(before), low.amin(before)
    if high.dim() > 1:
        high, low = high.flatten(1).amax(1), low.flatten(1).amin(1)
    return (high != 0) | (low != 0)


def clear(module: nn.Module, kind: LayerKind, side: str, gone: Tensor) -> None:
    """Zeroes what the layer has at the channels `gone` (a boolean for each); running statistics stay."""
    if kind is WIRING:
        lost = gone.tolist()
        old: list[int] = module.source  # type: ignore[assignment]
        source = [-1 if s >= 0 and lost[s if side == "in" else j] else s for j, s in enumerate(old)]
        module.arrange(module.in_channels, source)  # type: ignore[operator]
        return
    with torch.no_grad():
        for name, dim in kind.tensors(side).items():
            tensor = getattr(module, name)
            if tensor is None or name.startswith("running"):
                continue
            mask = gone.to(tensor.device)
            groups = getattr(module, "groups", 1)
            if side == "in" and groups > 1:
                grid = tensor.unflatten(0, (groups, -1))
                keep = ~mask.view(groups, 1, -1, *([1] * (tensor.dim() - 2)))
                tensor.copy_((grid * keep).flatten(0, 1))
            else:
                tensor.masked_fill_(mask.view([-1 if d == dim else 1 for d in range(tensor.dim())]), 0)


class Renewed:
    """Parameters that were replaced and what by, so that shared ones stay shared."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def get(self, old: Tensor) -> nn.Parameter | None:
        pair = self._pairs.get(id(old))
        return None if pair is None else pair[1]

    def note(self, old: nn.Parameter, new: nn.Parameter) -> None:
        self._pairs[id(old)] = (old, new)  # the old one is held, or its id could come back for another


def cut(module: nn.Module, kind: LayerKind, keep: dict[str, Tensor], renewed: Renewed) -> None:
    """Keeps only the channels listed for each side."""
    if kind is WIRING:
        if "out" in keep:
            module.keep_outputs(keep["out"].tolist())  # type: ignore[operator]
        if "in" in keep:
            module.keep_inputs(keep["in"].tolist())  # type: ignore[operator]
        return
    groups = getattr(module, "groups", 1)
    for name in dict.fromkeys([*kind.out, *kind.into]):
        tensor = getattr(module, name)
        if tensor is None:
            continue
        if (known := renewed.get(tensor)) is not None:
            setattr(module, name, known)
            continue
        new = tensor.detach()
        if "in" in keep and name in kind.into:
            new = _inputs(new, kind.into[name], keep["in"], groups)
        if "out" in keep and name in kind.out:
            out = keep["out"].to(new.device)
            new = new.index_select(kind.out[name], out)
        put(module, name, new, renewed)
    for side, index in keep.items():
        setattr(module, kind.out_size if side == "out" else str(kind.in_size), len(index))


def put(module: nn.Module, name: str, new: Tensor, renewed: Renewed) -> None:
    """Puts a tensor of another shape in the place of a parameter or buffer."""
    old = getattr(module, name)
    order = _order_of(old) if new.dim() == old.dim() else torch.preserve_format
    if order != torch.preserve_format or new.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
        new = new.clone(memory_format=order)
    if isinstance(old, nn.Parameter):
        parameter = nn.Parameter(new, requires_grad=old.requires_grad)
        renewed.note(old, parameter)
        setattr(module, name, parameter)
    else:
        setattr(module, name, new)
        module._non_persistent_buffers_set.discard(name)  # a fresh model would give its own, of the old shape


def _order_of(tensor: Tensor) -> torch.memory_format:
    """How a tensor lies in memory: picking channels makes it plain, and fast convolutions want channels last."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    kept = order is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=order)
    return order if kept else torch.preserve_format  # type: ignore[return-value]


def _inputs(weight: Tensor, dim: int, keep: Tensor, groups: int) -> Tensor:
    """The weight without the input channels that went."""
    keep = keep.to(weight.device)
    if groups == 1:
        return weight.index_select(dim, keep)
    per = weight.shape[1]
    return weight.index_select(1, keep[keep < per])


def loose_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and floating-point buffers outside the known layers, under every name that they have."""
    found: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        if kind_of(module) is None:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found += [(f"{prefix}.{name}" if prefix else name, t) for name, t in own if t.is_floating_point()]
    return found
