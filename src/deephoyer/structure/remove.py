"""Takes channels out of a network: zeroes everything that belongs to them, or removes it physically.

Which channels are dead is decided elsewhere; here it is only done, to a copy that the caller owns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.structure.attention import narrow, opened
from deephoyer.structure.channels import ALIGNMENT, IN, OUT, ChannelGraph, Place
from deephoyer.structure.layers import WIRING, Renewed, kind_of, put
from deephoyer.structure.narrowed import set_size
from deephoyer.structure.rms import absorb
from deephoyer.structure.sizes import apply_sizes

SIZES: dict[str, dict[str, Place]] = {
    "Linear": {"out_features": ("weight", 0), "in_features": ("weight", 1)},
    "Bilinear": {"out_features": ("weight", 0), "in1_features": ("weight", 1), "in2_features": ("weight", 2)},
    "_ConvNd": {"out_channels": ("weight", 0), "in_channels": ("weight", 1)},
    "_ConvTransposeNd": {"out_channels": ("weight", 1), "in_channels": ("weight", 0)},
    "Embedding": {"embedding_dim": ("weight", 1)},
    "EmbeddingBag": {"embedding_dim": ("weight", 1)},
    "_NormBase": {"num_features": ("weight", 0)},
    "GroupNorm": {"num_channels": ("weight", 0)},
    "RNNBase": {"hidden_size": ("weight_hh_l0", 1), "input_size": ("weight_ih_l0", 1)},
    "PReLU": {"num_parameters": ("weight", 0)},
    "Conv1D": {"nf": ("weight", 1), "nx": ("weight", 0)},
}
"""Attributes that say what sizes a module's tensor has, by a class that it comes from."""


def zero(model: nn.Module, graph: ChannelGraph, dead: Tensor) -> None:
    """Sets all slices of the dead channels (a boolean for each) to zero.

    Buffers, which no pruning changes (statistics, the knots of splines), stay but where channels are added up.
    """
    quiet = dead & graph.quiet()
    with torch.no_grad():
        for (name, dim), channels in graph.places.items():
            gone = dead[channels]
            if not gone.any() or (name, dim) in graph.directions:
                continue
            if name in graph.wirings:
                _unwire(model.get_submodule(name), dim, gone)
                continue
            tensor = tensor_of(model, name)
            if not isinstance(tensor, nn.Parameter):
                gone = quiet[channels]
            tensor.index_fill_(dim, torch.nonzero(gone).flatten().to(tensor.device), 0)


def remove(model: nn.Module, graph: ChannelGraph, dead: Tensor) -> None:
    """Leaves the dead channels out of every parameter and buffer, and tells the modules their new sizes."""
    cuts: dict[str, dict[int, Tensor]] = {}
    for (name, dim), channels in graph.places.items():
        gone = dead[channels]
        if not gone.any():
            continue
        keep = torch.nonzero(~gone).flatten()
        if name in graph.wirings:
            module: Any = model.get_submodule(name)
            (module.keep_outputs if dim == OUT else module.keep_inputs)(keep.tolist())
        else:
            cuts.setdefault(name, {})[dim] = keep
    homes = homes_of(model)
    resized: dict[int, nn.Module] = {}  # all modules that share a parameter, not only the one it is called after
    for name in sorted(cuts, key=lambda name: tensor_of(model, name).numel()):  # the largest once others have made room
        old, dims = tensor_of(model, name), cuts[name]
        resized |= {id(module): module for module, _ in homes[id(old)]}
        new = old.detach()
        for dim, keep in dims.items():
            new = new.index_select(dim, keep.to(old.device))
        replace_tensor(homes[id(old)], new)
    for block in graph.blocks:
        module = model.get_submodule(block.module)
        left = int((~dead[graph.places[block.place]]).sum()) // block.per
        if opened(module):
            if resized.keys() & {id(module), id(module.out_proj)}:
                narrow(module, left)
        else:
            set_size(module, block.attribute, left)
    for module in resized.values():
        resize(module)
    for name, (norm, channels) in graph.norms.items():
        absorb(model.get_submodule(name), norm, len(channels), int((~dead[channels]).sum()))
    apply_sizes(model, graph.sizes, graph.calls, dead)


def resize(module: Any) -> None:
    """Makes a module's size attributes those of its tensors."""
    bases = {base.__name__ for base in type(module).__mro__}
    for base, attributes in SIZES.items():
        if base not in bases or (base == "_ConvNd" and "_ConvTransposeNd" in bases):
            continue
        for attribute, (tensor, dim) in attributes.items():
            its = getattr(module, tensor, None)
            if tensor == "weight" and its is None:
                its = getattr(module, "running_mean", None)
            if isinstance(its, Tensor) and hasattr(module, attribute):
                times = getattr(module, "groups", 1) if dim == 1 and base in ("_ConvNd", "_ConvTransposeNd") else 1
                setattr(module, attribute, its.shape[dim] * times)
    if isinstance(getattr(module, "normalized_shape", None), tuple) and isinstance(module.weight, Tensor):
        module.normalized_shape = tuple(module.weight.shape)


def spare_last(graph: ChannelGraph, dead: Tensor) -> Tensor:
    """Every place keeps at least one channel, dead or not, and as many as its kernel wants: no layer ends with none."""
    dead = dead.clone()
    for place, channels in graph.places.items():
        left = int((~dead[channels]).sum())
        wanted = -(-left // ALIGNMENT) * ALIGNMENT if place in graph.aligned else max(left, 1)
        if wanted > left:
            dead[channels[dead[channels]][: wanted - left]] = False
    return dead


def homes_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter and buffer is, by its identity: under every name that it has."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                homes.setdefault(id(tensor), []).append((module, name))
    return homes


def replace_tensor(homes: list[tuple[nn.Module, str]], new: Tensor) -> None:
    """Puts a tensor in the place of another, wherever that is."""
    renewed = Renewed()
    for module, name in homes:
        known = renewed.get(getattr(module, name))
        if known is not None:
            setattr(module, name, known)
        else:
            put(module, name, new, renewed)


def own_parameters(small: nn.Module, model: nn.Module) -> None:
    """Gives a copy that shares parameters with a model its own."""
    theirs = {id(p) for p in model.parameters()}
    for identity, homes in homes_of(small).items():
        if identity in theirs:
            replace_tensor(homes, getattr(*homes[0]).detach())


def alive_outputs(
    model: nn.Module, graph: ChannelGraph, dead: Tensor, gone: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each layer, which of its outputs matter: their indices in the model and in the smaller one."""
    matter: dict[str, tuple[Tensor, Tensor]] = {}
    for name in graph.order:
        kind = kind_of(model.get_submodule(name))
        channels = None if kind is None or kind is WIRING else graph.places.get((f"{name}.weight", kind.out["weight"]))
        if channels is not None:
            left = torch.nonzero(~gone[channels]).flatten()
            live = torch.nonzero(~dead[channels[left]]).flatten()
            matter[name] = (left[live], live)
    return matter


def _unwire(module: Any, side: int, gone: Tensor) -> None:
    lost = gone.tolist()
    source = [-1 if s >= 0 and lost[s if side == IN else j] else s for j, s in enumerate(module.source)]
    module.arrange(module.in_channels, source)


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, attribute = name.rpartition(".")
    return model.get_submodule(prefix), attribute


def tensor_of(model: nn.Module, name: str) -> Tensor:
    module, attribute = owner(model, name)
    tensor = getattr(module, attribute)
    assert isinstance(tensor, Tensor)
    return tensor
