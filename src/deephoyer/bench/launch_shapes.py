"""Trying launch shapes of the Triton kernels, to set the constants in `kernels/triton.py` and `kernels/tables.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deephoyer.bench.clock import milliseconds, replayed
from deephoyer.bench.networks import tensors_of
from deephoyer.bench.regularizer import attempt
from deephoyer.bench.sides import ours


def tune(names: list[str], budget: float) -> None:
    """Prints device milliseconds for launch shapes."""
    from deephoyer.kernels import launch_tables as tables
    from deephoyer.kernels import triton

    def device_ms(model: nn.Module, groups: str, shown: dict[str, Any]) -> None:
        attempt(shown, "ms", lambda: milliseconds(replayed(ours(model, groups, "triton")), "cuda", budget))
        print(groups, shown)

    for name in names:
        model = tensors_of(name, "cuda", torch.float32)
        print(name)
        for warps, block, chunk in CHUNK_SHAPES:
            triton.LARGE["num_warps"], triton.BLOCK, tables.CHUNKS = warps, block, (chunk,) * 3
            device_ms(model, "elements", {"warps": warps, "block": block, "chunk": chunk})
        for warps, height, width, tall in TILE_SHAPES:
            triton.LARGE["num_warps"], triton.HEIGHT, triton.WIDTH, tables.TALLS = warps, height, width, (tall,) * 3
            shape = {"warps": warps, "height": height, "width": width, "tall": tall}
            device_ms(model, "filters+channels", shape)


CHUNK_SHAPES = [(4, 1024, 4096), (4, 2048, 4096), (8, 2048, 8192), (8, 4096, 4096)]
CHUNK_SHAPES += [(8, 4096, 8192), (8, 4096, 16384), (8, 4096, 32768), (16, 8192, 16384)]
TILE_SHAPES = [(8, 32, 128, 64), (8, 32, 128, 128), (8, 32, 128, 256), (8, 32, 128, 512)]
TILE_SHAPES += [(4, 16, 128, 128), (8, 16, 256, 128), (8, 16, 256, 256), (4, 8, 256, 128)]
