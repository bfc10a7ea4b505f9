"""What each operation does to the channels of its tensors, other than the products and norms of `products.py`.

Operations that only move elements are done to the axes as they are; element-wise ones join the channels that meet;
pooling and reductions keep channels that they don't run over. Everything else may mix channels, and fixes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deephoyer.structure.channel_ids import Labels, like, overlap, squeezed
from deephoyer.structure.inputs import tensors_in
from deephoyer.structure.sizes import Computed, Setting, counts_heads


@dataclass
class Operation:
    """One call of an ATen function: `where` names the module it happened in, `asked` the sizes that its code gave.

    Calls have a `number` in the order in which they are made. `opened` says that the module is torch's attention, whose
    code is replaced when heads go.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    where: str
    counts_heads: Callable[[int], bool] = lambda size: False
    asked: Sequence[int] = ()
    number: int = 0
    opened: bool = False
    given: list[Tensor] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given, self.outs = tensors_in((self.args, self.kwargs)), tensors_in(self.out)

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)


Rule = Callable[[Labels, Operation], None]
Part = tuple[Sequence[int], list[Tensor]]  # a tensor's shape and its axes


def mixes(n: Labels, op: Operation) -> None:
    n.mix([axis for tensor in op.given for axis in n.of(tensor)], op.outs, _may_mix(op))


def _may_mix(op: Operation) -> str:
    return f"{op.name} in {op.where} may mix channels"


# Operations that move elements.


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
        n.set(op.out, [_short(n, axis, x.dim() - 1).squeeze(-1) for axis in n.of(x)])


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
        n.set(op.out, meet(n, [(s, [_short(n, a, dim) for a in axes]) for s, axes in rest], op.where))
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
            ([1 if d == dim else s for d, s in enumerate(unexpanded(tensor))], [_short(n, a, dim) for a in mine])
        )
    row = torch.cat(rows).view([-1 if d == dim else 1 for d in range(tensors[0].dim())])
    n.set(op.out, [row, *meet(n, others, op.where)])


def _short(n: Labels, axis: Tensor, dim: int) -> Tensor:
    return axis if axis.shape[dim] == 1 else n.tie(axis, dim)


# Operations on elements.


def meet(n: Labels, parts: Sequence[Part], where: str) -> list[Tensor]:
    """The axes of what tensors of these shapes and axes make together, element by element, broadcast.

    Channels that lie along the same dimension become the same. Where one tensor has channels along a dimension and
    another as many elements that are none, it would no longer fit when some go: they stay. Axes that share no
    dimension are all that is left, so there are never more of them than dimensions.
    """
    dims = max((len(shape) for shape, _ in parts), default=0)
    result: list[Tensor] = []
    for _, axes in parts:
        for axis in axes:
            axis = like(axis, dims)
            for other in [o for o in result if overlap(o, axis)]:
                n.joined.join(axis, other)
                result = [o for o in result if o is not other]
                for d in range(dims):
                    if other.shape[d] == 1 or axis.shape[d] == 1:
                        axis, other = axis.narrow(d, 0, 1), other.narrow(d, 0, 1)
            if axis.numel() > 1:
                result.append(axis)
    for shape, axes in parts:
        for d in range(1, len(shape) + 1):
            if shape[-d] > 1 and not any(axis.dim() >= d and axis.shape[-d] > 1 for axis in axes):
                for axis in result:
                    if n.varies(axis, -d):
                        n.joined.fix(axis, f"{where} meets them with a tensor of fixed size")
    return result


def pointwise(n: Labels, op: Operation) -> None:
    target = op.outs[0]
    before = n.of(target)
    axes = meet(n, [(_fixed_sizes(n, t), n.of(t)) for t in op.given], op.where)
    axes = [like(axis, target.dim()) for axis in axes]
    if op.func._schema.is_mutable and target._is_view() and len(before) != len(axes):
        _write_into_part(n, op, target, axes)
    for tensor in op.outs:
        n.set(tensor, axes if tensor.shape == target.shape else [])


