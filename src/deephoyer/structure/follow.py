"""Follows channels through a network: one forward pass in which every element carries its channel's number.

Operations that only move elements (views, permutations, concatenation, chunks) are done to the numbers
as they are done to the values; element-wise operations join the channels that meet; layers read and
write channels; whatever mixes channels fixes them, and so does every operation not known here. That
makes flattening, shuffling and concatenation come out right without a rule for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deephoyer.errors import UserError
from deephoyer.structure.channels import ChannelGraph, Joined, Place
from deephoyer.structure.inputs import Inputs, call, tensors_in
from deephoyer.structure.layers import CONV, Kind, by_blocks, channel_dim, kind_of, loose_tensors, size


class CannotFollow(UserError):
    """The network's channels can't be worked out; the message names the module."""


MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias permute transpose t expand squeeze unsqueeze clone detach alias "
    "contiguous split split_with_sizes chunk unbind cat stack repeat lift_fresh slice select narrow".split()
)
POINTWISE = frozenset(
    "hardswish hardswish_ _prelu_kernel dropout native_dropout dropout_ _to_copy copy_ masked_fill masked_fill_ "
    "where zeros_like ones_like".split()
)
SPATIAL = ("max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_", "reflection_pad", "replication_pad")
REDUCE = frozenset("mean sum amax amin max min var std norm linalg_vector_norm logsumexp prod".split())
ALONG = frozenset("_softmax softmax _log_softmax log_softmax cumsum".split())
VIEWS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias"))
CUTS = frozenset(("slice", "select", "narrow"))


def follow(model: nn.Module, inputs: Inputs) -> ChannelGraph:
    """The channels of a model in eval mode; the model must be a copy, since hooks are left on it."""
    with torch.no_grad(), _plain_attention():
        follower = Follower(model)
        follower.inputs(inputs)
        try:
            with follower:
                outputs = call(model, inputs)
        except CannotFollow:
            raise
        except Exception as why:
            where = follower.where()
            raise CannotFollow(f"the model can't be run on the example inputs: {where} fails: {why}") from why
        follower.outputs(outputs)
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
    """Carries the numbers; `layers` and `loose` collect where channels lie."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.joined = Joined()
        self.layers: dict[Place, Tensor] = {}
        self.loose: dict[str, Tensor] = {}
        self.touched: dict[str, list[Tensor]] = {}
        self._numbers: dict[int, tuple[Tensor, Tensor]] = {}
        self._constants: dict[int, Tensor] = {}
        self._stack: list[str] = []
        self._asleep = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._owners = {id(tensor): name for name, tensor in reversed(loose_tensors(model))}
        self._tied: dict[int, str] = {}
        for name, module in model.named_modules():
            self._hook(name, module)

    # What the network is given, and what it gives.

    def inputs(self, inputs: Inputs) -> None:
        for tensor in tensors_in(inputs):
            node = self.joined.new(1)
            self.joined.fix(node, "network input")
            self._set(tensor, node.expand(tensor.shape).clone())

    def outputs(self, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            if (numbers := self._get(tensor)) is not None:
                self.joined.fix(numbers, "network output")

    def where(self) -> str:
        name = self._stack[-1] if self._stack else ""
        module = self._modules[name]
        return f"module {name!r} ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"

    # Modules: the names on the stack, and the layers.

    def _hook(self, name: str, module: nn.Module) -> None:
        kind = kind_of(module)
        opaque = kind is not None or isinstance(module, (nn.MultiheadAttention, torch.jit.ScriptModule))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(name)
            self._asleep += opaque

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._asleep -= opaque
            if opaque and not self._asleep:
                if kind is not None:
                    self._layer(name, module, kind, tensors_in((args, kwargs))[0], output)
                else:
                    self._mixes(tensors_in((args, kwargs)), f"{type(module).__name__} {name!r} needs all of them")
            self._stack.pop()

        if isinstance(module, torch.jit.ScriptModule):
            return
        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(leave, with_kwargs=True, prepend=False)

    def _layer(self, name: str, module: nn.Module, kind: Kind, x: Tensor, y: Tensor) -> None:
        dim = channel_dim(module, kind)
        if kind.in_size is not None:
            side = "in" if "in" in kind.sides() else "out"
            self._read((name, side), x, dim, size(module, kind, side))
        if "out" in kind.sides() and (name, "out") not in self.layers:
            self.layers[name, "out"] = self.joined.new(size(module, kind, "out"))
            if kind is CONV and module.groups > 1:  # type: ignore[operator]
                self._groups(name, module)
            self._tie(name, module, kind)
        nodes = self.layers[name, "out"]
        shape = [1] * y.dim()
        shape[dim] = -1
        self._set(y, nodes.view(shape).expand(y.shape).clone())

    def _read(self, place: Place, x: Tensor, dim: int, count: int) -> None:
        numbers = self._get(x)
        if numbers is None:
            numbers = torch.zeros(x.shape, dtype=torch.long)
        rows = numbers.movedim(dim, 0).reshape(count, -1)
        nodes = rows.amax(1)
        self.joined.join(rows, nodes[:, None].expand(rows.shape))
        none = nodes == 0
        if none.any():
            nodes[none] = self.joined.new(int(none.sum()))
            self.joined.fix(nodes[none], f"{place[0]!r} reads what is no channel")
        if place in self.layers:
            self.joined.join(self.layers[place], nodes)
        else:
            self.layers[place] = nodes

    def _groups(self, name: str, module: nn.Module) -> None:
        """Ties the channels of a grouped convolution that can only go together."""
        outs = self.layers[name, "out"].view(module.groups, -1)  # type: ignore[arg-type]
        ins = self.layers[name, "in"].view(module.groups, -1)  # type: ignore[arg-type]
        if by_blocks(module):
            whole = torch.cat([outs, ins], 1)
            self.joined.join(whole, whole[:, :1].expand(whole.shape))
        else:
            self.joined.join(outs, outs[:1].expand(outs.shape))
            self.joined.join(ins, ins[:1].expand(ins.shape))

    def _tie(self, name: str, module: nn.Module, kind: Kind) -> None:
        """Layers that share a weight lose the same channels; of different kinds, none."""
        weight = getattr(module, "weight", None)
        if weight is None:
            return
        other = self._tied.setdefault(id(weight), name)
        if other == name:
            return
        same = kind_of(self._modules[other]) is kind
        for side in kind.sides():
            if same:
                self.joined.join(self.layers[name, side], self.layers[other, side])
        if not same:
            for place, nodes in self.layers.items():
                if place[0] in (name, other):
                    self.joined.fix(nodes, f"{name!r} and {other!r} share a weight")

    # Operations between layers.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func.overloadpacket.__name__
        given = tensors_in((args, kwargs))
        if op in ("_local_scalar_dense", "is_nonzero", "equal") and not self._asleep:
            if any(self._depends(t) for t in given):
                raise CannotFollow(
                    f"{self.where()} takes a value out of a tensor (`.item()`, or an `if` on it), so what it "
                    "computes can't be followed for all inputs; keep it out of the part to compact."
                )
        out = func(*args, **kwargs)
        if not self._asleep:
            self._account(func, op, args, kwargs, given, out)
        return out

    def _account(self, func: Any, op: str, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        if not given or (not any(self._get(t) is not None for t in given)):
            for tensor in tensors_in(out):
                if all(id(t) in self._constants for t in given) and "rand" not in op:
                    self._constants[id(tensor)] = tensor
            return
        bare = op[:-1] if op.endswith("_") and not op.endswith("__") else op
        if op in MOVES:
            self._move(func, op, args, kwargs, out)
        elif bare == "constant_pad_nd":
            self._pad(args, out)
        elif torch.Tag.pointwise in func.tags or op in POINTWISE or bare in POINTWISE:
            self._pointwise(given, out)
        elif op.startswith(SPATIAL):
            self._spatial(op, args[0], out)
        elif bare in REDUCE:
            self._reduce(op, args, kwargs, out)
        elif bare in ALONG:
            self._along([int(args[1])], args[0], out)
        elif op == "native_layer_norm":
            self._along(list(range(-len(args[1]), 0)), args[0], out[0])
        elif op in ("mm", "bmm"):
            self._matmul(op, args[0], args[1], out)
        else:
            self._mixes(given, f"{op} in {self.where()} may mix channels")
        self._touch(tensors_in((given, out)))

    def _move(self, func: Any, op: str, args: Any, kwargs: Any, out: Any) -> None:
        first = tensors_in(args)[0]
        if op in ("cat", "stack"):
            for t in tensors_in(args):
                if self._get(t) is None:
                    self._fresh(t)
        if op in CUTS:
            dim = args[1] if len(args) > 1 else 0
            if tensors_in(out)[0].numel() < first.numel() and self._varies(self._get(first), dim):
                self.joined.fix(self._get(first), f"{self.where()} takes channels by their position")
        if op in ("split", "split_with_sizes", "chunk", "unbind"):
            self._even(args, kwargs, out)
        if op in VIEWS:
            numbers = self._get(first).reshape(out.shape)
            self._unmerge(self._get(first), numbers)
        else:
            plain = pytree.tree_map(lambda t: self._get(t) if isinstance(t, Tensor) else t, (args, kwargs))
            numbers = func(*plain[0], **{k: v for k, v in plain[1].items() if k != "memory_format"})
        for tensor, its in zip(tensors_in(out), tensors_in(numbers), strict=True):
            self._set(tensor, its)

    def _even(self, args: Any, kwargs: Any, out: Any) -> None:
        """Chunks of a channel dimension stay even only if all lose the same of their channels."""
        numbers = self._get(args[0])
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if not self._varies(numbers, dim):
            return
        parts = numbers.split([t.shape[dim] for t in out], dim)
        for part in parts[1:]:
            if part.shape == parts[0].shape:
                self.joined.join(part, parts[0])
            else:
                self.joined.fix(numbers, f"{self.where()} splits channels unevenly")

    def _unmerge(self, before: Tensor, after: Tensor) -> None:
        """A dimension seen as two: the larger of the two is the one that can shrink, evenly."""
        for dims in _splits(tuple(before.shape), tuple(after.shape)):
            varying = [d for d in dims if self._varies(after, d)]
            if len(varying) < 2:
                continue
            shrinks = max(varying, key=lambda d: (after.shape[d], d))
            for d in varying:
                if d != shrinks:
                    self.joined.join(after, after.narrow(d, 0, 1).expand(after.shape))

    def _pad(self, args: Any, out: Tensor) -> None:
        numbers = torch.nn.functional.pad(self._get(args[0]), args[1], value=0)
        self._set(out, self._filled(numbers))

    def _filled(self, numbers: Tensor) -> Tensor:
        """Constants among channels are channels of their own, one an element until they meet others."""
        none = numbers == 0
        numbers = numbers.clone()
        numbers[none] = self.joined.new(int(none.sum()))
        return numbers

    def _fresh(self, tensor: Tensor) -> None:
        numbers = self.joined.new(tensor.numel()).view(tensor.shape)
        if id(tensor) not in self._constants:
            self.joined.fix(numbers, f"{self.where()} joins on what is no channel")
        self._set(tensor, numbers)

    def _pointwise(self, given: list[Tensor], out: Any) -> None:
        target = tensors_in(out)[0]
        result = torch.zeros(target.shape, dtype=torch.long)
        others: list[Tensor] = []
        for t in given:
            numbers = self._get(t)
            if numbers is None or not bool((numbers != 0).any()):
                others.append(t)
                continue
            if numbers.numel() > 1 or target.numel() == 1:
                numbers = numbers.expand(target.shape)
                self.joined.join(result, numbers)
                result = torch.where(result == 0, numbers, result)
        for t in others:
            for d in range(1, t.dim() + 1):
                if t.shape[-d] > 1 and self._varies(result, -d):
                    self.joined.fix(result, f"{self.where()} meets them with a tensor of fixed size")
        for tensor in tensors_in(out):
            if tensor.shape == target.shape:
                self._set(tensor, result)

    def _spatial(self, op: str, x: Tensor, out: Any) -> None:
        dims = next(int(c) for c in op if c.isdigit())
        numbers = self._get(x)
        rows = numbers.flatten(-dims)
        per = rows.amax(-1, keepdim=True)
        self.joined.join(rows, per.expand(rows.shape))
        per = per.view(*per.shape[:-1], *([1] * dims))
        for tensor in tensors_in(out):
            self._set(tensor, per.expand(tensor.shape).clone())

    def _reduce(self, op: str, args: Any, kwargs: Any, out: Any) -> None:
        x = args[0]
        numbers = self._get(x)
        dims = _reduced(op, args, kwargs, x.dim())
        if any(self._varies(numbers, d) for d in dims):
            self._mixes([x], f"{op} in {self.where()} runs over channels")
            return
        kept = numbers.amax(dims, keepdim=True)
        for tensor in tensors_in(out):
            self._set(tensor, (kept if tensor.dim() == x.dim() else kept.squeeze(dims)).expand(tensor.shape).clone())

    def _along(self, dims: list[int], x: Tensor, out: Tensor) -> None:
        numbers = self._get(x)
        if any(self._varies(numbers, d) for d in dims):
            self.joined.fix(numbers, f"{self.where()} normalises over channels")
        self._set(out, numbers)

    def _matmul(self, op: str, a: Tensor, b: Tensor, out: Tensor) -> None:
        """A product with weights that are no channels keeps the right side's columns (attention times values)."""
        left, right = self._get(a), self._get(b)
        plain = (left is None or not bool((left != 0).any())) and right is not None
        if not plain or self._varies(right, -2):
            self._mixes([a, b], f"{op} in {self.where()} may mix channels")
            return
        self._set(out, right.narrow(-2, 0, 1).expand(out.shape).clone())

    def _mixes(self, given: list[Tensor], reason: str) -> None:
        for t in given:
            if (numbers := self._get(t)) is not None:
                self.joined.fix(numbers, reason)

    # The numbers of a tensor.

    def _get(self, tensor: Tensor) -> Tensor | None:
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)][1]
        owner = self._owners.get(id(tensor))
        if owner is None or tensor.numel() < 2:
            return None
        self.loose[owner] = self.joined.new(tensor.numel()).view(tensor.shape)
        self._set(tensor, self.loose[owner])
        return self.loose[owner]

    def _set(self, tensor: Tensor, numbers: Tensor) -> None:
        self._numbers[id(tensor)] = (tensor, numbers)

    def _depends(self, tensor: Tensor) -> bool:
        return id(tensor) in self._numbers

    def _varies(self, numbers: Tensor | None, dim: int) -> bool:
        if numbers is None or numbers.dim() == 0 or numbers.shape[dim] < 2:
            return False
        roots = self.joined.find(numbers)
        return bool((roots != roots.narrow(dim, 0, 1)).any())

    def _touch(self, tensors: list[Tensor]) -> None:
        """Remembers which channels a module's own operations see, for when its sizes prove to be fixed."""
        name = self._stack[-1] if self._stack else ""
        for t in tensors:
            if id(t) in self._numbers:
                self.touched.setdefault(name, []).append(torch.unique(self._numbers[id(t)][1]))

    # What was found.

    def graph(self) -> ChannelGraph:
        loose = {place: nodes for name, whole in self.loose.items() for place, nodes in self._lay(name, whole)}
        places = {**self.layers, **loose}
        roots = {place: self.joined.find(nodes) for place, nodes in places.items()}
        known = torch.unique(torch.cat(list(roots.values()))) if roots else torch.zeros(0, dtype=torch.long)
        number = {root: i for i, root in enumerate(known.tolist())}
        reasons = self.joined.reasons()
        touched = {name: torch.unique(self.joined.find(torch.cat(seen))).tolist() for name, seen in self.touched.items()}
        return ChannelGraph(
            layers={p: torch.searchsorted(known, roots[p]) for p in self.layers},
            loose={p: torch.searchsorted(known, roots[p]) for p in loose},
            fixed={number[root]: why for root, why in reasons.items() if root in number},
            touched={name: {number[r] for r in seen if r in number} for name, seen in touched.items()},
            order=list(dict.fromkeys(name for name, _ in self.layers)),
            count=len(known),
        )

    def _lay(self, name: str, whole: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """The dimension of a loose tensor along which channels lie; more than one, and they must stay."""
        varying = [d for d in range(whole.dim()) if self._varies(whole, d)]
        if len(varying) != 1:
            self.joined.fix(whole, f"{name!r} isn't cut along one dimension")
            return
        (dim,) = varying
        rows = whole.movedim(dim, 0).flatten(1)
        yield (name, str(dim)), rows[:, 0]


def _splits(before: tuple[int, ...], after: tuple[int, ...]) -> list[list[int]]:
    """For each dimension that a view takes apart, the dimensions of the result it becomes."""
    found: list[list[int]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        ins, outs, a, b = [i], [j], before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                ins.append(i)
                a *= before[i]
            else:
                j += 1
                outs.append(j)
                b *= after[j]
        if len(outs) > 1:
            found.append(outs)
        i, j = i + 1, j + 1
    return found


def _reduced(op: str, args: Any, kwargs: Any, dims: int) -> list[int]:
    position = 2 if op in ("norm", "linalg_vector_norm") else 1
    given = kwargs.get("dim", args[position] if len(args) > position else None)
    if given is None or given == []:
        return list(range(dims))
    return [d % dims for d in ([given] if isinstance(given, int) else given)]
