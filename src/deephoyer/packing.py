"""A sparse tensor as bytes: where its nonzeros are, and what they are.

Where: a bitmap, or the gaps between nonzeros, a byte each (255 stands for "255 further, nothing yet");
the gaps are smaller below about one weight in eight. What: the values, as they lie in memory. −0.0
is a zero like the other, for `weight * mask` makes many of them. Files and models are not known here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A packed tensor has one more name in a file's header, and a line in its manifest: below this, packing costs more.
OVERHEAD = 200
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]


class PackingError(ValueError):
    """The bytes are not what packing gives."""


def pack_pattern(pattern: Bools) -> tuple[str, Bytes]:
    """The smaller of the two forms, with its name.

    >>> pack_pattern(np.array([False] * 300 + [True]))
    ('gaps', array([255,  45], dtype=uint8))
    """
    flat = pattern.ravel()
    if pattern_size(flat) < bitmap_size(flat.size):
        return "gaps", _to_gaps(flat)
    return "bitmap", np.packbits(flat, bitorder="little")


def unpack_pattern(form: str, packed: Bytes, size: int) -> Bools:
    """The pattern of `size` elements again; bytes that can't have come from `pack_pattern` are refused."""
    if form == "gaps":
        return _from_gaps(packed, size)
    if form != "bitmap":
        raise PackingError(f"{form!r} is not a form of pattern")
    if len(packed) != bitmap_size(size):
        raise PackingError(f"a bitmap of {len(packed)} bytes can't hold {size} elements")
    bits = np.unpackbits(packed, bitorder="little")
    if bits[size:].any():
        raise PackingError("the bitmap has bits beyond its last element")
    return bits[:size].astype(bool)


def _to_gaps(flat: Bools) -> Bytes:
    gaps = np.diff(np.flatnonzero(flat), prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1)
    packed = np.full(int(ends[-1]) if len(ends) else 0, 255, np.uint8)
    packed[ends - 1] = gaps % 255
    return packed


def _from_gaps(packed: Bytes, size: int) -> Bools:
    real = packed != 255
    reached = np.cumsum(packed.astype(np.int64) + real) - 1
    if len(packed) and (not real[-1] or reached[-1] >= size):
        raise PackingError(f"the gaps lead past the {size} elements")
    pattern = np.zeros(size, bool)
    pattern[reached[real]] = True
    return pattern


def bitmap_size(elements: int) -> int:
    """Bytes of a bitmap."""
    return (elements + 7) // 8


def gaps_size(flat: Bools) -> int:
    """Bytes of the gaps."""
    gaps = np.diff(np.flatnonzero(flat), prepend=-1) - 1
    return int(len(gaps) + (gaps // 255).sum())


def pattern_size(flat: Bools) -> int:
    """Bytes of the smaller form; a byte a nonzero can't beat the bitmap once there are that many."""
    bitmap = bitmap_size(flat.size)
    return bitmap if np.count_nonzero(flat) >= bitmap else min(bitmap, gaps_size(flat))


def packed_size(pattern: Bools, bytes_each: int) -> int:
    """Bytes that a tensor with these nonzeros takes: packed where that is worth it, as it is otherwise.

    >>> packed_size(np.zeros(1000, bool), 4), packed_size(np.ones(1000, bool), 4)
    (0, 4000)
    """
    flat = pattern.ravel()
    dense = flat.size * bytes_each
    packed = pattern_size(flat) + int(np.count_nonzero(flat)) * bytes_each
    return packed if packed + OVERHEAD < dense else dense
