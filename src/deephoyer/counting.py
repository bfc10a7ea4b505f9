"""Counts of a model's weights and multiply-accumulates, layer by layer.

Three ways of counting, never mixed:
- nonzeros: weights that are not 0;
- MACs as the paper counts them: a layer's dense cost less its own all-zero filters and channels,
  whether or not they could be taken out of the network;
- MACs that are executed and parameters that are there: the cost of the module as it stands, products without
  weights (attention) and recurrent layers included.

A row is a weight as `find_weights` finds them. MACs come from running the model on example inputs (`executed.py`), so
that every shape is right whatever the network does. Latency is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.executed import executed
from deephoyer.inference import Examples
from deephoyer.packing import packed_size, pattern_size
from deephoyer.structure.indices import as_pattern
from deephoyer.weights import CONVOLUTIONS, TRANSPOSED, Weight, all_weights, named_modules, with_values


@dataclass(frozen=True)
class LayerCounts:
    """One weight, called after its layer where that has no other, or after its parameter; MACs are for one example,
    and None where no example inputs were given. A row without weights has a module's products of other tensors."""

    name: str
    shape: tuple[int, ...]
    weights: int
    nonzeros: int
    live_filters: int
    filters: int
    live_channels: int
    channels: int
    bytes_stored: int
    macs_paper: int | None = None
    macs_executed: int | None = None
    convolution: bool = False

    @property
    def density(self) -> float:
        return self.nonzeros / max(1, self.weights)


@dataclass(frozen=True)
class TotalCounts:
    """The whole network: layers' weights, all parameters, and all that a file holds, buffers included."""

    weights: int
    nonzeros: int
    parameters: int
    bytes_dense: int
    bytes_stored: int
    macs_paper: int | None = None
    macs_executed: int | None = None

    @property
    def density(self) -> float:
        return self.nonzeros / max(1, self.weights)


def count(model: nn.Module, examples: Examples | None = None) -> tuple[list[LayerCounts], TotalCounts]:
    """One row for each weight and for each module that multiplies other tensors; and the total, with tied ones once.

    >>> rows, total = count(nn.Linear(3, 2), torch.zeros(1, 3))
    >>> rows[0].weights, total.parameters, total.macs_executed
    (6, 8, 6)
    """
    with_values(model)
    _refuse_packed(model)
    weights = all_weights(model)
    used: dict[str, int] | None = None
    other: dict[str, int] = {}
    if examples is not None:
        used, other = executed(model, examples, {w.name: w.tensor for w in weights})
    modules = dict(named_modules(model))
    rows = [_row(modules, weight, None if used is None else used.get(weight.name, 0)) for weight in weights]
    first = {id(weight.tensor): i for i, weight in reversed(list(enumerate(weights)))}
    once = [rows[i] for i in sorted(first.values())]
    for name, macs in other.items():  # of products without a weight the paper's counting knows nothing
        title = f"{name} (products)".lstrip()
        rows.append(LayerCounts(title, (), 0, 0, 0, 0, 0, 0, 0, macs_paper=0, macs_executed=macs))
    state = (t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor))
    stored = {_storage(part): part for tensor in state for part in _parts(tensor)}
    total = TotalCounts(
        weights=sum(r.weights for r in once),
        nonzeros=sum(r.nonzeros for r in once),
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_dense=sum(t.numel() * t.element_size() for t in stored.values()),
        bytes_stored=sum(stored_size(t) for t in stored.values()),
        macs_paper=None if used is None else sum(r.macs_paper or 0 for r in rows),
        macs_executed=None if used is None else sum(r.macs_executed or 0 for r in rows),
    )
    return rows, total


def _refuse_packed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_packed_params"):
            raise UserError(
                f"{name or 'the model'} is a {type(module).__name__} of torch.ao, whose packed weights can't be "
                "counted: count the network before it is quantized."
            )


def layer_widths(rows: list[LayerCounts]) -> str | None:
    """Live filters of convolutions and live inputs of linear layers, as the paper writes them: 353-45-11.

    None for deep networks, where the rows say it better.
    """
    layers = [r for r in rows if r.weights]
    if not layers or len(layers) > 10:
        return None
    return "-".join(str(r.live_filters if r.convolution else r.live_channels) for r in layers)


def stored_size(tensor: Tensor) -> int:
    """Bytes of a tensor in a file: packed when that is smaller, as it is otherwise."""
    index = as_pattern(tensor)
    if index is not None:
        return pattern_size(index[1].numpy())
    return packed_size((tensor.detach() != 0).cpu().numpy(), tensor.element_size())


def _parts(tensor: Tensor) -> list[Tensor]:
    """A quantized tensor holds others: whole numbers and their scales."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for one in inner for part in _parts(one)]


def _storage(tensor: Tensor) -> tuple[object, ...]:
    """The same for tied tensors, which are one tensor under several names."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (id(tensor),)


def _row(modules: Mapping[str, nn.Module], of: Weight, macs: int | None) -> LayerCounts:
    weight = of.tensor.detach()
    if hasattr(weight, "qdata"):  # torchao's tensors, which can't be compared with anything as they are
        weight = weight.dequantize()
    owner, _, attribute = of.name.rpartition(".")
    layer = modules[owner]
    alive = _by_group(weight != 0, of)
    filters, channels = alive.any(2), alive.any(1)
    pairs = int((filters.sum(1) * channels.sum(1)).sum())
    whole = max(1, alive.numel())
    alone = attribute == "weight"
    own = layer.parameters(recurse=False) if alone else [of.tensor]
    return LayerCounts(
        name=owner if alone else of.name,
        shape=tuple(weight.shape),
        weights=weight.numel(),
        nonzeros=int(torch.count_nonzero(weight)),
        live_filters=int(filters.sum()),
        filters=filters.numel(),
        live_channels=int(channels.sum()),
        channels=channels.numel(),
        bytes_stored=sum(stored_size(part) for p in own for part in _parts(p)),
        macs_paper=None if macs is None else macs * pairs // whole,
        macs_executed=macs,
        convolution=isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)),
    )


def _by_group(nonzero: Tensor, of: Weight) -> Tensor:
    """(groups, filters, channels): whether a filter reads a channel at all; a stack's matrices are its groups."""
    if of.stacked:
        return nonzero if of.out_dim == 1 else nonzero.transpose(1, 2)
    pairs = nonzero.flatten(2).any(2) if nonzero.dim() > 2 else nonzero
    split = pairs.reshape(of.groups, pairs.shape[0] // of.groups, pairs.shape[1])
    return split if of.out_dim == 0 else split.transpose(1, 2)
