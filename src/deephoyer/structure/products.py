"""What layers do to channels, by the operations that they end in: products, convolutions, norms, embeddings, attention.

A layer is what its tensors are used for, whichever module calls the operation. A product reads channels along the
dimension that it sums over, and makes those of the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deephoyer.structure.channel_ids import Labels
from deephoyer.structure.operations import Operation, Part, Rule, meet, mixes, shortened, unexpanded


def multiplies(n: Labels, op: Operation) -> None:
    """x @ w: channels along the middle are read, rows of x and columns of w stay; a batch of either meets."""
    left, right = op.args[-2:] if op.name in ("addmm", "baddbmm") else op.args[:2]
    axes = product(n, op, left, right)
    if op.name in ("addmm", "baddbmm") and not n.is_made(op.args[0]):
        axes = meet(n, [(op.out.shape, axes), (op.args[0].shape, n.of(op.args[0]))], op.where)
    n.set(op.out, axes)


def product(n: Labels, op: Operation, left: Tensor, right: Tensor) -> list[Tensor]:
    """The axes of left @ right, two tensors with as many dimensions."""
    read(n, op, left, left.dim() - 1, right, right.dim() - 2)
    rows, columns = n.across(left, -1), n.across(right, -2)
    if left.dim() == 3 and not n.is_weight(left) and not n.is_weight(right):  # attention that is written out
        heads = [axis for axis in (*rows, *columns) if axis.shape[0] > 1]
        n.heads += heads
        if heads:
            n.within_heads(n.along(left, -2) + n.along(right, -1))
    above, beside = unexpanded(left)[:-1], unexpanded(right)
    return meet(n, [([*above, 1], rows), ([*beside[:-2], 1, beside[-1]], columns)], op.where)


def read(n: Labels, op: Operation, x: Tensor, x_dim: int, w: Tensor, w_dim: int) -> None:
    """The channels of x along one dimension are summed up, weighted with w along another."""
    mine, theirs = n.along(x, x_dim), n.along(w, w_dim)
    for tensor, axes in ((x, mine), (w, theirs)):
        if axes and not n.is_weight(tensor) and not n.is_weight(w if tensor is x else x):
            for axis in axes:
                n.within_heads([axis])
                n.joined.fix(axis, f"{op.where} sums over them")
    if mine and theirs:
        first = n.line(mine[0], x_dim)
        for dim, axes in ((x_dim, mine), (w_dim, theirs)):
            for axis in axes:
                n.joined.join(first, n.line(axis, dim))
        # Of two weights one that is zero is enough: a parameter, which can be.
        its_own = n.is_weight(w) and not (n.is_weight(x) and any(n.is_of_buffer(axis) for axis in theirs))
        note_reads(n, *((w, theirs) if its_own else (x, mine)))
    elif mine or theirs:
        weight = n.is_weight(w if theirs else x)
        for axis in mine or theirs:
            n.joined.fix(axis, "network input" if weight else f"{op.where} meets them with a tensor of fixed size")
        note_reads(n, w if theirs else x, mine or theirs)
    note_writes(n, w, w_dim)
    note_writes(n, x, x_dim)


def note_reads(n: Labels, tensor: Tensor, axes: list[Tensor]) -> None:
    """A weight reads these channels; a buffer as well, but nobody makes zeros of it: they must be zero themselves."""
    for axis in axes if n.is_weight(tensor) else ():
        if (place := n.place_of(axis)) is not None:
            n.reads.add(place)
            if n.is_of_buffer(axis):
                n.summed.append(axis)


def note_writes(n: Labels, tensor: Tensor, read_dim: int) -> None:
    """A weight makes the channels along the dimensions that it isn't read along."""
    if n.is_weight(tensor):
        n.writes.update(place for axis in n.across(tensor, read_dim) if (place := n.place_of(axis)) is not None)


