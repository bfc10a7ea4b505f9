"""Stacked convolutions and pooling on CUDA: launches the Triton kernels, and is differentiable.

Nothing waits for the device and nothing is summed in an order that changes: steps can be captured and repeat bit for
bit. `train/stacked.py` has the plain twin and chooses.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deephoyer.kernels import triton_convolutions as kernels

PROGRAMS = 1024
"""Programs that a GPU is to work on at once where a long sum can be split."""
POOL_BLOCK = 1024
Padding = tuple[int, int]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding = (0, 0)) -> Tensor:
    """`F.conv2d` for each network: images of all networks one after the other, weight networks × O × C × rows × columns."""
    found: Tensor = _Convolution.apply(x, weight, bias, padding)
    return found


def rectify_and_pool(x: Tensor) -> Tensor:
    """`max_pool2d(relu(x), 2)` in one pass; height and width must be even."""
    found: Tensor = _RectifiedPool.apply(x)
    return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding) -> Tensor:
        x = _channels_last(x)
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.padding, ctx.precision = bias is not None, padding, _precision(x.dtype)
        packed = weight.detach().permute(0, 1, 3, 4, 2).to(x.dtype).contiguous()
        return _convolve(x, packed, bias, padding, ctx.precision).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = _channels_last(grads[0])
        found: list[Tensor | None] = [None, None, None, None]
        if ctx.needs_input_grad[0]:
            # An input has a part in the windows around it: a convolution of the outputs' gradient, taps reversed.
            packed = weight.permute(0, 2, 3, 4, 1).to(x.dtype).contiguous()
            around = (weight.shape[3] - 1 - ctx.padding[0], weight.shape[4] - 1 - ctx.padding[1])
            found[0] = _convolve(grad, packed, None, around, ctx.precision, backwards=True).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            found[1], found[2] = _weight_gradient(x, grad, weight, ctx.biased, ctx.padding, ctx.precision)
        return tuple(found)


class _RectifiedPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = _channels_last(x)
        images, high, wide, channels = ctx.shape = x.shape
        y = x.new_empty(images, high // 2, wide // 2, channels)
        which = torch.empty_like(y, dtype=torch.uint8)
        _pool(kernels.rectify_and_pool, (x, y, which), x.shape)
        ctx.save_for_backward(which)
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (which,) = ctx.saved_tensors
        grad = _channels_last(grads[0])
        out = grad.new_empty(ctx.shape)
        _pool(kernels.unpool, (grad, which, out), ctx.shape)
        return out.permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def _precision(dtype: torch.dtype) -> str:
    exact = dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shape(x: Tensor, outputs: int, taps: tuple[int, int], padding: Padding, precision: str) -> dict[str, Any]:
    """What both kernels want to know at compile time: `VEC` numbers of a window lie side by side, and aligned."""
    _, high, wide, channels = x.shape
    together = 16 // x.element_size()
    return {
        "H": high, "W": wide, "C": channels, "O": outputs, "KH": taps[0], "KW": taps[1],
        "PAD_H": padding[0], "PAD_W": padding[1], "PRECISION": precision,
        "WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "VEC": gcd(channels, together), "OUT_VEC": gcd(outputs, together),
    }  # fmt: skip


def _exact(x: Tensor, precision: str) -> bool:
    """Whether products run without tensor cores: tiles must then be small to fit in registers."""
    return precision == "ieee" and x.element_size() >= 4


def _block(size: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _convolve(
    x: Tensor, packed: Tensor, bias: Tensor | None, padding: Padding, precision: str, backwards: bool = False
) -> Tensor:
    """`packed`: networks × O × rows × columns × channels, as windows lie."""
    networks, outputs, *taps, channels = packed.shape
    images, high, wide, _ = x.shape
    high, wide = high + 2 * padding[0] - taps[0] + 1, wide + 2 * padding[1] - taps[1] + 1
    y = x.new_empty(images, high, wide, outputs)
    images //= networks
    exact = _exact(x, precision)
    block_m, block_o = (64, _block(outputs, 64)) if exact else (128, _block(outputs, 128))
    block_k = _block(taps[0] * taps[1] * channels, 16 if exact else 128 // x.element_size())
    rows = high * -(-images * wide // block_m) if any(padding) else -(-images * high * wide // block_m)
    grid = (rows, networks, -(-outputs // block_o))
    shape = _shape(x, outputs, (taps[0], taps[1]), padding, precision)
    with torch.cuda.device_of(x):
        kernels.convolve[grid](
            x, packed, x if bias is None else bias, y, images, **shape, BACKWARDS=backwards, BIASED=bias is not None,
            BLOCK_M=block_m, BLOCK_O=block_o, BLOCK_K=block_k, num_warps=4, num_stages=2 if exact else 4,
        )  # fmt: skip
    return y


def _weight_gradient(
    x: Tensor, grad: Tensor, weight: Tensor, biased: bool, padding: Padding, precision: str
) -> tuple[Tensor, Tensor | None]:
    networks, outputs, channels, *taps = weight.shape
    inputs = taps[0] * taps[1] * channels + biased
    images = len(x) // networks
    exact = _exact(x, precision)
    block_m, most = (16, 32) if exact else (64, 128)
    block_k, block_o = _block(inputs, most), _block(outputs, 64)
    blocks = -(-inputs // block_k) * -(-outputs // block_o)
    positions = images * grad.shape[1] * grad.shape[2]
    splits = max(1, min(PROGRAMS // (networks * blocks), positions // (4 * block_m)))
    share = -(-positions // (splits * block_m)) * block_m
    splits = -(-positions // share)
    size = weight.numel() + (networks * outputs if biased else 0)
    partial = torch.empty(splits, size, dtype=_wide(x.dtype), device=x.device)
    shape = _shape(x, outputs, (taps[0], taps[1]), padding, precision)
    with torch.cuda.device_of(x):
        kernels.weight_gradient[(blocks, splits, networks)](
            x, grad, partial, images, share, **shape, BIASED=biased,
            BLOCK_M=block_m, BLOCK_O=block_o, BLOCK_K=block_k, num_warps=4, num_stages=2 if exact else 3,
        )  # fmt: skip
    sums = (partial.sum(0) if splits > 1 else partial[0]).to(weight.dtype)
    bias = sums[weight.numel() :].view(networks, outputs) if biased else None
    return sums[: weight.numel()].view_as(weight), bias


def _pool(kernel: Any, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> None:
    images, high, wide, channels = shape
    programs = images * triton.cdiv(high // 2 * (wide // 2) * channels, POOL_BLOCK)
    vec = gcd(channels, 16 // tensors[0].element_size())
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*tensors, H=high, W=wide, C=channels, VEC=vec, BLOCK=POOL_BLOCK, num_warps=4)
