"""What operations that only move elements do to channels: the same is done to the axes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deephoyer.structure.channel_ids import Labels, like, squeezed
from deephoyer.structure.operations import Operation, Rule, meet, mixes, short, unexpanded
from deephoyer.structure.sizes import Computed, Setting, counts_heads


def same_place(n: Labels, op: Operation) -> None:
    for tensor in op.outs:
        n.set(tensor, n.of(op.args[0]))


def transposes(n: Labels, op: Operation) -> None:
    rest = op.args[1:]
    # Done to a view of each axis, which stays what it is for other tensors where this is in place.
    n.set(op.out, [op.func(axis.detach(), *rest, **op.kwargs) for axis in n.of(op.args[0])])


def squeezes(n: Labels, op: Operation) -> None:
    """Dimensions of length 1 leave or come: of the tensor, while an axis has more of them."""
    x = op.args[0]
    given = op.argument("dim", 1)
    dims = range(x.dim()) if given is None else [given] if isinstance(given, int) else given
    if op.name == "squeeze_" and given is not None:  # x has fewer dimensions already
        return n.set(x, [axis.squeeze(tuple(dims)) if axis.dim() > x.dim() else axis for axis in n.of(x)])
    gone = tuple(d % x.dim() for d in dims if x.dim() and x.shape[d] == 1)
    n.set(op.out, [axis.squeeze(gone) for axis in n.of(x)])


def expands(n: Labels, op: Operation) -> None:
    n.set(op.out, [like(axis, op.out.dim()) for axis in n.of(op.args[0])])


def pairs(n: Labels, op: Operation) -> None:
    """Pairs of numbers seen as complex ones, or those as pairs: both of a pair stay or go."""
    x = op.args[0]
    if op.name == "view_as_real":
        n.set(op.out, [axis.unsqueeze(-1) for axis in n.of(x)])
    else:
        n.set(op.out, [short(n, axis, x.dim() - 1).squeeze(-1) for axis in n.of(x)])


def repeats(n: Labels, op: Operation) -> None:
    times = list(op.args[1])
    axes = [like(axis, len(times)) for axis in n.of(op.args[0])]
    n.set(op.out, [a.repeat([t if s > 1 else 1 for t, s in zip(times, a.shape, strict=True)]) for a in axes])


def rearranges(n: Labels, op: Operation) -> None:
    """Elements picked by an index, rolled, turned round: right for tokens and pixels; channels would move."""
    x, axes = op.args[0], []
    if any(n.known(t) for t in op.given[1:]):
        return mixes(n, op)
    if x.numel() and not op.out.numel():
        return n.fix([x], f"{op.where} picks nothing of them for these examples")
    for axis in n.of(x):
        args = pytree.tree_map(lambda t, axis=axis: axis.expand(x.shape) if t is x else t, op.args)
        for d in (d for d in _picked(op, x) if n.varies(axis, d)):
            n.joined.fix(_held_by_position(n, op, axis, d), f"{op.where} picks channels by their position")
        axes.append(squeezed(op.func(*args, **op.kwargs)))
    n.set(op.out, axes)


def _held_by_position(n: Labels, op: Operation, axis: Tensor, dim: int) -> Tensor:
    """The part of an axis that must stay for an index to pick the same; all of it, where that follows from the input.

    An index from the end (`x[..., [-2], :]`) asks for what lies behind it.
    """
    index = op.args[1][dim] if op.name == "index" else None
    if index is None or not n.is_constant(index) or index.dtype != torch.long or not bool((index < 0).all()):
        return axis
    start = axis.shape[dim] + int(index.min())
    return axis.narrow(dim, start, axis.shape[dim] - start)


def _picked(op: Operation, x: Tensor) -> list[int]:
    """The dimensions along which `rearranges` takes elements by position."""
    if op.name in ("index", "_unsafe_index"):
        return [d for d, index in enumerate(op.args[1]) if index is not None]
    given = op.argument("dims", 2 if op.name == "roll" else 1, None)
    given = op.argument("dim", 1, given) if op.name not in ("roll", "flip") else given
    dims = list(range(x.dim())) if given is None or given == [] else [given] if isinstance(given, int) else given
    return [d % x.dim() for d in dims]


def takes(n: Labels, op: Operation) -> None:
    """A slice by position: right for pixels and tokens, but channels would move when others go.

    Every so many (`x[..., ::2]`) go with their neighbours, so that each slice keeps its own.
    """
    x, dim = op.args[0], op.argument("dim", 1, 0) % op.args[0].dim()
    step = op.argument("step", 4, 1) if op.name == "slice" else 1
    axes: list[Tensor] = []
    taken: list[Tensor] = []
    for axis in n.of(x):
        if axis.shape[dim] == 1:
            axes.append(axis.select(dim, 0) if op.name == "select" else axis)
            continue
        told = op.name == "slice" and len(op.asked) == 2 and step == 1
        alone = op.name == "slice" and op.out.shape[dim] == 1
        if op.out.numel() < x.numel() and n.varies(axis, dim):
            if 1 < step == x.shape[dim] // op.out.shape[dim] and x.shape[dim] % step == 0:
                n.tie(axis.unflatten(dim, (-1, step)), dim + 1)
            elif alone or not told:
                taken.append(axis)
            elif n.is_constant(x) and x.dim() > 1 and op.out.numel():  # a table; biases are sliced to be changed
                n.take(x, axis, dim, op.func(torch.arange(x.shape[dim]), 0, *op.args[2:], **op.kwargs), op.where)
        axes.append(op.func(axis, *op.args[1:], **op.kwargs))
    n.mix(taken, op.outs, f"{op.where} takes channels by their position")
    n.set(op.out, axes)


def splits(n: Labels, op: Operation) -> None:
    """Chunks of a channel dimension stay even only if all lose the same of their channels."""
    x, unbinds = op.args[0], op.name == "unbind"
    dim = op.argument("dim", 1 if unbinds else 2, 0) % x.dim()
    parts: list[list[Tensor]] = [[] for _ in op.outs]
    listed = op.opened or len(op.asked) == len(op.outs) > 1  # the code has a size for each, which it can be told
    for axis in n.of(x):
        if axis.shape[dim] == 1:
            pieces = [axis] * len(op.outs)
        else:
            pieces = list(axis.split([1] * len(op.outs) if unbinds else [t.shape[dim] for t in op.outs], dim))
            if n.varies(axis, dim) and (not listed or min(t.shape[dim] for t in op.outs) < 2):
                for piece in pieces[1:]:
                    if piece.shape == pieces[0].shape:
                        n.joined.join(piece, pieces[0])
                    else:
                        n.joined.fix(axis, f"{op.where} splits channels unevenly")
        for mine, piece in zip(parts, pieces, strict=True):
            mine.append(piece.squeeze(dim) if unbinds else piece)
    for tensor, axes in zip(op.outs, parts, strict=True):
        n.set(tensor, axes)


def views(n: Labels, op: Operation) -> None:
    """Dimensions seen as others. Of one that is seen as two (groups to shuffle, heads), one can shrink, evenly."""
    x, after = op.args[0], list(op.out.shape)
    parts = regrouped(list(x.shape), after)
    axes = []
    for axis in n.of(x):
        sizes: list[int] = []
        full = list(axis.shape)
        for before, behind in parts:
            still = all(axis.shape[d] == 1 for d in before)
            sizes += [1 if still else after[d] for d in behind]
            for d in before:
                full[d] = 1 if still else x.shape[d]
        axis = axis.expand(full).reshape(sizes)
        for _, behind in parts:
            axis = _one_shrinks(n, op, axis, behind)
        axes.append(axis)
    for before, behind in parts:
        if len(before) > 1:
            axes = _one_kind_along(n, op, axes, behind)
    n.set(op.out, axes)


def _one_kind_along(n: Labels, op: Operation, axes: list[Tensor], dims: list[int]) -> list[Tensor]:
    """Of two kinds of channels that come to lie along one dimension, heads and what is the same in each, one stays."""
    lying = [axis for axis in axes if any(n.varies(axis, d) for d in dims)]

    def worth(axis: Tensor) -> tuple[bool, int]:
        count = len(torch.unique(n.joined.find(axis)))
        return op.counts_heads(count), count

    stay = [axis for axis in lying if axis is not max(lying, key=worth)]
    for axis in stay:
        n.joined.fix(axis, f"{op.where} lays them beside others along one dimension")
    return [axis for axis in axes if not any(axis is its for its in stay)]


def _one_shrinks(n: Labels, op: Operation, axis: Tensor, dims: list[int]) -> Tensor:
    """Ties what lies along all but one of the dimensions that a dimension was taken apart into.

    Where heads are counted, whole heads go; else what the code leaves open (−1); else the longest. If that has proved
    to lie within heads, it is the next of these.
    """
    varying = [d for d in dims if n.varies(axis, d)]
    if len(varying) < 2:
        return axis
    asked = op.asked if len(op.asked) == axis.dim() else [0] * axis.dim()
    named = [d for d in varying if isinstance(size := asked[d], Setting | Computed) and counts_heads(size.name)]
    heads = named or [d for d in varying if op.counts_heads(axis.shape[d])]
    in_turn = sorted(varying, key=lambda d: (asked[d] != -1, -axis.shape[d], -d))
    shrinks = (heads or (in_turn[1:] if op.number in n.turned else in_turn))[0]
    for d in varying:
        if d != shrinks:
            axis = n.tie(axis, d)
    if not heads and op.number not in n.turned:
        n.guess(op.number, axis)
    return axis


def regrouped(before: list[int], after: list[int]) -> list[tuple[list[int], list[int]]]:
    """Which dimensions of a view come from which: runs of both with the same number of elements.

    >>> regrouped([1, 6, 4], [1, 2, 3, 4])
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    parts: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right, a, b = [], [], 1, 1
        if i < len(before):
            left, a, i = [i], before[i], i + 1
        if j < len(after):
            right, b, j = [j], after[j], j + 1
        while a != b:
            if (a < b or not right) and i < len(before):
                left, a, i = [*left, i], a * before[i], i + 1
            else:
                right, b, j = [*right, j], b * after[j], j + 1
        parts.append((left, right))
    return parts