def multiplies_by_vector(n: Labels, op: Operation) -> None:
    """A matrix or a vector times a vector, whose channels are read."""
    left, right = op.args[-2:]
    read(n, op, left, left.dim() - 1, right, 0)
    parts: list[Part] = [(list(op.out.shape), [axis.squeeze(-1) for axis in n.across(left, -1) if left.dim() == 2])]
    if op.name == "addmv" and not n.is_made(op.args[0]):
        parts.append((list(op.args[0].shape), n.of(op.args[0])))
    n.set(op.out, meet(n, parts, op.where))


def applies(n: Labels, op: Operation) -> None:
    """aten.linear, where it isn't taken apart."""
    x, w = op.args[:2]
    flipped = w.t()
    n.set(flipped, [axis.t() for axis in n.of(w)])
    if n.is_weight(w):
        n.set_view(flipped)
    read(n, op, x, x.dim() - 1, flipped, 0)
    parts: list[Part] = [([*x.shape[:-1], 1], n.across(x, -1)), ([1, w.shape[0]], n.across(flipped, 0))]
    bias = op.argument("bias", 2)
    if bias is not None:
        parts.append((list(bias.shape), n.of(bias)))
    n.set(op.out, meet(n, parts, op.where))


def multiplies_by_expert(n: Labels, op: Operation) -> None:
    """Rows of x, each with the matrix of w that it was sent to: which one is chosen by number."""
    x, w = op.args[:2]
    if x.dim() != 2 or w.dim() != 3:
        return mixes(n, op)
    for axis in n.along(w, 0):
        n.joined.fix(axis, f"{op.where} picks channels by their position")
    read(n, op, x, 1, w, 1)
    n.aligned.update(place for axis in n.along(w, 1) if (place := n.place_of(axis)) is not None)
    n.set(op.out, [axis[0] for axis in n.across(w, 1) if axis.shape[0] == 1])


def multiplies_pairs(n: Labels, op: Operation) -> None:
    """A bilinear layer reads the channels of two tensors, each along a dimension of its weight."""
    x, w, y = op.args[:3]
    if not n.is_weight(w) or [list(dims) for dims in op.args[3:7]] != [[1, 3], [0], [1, 2], [2, 3]]:
        return mixes(n, op)
    for tensor, dim in ((x, 1), (y, 2)):
        mine, theirs = n.along(tensor, 1), n.along(w, dim)
        for axis in mine:
            n.joined.join(n.line(axis, 1), n.line(theirs[0], dim)) if theirs else n.joined.fix(axis, "network input")
        for axis in theirs if not mine else ():
            n.joined.fix(axis, "network input")
        note_reads(n, w, theirs)
    made = [n.line(axis, 0).view(1, -1) for axis in n.of(w) if axis.shape[0] > 1]
    n.writes.update(place for axis in n.along(w, 0) if (place := n.place_of(axis)) is not None)
    rows = [axis for tensor in (x, y) for axis in n.across(tensor, 1)]
    n.set(op.out, meet(n, [([len(x), 1], rows), ([1, len(w)], made)], op.where))


# Convolutions.


def convolves(n: Labels, op: Operation) -> None:
    x, w, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    for tensor in (x, w):
        for d in range(2, tensor.dim()):
            for axis in n.along(tensor, d):
                n.joined.fix(axis, f"{op.where} runs over them")
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    made: list[Tensor] = []
    if groups == 1:
        read(n, op, x, 1, w, in_dim)
    elif (line := _channels(n, x)) is not None and _one_kernel_for_all(n, w, groups, len(line)):
        made = [line]
    elif line is None or not n.is_weight(w):
        n.fix([x, w], "network input" if n.is_weight(w) else f"{op.where} computes its weight")
    elif transposed:
        made = _transposed_in_groups(n, op, line, w, groups)
    else:
        _in_groups(n, op, line, w, groups)
    shape = [-1 if d == 1 else 1 for d in range(op.out.dim())]
    if groups == 1 or not (transposed or made):
        made = [n.line(axis, out_dim) for axis in n.of(w) if axis.shape[out_dim] > 1]
    passed = [axis for axis in n.across(x, 1) if not any(s > 1 for s in axis.shape[2:])]
    flat = [1, op.out.shape[1]] + [1] * (op.out.dim() - 2)
    parts: list[Part] = [(flat, [line.view(shape) for line in made]), ([x.shape[0]] + [1] * (op.out.dim() - 1), passed)]
    if bias is not None:
        parts.append((flat, [axis.view(shape) for axis in n.of(bias)]))
    n.set(op.out, meet(n, parts, op.where))


