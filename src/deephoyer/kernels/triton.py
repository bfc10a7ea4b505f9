"""The passes as Triton kernels: all tensors of a model in a few launches, for CUDA.

Element-wise: three launches (sums of chunks, sums of tensors, gradient); on slices four (squares of
tiles, of slices, coefficients, gradient). Weights of several types, or some whose addresses or sizes
don't allow 16-byte loads, take a launch a type more. There is no temporary as large as the weights,
no waiting for the device, and no atomics. This file launches; the device code is next to it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from deephoyer.kernels import triton_elements, triton_slices
from deephoyer.kernels.addresses import AddressBook
from deephoyer.kernels.passes import Pair, Passes, Plan
from deephoyer.kernels.slices import one_penalty
from deephoyer.kernels.tables import ChunkTable, TileTable, chunk_table, tile_table
from deephoyer.kernels.triton_slopes import kind_of
from deephoyer.penalties import Penalty

TYPES: dict[torch.dtype | None, tl.dtype] = {
    torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
}  # fmt: skip
BLOCK = 4096  # elements a program has in registers at a time
HEIGHT, WIDTH = 32, 128  # the same for slices: rows and columns
LARGE = {"num_warps": 8, "enable_fp_fusion": True}
SMALL = {"num_warps": 4, "enable_fp_fusion": True}
FACE_BLOCK, FACE_DEEP = 64, 16


@dataclass(eq=False)
class Desk:
    """What a plan needs at every step."""

    book: AddressBook
    one: Tensor
    chunks: dict[tuple[bool, ...], ChunkTable] = field(default_factory=dict)
    tiles: dict[tuple[bool, ...], TileTable] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)  # by the first pass, for the second


class Triton(Passes):
    """Fused kernels for CUDA."""

    name = "triton"

    # A compiler that traced a launch would see tables of addresses, not the gradients that are written.
    @torch.compiler.disable
    def add_grad_(self, times: Tensor | None = None) -> None:
        super().add_grad_(times)

    def _run(self, plan: Plan, pairs: list[Pair], times: Tensor | None) -> None:
        with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
            super()._run(plan, pairs, times)

    def takes(self, penalty: Penalty, element_wise: bool) -> bool:
        return not element_wise or kind_of(penalty) is not None

    def element_sums(self, plan: Plan, pairs: list[Pair]) -> Tensor:
        _desk(plan).found["elements"] = found = self._element_tables(plan, pairs)
        table, (weights, _, _) = found
        partial = torch.empty(2 * table.chunks, dtype=plan.dtype, device=plan.device)
        sums = torch.empty(2, len(plan.elements), dtype=plan.dtype, device=plan.device)
        for launch in table.launches:
            triton_elements.element_sums[(launch.end - launch.begin,)](
                weights, table.chunk_of, table.first, table.lengths, partial, launch.begin, table.chunks,
                DTYPE=TYPES[launch.dtype], WIDE=_wide(launch.dtype), ALIGNED=launch.aligned,
                CHUNK=table.chunk, BLOCK=BLOCK, **LARGE,
            )  # fmt: skip
        triton_elements.tensor_sums[(len(plan.elements),)](
            partial, table.first, table.ends, sums, table.chunks, len(plan.elements),
            WIDE=TYPES[plan.dtype], BLOCK=1024, **SMALL,
        )  # fmt: skip
        return sums

    def add_elements_(self, plan: Plan, pairs: list[Pair], sums: Tensor | None, times: Tensor | None) -> None:
        found = _desk(plan).found.pop("elements", None) or self._element_tables(plan, pairs)
        table, (weights, grads, scales) = found
        if sums is None:  # a separable penalty doesn't look at them
            sums = torch.empty(2, len(plan.elements), dtype=plan.dtype, device=plan.device)
        times = _desk(plan).one if times is None else times
        for launch in reversed(table.launches):
            kind, p0, p1 = kind_of(launch.penalty) or (0, 0.0, 0.0)
            triton_elements.element_add[(launch.end - launch.begin,)](
                weights, grads, table.chunk_of, table.first, table.lengths, sums, scales, times,
                launch.begin, len(plan.elements),
                DTYPE=TYPES[launch.dtype], GRAD=TYPES[launch.grad], WIDE=_wide(launch.dtype), SCALE=TYPES[launch.scale],
                ALIGNED=launch.aligned, CHUNK=table.chunk, BLOCK=BLOCK, KIND=kind, P0=p0, P1=p1, **LARGE,
            )  # fmt: skip

    def slice_squares(self, plan: Plan, pairs: list[Pair]) -> Tensor:
        assert plan.slices is not None
        _desk(plan).found["slices"] = found = self._slice_tables(plan, pairs)
        table, (weights, _, _) = found
        partial = torch.empty(table.partials, dtype=plan.dtype, device=plan.device)
        squares = torch.zeros(plan.slices.slices, dtype=plan.dtype, device=plan.device)
        for launch in table.launches:
            triton_slices.tile_squares[(launch.end - launch.begin,)](
                weights, table.tile_of, table.matrices, partial, launch.begin,
                DTYPE=TYPES[launch.dtype], WIDE=_wide(launch.dtype), ALIGNED=launch.aligned,
                TALL=table.tall, HEIGHT=HEIGHT, WIDTH=WIDTH, **LARGE,
            )  # fmt: skip
        if len(table.block_of):
            triton_slices.face_squares[(len(table.block_of),)](
                partial, table.block_of, table.faces, squares,
                WIDE=TYPES[plan.dtype], BLOCK=FACE_BLOCK, DEEP=FACE_DEEP, **SMALL,
            )  # fmt: skip
        return squares

    def add_slices_(self, plan: Plan, pairs: list[Pair], squares: Tensor, times: Tensor | None) -> None:
        table, (weights, grads, scales) = _desk(plan).found.pop("slices")
        c = self._coefficients(plan, table, scales, squares, times)
        for launch in reversed(table.launches):
            if launch.grad is not None:
                triton_slices.tile_add[(launch.end - launch.begin,)](
                    weights, grads, table.tile_of, table.matrices, c, launch.begin,
                    DTYPE=TYPES[launch.dtype], GRAD=TYPES[launch.grad], WIDE=_wide(launch.dtype),
                    ALIGNED=launch.aligned, TALL=table.tall, HEIGHT=HEIGHT, WIDTH=WIDTH, **LARGE,
                )  # fmt: skip

    def _coefficients(
        self, plan: Plan, table: TileTable, scales: Tensor, squares: Tensor, times: Tensor | None
    ) -> Tensor:
        assert plan.slices is not None
        penalty = one_penalty(plan.slices.terms)
        alike = all(t.scale.dtype == plan.dtype for t in plan.slices.terms)
        known = kind_of(penalty) if penalty is not None and alike else None
        if known is None:
            return plan.slices.coefficients(squares, times)
        c = torch.empty(plan.slices.groups, dtype=plan.dtype, device=plan.device)
        triton_slices.group_coefficients[(len(plan.slices.terms),)](
            plan.slices.gather(squares), table.starts, scales, _desk(plan).one if times is None else times, c,
            SCALE=TYPES[plan.dtype], WIDE=TYPES[plan.dtype], BLOCK=1024,
            KIND=known[0], P0=known[1], P1=known[2], **SMALL,
        )  # fmt: skip
        return plan.slices.scatter(c)

    # Tables

    def _element_tables(self, plan: Plan, pairs: list[Pair]) -> tuple[ChunkTable, list[Tensor]]:
        desk = _desk(plan)
        at = [e.at for e in plan.elements]
        sections = _addresses(pairs, at, tuple(e.term.scale.data_ptr() for e in plan.elements))
        aligned = _aligned(sections)
        if aligned not in desk.chunks:
            by_place = dict(zip(at, aligned, strict=True))
            desk.chunks[aligned] = chunk_table(plan, pairs, [by_place.get(i, False) for i in range(len(pairs))])
        return desk.chunks[aligned], desk.book.table(sections)

    def _slice_tables(self, plan: Plan, pairs: list[Pair]) -> tuple[TileTable, list[Tensor]]:
        assert plan.slices is not None
        desk = _desk(plan)
        at = [p.at for p in plan.pieces]
        sections = _addresses(pairs, at, tuple(t.scale.data_ptr() for t in plan.slices.terms))
        aligned = _aligned(sections)
        if aligned not in desk.tiles:
            by_place = dict(zip(at, aligned, strict=True))
            flags = [by_place.get(i, False) for i in range(len(pairs))]
            desk.tiles[aligned] = tile_table(plan, pairs, flags, WIDTH, FACE_BLOCK)
        return desk.tiles[aligned], desk.book.table(sections)


def _desk(plan: Plan) -> Desk:
    if plan.tables is None:
        plan.tables = Desk(AddressBook(plan.device), torch.ones((), dtype=plan.dtype, device=plan.device))
    desk: Desk = plan.tables
    return desk


def _addresses(pairs: list[Pair], at: list[int], scales: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    weights = tuple(pairs[i][0].data_ptr() for i in at)
    grads = tuple(0 if (grad := pairs[i][1]) is None else grad.data_ptr() for i in at)
    return weights, grads, scales


def _aligned(sections: tuple[tuple[int, ...], ...]) -> tuple[bool, ...]:
    return tuple((w | g) % 16 == 0 for w, g in zip(sections[0], sections[1], strict=True))


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