def restrides(n: Labels, op: Operation) -> None:
    """Pooling to one place in a channels-last tensor ends in strides that move nothing: sizes of 1 have any."""
    x, shape, strides = op.args[0], list(op.args[1]), op.args[2]
    plain = torch.empty(shape, device="meta").stride()
    if shape == list(x.shape) and all(a == b or s == 1 for a, b, s in zip(plain, strides, shape, strict=True)):
        n.set(op.out, n.of(x))
    else:
        mixes(n, op)


def pads(n: Labels, op: Operation) -> None:
    """Constants put among channels are channels of their own."""
    x, widths, axes = op.args[0], op.args[1], []
    for axis in n.of(x):
        for i in range(0, len(widths), 2):
            dim = x.dim() - 1 - i // 2
            if axis.shape[dim] > 1 and (widths[i] or widths[i + 1]):
                if min(widths[i], widths[i + 1]) < 0:
                    return mixes(n, op)
                ends = [n.joined.new(count).view([-1] + [1] * (axis.dim() - 1)) for count in widths[i : i + 2]]
                before, behind = (
                    e.transpose(0, dim).expand([*axis.shape[:dim], -1, *axis.shape[dim + 1 :]]) for e in ends
                )
                axis = torch.cat([before, axis, behind], dim)
        axes.append(axis)
    n.set(op.out, axes)


