"""The groupings: how weights are cut into groups, each with an l2 magnitude r ≥ 0.

A grouping turns weights into units. A unit is what one penalty value is taken over: one tensor for
elements, filters and channels; tensors of several layers for coupled channels. It gives the
magnitudes of its groups, and spreads one coefficient a group back over the elements, which is all
that a gradient (∂R/∂w = c_g · w with c_g = p'(r_g) / r_g) or a mask needs. Penalties are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, shown
from deephoyer.penalties import wide
from deephoyer.registry import Registry
from deephoyer.weights import Weight, all_computed, find_weights


class Unit:
    """Tensors that are cut into groups together."""

    name: str
    names: list[str]
    tensors: list[Tensor]

    def magnitudes(self) -> Tensor:
        """r, one a group, differentiable; float32 at least."""
        raise NotImplementedError

    def spread(self, c: Tensor) -> list[Tensor]:
        """For each tensor, the sum of c over the groups an element is in; broadcasts to the tensor's shape."""
        raise NotImplementedError

    def sizes(self) -> Tensor:
        """How many elements each group has."""
        raise NotImplementedError


class ElementUnit(Unit):
    """Every element is a group of its own: r = |w|."""

    def __init__(self, weight: Weight):
        self.name, self.names, self.tensors = weight.name, [weight.name], [weight.tensor]

    def magnitudes(self) -> Tensor:
        return wide(self.tensors[0]).abs().flatten()

    def spread(self, c: Tensor) -> list[Tensor]:
        return [c.view(self.tensors[0].shape)]

    def sizes(self) -> Tensor:
        return torch.ones(self.tensors[0].numel(), device=self.tensors[0].device)


