"""The tables by which one launch serves all tensors of a model: what a program works on, and where.

Built once for a plan, with everything that doesn't change from step to step; addresses may change (a
gradient is allocated anew), so they have a table of their own. Nothing here needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deephoyer.kernels.layout import Matrix, Pairs
from deephoyer.kernels.passes import DevicePlan, Piece

# For models under 2²³ weights, under 2²⁷, and above: small ones need many small programs to fill a device.
CHUNKS = (4096, 8192, 16384)
TALLS = (64, 128, 256)


@dataclass(frozen=True)
class Launch:
    """Programs `begin` to `end` of a table: tensors of the same types, all of them aligned or none."""

    begin: int
    end: int
    dtype: torch.dtype
    grad: torch.dtype | None
    aligned: bool
    penalty: Any = None
    scale: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Element-wise terms: the tensors cut into chunks."""

    launches: list[Launch]
    chunk: int
    chunks: int
    chunk_of: Tensor
    first: Tensor
    ends: Tensor
    lengths: Tensor


@dataclass(frozen=True, eq=False)
class TileTable:
    """Terms on slices: the tensors as matrices cut into tiles, and how partial sums add up to slices."""

    launches: list[Launch]
    tall: int
    tile_of: Tensor
    matrices: Tensor
    block_of: Tensor
    faces: Tensor
    partials: int
    starts: Tensor


def chunk_table(plan: DevicePlan, pairs: Pairs, aligned: Sequence[bool]) -> ChunkTable:
    lengths = [pairs[e.at][0].numel() for e in plan.elements]
    chunk = _by_size(sum(lengths), CHUNKS)
    keys = []
    for e, length in zip(plan.elements, lengths, strict=True):
        w, g = pairs[e.at]
        assert g is not None
        keys.append((w.dtype, g.dtype, aligned[e.at] and length % 8 == 0, e.term.penalty, e.term.scale.dtype))
    counts = [-(-n // chunk) for n in lengths]
    launches, order, first = _in_launches(keys, counts)
    ends = [a + n for a, n in zip(first, counts, strict=True)]
    on = plan.device
    return ChunkTable(
        launches, chunk, sum(counts),
        _repeat(order, counts, on), _int64(first, on), _int64(ends, on), _int64(lengths, on),
    )  # fmt: skip


def tile_table(plan: DevicePlan, pairs: Pairs, aligned: Sequence[bool], width: int, block: int) -> TileTable:
    assert plan.slices is not None
    tall = _by_size(sum(pairs[p.at][0].numel() for p in plan.pieces), TALLS)
    keys, counts = [], []
    for p in plan.pieces:
        w, g = pairs[p.at]
        keys.append((w.dtype, None if g is None else g.dtype, aligned[p.at] and p.matrix.columns % 8 == 0, None))
        across, down = _grid(p.matrix, tall, width)
        counts.append(across * down * p.matrix.groups)
    launches, order, first = _in_launches(keys, counts)
    matrices, faces, partials = _rows(plan.pieces, first, tall, width)
    blocks = [-(-face[1] // block) for face in faces]
    for face, start in zip(faces, _running(blocks), strict=True):
        face[0] = start
    on = plan.device
    starts = [*_running(plan.slices.lengths), sum(plan.slices.lengths)]
    return TileTable(
        launches, tall, _repeat(order, counts, on), _int64(matrices, on),
        _repeat(range(len(faces)), blocks, on), _int64(faces, on), partials, _int64(starts, on),
    )  # fmt: skip


def _rows(pieces: list[Piece], first: list[int], tall: int, width: int) -> tuple[list[list[int]], list[list[int]], int]:
    """The rows of both tables, as the device code reads them, and how many partial sums there are."""
    matrices, faces, partials = [], [], 0
    for p, tile in zip(pieces, first, strict=True):
        m = p.matrix
        across, down = _grid(m, tall, width)
        by_row, by_column = partials, partials + across * m.rows
        partials = by_column + down * m.groups * m.columns
        matrices.append([tile, m.band, m.columns, m.rows, by_row, by_column, p.row, p.column, m.channels, m.inner])
        if p.row >= 0:
            faces.append([0, m.rows, p.row, by_row, max(m.rows, 1), 0, 1, 1, across, m.rows])
        if p.column >= 0:
            step = m.groups * m.columns
            count = m.groups * m.channels
            faces.append([0, count, p.column, by_column, m.channels, m.columns, m.inner, m.outer, down, step])
    return matrices, [f for f in faces if f[1] * f[6] * f[7] * f[8] > 0], partials


def _grid(m: Matrix, tall: int, width: int) -> tuple[int, int]:
    return -(-m.columns // width), -(-m.band // tall)


def _by_size(total: int, sizes: tuple[int, int, int]) -> int:
    return sizes[0] if total < 1 << 23 else sizes[1] if total < 1 << 27 else sizes[2]


def _in_launches(keys: list[tuple[Any, ...]], counts: list[int]) -> tuple[list[Launch], list[int], list[int]]:
    """Items with equal keys next to each other: the launches, the items in that order, each item's first program."""
    order = sorted(range(len(keys)), key=lambda i: [*map(str, keys[i]), i])
    starts = dict(zip(order, _running([counts[i] for i in order]), strict=True))
    launches = []
    for key in dict.fromkeys(keys[i] for i in order):
        mine = [i for i in order if keys[i] == key and counts[i]]
        if mine:
            launches.append(Launch(starts[mine[0]], starts[mine[-1]] + counts[mine[-1]], *key))
    return launches, order, [starts[i] for i in range(len(keys))]


def _running(counts: Iterable[int]) -> list[int]:
    """The sum of what came before each."""
    return list(accumulate(counts, initial=0))[:-1]


def _repeat(order: Iterable[int], counts: list[int], device: torch.device) -> Tensor:
    order = list(order)
    times = torch.tensor([counts[i] for i in order], dtype=torch.int64)
    return torch.repeat_interleave(torch.tensor(order, dtype=torch.int32), times).to(device)


def _int64(numbers: Any, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)
