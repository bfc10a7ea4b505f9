"""What each operation between layers does to the channel numbers of its tensors.

Operations that only move elements are done to the numbers as they are; element-wise ones join the
channels that meet; pooling and reductions keep channels that they don't run over. Everything else may
mix channels, and fixes them. Layers are not handled here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from deephoyer.structure.channel_ids import Numbers
from deephoyer.structure.inputs import tensors_in


@dataclass
class Operation:
    """One call of an ATen function: `where` names the module it happened in."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    where: str

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @property
    def given(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def outs(self) -> list[Tensor]:
        return tensors_in(self.out)

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)


def account(n: Numbers, op: Operation) -> None:
    """Numbers what the operation gave."""
    if all(n.get(t) is None for t in op.given):
        made_here = op.name == "lift_fresh" or all(n.is_constant(t) for t in op.given)
        if made_here and "rand" not in op.name:
            for tensor in op.outs:
                n.set_constant(tensor)
        return
    _rule(op)(n, op)


def _rule(op: Operation) -> Callable[[Numbers, Operation], None]:
    name = op.name.rstrip("_") or op.name
    if name in RULES:
        return RULES[name]
    if torch.Tag.pointwise in op.func.tags:
        return pointwise
    if op.name.startswith("_scaled_dot_product"):
        return attends
    return spatial if op.name.startswith(SPATIAL) else mixes


def mixes(n: Numbers, op: Operation) -> None:
    n.fix(op.given, f"{op.name} in {op.where} may mix channels")
    for tensor in op.outs:
        n.drop(tensor)


def moves(n: Numbers, op: Operation) -> None:
    plain = pytree.tree_map(lambda t: n.of(t) if isinstance(t, Tensor) else t, (op.args, op.kwargs))
    plain[1].pop("memory_format", None)
    numbers = op.func(*plain[0], **plain[1])
    for tensor, its in zip(op.outs, tensors_in(numbers), strict=True):
        n.set(tensor, its)


def joins_on(n: Numbers, op: Operation) -> None:
    """Concatenation: constants and foreign tensors become channels of their own."""
    for tensor in op.given:
        if n.get(tensor) is None:
            n.number(tensor, f"{op.where} joins on what is no channel")
    moves(n, op)


def takes(n: Numbers, op: Operation) -> None:
    """A slice by position: right for pixels and tokens, but channels would move when others go."""
    x, dim = op.args[0], op.argument("dim", 1, 0)
    if op.outs[0].numel() < x.numel() and n.varies(n.of(x), dim):
        n.fix([x], f"{op.where} takes channels by their position")
    moves(n, op)


def splits(n: Numbers, op: Operation) -> None:
    """Chunks of a channel dimension stay even only if all lose the same of their channels."""
    numbers, dim = n.of(op.args[0]), op.argument("dim", 2, 0)
    if n.varies(numbers, dim):
        parts = numbers.split([t.shape[dim] for t in op.outs], dim)
        for part in parts[1:]:
            if part.shape == parts[0].shape:
                n.joined.join(part, parts[0])
            else:
                n.joined.fix(numbers, f"{op.where} splits channels unevenly")
    moves(n, op)


def views(n: Numbers, op: Operation) -> None:
    """A dimension seen as two (groups to shuffle, heads): one can shrink, evenly; which, is the reading's choice."""
    before = n.of(op.args[0])
    after = before.reshape(op.out.shape)
    for dims in taken_apart(tuple(before.shape), tuple(after.shape)):
        varying = [d for d in dims if n.varies(after, d)]
        if len(varying) > 1:
            n.ambiguous = True
            shrinks = varying[0] if n.reading == "first" else max(varying, key=lambda d: (after.shape[d], d))
            for d in varying:
                if d != shrinks:
                    n.joined.join(after, after.narrow(d, 0, 1).expand(after.shape))
    n.set(op.out, after)


