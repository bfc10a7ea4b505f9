"""The device code for zeroing: only what is dropped is written, so all else keeps its bits, NaNs included."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
PROGRAMS = 256  # at most, for each tensor; a long one's take turns
BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # zero has the same bits in every type


@triton.jit(do_not_specialize=["programs"])
def zero_dropped(tensors, drops, lengths, programs, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in one tensor wherever its mask is set."""
    t = tl.program_id(1)
    length = tl.load(lengths + t)
    tensor = tl.load(tensors + t).to(tl.pointer_type(DTYPE))
    drop = tl.load(drops + t).to(tl.pointer_type(tl.int8))
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < length:
        i = start + tl.arange(0, BLOCK)
        gone = tl.load(drop + i, mask=i < length, other=0) != 0
        tl.store(tensor + i, tl.zeros([BLOCK], DTYPE), mask=gone)
        start += programs * BLOCK


def launch(table: list[Tensor], count: int, longest: int, size: int, device: torch.device) -> None:
    """For `count` tensors at the addresses in the table, whose elements take `size` bytes."""
    programs = max(1, min(PROGRAMS, -(-longest // BLOCK)))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        zero_dropped[(programs, count)](*table, programs, DTYPE=BITS[size], BLOCK=BLOCK, num_warps=8)