def convolves_at_offsets(n: Labels, op: Operation) -> None:
    """A deformable convolution: where it looks is computed for each place, alike for all channels."""
    x, w, offset, mask, bias = op.args[:5]
    weight_groups, offset_groups = op.args[11:13]
    if weight_groups != 1 or offset_groups != 1:
        return mixes(n, op)
    for tensor in (offset, mask):
        for axis in n.of(tensor):
            n.joined.fix(axis, f"{op.where} takes its places from them")
    read(n, op, x, 1, w, 1)
    flat, shape = [1, op.out.shape[1], 1, 1], [1, -1, 1, 1]
    made = [n.line(axis, 0).view(shape) for axis in n.of(w) if axis.shape[0] > 1]
    n.set(op.out, meet(n, [(flat, made), (flat, [axis.view(shape) for axis in n.of(bias)])], op.where))


def _channels(n: Labels, x: Tensor) -> Tensor | None:
    found = n.along(x, 1)
    if not found:
        return None
    first = n.line(found[0], 1)
    for axis in found[1:]:
        n.joined.join(first, n.line(axis, 1))
    return first


def _one_kernel_for_all(n: Labels, w: Tensor, groups: int, ins: int) -> bool:
    """Whether each channel is convolved by itself with a kernel that is laid out for as many as there are."""
    laid_out = w.stride(0) == 0 or n.is_new(w)
    return groups == ins == w.shape[0] and w.shape[1] == 1 and laid_out and not n.along(w, 0)


def by_blocks(groups: int, ins: int, outs: int) -> bool:
    """Whether a grouped convolution loses whole groups, or the same channels of each group.

    Either keeps it a grouped convolution; the one that ties fewer channels together is taken.
    """
    return groups >= ins // groups + outs // groups