@dataclass(frozen=True, eq=False)
class Slices:
    """A tensor seen through `shape`, whose dimensions `keep` number the slices.

    `group[i]` is the group of slice i, or −1 for none; without it slice i is group i.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    keep: tuple[int, ...]
    group: Tensor | None = None

    @classmethod
    def of(cls, weight: Weight, dim: int) -> Slices:
        """A weight's slices along a dimension; one for each matrix and index where matrices are stacked."""
        if weight.stacked:
            return cls(weight.name, weight.tensor, tuple(weight.tensor.shape), (0, dim))
        return cls.along(weight.name, weight.tensor, dim, weight.groups)

    @classmethod
    def along(cls, name: str, tensor: Tensor, dim: int, conv_groups: int = 1, group: Tensor | None = None) -> Slices:
        """Slices along a dimension; along dimension 1 of a grouped convolution, one for each group and index."""
        shape = tuple(tensor.shape)
        if dim == 1 and conv_groups > 1:
            split = (conv_groups, shape[0] // conv_groups, *shape[1:])
            return cls(name, tensor, split, (0, 2), group)
        return cls(name, tensor, shape, (dim,), group)

    @property
    def count(self) -> int:
        return math.prod(self.shape[d] for d in self.keep)

    def norms(self) -> Tensor:
        drop = tuple(d for d in range(len(self.shape)) if d not in self.keep)
        x = wide(self.tensor).view(self.shape)
        return (torch.linalg.vector_norm(x, dim=drop) if drop else x.abs()).flatten()

    def lay(self, c: Tensor) -> Tensor:
        """One coefficient a slice, in a shape that broadcasts to the tensor's."""
        ones = [self.shape[d] if d in self.keep else 1 for d in range(len(self.shape))]
        c = c.view(ones)
        if len(self.shape) > self.tensor.dim():
            c = c.expand(-1, self.shape[1], *([-1] * (len(self.shape) - 2))).flatten(0, 1)
        return c


class SliceUnit(Unit):
    """Groups made of whole slices, of one tensor or of several that must vanish together."""

    def __init__(self, name: str, parts: Sequence[Slices], count: int | None = None):
        self.name, self.parts = name, list(parts)
        self.names = [p.name for p in self.parts]
        self.tensors = [p.tensor for p in self.parts]
        self.count = self.parts[0].count if count is None else count

    def magnitudes(self) -> Tensor:
        if len(self.parts) == 1 and self.parts[0].group is None:
            return self.parts[0].norms()
        return _root(self._gather([p.norms().square() for p in self.parts]))

    def _gather(self, per_slice: Sequence[Tensor]) -> Tensor:
        total = per_slice[0].new_zeros(self.count + 1)
        for part, values in zip(self.parts, per_slice, strict=True):
            total = total.index_add(0, _bins(part, self.count).to(total.device), values.to(total))
        return total[:-1]

    def spread(self, c: Tensor) -> list[Tensor]:
        padded = torch.cat([c, c.new_zeros(1)])
        laid = []
        for part in self.parts:
            here = padded.to(part.tensor.device)
            laid.append(part.lay(here[:-1] if part.group is None else here[_bins(part, self.count)]))
        return laid

    def sizes(self) -> Tensor:
        each = [torch.full((p.count,), p.tensor.numel() / p.count, device=p.tensor.device) for p in self.parts]
        return self._gather(each)


def _root(squares: Tensor) -> Tensor:
    """With gradient 0, and not NaN, where a square is 0."""
    alive = squares > 0
    return torch.where(alive, squares, torch.ones_like(squares)).sqrt() * alive


def _bins(part: Slices, count: int) -> Tensor:
    """The bin each slice is added to; the last bin is for slices without a group."""
    if part.group is None:
        return torch.arange(count, device=part.tensor.device)
    group = part.group.to(part.tensor.device)
    return torch.where(group < 0, torch.full_like(group, count), group)


class IndexUnit(Unit):
    """Explicit groups of flat indices into one tensor; they may overlap and need not cover it."""

    def __init__(self, weight: Weight, groups: Sequence[Sequence[int]]):
        self.name, self.names, self.tensors = weight.name, [weight.name], [weight.tensor]
        self.count = len(groups)
        size = weight.tensor.numel()
        members = [torch.as_tensor(g).flatten() for g in groups]
        if not members or any(len(m) == 0 for m in members):
            raise UserError(f"groups of {weight.name}: there is none, or one of them is empty.")
        if any(m.is_floating_point() or m.dtype == torch.bool for m in members):
            raise UserError(f"groups of {weight.name}: a group is a list of flat indices, whole numbers.")
        if any(m.min() < 0 or m.max() >= size for m in members):
            raise UserError(f"groups of {weight.name}: an index is outside 0…{size - 1}.")
        lengths = torch.tensor([len(m) for m in members])
        self._index = torch.cat(members).long()
        self._group = torch.repeat_interleave(torch.arange(self.count), lengths)
        self._follow()

    def _follow(self) -> None:
        """The indices go where the weights are; `model.to(...)` may have moved them."""
        device = self.tensors[0].device
        self._index, self._group = self._index.to(device), self._group.to(device)

    def magnitudes(self) -> Tensor:
        self._follow()
        x = wide(self.tensors[0]).flatten()[self._index].square()
        return _root(x.new_zeros(self.count).index_add(0, self._group, x))

    def spread(self, c: Tensor) -> list[Tensor]:
        w = self.tensors[0]
        return [c.new_zeros(w.numel()).index_add(0, self._index, c[self._group]).view(w.shape)]

    def sizes(self) -> Tensor:
        return torch.bincount(self._group, minlength=self.count).to(torch.float32)


class Grouping:
    """Cuts weights into units. A new one needs `units`, and a line in `GROUPINGS` to have a name."""

    name: str = "groups"
    needs_graph: bool = False
    """It is made from the model and example inputs, which come before its settings."""

    def units(self, weights: Sequence[Weight]) -> list[Unit]:
        raise NotImplementedError


class Elements(Grouping):
    """every weight by itself: r = abs(w)"""

    name = "elements"

    def units(self, weights: Sequence[Weight]) -> list[Unit]:
        return [ElementUnit(w) for w in weights]


class Filters(Grouping):
    """all weights that compute one output: a filter of a convolution, a row of a linear layer"""

    name = "filters"

    def units(self, weights: Sequence[Weight]) -> list[Unit]:
        for w in weights:
            if w.tensor.dim() < 1:
                raise UserError(
                    f"filters: {w.name} is a single number and has no outputs; leave it out of parameters=."
                )
        return [SliceUnit(w.name, [Slices.of(w, w.out_dim)]) for w in weights]


class Channels(Grouping):
    """all weights that read one input: a channel of a convolution, a column of a linear layer"""

    name = "channels"

    def units(self, weights: Sequence[Weight]) -> list[Unit]:
        for w in weights:
            if w.tensor.dim() < 2:
                raise UserError(f"channels: {w.name} has no dimension of inputs; leave it out of parameters=.")
        return [SliceUnit(w.name, [Slices.of(w, w.in_dim)]) for w in weights]


class IndexGroups(Grouping):
    """your own groups, as flat indices for each parameter; they may overlap

    >>> IndexGroups({"fc1.weight": [[0, 1, 2], [2, 3]]}).name
    'index'
    """

    name = "index"

    def __init__(self, groups: Mapping[str, Sequence[Sequence[int]]]):
        if not isinstance(groups, Mapping):
            raise UserError(f"index groups: {shown(groups)} is no mapping of parameter names to lists of indices.")
        self.groups = dict(groups)

    def units(self, weights: Sequence[Weight]) -> list[Unit]:
        by_name = {w.name: w for w in weights}
        missing = [name for name in self.groups if name not in by_name]
        if missing:
            raise UserError(f"index groups: {missing[0]!r} is not among the selected parameters: {', '.join(by_name)}.")
        return [IndexUnit(by_name[name], groups) for name, groups in self.groups.items()]


GROUPINGS: Registry[Grouping] = Registry("group", "groups")
GROUPINGS.add("elements", Elements)
GROUPINGS.add("filters", Filters)
GROUPINGS.add("channels", Channels)
GROUPINGS.add("coupled", "deephoyer.structure.coupled:Coupled")
GROUPINGS.add("heads", "deephoyer.structure.coupled:Heads")
GROUPINGS.add("neurons", "deephoyer.structure.coupled:Neurons")

Kinds = str | Grouping | Mapping[str, Any] | Iterable[str | Grouping | Mapping[str, Any]]


def groupings(choice: Kinds, model: nn.Module | None = None, example_inputs: Any = None) -> list[Grouping]:
    """`"filters+channels"`, a grouping, `{"name": …, …settings}`, or several of these, as a list of groupings.

    Those that need the network's graph are made from the model and the example inputs.

    >>> [g.name for g in groupings("filters+channels")]
    ['filters', 'channels']
    """
    parts: list[Any] = [choice]
    if isinstance(choice, str):
        parts = choice.split("+")
    elif isinstance(choice, Iterable) and not isinstance(choice, (Grouping, Mapping, Tensor)):
        parts = list(choice)
    chosen = [_grouping(p.strip() if isinstance(p, str) else p, model, example_inputs) for p in parts]
    for part in chosen:
        if not isinstance(part, Grouping):
            raise UserError(f"groups: {shown(part)} is neither a grouping nor the name of one; Filters() is.")
    names = [g.name for g in chosen]
    if len(set(names)) < len(names) or not names:
        raise UserError(f"groups: {shown(choice)} must name at least one kind of group, and each once.")
    return chosen


def weights_for(model: nn.Module, kinds: Iterable[Grouping], parameters: str | Iterable[str] | None) -> list[Weight]:
    """The weights that these kinds of groups are made of.

    None where every weight of the network is computed (all layers have weight norm) and the groups come from its graph,
    which knows what they are computed from.
    """
    if parameters is None and all_computed(model) and all(getattr(kind, "needs_graph", False) for kind in kinds):
        return []
    return find_weights(model, parameters)


def _grouping(part: Any, model: nn.Module | None, example_inputs: Any) -> Grouping:
    name = part.get("name") if isinstance(part, Mapping) else part
    if not (isinstance(name, str) and name in GROUPINGS and getattr(GROUPINGS[name], "needs_graph", False)):
        return GROUPINGS.make(part)
    if model is None or example_inputs is None:
        cls = GROUPINGS[name].__name__
        raise UserError(f"groups: {name!r} needs the network's graph: pass {cls}(model, example_inputs) instead.")
    return GROUPINGS.make(part, model=model, example_inputs=example_inputs)
