"""Networks in a line: layers by name and what is done with them, and what half of their channels leave."""

import torch
from torch import Tensor, nn

import deephoyer as dh


class Net(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs):
        return self.way(self, *inputs)


def largest_gap(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs().max() / a.abs().max()).detach())


def linears(**sizes):
    return {name: nn.Linear(*size).double() for name, size in sizes.items()}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def half_of(net, x, **more):
    """The network with half of its channels zero, and the smaller one."""
    groups = dh.Coupled(net, x, **more)
    dh.prune(net, dh.Density(0.5), groups=groups)
    return dh.compact(net, x, groups=groups, **more)
