"""Channels of a network: which slices of which tensors belong to one channel, and which channels may not go.

A channel is a class of slices that stand or fall together. Nodes are joined while a network is followed
(`follow.py`); the finished `ChannelGraph` is what coupled groups and compaction read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deephoyer.inference import Examples
from deephoyer.structure.asked_sizes import Call
from deephoyer.structure.rms import RmsNorm
from deephoyer.structure.sizes import SizedCall, SizeRule

Place = tuple[str, int]  # a parameter's or buffer's name and a dimension of it; or a wiring's name and IN or OUT
OUT, IN = 0, 1  # the sides of a wiring
ALIGNMENT = 8  # numbers of two bytes in 16 bytes


class Joined:
    """Disjoint sets of nodes, numbered from 1. Sets may be fixed, with a reason."""

    def __init__(self) -> None:
        self._parent = np.zeros(1024, dtype=np.int64)
        self._size = 1
        self._reasons: dict[int, str] = {}

    def new(self, count: int) -> Tensor:
        start, end = self._size, self._size + count
        if end > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros(max(count, len(self._parent)), dtype=np.int64)])
        self._parent[start:end] = np.arange(start, end)
        self._size = end
        return torch.arange(start, end)

    def find(self, nodes: Tensor) -> Tensor:
        given = nodes.numpy()
        roots = self._parent[given]
        while True:
            above = self._parent[roots]
            if np.array_equal(above, roots):
                break
            roots = above
        self._parent[given] = roots  # the way is short the next time
        return torch.from_numpy(np.asarray(roots))

    def join(self, a: Tensor, b: Tensor) -> None:
        """Puts a[i] and b[i] into one set, for every i; the two are broadcast."""
        if a is b or a.numel() == 0:
            return
        while True:
            left, right = (t.numpy() for t in torch.broadcast_tensors(self.find(a), self.find(b)))
            differ = left != right
            if not differ.any():
                return
            left, right = left[differ], right[differ]
            np.minimum.at(self._parent, np.maximum(left, right), np.minimum(left, right))

    def fix(self, nodes: Tensor, reason: str) -> None:
        """These channels must stay."""
        for root in np.unique(self.find(nodes).numpy()).tolist():
            self._reasons.setdefault(root, reason)

    def reasons(self) -> dict[int, str]:
        """The reason of each fixed set, by its root."""
        found: dict[int, str] = {}
        nodes = list(self._reasons)
        for node, root in zip(nodes, self.find(torch.tensor(nodes, dtype=torch.long)).tolist(), strict=True):
            found.setdefault(root, self._reasons[node])
        return found


@dataclass
class ChannelSet:
    """Channels that lie in the same places; none of them is removable where there is a `reason`.

    `share` is the part of the network's channels that are in this set.
    """

    name: str
    channels: list[int]
    places: list[Place]
    reason: str | None = None
    heads: bool = False
    share: float = 0.0

    @property
    def layers(self) -> list[str]:
        """The modules whose tensors the channels lie in."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in self.places))


@dataclass(frozen=True)
class Blocks:
    """A layer that works in groups of channels, and loses whole ones: `groups` is an attribute of the module.

    The number of groups that stay is the number of channels along `place` that stay, over `per`.
    """

    module: str
    attribute: str
    place: Place
    per: int