def joins_on(n: Labels, op: Operation) -> None:
    """Concatenation: along the dimension each brings its channels, along all others they meet."""
    tensors = [t for t in op.args[0] if t.numel() or t.dim() > 1]
    dim = op.argument("dim", 1, 0)
    if op.name == "stack":
        dim %= tensors[0].dim() + 1
        shape = [*tensors[0].shape[:dim], 1, *tensors[0].shape[dim:]]
        n.set(op.out, meet(n, [(shape, [a.unsqueeze(dim) for a in n.of(t)]) for t in tensors], op.where))
        return
    dim %= tensors[0].dim()
    lying = [n.along(t, dim) for t in tensors]
    if not any(lying):
        rest = [([1 if d == dim else s for d, s in enumerate(unexpanded(t))], n.of(t)) for t in tensors]
        n.set(op.out, meet(n, [(s, [short(n, a, dim) for a in axes]) for s, axes in rest], op.where))
        return
    rows, others = [], []
    for tensor, axes in zip(tensors, lying, strict=True):
        if len(axes) != 1:
            why = None if n.is_constant(tensor) else f"{op.where} joins on what is no channel"
            for axis in axes:
                n.joined.fix(axis, f"{op.where} joins on two kinds of channels")
            axes = [n.fresh(tensor, dim, why)]
        for d in range(tensor.dim()):
            if d != dim and axes[0].shape[d] > 1 and n.varies(axes[0], d):
                axes = [n.tie(axes[0], d)]
        row = axes[0].movedim(dim, 0).flatten(1)[:, 0] if tensor.dim() > 1 else axes[0]
        rows.append(row)
        mine = [a for a in n.of(tensor) if not n.varies(a, dim)]
        others.append(
            ([1 if d == dim else s for d, s in enumerate(unexpanded(tensor))], [short(n, a, dim) for a in mine])
        )
    row = torch.cat(rows).view([-1 if d == dim else 1 for d in range(tensors[0].dim())])
    n.set(op.out, [row, *meet(n, others, op.where)])


_RULES: tuple[tuple[Rule, str], ...] = (
    (same_place, "clone detach alias contiguous lift_fresh _to_copy dropout _conj _neg_view"),
    (transposes, "permute transpose t unsqueeze"),
    (squeezes, "squeeze"),
    (expands, "expand"),
    (pairs, "view_as_complex view_as_real"),
    (repeats, "repeat"),
    (rearranges, "index _unsafe_index index_select gather roll flip unfold"),
    (joins_on, "cat stack"),
    (takes, "slice select narrow"),
    (splits, "split split_with_sizes chunk unbind unsafe_split unsafe_chunk unsafe_split_with_sizes"),
    (views, "view _unsafe_view reshape _reshape_alias"),
    (restrides, "as_strided"),
    (pads, "constant_pad_nd"),
)
RULES: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names.split()}
