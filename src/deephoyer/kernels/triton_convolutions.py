"""The device code for stacked convolutions: each network's images with its own weights, nothing copied into windows.

Images lie channels last. A convolution is a matrix product whose one side is read from where the windows are:
for each output position (m) all taps and channels (k). A network's programs touch only its own images, so that
places in memory fit in 32 bits once its beginning is known. Launching is in `convolutions.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_place(k, W: tl.constexpr, C: tl.constexpr, KW: tl.constexpr, VEC: tl.constexpr):
    """Where in a window the k-th number is: row, column, and how far from the window's first number."""
    tap = k // C
    row = tap // KW
    column = tap - row * KW
    away = (row * W + column) * C + k - tap * C
    return row, column, tl.max_contiguous(tl.multiple_of(away, VEC), VEC)


@triton.jit(do_not_specialize=["images"])
def convolve(
    x, weight, bias, y, images,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACKWARDS: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weight: networks × O × (taps, channels); `BACKWARDS` reads its taps from the last, as an input's gradient does.

    With padding a program's positions are in one row of all images: taps above or below the image are left out.
    """
    HO: tl.constexpr = H + 2 * PAD_H - KH + 1
    WO: tl.constexpr = W + 2 * PAD_W - KW + 1
    TAPS: tl.constexpr = KH * KW
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    network = tl.program_id(1).to(tl.int64)
    x += network * images * (H * W * C)
    y += network * images * (HO * WO * OUT)
    weight += network * (OUT * TAPS * C)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    if PADDED:
        tiles = (images * WO + BLOCK_M - 1) // BLOCK_M
        high = tl.program_id(0) // tiles
        m = (tl.program_id(0) - high * tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = m < images * WO
        image = m // WO
        wide = m - image * WO
        out = ((image * HO + high) * WO + wide) * OUT
        first = tl.maximum(PAD_H - high, 0) * (KW * C)
        last = tl.minimum(H + PAD_H - high, KH) * (KW * C)
    else:
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = m < images * (HO * WO)
        image = m // (HO * WO)
        rest = m - image * (HO * WO)
        high = rest // WO
        wide = rest - high * WO
        out = m * OUT
        first = 0
        last = TAPS * C
    left = wide - PAD_W
    window = tl.multiple_of(((image * H + high - PAD_H) * W + left) * C, VEC)
    sums = tl.zeros([BLOCK_M, BLOCK_O], WIDE)
    for at in range(first, last, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        _, column, away = window_place(k, W, C, KW, VEC)
        seen = inside[:, None] & (k < last)[None, :]
        if PADDED:
            across = left[:, None] + column[None, :]
            seen = seen & (across >= 0) & (across < W)
        seen = tl.max_constancy(seen, [1, VEC])
        a = tl.load(x + (window[:, None] + away[None, :]), mask=seen, other=0.0)
        tap = k // C
        own = (TAPS - 1 - tap) * C + k - tap * C if BACKWARDS else k
        own = tl.max_contiguous(tl.multiple_of(own, VEC), VEC)
        used = tl.max_constancy((k < last)[:, None] & (o < OUT)[None, :], [VEC, 1])
        b = tl.load(weight + (own[:, None] + (o * (TAPS * C))[None, :]), mask=used, other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if BIASED:
        sums += tl.load(bias + network * OUT + o, mask=o < OUT, other=0.0).to(WIDE)[None, :]
    kept = tl.max_constancy(inside[:, None] & (o < OUT)[None, :], [1, OUT_VEC])
    place = tl.max_contiguous(tl.multiple_of(out[:, None] + o[None, :], [1, OUT_VEC]), [1, OUT_VEC])
    tl.store(y + place, sums.to(y.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["images", "share"])
def weight_gradient(
    x, grad, which, partial, images, share,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, POOLED: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of weights and biases from `share` positions: partial sums, laid as weights are, then biases.

    A bias is the weight of an input that is always 1, one k beyond the others. `POOLED`: the gradient is the pooled
    outputs', and `which` says whose of the four each is.
    """
    STEP: tl.constexpr = 2 if POOLED else 1
    HO: tl.constexpr = (H + 2 * PAD_H - KH + 1) // STEP
    WO: tl.constexpr = (W + 2 * PAD_W - KW + 1) // STEP
    TAPS: tl.constexpr = KH * KW
    K: tl.constexpr = TAPS * C
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    blocks: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    network = tl.program_id(2).to(tl.int64)
    networks = tl.num_programs(2).to(tl.int64)
    x += network * images * (H * W * C)
    grad += network * images * (HO * WO * OUT)
    if POOLED:
        which += network * images * (HO * WO * OUT)
    k = (tl.program_id(0) // blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    o = (tl.program_id(0) % blocks) * BLOCK_O + tl.arange(0, BLOCK_O)
    row, column, away = window_place(k, W, C, KW, VEC)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, images * (HO * WO))
    sums = tl.zeros([BLOCK_K, BLOCK_O], WIDE)
    for at in range(begin, end, BLOCK_M):
        m = at + tl.arange(0, BLOCK_M)
        inside = m < end
        image = m // (HO * WO)
        rest = m - image * (HO * WO)
        high = rest // WO
        left = (rest - high * WO) * STEP - PAD_W
        high = high * STEP - PAD_H
        window = tl.multiple_of(((image * H + high) * W + left) * C, VEC)
        seen = (k < K)[:, None] & inside[None, :]
        if PADDED:
            down = row[:, None] + high[None, :]
            across = column[:, None] + left[None, :]
            seen = seen & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        seen = tl.max_constancy(seen, [VEC, 1])
        kept = tl.max_constancy(inside[:, None] & (o < OUT)[None, :], [1, OUT_VEC])
        place = tl.max_contiguous(tl.multiple_of((m * OUT)[:, None] + o[None, :], [1, OUT_VEC]), [1, OUT_VEC])
        b = tl.load(grad + place, mask=kept, other=0.0)
        if POOLED:
            number = tl.load(which + place, mask=kept, other=4)
        for q in tl.static_range(STEP * STEP):
            a = tl.load(x + (away[:, None] + window[None, :] + (q // 2 * W + q % 2) * C), mask=seen, other=0.0)
            if BIASED:
                a = tl.where((k == K)[:, None], 1.0, a).to(x.dtype.element_ty)
            own = tl.where(number == q, b, 0.0).to(b.dtype) if POOLED else b
            sums = tl.dot(a, own, sums, input_precision=PRECISION)
    weights = networks * (OUT * K)
    partial += tl.program_id(1) * (weights + networks * OUT if BIASED else weights)
    tap = k // C
    there = network * (OUT * K) + (o * K)[None, :] + ((k - tap * C) * TAPS + tap)[:, None]
    tl.store(partial + there, sums, mask=(k < K)[:, None] & (o < OUT)[None, :])
    if BIASED:
        biases = weights + network * OUT + (k - K)[:, None] + o[None, :]
        tl.store(partial + biases, sums, mask=(k == K)[:, None] & (o < OUT)[None, :])


@triton.jit
def pool_places(H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """A program's pooled elements: where their image begins, which they are, and the first of the four of each."""
    SIZE: tl.constexpr = (H // 2) * (W // 2) * C
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    image = tl.program_id(0) // blocks
    e = (tl.program_id(0) - image * blocks) * BLOCK + tl.arange(0, BLOCK)
    pixel = e // C
    line = pixel // (W // 2)
    first = (line * 2 * W + (pixel - line * (W // 2)) * 2) * C + e - pixel * C
    first = tl.max_contiguous(tl.multiple_of(first, VEC), VEC)
    image = image.to(tl.int64)
    return image * (H * W * C), image * SIZE, e, first, tl.max_constancy(e < SIZE, VEC)


@triton.jit
def larger(best, which, value, number: tl.constexpr):
    """The first of the largest, and its number; NaN is larger than all."""
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, number, which)


@triton.jit(do_not_specialize=["images"])
def convolve_and_pool(
    x, weight, bias, y, which, images,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`convolve` and `rectify_and_pool` at once, for windows of one block and no padding: positions are pooled ones."""
    HO: tl.constexpr = (H - KH + 1) // 2
    WO: tl.constexpr = (W - KW + 1) // 2
    K: tl.constexpr = KH * KW * C
    network = tl.program_id(1).to(tl.int64)
    x += network * images * (H * W * C)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < images * (HO * WO)
    image = m // (HO * WO)
    rest = m - image * (HO * WO)
    high = rest // WO
    window = tl.multiple_of(((image * H + high * 2) * W + (rest - high * WO) * 2) * C, VEC)
    k = tl.arange(0, BLOCK_K)
    _, _, away = window_place(k, W, C, KW, VEC)
    seen = tl.max_constancy(inside[:, None] & (k < K)[None, :], [1, VEC])
    used = tl.max_constancy((k < K)[:, None] & (o < OUT)[None, :], [VEC, 1])
    b = tl.load(weight + network * (OUT * K) + (k[:, None] + (o * K)[None, :]), mask=used, other=0.0)
    zero = tl.zeros([BLOCK_M, BLOCK_O], WIDE)
    best = zero
    number = tl.zeros([BLOCK_M, BLOCK_O], tl.int32)
    for q in tl.static_range(4):
        a = tl.load(x + (window[:, None] + away[None, :] + (q // 2 * W + q % 2) * C), mask=seen, other=0.0)
        sums = tl.dot(a, b, zero, input_precision=PRECISION)
        if q == 0:
            best = sums
        else:
            best, number = larger(best, number, sums, q)
    if BIASED:
        best += tl.load(bias + network * OUT + o, mask=o < OUT, other=0.0).to(WIDE)[None, :]
    # What is stored is looked at, so that a number rounded to 0 has no gradient, as if ReLU came after.
    best = best.to(y.dtype.element_ty)
    dead = best <= 0
    kept = tl.max_constancy(inside[:, None] & (o < OUT)[None, :], [1, OUT_VEC])
    place = tl.max_contiguous(tl.multiple_of((m * OUT)[:, None] + o[None, :], [1, OUT_VEC]), [1, OUT_VEC])
    begin = network * images * (HO * WO * OUT)
    tl.store(y + begin + place, tl.where(dead, 0.0, best).to(y.dtype.element_ty), mask=kept)
    tl.store(which + begin + place, tl.where(dead, 4, number).to(tl.uint8), mask=kept)


@triton.jit
def rectify_and_pool(
    x, y, which,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """max(0, largest of 2 × 2), and which one it was; 4 if none is above 0."""
    begin, pooled, e, first, inside = pool_places(H, W, C, VEC, BLOCK)
    x += begin
    best = tl.load(x + first, mask=inside, other=0.0)
    number = tl.zeros([BLOCK], tl.int32)
    best, number = larger(best, number, tl.load(x + first + C, mask=inside, other=0.0), 1)
    best, number = larger(best, number, tl.load(x + first + W * C, mask=inside, other=0.0), 2)
    best, number = larger(best, number, tl.load(x + first + (W + 1) * C, mask=inside, other=0.0), 3)
    dead = best <= 0
    tl.store(y + pooled + e, tl.where(dead, 0.0, best).to(y.dtype.element_ty), mask=inside)
    tl.store(which + pooled + e, tl.where(dead, 4, number).to(tl.uint8), mask=inside)


@triton.jit
def unpool(
    grad, which, out,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each gradient goes to the one that was the largest; the others get 0."""
    begin, pooled, e, first, inside = pool_places(H, W, C, VEC, BLOCK)
    out += begin
    g = tl.load(grad + pooled + e, mask=inside, other=0.0)
    number = tl.load(which + pooled + e, mask=inside, other=4)
    zero = tl.zeros_like(g)
    tl.store(out + first, tl.where(number == 0, g, zero), mask=inside)
    tl.store(out + first + C, tl.where(number == 1, g, zero), mask=inside)
    tl.store(out + first + W * C, tl.where(number == 2, g, zero), mask=inside)
    tl.store(out + first + (W + 1) * C, tl.where(number == 3, g, zero), mask=inside)
