"""Example inputs: others like them, and the tensors in what comes out. Calling a model is in `inference.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deephoyer.inference import Examples

REMEMBERED = ("past_key_values", "mems", "state", "encoder_past_key_values")
"""Where Hugging Face's language models give back what they would compute again otherwise, head by head."""


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a nest of dicts, lists, tuples and data classes, in a fixed order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            # Not by `getattr`: a configuration of Hugging Face may refuse what differs from layer to layer.
            own = vars(leaf) if hasattr(leaf, "__dict__") else {n: getattr(leaf, n, None) for n in leaf.__slots__}
            found += tensors_in([own.get(name) for name in leaf.__dataclass_fields__])
    return found


def outputs_in(tree: Any) -> list[Tensor]:
    """The tensors that a network computes for its user: all but what Hugging Face's remember for the next token.

    In a plain dict a "state" is an output like any other. An object of another kind (a distribution, a result with
    attributes) may hold some, too.
    """
    if isinstance(tree, Mapping) and hasattr(tree, "__dataclass_fields__"):
        tree = {key: value for key, value in tree.items() if key not in REMEMBERED}
    return tensors_in(pytree.tree_map(_attributes, tree))


def _attributes(leaf: Any) -> Any:
    """What an object of somebody's own class holds, as far down as there are such objects; anything else as it is."""
    seen: set[int] = set()

    def inside(value: Any) -> Any:
        known = isinstance(value, Tensor | nn.Module | type) or hasattr(value, "__dataclass_fields__")
        if known or callable(value) or not hasattr(value, "__dict__") or id(value) in seen:
            return value
        seen.add(id(value))
        return pytree.tree_map(inside, dict(vars(value)))

    return inside(leaf)


def one_sample(inputs: Examples) -> Examples:
    """The first sample alone, where every tensor has the same number of them, more than one; else the inputs."""
    counts = {t.shape[0] if t.dim() else 0 for t in tensors_in(inputs)}
    if len(counts) != 1 or counts <= {0, 1}:
        return inputs
    return pytree.tree_map(lambda t: t[:1] if isinstance(t, Tensor) else t, inputs)


def other_sizes(inputs: Examples) -> Iterator[tuple[Examples, ...]]:
    """The examples in other sizes that a network may be given: longer texts, larger pictures, another batch.

    The first sample alone, if there are more; and of that, for each dimension and for those of a picture together,
    shorter and longer ones and those of one place, several of each to try, since a network may take only some of them.
    Tensors that are as long there as the first one change with it.
    """
    sample = one_sample(inputs)
    if sample is not inputs:
        yield (sample,)
    inputs, tensors = sample, tensors_in(sample)
    dims = max((t.dim() for t in tensors), default=0)
    for changed in [*((d,) for d in range(dims)), *([tuple(range(2, dims))] if dims > 3 else [])]:
        sizes = {d: next(t.shape[d] for t in tensors if t.dim() > d) for d in changed}
        for changes in (SHORTER, LONGER, SINGLE):
            others = [{d: change(size) for d, size in sizes.items()} for change in changes]
            yield tuple(_resized(inputs, sizes, other) for other in others if all(other.values()) and other != sizes)


# First one that is no multiple, for which a network may pad what it is given.
SHORTER: tuple[Callable[[int], int], ...] = (lambda size: size // 2 + 1, lambda size: size // 2, lambda size: size // 4)
LONGER: tuple[Callable[[int], int], ...] = (lambda size: size * 2 + 1, lambda size: size * 2)
SINGLE: tuple[Callable[[int], int], ...] = (lambda size: 1,)


def _resized(inputs: Examples, sizes: dict[int, int], others: dict[int, int]) -> Examples:
    def fit(leaf: Any) -> Any:
        for d, size in sizes.items():
            if isinstance(leaf, Tensor) and leaf.dim() > d and leaf.shape[d] == size:
                leaf = leaf.index_select(d, torch.arange(others[d], device=leaf.device) % size)
        return leaf

    return pytree.tree_map(fit, inputs)


def drawn_like(inputs: Examples, seed: int = 0, scale: float = 1.0) -> tuple[Examples, ...]:
    """Random examples, and after them what to take where a model fails on those before.

    Whole numbers may have to fit together (where each bag of an `EmbeddingBag` begins): then they stay as they are.
    """
    return random_like(inputs, seed, scale=scale), random_like(inputs, seed, scale=scale, whole=False)


def random_like(
    inputs: Examples, seed: int = 0, bold: bool = False, scale: float = 1.0, whole: bool = True
) -> Examples:
    """Examples of the same shapes and kinds: normal numbers × `scale`, and integers within the range of the given ones.

    Masks stay as they are, since not every mask makes sense; `bold` draws them too, and integers from 0. Without
    `whole` integers stay as well.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.numel() == 0:
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            wide = torch.complex128 if leaf.is_complex() else torch.float64
            drawn = scale * torch.randn(leaf.shape, generator=generator, dtype=wide)
            return drawn.to(device=leaf.device, dtype=leaf.dtype)
        if leaf.dtype == torch.bool:
            return torch.rand(leaf.shape, generator=generator).to(leaf.device) < 0.5 if bold else leaf
        if not whole:
            return leaf
        low, high = int(leaf.min()), int(leaf.max())
        low = min(low, 0) if bold else low
        return torch.randint(low, high + 1, leaf.shape, generator=generator).to(device=leaf.device, dtype=leaf.dtype)

    return pytree.tree_map(draw, inputs)