def taken_apart(before: tuple[int, ...], after: tuple[int, ...]) -> list[list[int]]:
    """For each dimension that a view takes apart, the dimensions of the result it becomes.

    >>> taken_apart((1, 6, 4), (1, 2, 3, 4))
    [[1, 2]]
    """
    found: list[list[int]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        outs, a, b = [j], before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                a *= before[i]
            else:
                j += 1
                outs.append(j)
                b *= after[j]
        if len(outs) > 1:
            found.append(outs)
        i, j = i + 1, j + 1
    return found


def restrides(n: Numbers, op: Operation) -> None:
    """Pooling to one place in a channels-last tensor ends in strides that move nothing: sizes of 1 have any."""
    x, shape, strides = op.args[0], list(op.args[1]), op.args[2]
    plain = torch.empty(shape, device="meta").stride()
    if shape == list(n.of(x).shape) and all(a == b or s == 1 for a, b, s in zip(plain, strides, shape, strict=True)):
        n.set(op.out, n.of(x))
    else:
        mixes(n, op)


def pads(n: Numbers, op: Operation) -> None:
    """Constants put among channels are channels of their own, one an element until they meet others."""
    numbers = F.pad(n.of(op.args[0]), op.args[1], value=0)
    none = numbers == 0
    numbers[none] = n.joined.new(int(none.sum()))
    n.set(op.out, numbers)


def pointwise(n: Numbers, op: Operation) -> None:
    target = op.outs[0]
    numbers = torch.zeros(target.shape, dtype=torch.long)
    meeting = [n.of(tensor) for tensor in op.given]
    others = []
    for tensor, its in zip(op.given, meeting, strict=True):
        if not its.any():
            others.append(tensor)
            continue
        if any(_spreads_over(n, its, them) for them in meeting):
            n.joined.fix(its, f"{op.where} lets every channel of another tensor read it")
            others.append(tensor)
            continue
        its = its.expand(target.shape)
        n.joined.join(numbers, its)
        numbers = torch.where(numbers == 0, its, numbers)
    _sizes_agree(n, op, numbers, others)
    if op.func._schema.is_mutable and target._is_view() and not torch.equal(n.of(target), numbers):
        n.joined.fix(numbers, f"{op.where} writes into a slice")
    for tensor in op.outs:
        if tensor.shape == target.shape:
            n.set(tensor, numbers)


def _spreads_over(n: Numbers, its: Tensor, them: Tensor) -> bool:
    """Whether one place of a tensor meets several channels of another: a gate of width 1, an outer product."""
    return any((d > its.dim() or its.shape[-d] == 1) and n.varies(them, -d) for d in range(1, them.dim() + 1))


def _sizes_agree(n: Numbers, op: Operation, numbers: Tensor, others: list[Tensor]) -> None:
    """What is no channel must be broadcast along channels, or it would no longer fit when some go."""
    for tensor in others:
        for d in range(1, tensor.dim() + 1):
            if tensor.shape[-d] > 1 and n.varies(numbers, -d):
                n.joined.fix(numbers, f"{op.where} meets them with a tensor of fixed size")


def spatial(n: Numbers, op: Operation) -> None:
    """Pooling and resizing: each channel by itself."""
    dims = next(int(c) for c in op.name if c.isdigit())
    rows = n.of(op.args[0]).flatten(-dims)
    one = rows.amax(-1, keepdim=True)
    n.joined.join(rows, one.expand(rows.shape))
    one = one.view(*one.shape[:-1], *([1] * dims))
    for tensor in op.outs:
        n.set(tensor, one.expand(tensor.shape))


def reduces(n: Numbers, op: Operation) -> None:
    x = op.args[0]
    given = op.argument("dim", 2 if "norm" in op.name else 1)
    dims = [d % x.dim() for d in ([given] if isinstance(given, int) else given or range(x.dim()))]
    numbers = n.of(x)
    if any(n.varies(numbers, d) for d in dims):
        mixes(n, op)
        return
    one = numbers.amax(dims, keepdim=True)
    for tensor in op.outs:
        n.set(tensor, (one if tensor.dim() == x.dim() else one.squeeze(dims)).expand(tensor.shape))


def normalises(n: Numbers, op: Operation) -> None:
    """Softmax and layer norm: removing a channel would change the others."""
    x, which = op.args[0], op.args[1]
    numbers = n.of(x)
    dims = [which] if isinstance(which, int) else range(-len(which), 0)
    if any(n.varies(numbers, d) for d in dims):
        n.joined.fix(numbers, f"{op.where} normalises over channels")
    for scale in op.given[1:]:
        n.joined.join(n.of(scale).expand(numbers.shape), numbers)
    n.set(op.outs[0], numbers)


def multiplies(n: Numbers, op: Operation) -> None:
    """Products of activations: heads stay heads, and attention times values keeps the values' columns."""
    left, right = (n.of(t) for t in op.given[:2])
    if not left.any() and not n.varies(right, -2):
        n.set(op.out, right.narrow(-2, 0, 1).expand(op.out.shape))
    elif _whole_heads(n, left) and _whole_heads(n, right):
        n.set(op.out, _per_head(n, left, right).expand(op.out.shape))
    else:
        mixes(n, op)


def attends(n: Numbers, op: Operation) -> None:
    """Fused attention: whole heads go together; else queries and keys stay, for their width sets the scale."""
    query, key, value = (n.of(t) for t in op.given[:3])
    out = op.outs[0]
    if all(_whole_heads(n, numbers) for numbers in (query, key, value)) and query.any():
        n.set(out, _per_head(n, query, key, value).expand(out.shape))
    elif not n.varies(value, -2):
        n.fix(op.given[:2], f"attention in {op.where} is scaled by their number")
        n.set(out, value.narrow(-2, 0, 1).expand(out.shape))
    else:
        mixes(n, op)


def _whole_heads(n: Numbers, numbers: Tensor) -> bool:
    return not n.varies(numbers, -1) and not n.varies(numbers, -2)


def _per_head(n: Numbers, *several: Tensor) -> Tensor:
    """One number a head, the same for all the tensors."""
    first, *others = (numbers[..., :1, :1] for numbers in several)
    for other in others:
        n.joined.join(first, other)
        first = torch.where(first == 0, other, first)
    return first


SPATIAL = ("max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_", "reflection_", "replication_")

_RULES: tuple[tuple[Callable[[Numbers, Operation], None], str], ...] = (
    (moves, "permute transpose t expand squeeze unsqueeze clone detach alias contiguous repeat lift_fresh"),
    (joins_on, "cat stack"),
    (takes, "slice select narrow"),
    (splits, "split split_with_sizes chunk unbind"),
    (views, "view _unsafe_view reshape _reshape_alias"),
    (restrides, "as_strided"),
    (pads, "constant_pad_nd"),
    (pointwise, "hardswish _prelu_kernel dropout native_dropout _to_copy copy masked_fill where zeros_like ones_like"),
    (reduces, "mean sum amax amin max min var std norm linalg_vector_norm logsumexp prod"),
    (normalises, "_softmax softmax _log_softmax log_softmax cumsum native_layer_norm"),
    (multiplies, "mm bmm"),
)
RULES = {name: rule for rule, names in _RULES for name in names.split()}
