"""The channels of every tensor while a network is being followed: labels along its dimensions.

A tensor has *axes*. An axis is a whole number for each element, a node of `Joined`, in a tensor that is as long as
the other along the dimensions in which the number varies and 1 along all others. A weight matrix has two axes, one
for its rows and one for its columns; what a layer gives has one for its channels; heads seen as a dimension of their
own, an outer product or a mixer's tokens make more. Which operation does what to them is not known here.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deephoyer.structure.channels import Blocks, Joined, Place


class Labels:
    """Tensors and their axes; the network's own tensors get theirs when they are first met."""

    def __init__(self, model: nn.Module, exact: bool = True, turned: frozenset[int] = frozenset()) -> None:
        self.exact = exact
        self.turned = turned  # the numbers of views whose longest dimension stays, and another shrinks
        self._guesses: dict[int, Tensor] = {}
        self._within_heads: list[Tensor] = []
        self.rounding = torch.float64
        self.layer_norms: dict[str, Tensor] = {}
        self.joined = Joined()
        self.blocks: list[Blocks] = []
        self._model = model
        self.places: dict[Place, Tensor] = {}
        self.reads: set[Place] = set()
        self.writes: set[Place] = set()
        self.heads: list[Tensor] = []
        self.summed: list[Tensor] = []
        self.directions: set[Place] = set()
        self.aligned: set[Place] = set()
        # By identity; the tensors are held too, or another could get a dead one's id.
        self._of: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._constants: dict[int, Tensor] = {}
        self._written: set[int] = set()
        self._own: dict[int, tuple[str, Tensor]] = {}
        self._views: dict[int, Tensor] = {}
        self._discrete: dict[int, Tensor] = {}
        self._passing: dict[int, Tensor] = {}
        self._mixed: dict[int, tuple[Tensor, list[Tensor], str]] = {}
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, str]] = {}
        self._starts: list[int] = []
        self._places: list[Place] = []
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for name, tensor in named:
            self.set_constant(tensor)
            if tensor.is_floating_point():
                self._own.setdefault(id(tensor), (name, tensor))

    def of(self, tensor: Tensor, dims: int | None = None) -> list[Tensor]:
        """Its axes; those of the first `dims` dimensions, where it is a tensor of the network that is new here."""
        if id(tensor) in self._of:
            return self._of[id(tensor)][1]
        if id(tensor) not in self._own:
            return []
        name = self._own[id(tensor)][0]
        axes = []
        for dim, size in enumerate(tensor.shape[:dims]):
            if size > 1:
                nodes = self.joined.new(size)
                self.places[name, dim] = nodes
                self._starts.append(int(nodes[0]))
                self._places.append((name, dim))
                axes.append(nodes.view([-1 if d == dim else 1 for d in range(tensor.dim())]))
        self.set(tensor, axes)
        return axes

    def set(self, tensor: Tensor, axes: list[Tensor]) -> None:
        """What is one channel all over says nothing of the tensor's elements, and is left out."""
        self._of[id(tensor)] = (tensor, [axis for axis in axes if axis.numel() > 1])

    def fits(self, tensor: Tensor) -> bool:
        """Whether its axes have the tensor's sizes, or 1."""
        return all(
            axis.dim() == tensor.dim() and all(a in (1, s) for a, s in zip(axis.shape, tensor.shape, strict=True))
            for axis in self.of(tensor)
        )

    def is_met(self, tensor: Tensor) -> bool:
        """Whether it has been asked for before."""
        return id(tensor) in self._of

    def known(self, tensor: Tensor) -> bool:
        return bool(self.of(tensor))

    def owner(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer."""
        return self._own[id(tensor)][0] if id(tensor) in self._own else None

    def is_buffer(self, tensor: Tensor) -> bool:
        return id(tensor) in self._own and not isinstance(tensor, nn.Parameter)

    # What is part of the network, or made of nothing else.

    def is_of_buffer(self, axis: Tensor) -> bool:
        """Whether an axis of a weight comes from a buffer."""
        place = self.place_of(axis)
        return place is not None and place[0] in self._buffers

    def set_constant(self, tensor: Tensor) -> None:
        self._constants[id(tensor)] = tensor

    def is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self._constants and not (self._written and _memory(tensor) in self._written)

    def set_computed(self, tensor: Tensor) -> None:
        """Made of what the network was given: where that was written into a constant, its views are none any more."""
        if id(tensor) in self._constants:
            self._written.add(_memory(tensor))

    def set_discrete(self, tensor: Tensor) -> None:
        """Made of nothing but whole numbers and masks that the network was given: what a tokenizer gives."""
        self._discrete[id(tensor)] = tensor

    def is_discrete(self, tensor: Tensor) -> bool:
        return id(tensor) in self._discrete

    def is_made(self, tensor: Tensor) -> bool:
        """Made on the way of nothing that was given, or for one use: it may follow others' sizes, as a trial shows."""
        return self.is_new(tensor) and not self.of(tensor)

    def is_new(self, tensor: Tensor) -> bool:
        """Made on the way of nothing that was given, or for one use."""
        return id(tensor) in self._passing or (id(tensor) in self._constants and id(tensor) not in self._own)

    def set_passing(self, tensor: Tensor) -> None:
        self._of.pop(id(tensor), None)
        self._passing[id(tensor)] = tensor

    def set_view(self, tensor: Tensor) -> None:
        """The tensor is a parameter laid out in another way: each of its elements is one of the parameter's."""
        self._views[id(tensor)] = tensor

    def is_weight(self, tensor: Tensor) -> bool:
        return id(tensor) in self._own or id(tensor) in self._views

    def place_of(self, axis: Tensor) -> Place | None:
        """The place that an axis of a weight comes from."""
        first = int(axis.flatten()[0])
        i = bisect.bisect_right(self._starts, first) - 1
        if i < 0 or first >= self._starts[i] + len(self.places[self._places[i]]):
            return None
        return self._places[i]

    # Axes.

    def varies(self, axis: Tensor, dim: int) -> bool:
        """Whether different channels lie along a dimension."""
        if axis.shape[dim] < 2:
            return False
        roots = self.joined.find(axis)
        return bool((roots != roots.narrow(dim, 0, 1)).any())

    def along(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """The axes that vary along a dimension."""
        dim %= tensor.dim()
        return [axis for axis in self.of(tensor) if self.varies(axis, dim)]

    def across(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """The axes that don't vary along a dimension, of length 1 there."""
        dim %= tensor.dim()
        return [axis.narrow(dim, 0, 1) for axis in self.of(tensor) if not self.varies(axis, dim)]

    def tie(self, axis: Tensor, dim: int) -> Tensor:
        """One channel for all that lie along a dimension: an axis of length 1 there."""
        first = axis.narrow(dim, 0, 1)
        self.joined.join(axis, first)
        return first

    def line(self, axis: Tensor, dim: int) -> Tensor:
        """The channels along one dimension; whatever lies along the others is tied."""
        for d in range(axis.dim()):
            if d != dim % axis.dim() and axis.shape[d] > 1:
                axis = self.tie(axis, d)
        return axis.flatten()

    def fix(self, tensors: list[Tensor], reason: str) -> None:
        self.use(tensors)
        for tensor in tensors:
            for axis in self.of(tensor):
                self.joined.fix(axis, reason)

    def mix(self, axes: list[Tensor], outs: list[Tensor], reason: str) -> None:
        """Channels that are mixed in what an operation gives must stay, if ever that is used."""
        for tensor in outs:
            self.set(tensor, [])
            if axes:
                self._mixed[id(tensor)] = (tensor, axes, reason)

    def take(self, tensor: Tensor, axis: Tensor, dim: int, part: Tensor, where: str) -> None:
        """Notes the places along a dimension that a slice of the network's own numbers takes."""
        new = (tensor, axis, torch.zeros(tensor.shape[dim], dtype=torch.bool), where)
        self._parts.setdefault((id(tensor), dim), new)[2][part] = True

    def guess(self, view: int, axis: Tensor) -> None:
        """Notes the channels that a view is taken to leave free, where nothing is called heads."""
        self._guesses[view] = axis

    def within_heads(self, axes: list[Tensor]) -> None:
        """Notes channels of which attention has some in each head: it sums or runs over them, or heads lie beside."""
        self._within_heads += axes

    def wrong_guesses(self) -> frozenset[int]:
        """The views that left channels free which proved to lie within heads: those could be free instead."""
        if not self._guesses or not self._within_heads:
            return frozenset()
        within = torch.unique(torch.cat([self.joined.find(axis).flatten() for axis in self._within_heads]))
        its = {view: self.joined.find(axis).flatten() for view, axis in self._guesses.items()}
        return frozenset(view for view, roots in its.items() if torch.isin(roots, within).all())

    def finish(self) -> None:
        """Rows of a table that no slice took may be wanted for other inputs, a longer text: none goes."""
        for _, axis, taken, where in self._parts.values():
            if not taken.all():
                self.joined.fix(axis, f"{where} takes channels by their position")

    def use(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._mixed:
                _, axes, reason = self._mixed.pop(id(tensor))
                for axis in axes:
                    self.joined.fix(axis, reason)

    def in_blocks(self, tensor: str, attribute: str, per: int, count: int, by_code: bool = False) -> None:
        """A module that knows the number of its groups loses whole ones, of `per` channels of its tensor each.

        Code around it (`by_code`) may count them by itself, which a trial shows.
        """
        module, nodes = tensor.rpartition(".")[0], self.places[tensor, 0]
        if getattr(self._model.get_submodule(module), attribute, None) == count:
            self.blocks.append(Blocks(module, attribute, (tensor, 0), per))
        elif not by_code:
            self.joined.fix(nodes, f"{module!r} doesn't say how many groups of channels it has")

    def fresh(self, tensor: Tensor, dim: int, reason: str | None) -> Tensor:
        """New channels along a dimension of a tensor, which must stay if there is a reason."""
        nodes = self.joined.new(tensor.shape[dim])
        if reason is not None:
            self.joined.fix(nodes, reason)
        return nodes.view([-1 if d == dim % tensor.dim() else 1 for d in range(tensor.dim())])


def _memory(tensor: Tensor) -> int:
    """The same for a tensor and its views; a tensor that wraps others has none."""
    return 0 if is_traceable_wrapper_subclass(tensor) else tensor.untyped_storage().data_ptr()


def squeezed(axis: Tensor) -> Tensor:
    """An axis of the tensor's full size, 1 along every dimension in which nothing varies."""
    for dim in range(axis.dim()):
        if axis.shape[dim] > 1:
            first = axis.narrow(dim, 0, 1)
            if bool((axis == first).all()):
                axis = first
    return axis


def like(axis: Tensor, dims: int) -> Tensor:
    """The axis of a tensor that is broadcast to more dimensions."""
    return axis.view([1] * (dims - axis.dim()) + list(axis.shape))


def overlap(a: Tensor, b: Tensor) -> bool:
    return any(x > 1 and y > 1 for x, y in zip(a.shape, b.shape, strict=True))