def _in_groups(n: Labels, op: Operation, ins: Tensor, w: Tensor, groups: int) -> None:
    """The channels of a grouped convolution that can only go together; its weight may be a parameter laid out anew."""
    rows, columns = (([axis for axis in n.of(w) if axis.shape[dim] > 1]) for dim in (0, 1))
    place = n.place_of(rows[0]) if len(rows) == 1 else None
    if place is None or len(columns) > 1:
        return n.fix([w], f"{op.where} computes its weight")
    n.writes.add(place)
    outs = n.line(rows[0], 0)
    if by_blocks(groups, len(ins), len(outs)):
        whole = torch.cat([outs.view(groups, -1), ins.view(groups, -1)], 1)
        n.joined.join(whole, whole[:, :1])
        for axis in columns:
            n.joined.fix(axis, "whole groups go")
        n.in_blocks(place[0], "groups", len(outs) // groups, groups, n.owner(w) is None or len(ins) == groups)
        return
    for half in (outs.view(groups, -1), ins.view(groups, -1)):
        n.joined.join(half, half[:1])
    for axis in columns:
        n.joined.join(n.line(axis, 1), ins.view(groups, -1)[0])
    note_reads(n, w, columns)


def _transposed_in_groups(n: Labels, op: Operation, ins: Tensor, w: Tensor, groups: int) -> list[Tensor]:
    """What of a transposed convolution can only go together; gives the channels that it makes."""
    name = n.owner(w)
    if name is None:
        n.fix([w], f"{op.where} is a transposed convolution in groups")
        n.joined.fix(ins, f"{op.where} is a transposed convolution in groups")
        return []
    axes = n.of(w)
    outs = n.joined.new(op.out.shape[1])
    if not by_blocks(groups, len(ins), len(outs)):  # all groups lose the same channels
        n.joined.join(n.places[name, 0], ins)
        for half in (ins.view(groups, -1), outs.view(groups, -1)):
            n.joined.join(half, half[:1])
        if (name, 1) in n.places:
            n.joined.join(n.places[name, 1], outs.view(groups, -1)[0])
            n.writes.add((name, 1))
        note_reads(n, w, [axis for axis in axes if axis.shape[0] > 1])
        return [outs]
    whole = torch.cat([n.places[name, 0].view(groups, -1), ins.view(groups, -1), outs.view(groups, -1)], 1)
    n.joined.join(whole, whole[:, :1])
    if (name, 1) in n.places:
        n.joined.fix(n.places[name, 1], "whole groups go")
    n.writes.add((name, 0))
    n.in_blocks(name, "groups", len(ins) // groups, groups)
    return [outs]


# Norms.


def normalises_batch(n: Labels, op: Operation) -> None:
    """Each channel by itself: weight, bias and statistics belong to the channels of dimension 1."""
    x = op.args[0]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    axes = []
    for axis in n.of(x):
        if any(n.varies(axis, d) for d in range(x.dim()) if d != 1):
            n.joined.fix(axis, f"{op.where} normalises over channels")
        axes.append(axis)
    parts: list[Part] = [(list(x.shape), axes)]
    for tensor in op.given[1:]:
        parts.append(([1, x.shape[1]] + [1] * (x.dim() - 2), [axis.view(shape) for axis in n.of(tensor)]))
    n.set(op.outs[0], meet(n, parts, op.where))
    for tensor in op.outs[1:]:
        n.set(tensor, [])


def normalises_layer(n: Labels, op: Operation) -> None:
    """Removing a channel would change the others."""
    x, over = op.args[0], range(-len(op.args[1]), 0)
    for axis in n.of(x):
        if any(n.varies(axis, d) for d in over) and n.exact:
            n.joined.fix(axis, f"{op.where} normalises over channels")
    name = n.owner(op.given[1]) if len(op.given) > 1 else None
    if not n.exact and name is not None and len(over) == 1 and (lying := n.along(x, -1)):
        n.layer_norms.setdefault(name.rpartition(".")[0], n.line(lying[0], -1))
    scales = [(t.shape, n.of(t)) for t in op.given[1:]]
    n.set(op.outs[0], meet(n, [(x.shape, n.of(x)), *scales], op.where))
    for tensor in op.outs[1:]:
        n.set(tensor, [])


def normalises_groups(n: Labels, op: Operation) -> None:
    """Whole groups go, and the number of groups is the module's."""
    x, w, groups = op.args[0], op.args[1], op.args[6]
    line = _channels(n, x)
    name = None if w is None else n.owner(w)
    if any(n.varies(axis, d) for axis in n.of(x) for d in range(x.dim()) if d != 1) or (line is not None and not name):
        n.fix(op.given, f"{op.where} normalises over channels")
    elif line is not None and name is not None:
        blocks = line.view(groups, -1)
        n.joined.join(blocks, blocks[:, :1])
        n.of(w)
        n.in_blocks(name, "num_groups", blocks.shape[1], groups)
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    parts: list[Part] = [(list(x.shape), n.of(x))]
    for tensor in op.given[1:3]:
        parts.append(([1, x.shape[1]] + [1] * (x.dim() - 2), [axis.view(shape) for axis in n.of(tensor)]))
    n.set(op.outs[0], meet(n, parts, op.where))
    for tensor in op.outs[1:]:
        n.set(tensor, [])


def normalises_weight(n: Labels, op: Operation) -> None:
    """Weight norm: along all dimensions but one a weight is divided by its length."""
    v, g = op.args[:2]
    dim = op.argument("dim", 2, 0) % v.dim()
    if any(axis.shape[dim] > 1 for axis in n.of(g)):  # each output by its own length, to which zeros add nothing
        n.set(op.outs[0], meet(n, [(v.shape, n.of(v)), (g.shape, n.of(g))], op.where))
        if n.is_weight(v):
            n.set_view(op.outs[0])
        if (name := n.owner(v)) is not None:
            n.directions.add((name, dim))
    else:
        mixes(n, op)


# Embeddings and attention.


def looks_up(n: Labels, op: Operation) -> None:
    """The rows of a table are chosen by number and stay; its columns are channels."""
    w, out = op.args[0], op.outs[0]
    for axis in n.of(w):
        if axis.shape[0] > 1:
            n.joined.fix(axis, "rows of an embedding")
    note_writes(n, w, 0)
    n.set(out, [axis.view([1] * (out.dim() - 1) + [-1]) for axis in n.across(w, 0)])
    for tensor in op.outs[1:]:
        n.set(tensor, [])


def attends(n: Labels, op: Operation) -> None:
    """Fused attention: heads stay heads; within one, the width of queries and keys sets the scale and stays."""
    query, key, value = op.args[:3]
    mask = op.argument("attn_mask", 5 if op.name.endswith("cpu") else 3)
    out = op.outs[0]
    for tensor in (query, key, value):
        _whole_heads(n, tensor)
    for tensor in (query, key):
        for axis in n.along(tensor, -1):
            n.within_heads([axis])
            n.joined.fix(axis, f"attention in {op.where} is scaled by their number")
    for axis in (axis for tensor in (query, key, value) for axis in n.along(tensor, -2)):
        n.joined.fix(axis, f"attention in {op.where} runs over them")
    heads = query.shape[1] if query.dim() == 4 else 1
    parts: list[Part] = []
    for tensor in (query, key, value):
        axes = [axis.narrow(-2, 0, 1) for axis in n.across(tensor, -1) if not n.varies(axis, -2)]
        shape = [*tensor.shape[:-2], 1, 1]
        if tensor.dim() == 4 and tensor.shape[1] not in (1, heads):  # grouped queries: several heads for a key
            times = heads // tensor.shape[1]
            axes = [a.repeat_interleave(times, 1) if a.shape[1] > 1 else a for a in axes]
            shape[1] = heads
        parts.append((shape, axes))
    if isinstance(mask, Tensor) and not n.is_made(mask):
        tokens = [axis for axis in n.of(mask) if n.varies(axis, -1) or n.varies(axis, -2)]
        for axis in tokens:
            n.joined.fix(axis, f"attention in {op.where} runs over them")
        heads_of = [shortened(n, a, (-1, -2)) for a in n.of(mask) if not any(a is t for t in tokens)]
        parts.append(([*mask.shape[:-2], 1, 1], heads_of))
    n.heads += [axis for _, axes in parts for axis in axes]
    columns = n.along(value, -1)
    if any(axes for _, axes in parts):
        n.within_heads(columns)
    n.set(out, [*meet(n, parts, op.where), *columns])
    for tensor in op.outs[1:]:
        n.set(tensor, [])


def _whole_heads(n: Labels, tensor: Tensor) -> None:
    """Heads whose channels are still told apart become whole."""
    if tensor.dim() == 4:
        n.set(tensor, [n.tie(axis, 3) if n.varies(axis, 1) and axis.shape[3] > 1 else axis for axis in n.of(tensor)])


_RULES: tuple[tuple[Rule, str], ...] = (
    (multiplies, "mm bmm addmm baddbmm"),
    (multiplies_by_vector, "mv addmv dot vdot"),
    (applies, "linear"),
    (multiplies_by_expert, "_grouped_mm"),
    (multiplies_pairs, "_trilinear"),
    (convolves, "convolution"),
    (convolves_at_offsets, "deform_conv2d"),
    (
        normalises_batch,
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "_batch_norm_with_update miopen_batch_norm",
    ),
    (normalises_layer, "native_layer_norm _fused_rms_norm"),
    (normalises_groups, "native_group_norm"),
    (normalises_weight, "_weight_norm_interface"),
    (looks_up, "embedding _embedding_bag _embedding_bag_forward_only"),
)
RULES: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names.split()}