@dataclass
class ChannelGraph:
    """For each place the channel at each index; channels are numbered from 0.

    `reads` and `writes` are the places where a product reads channels or makes them. `wires` are pairs of channels
    where one is passed on as the other without any weight: either can be taken out by itself, but zeroing all weights
    of one does not silence it. `wirings` are the modules that do so. For the `sample` that was followed `calls` are
    those that name sizes, and `sizes` the ones among them that the code must be told; modules that are `updated` get
    their new number of heads though something is computed from it. The channels of `norms` may go only if they are
    zero, not if they are merely read by nobody; so may those that are `summed` without weights. Slices at `directions`
    are divided by their own length and go as they are, since zero has none. Along the places that are `aligned` a
    kernel wants a multiple of `ALIGNMENT` channels. A network that `changes_weights` while it runs has its own to run.
    """

    places: dict[Place, Tensor] = field(default_factory=dict)
    reads: set[Place] = field(default_factory=set)
    writes: set[Place] = field(default_factory=set)
    fixed: dict[int, str] = field(default_factory=dict)
    heads: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)
    directions: set[Place] = field(default_factory=set)
    aligned: set[Place] = field(default_factory=set)
    touched: dict[str, set[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    wirings: list[str] = field(default_factory=list)
    wires: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[Blocks] = field(default_factory=list)
    sample: Examples = ()
    calls: dict[Call, SizedCall] = field(default_factory=dict)
    sizes: set[SizeRule] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)
    exact: bool = True
    changes_weights: bool = False
    rounding: torch.dtype = torch.float64
    norms: dict[str, tuple[RmsNorm, Tensor]] = field(default_factory=dict)
    count: int = 0

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
        number = to.tolist()
        return ChannelGraph(
            places={place: to[channels] for place, channels in self.places.items()},
            reads=self.reads,
            writes=self.writes,
            fixed={number[channel]: why for channel, why in self.fixed.items()},
            heads={number[channel] for channel in self.heads},
            order=self.order,
            wirings=self.wirings,
            count=len(known),
        )

    def free(self) -> int:
        """How many rows and columns of the network's tensors may go."""
        stays = torch.zeros(self.count, dtype=torch.bool)
        stays[list(self.fixed)] = True
        return sum(int((~stays[channels]).sum()) for channels in self.places.values())

    def quiet(self) -> Tensor:
        """The channels that may go only if they are zero, since they or their squares are added up."""
        found = torch.zeros(self.count, dtype=torch.bool)
        found[list(self.summed)] = True
        for _, channels in self.norms.values():
            found[channels] = True
        return found

    def sets(self) -> list[ChannelSet]:
        """The channels by where they lie, in the order of the network; fixed ones in sets of their own."""
        where: list[list[Place]] = [[]]
        alike = np.zeros(self.count, dtype=np.int64)  # a number for each channel: where it lies, of the places so far
        for place, lying in self.places.items():
            channels = np.unique(lying.numpy())
            before, which = np.unique(alike[channels], return_inverse=True)
            alike[channels] = len(where) + which
            where += [[*where[number], place] for number in before]
        reasons = [None, *dict.fromkeys(self.fixed.values())]
        number_of = {why: number for number, why in enumerate(reasons)}
        why = np.zeros(self.count, dtype=np.int64)
        why[list(self.fixed)] = [number_of[reason] for reason in self.fixed.values()]
        often = np.bincount(np.concatenate([why[:0], *(its.numpy() for its in self.places.values())]))
        order = np.lexsort((why, alike))
        ends = np.flatnonzero(np.diff(alike[order]) | np.diff(why[order])) + 1
        sets = []
        for channels in sorted(np.split(order, ends) if self.count else [], key=lambda its: int(its[0])):
            if places := where[alike[channels[0]]]:
                share = int(often[channels].sum()) / int(often.sum())
                reason, heads = reasons[why[channels[0]]], int(channels[0]) in self.heads
                sets.append(ChannelSet(self._name(places), channels.tolist(), places, reason, heads, share))
        return _distinct(sets)

    def _name(self, places: list[Place]) -> str:
        """A set is called after the first layer that writes it, or else after what reads it."""
        for name, side in places:
            if name in self.wirings and side == OUT:
                return name
            if (name, side) in self.writes or not self.writes:
                return name.rpartition(".")[0] or name
        name, side = places[0]
        layer = name if name in self.wirings else name.rpartition(".")[0]
        return f"inputs of {layer}" if (name, side) in self.reads or name in self.wirings else name


def _distinct(sets: list[ChannelSet]) -> list[ChannelSet]:
    seen: dict[str, int] = {}
    for one in sets:
        seen[one.name] = seen.get(one.name, 0) + 1
        if seen[one.name] > 1:
            one.name = f"{one.name}#{seen[one.name]}"
    return sets
