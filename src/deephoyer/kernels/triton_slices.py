"""The device code for penalties on filters, channels and coupled groups.

A program works on a tile of one tensor seen as a matrix: it reads the tile once for the sums along
both dimensions, and once more to add both gradients. Partial sums are added up in a fixed order.
Launching is in `triton.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from deephoyer.kernels.triton_elements import pointer
from deephoyer.kernels.triton_slopes import bounded, slope

FIELDS = tl.constexpr(10)  # numbers a row in the tables of matrices and faces, which `tables.py` fills


@triton.jit
def find_tile(tile_of, matrices, tile, ALIGNED: tl.constexpr, TALL: tl.constexpr, WIDTH: tl.constexpr):
    """Which tensor, its rows and columns, and the tile's band, place in the band, and place along the columns."""
    m = tl.load(tile_of + tile)
    fields = matrices + m * FIELDS
    band = tl.load(fields + 1).to(tl.int32)
    columns = tl.load(fields + 2).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(columns, 8)
    across = tl.cdiv(columns, WIDTH)
    down = tl.cdiv(band, TALL)
    at = (tile - tl.load(fields)).to(tl.int32)
    return m, fields, band, columns, at // across // down, at // across % down, at % across


@triton.jit(do_not_specialize=["begin"])
def tile_squares(
    weights, tile_of, matrices, partial, begin,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    TALL: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Σw² over the tile's columns for each row, and over its rows for each column."""
    tile = begin + tl.program_id(0)
    m, fields, band, columns, group, down, across = find_tile(tile_of, matrices, tile, ALIGNED, TALL, WIDTH)
    w = pointer(weights, m, 0, DTYPE, ALIGNED)
    rows = tl.load(fields + 3)
    row_out = partial + tl.load(fields + 4) + across * rows
    column_out = partial + tl.load(fields + 5) + (down.to(tl.int64) * tl.cdiv(rows, band) + group) * columns
    j = across * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], WIDE)
    for at in range(0, TALL, HEIGHT):
        i = down * TALL + at + tl.arange(0, HEIGHT)
        row = group.to(tl.int64) * band + i
        inside = (i < band)[:, None] & (j < columns)[None, :]
        x = tl.load(w + row[:, None] * columns + j[None, :], mask=inside, other=0.0).to(WIDE)
        x = x * x
        total += x
        tl.store(row_out + row, tl.sum(x, 1), mask=i < band)
    tl.store(column_out + j, tl.sum(total, 0), mask=j < columns)


@triton.jit
def face_squares(partial, block_of, faces, squares, WIDE: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    """Σw² of each slice, from the partial sums that belong to it: a number times itself apart, in three nested runs."""
    block = tl.program_id(0)
    f = tl.load(block_of + block)
    fields = faces + f * FIELDS
    count = tl.load(fields + 1)
    channels = tl.load(fields + 4)
    s = (block - tl.load(fields)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(fields + 3) + s // channels * tl.load(fields + 5) + s % channels * tl.load(fields + 6)
    inner = tl.load(fields + 6)
    outer = tl.load(fields + 7)
    total = tl.load(fields + 8) * outer * inner
    step = tl.load(fields + 9)
    sum_ = tl.zeros([DEEP, BLOCK], WIDE)
    at = total * 0
    while at < total:
        k = at + tl.arange(0, DEEP)
        place = k // (outer * inner) * step + k // inner % outer * channels * inner + k % inner
        inside = (k < total)[:, None] & (s < count)[None, :]
        sum_ += tl.load(partial + place[:, None] + base[None, :], mask=inside, other=0.0)
        at += DEEP
    tl.store(squares + tl.load(fields + 2) + s, tl.sum(sum_, 0), mask=s < count)


@triton.jit
def group_coefficients(
    squares, starts, scales, times, out,
    SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
):  # fmt: skip
    """c = scale · p'(r) / r of each group, 0 where r is 0; a program does one unit."""
    u = tl.program_id(0)
    begin = tl.load(starts + u)
    end = tl.load(starts + u + 1)
    scale = (tl.load(tl.load(scales + u).to(tl.pointer_type(SCALE))) * tl.load(times)).to(WIDE)
    sum1 = tl.zeros([BLOCK], WIDE)
    sum2 = tl.zeros([BLOCK], WIDE)
    at = begin
    while at < end:
        i = at + tl.arange(0, BLOCK)
        square = tl.load(squares + i, mask=i < end, other=0.0)
        sum1 += tl.sqrt(square)
        sum2 += square
        at += BLOCK
    s1 = tl.sum(sum1, 0)
    s2 = tl.sum(sum2, 0)
    at = begin
    while at < end:
        i = at + tl.arange(0, BLOCK)
        r = tl.sqrt(tl.load(squares + i, mask=i < end, other=0.0))
        c = bounded(slope(r, s1, s2, KIND, P0, P1) / tl.where(r > 0, r, 1.0))
        tl.store(out + i, tl.where(r > 0, scale * c, 0.0), mask=i < end)
        at += BLOCK


@triton.jit(do_not_specialize=["begin"])
def tile_add(
    weights, grads, tile_of, matrices, coefficients, begin,
    DTYPE: tl.constexpr, GRAD: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    TALL: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """grad += (c of the row + c of the column's channel) · w, in place; backwards, as in `element_add`."""
    tile = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    m, fields, band, columns, group, down, across = find_tile(tile_of, matrices, tile, ALIGNED, TALL, WIDTH)
    w = pointer(weights, m, 0, DTYPE, ALIGNED)
    g = pointer(grads, m, 0, GRAD, ALIGNED)
    row_first = tl.load(fields + 6)
    column_first = tl.load(fields + 7)
    channels = tl.load(fields + 8).to(tl.int32)
    inner = tl.load(fields + 9).to(tl.int32)
    j = across * WIDTH + tl.arange(0, WIDTH)
    channel = column_first + group * channels + j // inner % channels
    sliced_columns = tl.where(column_first >= 0, columns, 0)
    sliced_rows = tl.where(row_first >= 0, band, 0)
    by_column = tl.load(coefficients + channel, mask=j < sliced_columns, other=0.0).to(WIDE)
    for at in range(0, TALL, HEIGHT):
        i = down * TALL + at + tl.arange(0, HEIGHT)
        row = group.to(tl.int64) * band + i
        by_row = tl.load(coefficients + row_first + row, mask=i < sliced_rows, other=0.0).to(WIDE)
        inside = (i < band)[:, None] & (j < columns)[None, :]
        place = row[:, None] * columns + j[None, :]
        x = tl.load(w + place, mask=inside, other=0.0).to(WIDE)
        y = tl.load(g + place, mask=inside, other=0.0).to(WIDE)
        y += (by_row[:, None] + by_column[None, :]) * x
        tl.store(g + place, y.to(GRAD), mask=inside)
