"""Counts of a model's weights and multiply-accumulates, layer by layer.

Three ways of counting, never mixed:
- nonzeros: weights that are not 0;
- MACs as the paper counts them: a layer's dense cost less its own all-zero filters and channels,
  whether or not they could be taken out of the network;
- MACs and parameters that are there: the dense cost of the module as it stands.

Layers are linear and convolution modules. MACs come from running the model on example inputs, so
that every shape is right whatever the network does; products outside of layers (attention scores)
are not counted, as in the paper. Latency is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.inference import Examples, at_rest, batch_of, call
from deephoyer.packing import packed_size, pattern_size
from deephoyer.structure.indices import as_pattern
from deephoyer.weights import CONVOLUTIONS, LAYERS, TRANSPOSED


@dataclass(frozen=True)
class Row:
    """One layer. MACs are for one example, and None where no example inputs were given."""

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
    macs_there: int | None = None
    convolution: bool = False

    @property
    def density(self) -> float:
        return self.nonzeros / max(1, self.weights)


@dataclass(frozen=True)
class Total:
    """The whole network: layers' weights, all parameters, and all that a file holds, buffers included."""

    weights: int
    nonzeros: int
    parameters: int
    bytes_dense: int
    bytes_stored: int
    macs_paper: int | None = None
    macs_there: int | None = None

    @property
    def density(self) -> float:
        return self.nonzeros / max(1, self.weights)


def count(model: nn.Module, examples: Examples | None = None) -> tuple[list[Row], Total]:
    """A row a layer, and the total, in which tied tensors count once.

    >>> rows, total = count(nn.Linear(3, 2), torch.zeros(1, 3))
    >>> rows[0].weights, total.parameters, total.macs_there
    (6, 8, 6)
    """
    places = None if examples is None else _places(model, examples)
    layers = _layers(model)
    rows = [_row(name, layer, None if places is None else places.get(layer, 0)) for name, layer in layers]
    first = {id(layer.weight): i for i, (_, layer) in reversed(list(enumerate(layers)))}
    once = [rows[i] for i in sorted(first.values())]
    stored = {_storage(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    total = Total(
        weights=sum(r.weights for r in once),
        nonzeros=sum(r.nonzeros for r in once),
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_dense=sum(t.numel() * t.element_size() for t in stored.values()),
        bytes_stored=sum(stored_size(t) for t in stored.values()),
        macs_paper=None if places is None else sum(r.macs_paper or 0 for r in rows),
        macs_there=None if places is None else sum(r.macs_there or 0 for r in rows),
    )
    return rows, total


def layer_widths(rows: list[Row]) -> str | None:
    """Live filters of convolutions and live inputs of linear layers, as the paper writes them: 353-45-11.

    None for deep networks, where the rows say it better.
    """
    if not rows or len(rows) > 10:
        return None
    return "-".join(str(r.live_filters if r.convolution else r.live_channels) for r in rows)


def stored_size(tensor: Tensor) -> int:
    """Bytes of a tensor in a file: packed when that is smaller, as it is otherwise."""
    index = as_pattern(tensor)
    if index is not None:
        return pattern_size(index[1].numpy())
    return packed_size((tensor.detach() != 0).cpu().numpy(), tensor.element_size())


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LAYERS)]


def _storage(tensor: Tensor) -> tuple[object, ...]:
    """The same for tied tensors, which are one tensor under several names."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (id(tensor),)


def _row(name: str, layer: nn.Module, places: int | None) -> Row:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    groups = int(getattr(layer, "groups", 1))
    alive = _by_group(weight != 0, groups, isinstance(layer, TRANSPOSED))
    filters, channels = alive.any(2), alive.any(1)
    pairs = int((filters.sum(1) * channels.sum(1)).sum())
    spots = weight.numel() // max(1, alive.numel())
    return Row(
        name=name,
        shape=tuple(weight.shape),
        weights=weight.numel(),
        nonzeros=int(torch.count_nonzero(weight)),
        live_filters=int(filters.sum()),
        filters=filters.numel(),
        live_channels=int(channels.sum()),
        channels=channels.numel(),
        bytes_stored=sum(stored_size(p) for p in layer.parameters(recurse=False)),
        macs_paper=None if places is None else places * pairs * spots,
        macs_there=None if places is None else places * weight.numel(),
        convolution=isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)),
    )


def _by_group(nonzero: Tensor, groups: int, transposed: bool) -> Tensor:
    """(groups, filters, channels): whether a filter reads a channel at all."""
    pairs = nonzero.flatten(2).any(2) if nonzero.dim() > 2 else nonzero
    split = pairs.reshape(groups, pairs.shape[0] // groups, pairs.shape[1])
    return split.transpose(1, 2) if transposed else split


def _places(model: nn.Module, examples: Examples) -> dict[nn.Module, int]:
    """How often each layer's weights are used for one example: positions of an image, tokens of a text."""
    used: dict[nn.Module, int] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, TRANSPOSED):
            times = inputs[0].numel() // layer.in_channels
        else:
            width = layer.out_channels if isinstance(layer, CONVOLUTIONS) else layer.out_features
            times = output.numel() // max(1, int(width))  # type: ignore[arg-type]
        used[layer] = used.get(layer, 0) + times

    batch = batch_of(examples)
    with _watching(model, note), at_rest(model):
        try:
            call(model, examples)
        except UserError:
            raise
        except Exception as why:
            raise UserError(f"the model can't be run on the example inputs: {why}") from why
    return {layer: times // batch for layer, times in used.items()}


@contextmanager
def _watching(model: nn.Module, note: object) -> Iterator[None]:
    handles = [layer.register_forward_hook(note) for _, layer in _layers(model)]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
