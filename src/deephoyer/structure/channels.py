"""Channels of a network: which slices of which layers belong to one channel, and which channels may not go.

A channel is a class of slices that stand or fall together. Nodes are joined while a network is followed
(`follow.py`); the finished `ChannelGraph` is what coupled groups and compaction read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Place = tuple[str, str]  # a layer's name and a side, "out" or "in"; or a loose tensor's name and its dimension


class Joined:
    """Disjoint sets of nodes, numbered from 1; node 0 stands for no channel. Sets may be fixed, with a reason."""

    def __init__(self) -> None:
        self._parent = torch.zeros(1, dtype=torch.long)
        self._reasons: dict[int, str] = {}

    def new(self, count: int) -> Tensor:
        start = len(self._parent)
        nodes = torch.arange(start, start + count)
        self._parent = torch.cat([self._parent, nodes])
        return nodes

    def find(self, nodes: Tensor) -> Tensor:
        roots = self._parent[nodes]
        while True:
            above = self._parent[roots]
            if torch.equal(above, roots):
                return roots
            roots = above

    def join(self, a: Tensor, b: Tensor) -> None:
        """Puts a[i] and b[i] into one set, for every i where both are nodes."""
        if a is b or a.numel() == 0:
            return
        a, b = self.find(a.flatten()), self.find(b.flatten())
        differ = (a != b) & (a != 0) & (b != 0)
        if not differ.any():
            return
        size = len(self._parent)
        pairs = torch.unique(a[differ] * size + b[differ])
        parent = self._parent.numpy()
        for x, y in zip((pairs // size).tolist(), (pairs % size).tolist(), strict=True):
            while (up := parent[x]) != x:
                x = up
            while (up := parent[y]) != y:
                y = up
            if x != y:
                parent[max(x, y)] = min(x, y)
        self._parent = self.find(torch.arange(size))

    def fix(self, nodes: Tensor, reason: str) -> None:
        """These channels must stay."""
        for root in torch.unique(self.find(nodes.flatten())).tolist():
            if root and root not in self._reasons:
                self._reasons[root] = reason

    def reasons(self) -> dict[int, str]:
        """The reason of each fixed set, by its root."""
        if not self._reasons:
            return {}
        nodes = torch.tensor(list(self._reasons))
        found: dict[int, str] = {}
        for node, root in zip(nodes.tolist(), self.find(nodes).tolist(), strict=True):
            found.setdefault(root, self._reasons[node])
        return found


@dataclass
class ChannelSet:
    """Channels that lie in the same places; None of them is removable where there is a `reason`."""

    name: str
    channels: list[int]
    places: list[Place]
    reason: str | None = None


@dataclass
class ChannelGraph:
    """For each place the channel at each index; channels are numbered from 0.

    `wires` are pairs of channels where one is passed on as the other without any weight: either can be
    taken out by itself, but zeroing all weights of one does not silence it.
    """

    layers: dict[Place, Tensor] = field(default_factory=dict)
    loose: dict[Place, Tensor] = field(default_factory=dict)
    fixed: dict[int, str] = field(default_factory=dict)
    touched: dict[str, set[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    wires: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0
    ambiguous: bool = False

    def places(self) -> dict[Place, Tensor]:
        return {**self.layers, **self.loose}

    def freedom(self) -> int:
        """How many slices of layers are in channels that may go."""
        free = torch.ones(self.count, dtype=torch.bool)
        free[list(self.fixed)] = False
        return sum(int(free[channels].sum()) for channels in self.layers.values())

    def wired(self) -> ChannelGraph:
        """The graph in which channels that are passed on as each other are one."""
        joined = Joined()
        nodes = joined.new(self.count)
        if self.wires:
            ends = torch.tensor(self.wires)
            joined.join(nodes[ends[:, 0]], nodes[ends[:, 1]])
        roots = joined.find(nodes)
        known = roots.unique()
        to = torch.searchsorted(known, roots)
        return ChannelGraph(
            layers={place: to[channels] for place, channels in self.layers.items()},
            loose={place: to[channels] for place, channels in self.loose.items()},
            fixed={int(to[channel]): why for channel, why in self.fixed.items()},
            order=self.order,
            count=len(known),
        )

    def sets(self) -> list[ChannelSet]:
        """The channels by where they lie, in the order of the network; fixed ones in sets of their own."""
        lies: dict[int, list[Place]] = {}
        for place, channels in self.places().items():
            for channel in torch.unique(channels).tolist():
                lies.setdefault(channel, []).append(place)
        found: dict[tuple[tuple[Place, ...], str | None], ChannelSet] = {}
        for channel in sorted(lies):
            key = (tuple(sorted(lies[channel])), self.fixed.get(channel))
            if key not in found:
                found[key] = ChannelSet(_name(lies[channel]), [], lies[channel], key[1])
            found[key].channels.append(channel)
        return _distinct(list(found.values()))


def _name(places: list[Place]) -> str:
    """A set is called after the first layer that writes it, or else after what reads it."""
    for name, side in places:
        if side == "out":
            return name
    name, side = places[0]
    return f"inputs of {name}" if side == "in" else name


def _distinct(sets: list[ChannelSet]) -> list[ChannelSet]:
    seen: dict[str, int] = {}
    for one in sets:
        seen[one.name] = seen.get(one.name, 0) + 1
        if seen[one.name] > 1:
            one.name = f"{one.name}#{seen[one.name]}"
    return sets
