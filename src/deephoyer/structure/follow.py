"""Follows channels through a network: one forward pass in which every element carries its channel's number.

Layers read and write channels; what happens between them is in `operations.py`. Because the numbers
go through the very operations that the values go through, flattening, shuffling and concatenation
come out right without a rule for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deephoyer.errors import UserError
from deephoyer.inference import Examples, call
from deephoyer.structure.channel_ids import Numbers
from deephoyer.structure.channels import ChannelGraph, Place
from deephoyer.structure.inputs import tensors_in
from deephoyer.structure.layers import CONV, WIRING, Kind, by_blocks, channel_dim, kind_of, size
from deephoyer.structure.operations import Operation, account


class CannotFollow(UserError):
    """The network's channels can't be worked out; the message names the module."""


def follow(model: nn.Module, inputs: Examples, reading: str = "larger") -> ChannelGraph:
    """The channels of a model in eval mode; the model must be a copy, since hooks are left on it."""
    follower = Follower(model, reading)
    follower.begin(inputs)
    with torch.no_grad(), _plain_attention():
        try:
            with follower:
                outputs = call(model, inputs)
        except CannotFollow:
            raise
        except Exception as why:
            where = follower.where()
            raise CannotFollow(f"the model can't be run on the example inputs: {where} fails: {why}") from why
    if not tensors_in(outputs):
        raise CannotFollow(
            f"the model gives a {type(outputs).__name__} in which no tensor was found, so nothing could be compared; "
            "outputs may be tensors in tuples, lists, dicts and data classes."
        )
    follower.n.fix(tensors_in(outputs), "network output")
    return follower.graph()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """The fused attention layers hide the linear layers inside them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Follower(TorchDispatchMode):
    """Sees every operation and every layer; `layers` collects the nodes at each place."""

    def __init__(self, model: nn.Module, reading: str) -> None:
        super().__init__()
        self.n = Numbers(model, reading)
        self.layers: dict[Place, Tensor] = {}
        self._seen: dict[str, list[Tensor]] = {}
        self._stack: list[str] = []
        self._asleep = 0
        self._modules = dict(model.named_modules())
        self._owner_of: dict[int, str] = {}
        for name, module in self._modules.items():
            self._hook(name, module)

    def begin(self, inputs: Examples) -> None:
        for tensor in tensors_in(inputs):
            node = self.n.joined.new(1)
            self.n.joined.fix(node, "network input")
            self.n.set(tensor, node.expand(tensor.shape))

    def where(self) -> str:
        name = self._stack[-1] if self._stack else ""
        kind = type(self._modules[name]).__name__
        return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"

    # Modules.

    def _hook(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        kind = kind_of(module)
        opaque = kind is not None or isinstance(module, nn.MultiheadAttention)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(name)
            self._asleep += opaque

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = tensors_in((args, kwargs))
            if kind is not None:
                self._layer(name, module, kind, given[0], output)
            elif opaque:
                self.n.fix(given, f"{type(module).__name__} {name!r} needs all of them")
            self._asleep -= opaque
            self._stack.pop()

        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def _layer(self, name: str, module: nn.Module, kind: Kind, x: Tensor, y: Tensor) -> None:
        """Channels read on one side, channels written on the other; the same ones however often it is called."""
        dim = channel_dim(module, kind)
        if kind.in_size is not None:
            side = kind.sides()[-1]
            self._read((name, side), x, dim, size(module, kind, side))
        if (name, "out") not in self.layers:
            self.layers[name, "out"] = self.n.joined.new(size(module, kind, "out"))
        if kind is CONV and module.groups != 1:
            self._tie_groups(name, module)
        self._tie_shared(name, module, kind)
        shape = [1] * y.dim()
        shape[dim] = -1
        self.n.set(y, self.layers[name, "out"].view(shape).expand(y.shape))

    def _read(self, place: Place, x: Tensor, dim: int, count: int) -> None:
        joined = self.n.joined
        rows = self.n.of(x).movedim(dim, 0).reshape(count, -1)
        nodes = rows.amax(1)
        joined.join(rows, nodes[:, None].expand(rows.shape))
        none = nodes == 0
        if none.any():
            nodes[none] = joined.new(int(none.sum()))
            joined.fix(nodes[none], f"{place[0]!r} reads what is no channel")
        joined.join(self.layers.setdefault(place, nodes), nodes)

    def _tie_groups(self, name: str, module: Any) -> None:
        """The channels of a grouped convolution that can only go together."""
        outs = self.layers[name, "out"].view(module.groups, -1)
        ins = self.layers[name, "in"].view(module.groups, -1)
        if by_blocks(module):
            whole = torch.cat([outs, ins], 1)
            self.n.joined.join(whole, whole[:, :1].expand(whole.shape))
        else:
            for half in (outs, ins):
                self.n.joined.join(half, half[:1].expand(half.shape))

    def _tie_shared(self, name: str, module: nn.Module, kind: Kind) -> None:
        """Layers that share a weight lose the same channels, a bias the same outputs; of different kinds, none."""
        bias = getattr(module, "bias", None)
        like = self._owner_of.setdefault(id(bias), name) if bias is not None else name
        if like != name:
            self.n.joined.join(self.layers[name, "out"], self.layers[like, "out"])
        weight = getattr(module, "weight", None)
        other = self._owner_of.setdefault(id(weight), name) if weight is not None else name
        if other == name:
            return
        if kind_of(self._modules[other]) is kind:
            for side in kind.sides():
                self.n.joined.join(self.layers[name, side], self.layers[other, side])
            return
        for place, nodes in self.layers.items():
            if place[0] in (name, other):
                self.n.joined.fix(nodes, f"{name!r} and {other!r} share a weight")

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._asleep:
            return func(*args, **kwargs)
        self._refuse_branches(func, args)
        op = Operation(func, args, kwargs, func(*args, **kwargs), self.where())
        account(self.n, op)
        self._note([*op.given, *op.outs])
        return op.out

    def _refuse_branches(self, func: Any, args: Any) -> None:
        if func.overloadpacket.__name__ not in ("_local_scalar_dense", "is_nonzero", "equal"):
            return
        if not all(self.n.is_constant(t) for t in tensors_in(args)):
            raise CannotFollow(
                f"{self.where()} takes a value out of a tensor (`.item()`, or an `if` on it), so what it "
                "computes can't be followed for all inputs; leave it out of the part to compact."
            )

    def _note(self, tensors: list[Tensor]) -> None:
        """Which channels a module's own operations see, for when its sizes prove to be fixed."""
        seen = self._seen.setdefault(self._stack[-1] if self._stack else "", [])
        for tensor in tensors:
            if (numbers := self.n.get(tensor)) is not None:
                seen.append(torch.unique(numbers))

    # What was found.

    def graph(self) -> ChannelGraph:
        find = self.n.joined.find
        loose = dict(place for name, whole in self.n.loose.items() for place in self._lay(name, whole))
        roots = {place: find(nodes) for place, nodes in {**self.layers, **loose}.items()}
        known = torch.unique(torch.cat([torch.zeros(0, dtype=torch.long), *roots.values()]))
        number = {root: i for i, root in enumerate(known.tolist())}
        seen = {name: find(torch.cat(nodes)).unique().tolist() for name, nodes in self._seen.items() if nodes}
        layers = {p: torch.searchsorted(known, roots[p]) for p in self.layers}
        return ChannelGraph(
            layers=layers,
            loose={p: torch.searchsorted(known, roots[p]) for p in loose},
            fixed={number[root]: why for root, why in self.n.joined.reasons().items() if root in number},
            touched={name: {number[r] for r in nodes if r in number} for name, nodes in seen.items()},
            order=list(dict.fromkeys(name for name, _ in self.layers)),
            wires=[pair for name in self._modules for pair in self._wires(name, layers)],
            count=len(known),
            ambiguous=self.n.ambiguous,
        )

    def _wires(self, name: str, layers: dict[Place, Tensor]) -> Iterator[tuple[int, int]]:
        module: Any = self._modules[name]
        if kind_of(module) is WIRING and (name, "out") in layers:
            for out, source in zip(layers[name, "out"].tolist(), module.source, strict=True):
                if source >= 0:
                    yield int(layers[name, "in"][source]), out

    def _lay(self, name: str, whole: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """The dimension of a loose tensor along which channels lie; where there is no such one, they stay."""
        varying = [d for d in range(whole.dim()) if self.n.varies(whole, d)]
        if len(varying) != 1:
            self.n.joined.fix(whole, f"{name!r} isn't cut along one dimension")
            return
        (dim,) = varying
        yield (name, str(dim)), whole.movedim(dim, 0).reshape(whole.shape[dim], -1)[:, 0]
