"""The device code for element-wise penalties: sums of all tensors, and the gradient added to all tensors.

A program works on a chunk of one tensor. Tables say which tensor a chunk belongs to and where that
tensor is, so that one launch serves a whole model. Partial sums are written, not accumulated, and
added up in a fixed order: the same weights give the same bits. Loops to a bound that was loaded are
`while` loops, since older interpreters can't make a `range` of one. Launching is in `triton.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from deephoyer.kernels.triton_slopes import slope


@triton.jit
def find_chunk(chunk_of, first, lengths, chunk, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Which tensor, where in it (64 bits: a tensor may have 2³¹ elements and more), and how much is left there."""
    t = tl.load(chunk_of + chunk)
    start = (chunk - tl.load(first + t)).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(lengths + t) - start, CHUNK).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 8)
    return t, start, left


@triton.jit
def pointer(table, t, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in the table, as a pointer; if it is known to be aligned, loads of 16 bytes follow."""
    p = tl.load(table + t).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        p = tl.multiple_of(p, 16)
    return p + start


@triton.jit(do_not_specialize=["begin", "chunks"])
def element_sums(
    weights, chunk_of, first, lengths, partial, begin, chunks,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ|w| and Σw² of each chunk."""
    chunk = begin + tl.program_id(0)
    t, start, left = find_chunk(chunk_of, first, lengths, chunk, ALIGNED, CHUNK)
    w = pointer(weights, t, start, DTYPE, ALIGNED)
    s1 = tl.zeros([BLOCK], WIDE)
    s2 = tl.zeros([BLOCK], WIDE)
    for at in tl.static_range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(w + i, mask=i < left, other=0.0).to(WIDE)
        s1 += tl.abs(x)
        s2 += x * x
    tl.store(partial + chunk, tl.sum(s1, 0))
    tl.store(partial + chunks + chunk, tl.sum(s2, 0))


@triton.jit(do_not_specialize=["chunks", "tensors"])
def tensor_sums(partial, first, ends, sums, chunks, tensors, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The two sums of each tensor, from those of its chunks."""
    t = tl.program_id(0)
    begin = tl.load(first + t)
    end = tl.load(ends + t)
    s1 = tl.zeros([BLOCK], WIDE)
    s2 = tl.zeros([BLOCK], WIDE)
    at = begin
    while at < end:
        i = at + tl.arange(0, BLOCK)
        s1 += tl.load(partial + i, mask=i < end, other=0.0)
        s2 += tl.load(partial + chunks + i, mask=i < end, other=0.0)
        at += BLOCK
    tl.store(sums + t, tl.sum(s1, 0))
    tl.store(sums + tensors + t, tl.sum(s2, 0))


@triton.jit(do_not_specialize=["begin", "tensors"])
def element_add(
    weights, grads, chunk_of, first, lengths, sums, scales, times, begin, tensors,
    DTYPE: tl.constexpr, GRAD: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
):  # fmt: skip
    """grad += scale · p'(|w|) · sign(w), in place; backwards, for what the sums read last may still be in the cache."""
    chunk = begin + tl.num_programs(0) - 1 - tl.program_id(0)
    t, start, left = find_chunk(chunk_of, first, lengths, chunk, ALIGNED, CHUNK)
    w = pointer(weights, t, start, DTYPE, ALIGNED)
    g = pointer(grads, t, start, GRAD, ALIGNED)
    s1 = tl.load(sums + t).to(WIDE)
    s2 = tl.load(sums + tensors + t).to(WIDE)
    scale = (tl.load(tl.load(scales + t).to(tl.pointer_type(SCALE))) * tl.load(times)).to(WIDE)
    for at in tl.static_range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < left
        x = tl.load(w + i, mask=inside, other=0.0).to(WIDE)
        y = tl.load(g + i, mask=inside, other=0.0).to(WIDE)
        c = scale * slope(tl.abs(x), s1, s2, KIND, P0, P1)
        y += tl.where(x > 0, c, tl.where(x < 0, -c, 0.0))
        tl.store(g + i, y.to(GRAD), mask=inside)
