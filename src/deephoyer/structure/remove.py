"""Takes channels out of a network: zeroes everything that belongs to them, or removes it physically.

Which channels are dead is decided elsewhere; here it is only done, to a copy that the caller owns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deephoyer.structure.channels import ChannelGraph
from deephoyer.structure.layers import Renewed, clear, cut, kind_of, put


def zero(model: nn.Module, graph: ChannelGraph, dead: Tensor) -> None:
    """Sets all slices of the dead channels (a boolean for each) to zero."""
    for (name, side), channels in graph.layers.items():
        gone = dead[channels]
        module = model.get_submodule(name)
        kind = kind_of(module)
        if gone.any() and kind is not None:
            clear(module, kind, side, gone)
    with torch.no_grad():
        for (name, dim), channels in graph.loose.items():
            tensor = _tensor(model, name)
            gone = torch.nonzero(dead[channels]).flatten().to(tensor.device)
            tensor.index_fill_(int(dim), gone, 0)


def remove(model: nn.Module, graph: ChannelGraph, dead: Tensor) -> None:
    """Leaves the dead channels out of every layer, norm and loose tensor."""
    sides: dict[str, dict[str, Tensor]] = {}
    for (name, side), channels in graph.layers.items():
        gone = dead[channels]
        if gone.any():
            sides.setdefault(name, {})[side] = torch.nonzero(~gone).flatten()
    renewed = Renewed()
    for name, keep in sides.items():
        module = model.get_submodule(name)
        kind = kind_of(module)
        assert kind is not None
        cut(module, kind, keep, renewed)
    for (name, dim), channels in graph.loose.items():
        gone = dead[channels]
        if gone.any():
            _cut_loose(model, name, int(dim), torch.nonzero(~gone).flatten(), renewed)


def spare_last(graph: ChannelGraph, dead: Tensor) -> Tensor:
    """Every place keeps at least one channel, dead or not: no layer ends with none."""
    dead = dead.clone()
    for channels in graph.places().values():
        if dead[channels].all():
            dead[channels[0]] = False
    return dead


def _cut_loose(model: nn.Module, name: str, dim: int, keep: Tensor, renewed: Renewed) -> None:
    tensor = _tensor(model, name)
    module, attribute = owner(model, name)
    put(module, attribute, tensor.detach().index_select(dim, keep.to(tensor.device)), renewed)
    if isinstance(module, nn.PReLU):
        module.num_parameters = len(keep)


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, attribute = name.rpartition(".")
    return model.get_submodule(prefix), attribute


def _tensor(model: nn.Module, name: str) -> Tensor:
    module, attribute = owner(model, name)
    tensor = getattr(module, attribute)
    assert isinstance(tensor, Tensor)
    return tensor
