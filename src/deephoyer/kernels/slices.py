"""Slices, groups, units: from the squares of all slices of a model to one coefficient for each slice.

A face is a tensor with the dimension it is sliced along. All slices of all faces are numbered
through, so that a vector of squared norms goes in and a vector of coefficients c = p'(r) / r comes
out, whether the groups are filters, channels, or channels coupled across layers. Weights are not
read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deephoyer.groups import Slices, SliceUnit, Unit
from deephoyer.penalties import Penalty
from deephoyer.terms import Term


@dataclass(frozen=True, eq=False)
class Face:
    """All slices of a tensor along a dimension; the first of them has the number `first`."""

    tensor: Tensor
    side: SlicedSide
    first: int
    count: int


class SlicedSide(NamedTuple):
    """The dimension (0: rows, 1: columns) of a matrix that is sliced, and the groups that its columns are cut by.

    The groups are those of a convolution, or the matrices that a tensor has `stacked` along its dimension 0.
    """

    dim: int
    groups: int = 1
    stacked: bool = False


def side_of(part: Slices) -> SlicedSide | None:
    """How a part slices its tensor; None where no kernel does."""
    whole = part.shape == tuple(part.tensor.shape)
    if part.keep in ((0,), (1,)) and whole:
        return SlicedSide(part.keep[0])
    if part.keep in ((0, 1), (0, 2)) and whole and len(part.shape) == 3:
        return SlicedSide(part.keep[1] - 1, part.shape[0], stacked=True)
    if part.keep == (0, 2) and len(part.shape) == part.tensor.dim() + 1:
        return SlicedSide(1, part.shape[0])
    return None


class SlicePlan:
    """The terms on slices of a model, numbered."""

    def __init__(self, terms: Sequence[Term], device: torch.device, dtype: torch.dtype):
        self.terms, self.dtype = list(terms), dtype
        self.faces: dict[tuple[int, SlicedSide], Face] = {}
        self.slices = self.groups = 0
        self.lengths: list[int] = []
        pairs = [self._number(term.unit) for term in terms]
        group, number = (torch.cat(column) for column in zip(*pairs, strict=True))
        if _is_count(group, self.groups) and _is_count(number, self.slices):
            self.members = self.back = None  # group i is slice i: nothing to gather
        else:
            self.members = _rows(group, number, self.groups, self.slices).to(device)
            self.back = _rows(number, group, self.slices, self.groups).to(device)
        lengths = torch.tensor(self.lengths)
        self.unit_lengths = lengths.to(device)
        self.unit_of = torch.repeat_interleave(torch.arange(len(self.terms)), lengths).to(device)

    def _number(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """A group and a slice in it, for all groups of the unit; both numbered through."""
        assert isinstance(unit, SliceUnit)
        groups, numbers = [], []
        for part in unit.parts:
            group = torch.arange(part.count) if part.group is None else part.group.cpu()
            groups.append(self.groups + group[group >= 0])
            numbers.append(self._face(part).first + torch.nonzero(group >= 0).flatten())
        self.lengths.append(unit.count)
        self.groups += unit.count
        return torch.cat(groups), torch.cat(numbers)

    def _face(self, part: Slices) -> Face:
        side = side_of(part)
        assert side is not None
        key = (id(part.tensor), side)
        if key not in self.faces:
            self.faces[key] = Face(part.tensor, side, self.slices, part.count)
            self.slices += part.count
        return self.faces[key]

    members: Tensor | None
    back: Tensor | None

    def gather(self, squares: Tensor) -> Tensor:
        """r² of each group, from the squared norm of each slice."""
        return squares if self.members is None else _take(squares, self.members)

    def scatter(self, c: Tensor) -> Tensor:
        """For each slice the sum of c over the groups it is in."""
        return c if self.back is None else _take(c, self.back)

    def coefficients(self, squares: Tensor, times: Tensor | None = None) -> Tensor:
        """For each slice scale · p'(r) / r summed over its groups, 0 where r is 0."""
        r = self.gather(squares).sqrt()
        scales = torch.stack([t.scale.to(r) for t in self.terms])
        scale = (scales if times is None else scales * times.to(r))[self.unit_of]
        alive = r > 0
        most = torch.finfo(r.dtype).max ** 0.5  # as in `Penalty.coefficient`
        c = (self._slopes(r) / torch.where(alive, r, torch.ones_like(r))).clamp(-most, most)
        return self.scatter(torch.where(alive, scale * c, torch.zeros_like(r)))

    def _slopes(self, r: Tensor) -> Tensor:
        penalty = one_penalty(self.terms)
        if penalty is not None and penalty.scale_free:
            s1 = torch.segment_reduce(r, "sum", lengths=self.unit_lengths, unsafe=True)
            s2 = torch.segment_reduce(r.square(), "sum", lengths=self.unit_lengths, unsafe=True)
            a, b = penalty.line(s1, s2)
            return a[self.unit_of] - b[self.unit_of] * r
        if penalty is not None and penalty.separable:
            return penalty.slope(r)
        return torch.cat([t.penalty.slope(x) for t, x in zip(self.terms, r.split(self.lengths), strict=True)])


def one_penalty(terms: Sequence[Term]) -> Penalty | None:
    """The penalty all the terms share, if they do."""
    return terms[0].penalty if all(t.penalty is terms[0].penalty for t in terms) else None


def _is_count(numbers: Tensor, length: int) -> bool:
    return torch.equal(numbers, torch.arange(length))


def _rows(key: Tensor, value: Tensor, count: int, pad: int) -> Tensor:
    """A matrix whose row k holds the values that go with key k, filled up with `pad`."""
    order = torch.argsort(key, stable=True)
    key, value = key[order], value[order]
    sizes = torch.bincount(key, minlength=count)
    place = torch.arange(len(key)) - (sizes.cumsum(0) - sizes)[key]
    rows = torch.full((count, max(int(sizes.max()), 1)), pad)
    rows[key, place] = value
    return rows


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Sums of the values at each row of indices, in a fixed order; index len(values) stands for nothing."""
    padded = torch.cat([values, values.new_zeros(1)])
    return padded[index].sum(1)