def _write_into_part(n: Labels, op: Operation, part: Tensor, axes: list[Tensor]) -> None:
    """A tensor that was made to be filled by parts has the axes of each, but for those that lie along the cut."""
    whole = part._base
    filled = whole is not None and n.is_new(whole) and whole.dim() == part.dim() and whole.stride() == part.stride()
    sizes = part.shape if whole is None or not filled else whole.shape
    cut = [d for d in range(part.dim()) if part.shape[d] != sizes[d]]
    lying = [axis for axis in axes if not filled or any(axis.shape[d] > 1 for d in cut)]
    for axis in lying:
        n.joined.fix(axis, f"{op.where} writes into a slice")
    if whole is not None and filled:
        any_size = [1] * part.dim()
        kept = [axis for axis in axes if not any(axis is its for its in lying)]
        n.set(whole, meet(n, [(any_size, n.of(whole)), (any_size, kept)], op.where))


def _fixed_sizes(n: Labels, tensor: Tensor) -> list[int]:
    """Its sizes, 1 where they follow others', as a trial shows: where it was expanded, or all if it is new."""
    new = n.is_new(tensor) or (tensor._base is not None and n.is_new(tensor._base))
    return [1] * tensor.dim() if new else unexpanded(tensor)


def unexpanded(tensor: Tensor) -> list[int]:
    """Its sizes, 1 where it was expanded: that follows what it was expanded to, as a trial shows."""
    return [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def spatial(n: Labels, op: Operation) -> None:
    """Pooling and resizing: each channel by itself."""
    x = op.args[0]
    dims = next(int(c) for c in op.name if c.isdigit())
    lying = [axis for axis in n.of(x) if any(n.varies(axis, d) for d in range(-dims, 0))]
    axes = [shortened(n, axis, range(-dims, 0)) for axis in n.of(x) if not any(axis is its for its in lying)]
    n.mix(lying, op.outs, _may_mix(op))
    for tensor in op.outs:
        n.set(tensor, axes)


def samples(n: Labels, op: Operation) -> None:
    """Each channel at places of the picture that a grid names, which has no channels but one picture for each head."""
    x, grid = op.args[:2]
    for tensor, dims in ((x, range(2, x.dim())), (grid, range(1, grid.dim()))):
        for axis in (axis for d in dims for axis in n.along(tensor, d)):
            n.joined.fix(axis, f"{op.where} runs over them")
    flat = [1] * (x.dim() - 2)
    pictures = [
        shortened(n, axis, range(2, x.dim()))
        for axis in n.of(x)
        if not any(axis.shape[2:][d] > 1 for d in range(len(flat)))
    ]
    grids = [axis for axis in n.of(grid) if axis.shape[0] == axis.numel()]
    parts: list[Part] = [([*x.shape[:2], *flat], pictures), ([len(grid), 1, *flat], grids)]
    n.set(op.out, meet(n, parts, op.where))


def shortened(n: Labels, axis: Tensor, dims: Sequence[int]) -> Tensor:
    for d in dims:
        axis = _short(n, axis, d)
    return axis


def reduces(n: Labels, op: Operation) -> None:
    x = op.args[0]
    given = op.argument("dim", 2 if "norm" in op.name else 1)
    whole = given is None or isinstance(given, float) or given == []
    dims = [d % x.dim() for d in (range(x.dim()) if whole else [given] if isinstance(given, int) else given) if x.dim()]
    lying = [axis for axis in n.of(x) if any(n.varies(axis, d) for d in dims)]
    if op.name in ("sum", "norm", "linalg_vector_norm"):
        n.summed += lying  # to which a channel adds nothing if it is zero
    else:
        n.mix(lying, op.outs, _may_mix(op))
    axes = [shortened(n, axis, dims) for axis in n.of(x) if not any(axis is its for its in lying)]
    for tensor in op.outs:
        if tensor.dim() == x.dim():
            n.set(tensor, axes)
        elif tensor.dim() == x.dim() - len(dims):
            n.set(tensor, [axis.squeeze(tuple(dims)) for axis in axes])


def orders(n: Labels, op: Operation) -> None:
    """Along one dimension each place depends on the others: sorting, running sums, softmax."""
    x = op.args[0]
    position = {"topk": 2, "kthvalue": 2}.get(op.name, 1)
    dim = op.argument("dim", position, -1)
    if not isinstance(dim, int) or isinstance(dim, bool):
        return mixes(n, op)
    for axis in n.along(x, dim):
        n.within_heads([axis])
        n.joined.fix(axis, f"{op.name} in {op.where} runs over channels")
    if op.outs[0].dim() != x.dim():
        return mixes(n, op)
    axes = n.across(x, dim) + (n.along(x, dim) if op.outs[0].shape == x.shape else [])
    for tensor in op.outs:
        n.set(tensor, axes)


def transforms(n: Labels, op: Operation) -> None:
    """Fourier transforms: along their dimensions each place depends on all others, along the rest on none."""
    x, dims = op.args[0], [d % op.args[0].dim() for d in op.args[1]]
    lying = [axis for axis in n.of(x) if any(n.varies(axis, d) for d in dims)]
    n.mix(lying, op.outs, _may_mix(op))
    n.set(op.out, [shortened(n, axis, dims) for axis in n.of(x) if not any(axis is its for its in lying)])


def shuffles_pixels(n: Labels, op: Operation) -> None:
    """Channels become pixels, or pixels channels: those of one square go together."""
    x, r = op.args[0], int(op.args[1]) ** 2
    axes = []
    for axis in n.of(x):
        if axis.shape[-1] > 1 or axis.shape[-2] > 1:
            return mixes(n, op)
        if axis.shape[-3] > 1 and op.name == "pixel_shuffle":
            axis = n.tie(axis.unflatten(-3, (-1, r)), -3).squeeze(-3)
        elif axis.shape[-3] > 1:
            axis = axis.repeat_interleave(r, dim=-3)
        axes.append(axis)
    n.set(op.out, axes)


def gates(n: Labels, op: Operation) -> None:
    """The first half of the channels, each times the sigmoid of one of the second half."""
    x, dim = op.args[0], op.argument("dim", 1, -1) % op.args[0].dim()
    halves = [axis.chunk(2, dim) if axis.shape[dim] > 1 else (axis, axis) for axis in n.of(x)]
    for first, second in halves:
        n.joined.join(first, second)
    n.set(op.out, [first for first, _ in halves])


def unfolds(n: Labels, op: Operation) -> None:
    """Each channel becomes as many as a window has places, or those become one again."""
    window = op.args[1] if op.name == "im2col" else op.args[2]
    places, axes = window[0] * window[1], []
    for axis in n.of(op.args[0]):
        dim = axis.dim() - (3 if op.name == "im2col" else 2)
        if any(n.varies(axis, d) for d in range(dim + 1, axis.dim())):
            n.joined.fix(axis, f"{op.where} takes windows of them")
            continue
        axis = shortened(n, axis, range(dim + 1, axis.dim()))
        if op.name == "im2col":
            axes.append(axis.flatten(dim + 1).repeat_interleave(places if axis.shape[dim] > 1 else 1, dim))
        else:
            tied = n.tie(axis.unflatten(dim, (-1, places)), dim + 1) if axis.shape[dim] > 1 else axis.unsqueeze(-1)
            axes.append(tied)
    n.set(op.out, axes)


def makes(n: Labels, op: Operation) -> None:
    """A new tensor for which only the type of another counts."""
    for tensor in op.outs:
        n.set_passing(tensor)


def draws(n: Labels, op: Operation) -> None:
    """With fewer channels other numbers would be drawn."""
    n.fix(op.given, f"{op.where} draws random numbers for them")
    for tensor in op.outs:
        n.set(tensor, n.of(op.args[0]))


def scatters(n: Labels, op: Operation) -> None:
    """Rows of one tensor added up in another, at places given by an index: neighbours in a graph."""
    target, dim, source = op.args[0], op.args[1], op.args[3]
    index = op.args[2]
    if not isinstance(source, Tensor) or n.known(index) or n.along(source, dim) or n.along(target, dim):
        return mixes(n, op)
    flat = [1 if d == dim % target.dim() else s for d, s in enumerate(target.shape)]
    parts: list[Part] = [(flat, [_short(n, axis, dim % target.dim()) for axis in n.of(source)])]
    if not n.is_made(target):
        parts.append((flat, [_short(n, axis, dim % target.dim()) for axis in n.of(target)]))
    axes = meet(n, parts, op.where)
    for tensor in (target, *op.outs):
        n.set(tensor, axes)


def packs(n: Labels, op: Operation) -> None:
    """Sequences of different lengths laid end to end, or side by side again: features stay features."""
    x, out = op.args[0], op.outs[0]
    tokens = 2 if op.name == "_pack_padded_sequence" else 1  # dimensions that are tokens and batch
    axes = []
    for axis in n.of(x):
        if any(n.varies(axis, d) for d in range(tokens)):
            n.joined.fix(axis, f"{op.where} packs them by their position")
            continue
        features = shortened(n, axis, range(tokens)).flatten(0, tokens - 1)
        axes.append(like(features, out.dim()))
    n.set(out, axes)


def reads_regions(n: Labels, op: Operation) -> None:
    """Values of a map in boxes that another tensor says: each channel, dimension 1, by itself."""
    x, out = op.args[0], op.outs[0]
    spread = [axis for axis in n.of(x) if any(n.varies(axis, d) for d in range(x.dim()) if d != 1)]
    if spread or any(n.known(t) for t in op.given[1:]):
        return mixes(n, op)
    shape = [-1 if d == 1 else 1 for d in range(out.dim())]
    n.set(out, [n.line(axis, 1).view(shape) for axis in n.of(x)])


SPATIAL = ("max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_", "reflection_", "replication_")

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
    (makes, "new_zeros new_ones new_full new_empty new_empty_strided"),
    (scatters, "scatter_add scatter_reduce index_add scatter"),
    (views, "view _unsafe_view reshape _reshape_alias"),
    (restrides, "as_strided"),
    (pads, "constant_pad_nd"),
    (pointwise, "hardswish _prelu_kernel native_dropout copy masked_fill where"),
    (pointwise, "zeros_like ones_like full_like empty_like complex polar"),
    (draws, "randn_like rand_like randint_like bernoulli normal multinomial poisson exponential uniform"),
    # In place these have no tag in torch 2.9.
    (pointwise, "hardtanh leaky_relu elu gelu mish hardsigmoid celu selu threshold rrelu"),
    (reduces, "mean sum amax amin max min var std norm linalg_vector_norm logsumexp prod var_mean any all"),
    (orders, "_softmax softmax _safe_softmax _log_softmax log_softmax cumsum cumprod sort topk argsort argmax argmin"),
    (transforms, "_fft_r2c _fft_c2r _fft_c2c"),
    (samples, "grid_sampler_2d grid_sampler_3d"),
    (shuffles_pixels, "pixel_shuffle pixel_unshuffle"),
    (gates, "glu"),
    (unfolds, "im2col col2im"),
    (packs, "_pack_padded_sequence _pad_packed_sequence"),
    (reads_regions, "roi_align roi_pool"),
)
RULES: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names.split()}

_TEMPLATES = "new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like"
TEMPLATES = frozenset(_TEMPLATES.split())
"""What is given a tensor for its shape or its type, not for its numbers."""

_LAYS_OUT = """permute transpose t squeeze unsqueeze expand view _unsafe_view reshape _reshape_alias clone detach alias
contiguous _to_copy slice select split split_with_sizes chunk unbind index index_select"""
LAYS_OUT = frozenset(_LAYS_OUT.split())
"""What only lays a weight out in another way."""
