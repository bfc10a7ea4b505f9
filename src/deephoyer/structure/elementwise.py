"""What operations on elements do to channels.

Element-wise ones join the channels that meet; pooling and reductions keep channels that they don't run over. All that
has no rule, here or in `moving.py` and `products.py`, may mix channels, and fixes them.
"""

from __future__ import annotations

from torch import Tensor

from deephoyer.structure.channel_ids import Labels, like
from deephoyer.structure.operations import Operation, Part, Rule, may_mix, meet, mixes, short, shortened, unexpanded


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


def spatial(n: Labels, op: Operation) -> None:
    """Pooling and resizing: each channel by itself."""
    x = op.args[0]
    dims = next(int(c) for c in op.name if c.isdigit())
    lying = [axis for axis in n.of(x) if any(n.varies(axis, d) for d in range(-dims, 0))]
    axes = [shortened(n, axis, range(-dims, 0)) for axis in n.of(x) if not any(axis is its for its in lying)]
    n.mix(lying, op.outs, may_mix(op))
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


def reduces(n: Labels, op: Operation) -> None:
    x = op.args[0]
    given = op.argument("dim", 2 if "norm" in op.name else 1)
    whole = given is None or isinstance(given, float) or given == []
    dims = [d % x.dim() for d in (range(x.dim()) if whole else [given] if isinstance(given, int) else given) if x.dim()]
    lying = [axis for axis in n.of(x) if any(n.varies(axis, d) for d in dims)]
    if op.name in ("sum", "norm", "linalg_vector_norm"):
        n.summed += lying  # to which a channel adds nothing if it is zero
    else:
        n.mix(lying, op.outs, may_mix(op))
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
    n.mix(lying, op.outs, may_mix(op))
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
    parts: list[Part] = [(flat, [short(n, axis, dim % target.dim()) for axis in n.of(source)])]
    if not n.is_made(target):
        parts.append((flat, [short(n, axis, dim % target.dim()) for axis in n.of(target)]))
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
    (makes, "new_zeros new_ones new_full new_empty new_empty_strided"),
    (scatters, "scatter_add scatter_reduce index_add scatter"),
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
