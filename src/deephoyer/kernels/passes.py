"""Two passes over the weights: one for their sums, one that adds to their gradients; between them only small vectors.

What the fast paths have in common: sorting the terms by what can be done fast, numbering, and the
reduction over processes. How a pass is made is for the subclasses. What no fast path takes (an
unknown penalty on elements, overlapping index groups, memory that doesn't lie alike) is left to the plain path.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deephoyer.groups import ElementUnit, SliceUnit
from deephoyer.kernels.layout import Matrix, Pairs, matrix, pairs_of, walks_alike
from deephoyer.kernels.plain import Plain
from deephoyer.kernels.slices import Face, SlicedSide, SlicePlan, side_of
from deephoyer.penalties import Penalty
from deephoyer.sharded import Reduction, offsets, same_cut
from deephoyer.terms import Term


@dataclass(frozen=True, eq=False)
class Element:
    """An element-wise term on the tensor number `at`."""

    term: Term
    at: int


@dataclass(frozen=True, eq=False)
class Piece:
    """The tensor number `at` as a matrix; its slices are numbered from `row` and `column` on, −1 for not sliced."""

    at: int
    matrix: Matrix
    row: int
    column: int


@dataclass(eq=False)
class DevicePlan:
    """What is to be done on one device."""

    device: torch.device
    dtype: torch.dtype
    elements: list[Element]
    slices: SlicePlan | None
    pieces: list[Piece]
    reduction: Reduction
    wants_sums: bool  # of the element-wise terms
    tables: Any = None  # for a backend to keep what it derives


class Passes:
    """The driver. A backend gives the four methods that touch weights."""

    name = "passes"

    def __init__(self, terms: Sequence[Term], only: frozenset[int] | None = None):
        self.terms, self.only = list(terms), only
        self.tensors = list({id(t): t for term in terms for t in term.unit.tensors}.values())
        self._plans: dict[Any, tuple[list[DevicePlan], Plain]] = {}
        self._last: tuple[Any, tuple[list[DevicePlan], Plain]] = (None, ([], Plain([])))

    # For backends

    def takes(self, penalty: Penalty, element_wise: bool) -> bool:
        """Whether this backend has the penalty."""
        return not element_wise or penalty.separable or penalty.scale_free

    def element_sums(self, plan: DevicePlan, pairs: Pairs) -> Tensor:
        """Σ|w| and Σw² of each element-wise term, as [2, terms]."""
        raise NotImplementedError

    def slice_squares(self, plan: DevicePlan, pairs: Pairs) -> Tensor:
        """The squared norm of each slice; 0 for slices on other processes."""
        raise NotImplementedError

    def add_elements_(self, plan: DevicePlan, pairs: Pairs, sums: Tensor | None, times: Tensor | None) -> None:
        raise NotImplementedError

    def add_slices_(self, plan: DevicePlan, pairs: Pairs, squares: Tensor, times: Tensor | None) -> None:
        raise NotImplementedError

    def captured(self, plan: DevicePlan) -> bool:
        """Whether a captured graph may go on reading the plan's tables: then they must stay."""
        return False

    # The passes

    def add_grad_(self, times: Tensor | None = None) -> None:
        pairs = pairs_of(self.tensors, only=self.only)
        plans, rest = self._sorted(pairs)
        for plan in plans:
            self._run(plan, pairs, None if times is None else times.to(plan.device))
        if rest.terms:
            rest.add_grad_(times)

    def _run(self, plan: DevicePlan, pairs: Pairs, times: Tensor | None) -> None:
        sums = self.element_sums(plan, pairs) if plan.wants_sums else None
        squares = self.slice_squares(plan, pairs) if plan.slices else None
        if plan.reduction.steps:
            sums, squares = _reduce(plan.reduction, sums, squares)
        if plan.elements:
            self.add_elements_(plan, pairs, sums, times)
        if squares is not None:
            self.add_slices_(plan, pairs, squares, times)

    def shares(self) -> dict[str, int]:
        """How many terms each backend works on."""
        with torch.no_grad():  # a gradient that is not there yet will lie as its tensor does
            pairs = pairs_of(self.tensors, lambda t: t if t.grad is None else t.grad, self.only)
        plans, rest = self._sorted(pairs)
        fast = sum(len(p.elements) + (len(p.slices.terms) if p.slices else 0) for p in plans)
        return {name: n for name, n in ((self.name, fast), (rest.name, len(rest.terms))) if n}

    # Sorting the terms

    def _sorted(self, pairs: Pairs) -> tuple[list[DevicePlan], Plain]:
        key = pairs.signature()
        if key != self._last[0]:
            if key not in self._plans:
                if len(self._plans) > 8:
                    self._plans = {k: v for k, v in self._plans.items() if any(map(self.captured, v[0]))}
                self._plans[key] = self._sort(pairs)
            self._last = key, self._plans[key]
        return self._last[1]

    def _sort(self, pairs: Pairs) -> tuple[list[DevicePlan], Plain]:
        number = {id(t): i for i, t in enumerate(self.tensors)}
        fits = [self._fits(*pair, tensor) for pair, tensor in zip(pairs, self.tensors, strict=True)]
        by_device: dict[torch.device, list[Term]] = {}
        rest: list[Term] = []
        seen: dict[tuple[int, int], SlicedSide] = {}
        for term in self.terms:
            places = [number[id(t)] for t in term.unit.tensors]
            devices = {pairs[i][0].device for i in places}
            fast = len(devices) == 1 and all(fits[i] for i in places) and self._knows(term, pairs, places, seen)
            (by_device.setdefault(devices.pop(), []) if fast else rest).append(term)
        for penalty in {type(t.penalty): t.penalty for t in rest if type(t.unit) is ElementUnit}.values():
            if not self.takes(penalty, element_wise=True):
                warnings.warn(  # Python shows the same words once
                    f"{type(penalty).__name__} on elements has no fast path ({self.name}): it declares none, so its "
                    "gradient is computed tensor by tensor, with temporaries as large as the weights.",
                    stacklevel=2,
                )
        plans = [self._plan(device, terms, pairs, number) for device, terms in by_device.items()]
        return plans, Plain(rest, self.only)

    def _fits(self, weight: Tensor, grad: Tensor | None, tensor: Tensor) -> bool:
        if not weight.is_floating_point():
            return False
        whole = tensor if tensor.grad is None else tensor.grad
        return grad is None or (same_cut(tensor, whole) and walks_alike(weight, grad))

    def _knows(self, term: Term, pairs: Pairs, places: list[int], seen: dict[tuple[int, int], SlicedSide]) -> bool:
        unit = term.unit
        if type(unit) is ElementUnit:
            return self.takes(term.penalty, element_wise=True) and pairs[places[0]][1] is not None
        if not isinstance(unit, SliceUnit) or not self.takes(term.penalty, element_wise=False):
            return False
        for part, at in zip(unit.parts, places, strict=True):
            side = side_of(part)
            if side is None or matrix(pairs[at][0], side.groups, side.stacked) is None:
                return False
            if side.groups > 1 and pairs[at][0] is not part.tensor:  # a shard may cut through a group
                return False
            other = seen.get((at, 1 - side.dim), side)
            if seen.setdefault((at, side.dim), side) != side or other.stacked != side.stacked:
                return False
        return True

    def _plan(self, device: torch.device, terms: list[Term], pairs: Pairs, number: dict[int, int]) -> DevicePlan:
        used = {number[id(t)] for term in terms for t in term.unit.tensors}
        double = any(pairs[i][0].dtype == torch.float64 for i in used)
        dtype = torch.float64 if double else torch.float32
        elements = [Element(t, number[id(t.unit.tensors[0])]) for t in terms if type(t.unit) is ElementUnit]
        sliced = [t for t in terms if type(t.unit) is not ElementUnit]
        slices = SlicePlan(sliced, device, dtype) if sliced else None
        faces = list(slices.faces.values()) if slices else []
        wants_sums = any(e.term.penalty.scale_free for e in elements)
        lengths = ([1] * 2 * len(elements) if wants_sums else []) + [f.count for f in faces]
        owners = [e.term.unit.tensors[0] for e in elements] * (2 if wants_sums else 0) + [f.tensor for f in faces]
        reduction = Reduction.of(owners, lengths, device)
        return DevicePlan(device, dtype, elements, slices, _pieces(faces, pairs, number), reduction, wants_sums)


def _pieces(faces: list[Face], pairs: Pairs, number: dict[int, int]) -> list[Piece]:
    """Each sliced tensor once, with the numbers of its local slices along both dimensions."""
    by_tensor: dict[int, list[Face]] = {}
    for face in faces:
        by_tensor.setdefault(number[id(face.tensor)], []).append(face)
    pieces = []
    for at, along in by_tensor.items():
        shape = matrix(pairs[at][0], max(f.side.groups for f in along), along[0].side.stacked)
        assert shape is not None
        first = {0: -1, 1: -1}
        for face in along:
            first[face.side.dim] = face.first + offsets(face.tensor)[face.side.dim]
        pieces.append(Piece(at, shape, first[0], first[1]))
    return pieces


def _reduce(reduction: Reduction, sums: Tensor | None, squares: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    parts = [p.flatten() for p in (sums, squares) if p is not None]
    joined = list(reduction(torch.cat(parts)).split([len(p) for p in parts]))
    if sums is not None:
        sums = joined.pop(0).view_as(sums)
    return sums, joined.pop() if squares is not None else None
