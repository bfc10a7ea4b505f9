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
FEW = 64
"""Numbers in a window up to which memory, not arithmetic, is the limit: the outputs are then pooled before stored."""
Padding = tuple[int, int]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding = (0, 0)) -> Tensor:
    """`F.conv2d` of each network. The images: all networks' one after the other; the weights: stacked."""
    found: Tensor = _Convolution.apply(x, weight, bias, padding)
    return found


def convolve_and_pool(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Padding = (0, 0)) -> Tensor:
    """`max_pool2d(relu(…), 2)` of the convolutions; height and width of what they give must be even."""
    if any(padding) or weight[0, 0].numel() > FEW:
        return rectify_and_pool(convolve(x, weight, bias, padding))
    found: Tensor = _PooledConvolution.apply(x, weight, bias)
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
        return _convolve(x, _packed(weight, x.dtype), bias, padding, ctx.precision).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = _channels_last(grads[0])
        found: list[Tensor | None] = [None, None, None, None]
        if ctx.needs_input_grad[0]:
            found[0] = _input_gradient(grad, weight, ctx.padding, ctx.precision)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            found[1], found[2] = _weight_gradient(x, grad, weight, ctx.biased, ctx.padding, ctx.precision)
        return tuple(found)


class _PooledConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = _channels_last(x)
        ctx.biased, ctx.precision = bias is not None, _precision(x.dtype)
        y, which = _convolve_and_pool(x, weight, bias, ctx.precision)
        ctx.save_for_backward(x, weight, which)
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, which = ctx.saved_tensors
        grad = _channels_last(grads[0])
        found: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            found[0] = _input_gradient(_unpool(grad, which), weight, (0, 0), ctx.precision)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            found[1], found[2] = _weight_gradient(x, grad, weight, ctx.biased, (0, 0), ctx.precision, which)
        return tuple(found)


class _RectifiedPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = _channels_last(x)
        images, high, wide, channels = x.shape
        y = x.new_empty(images, high // 2, wide // 2, channels)
        which = torch.empty_like(y, dtype=torch.uint8)
        _pool(kernels.rectify_and_pool, (x, y, which), x.shape)
        ctx.save_for_backward(which)
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (which,) = ctx.saved_tensors
        return _unpool(_channels_last(grads[0]), which).permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def _packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Networks × outputs × rows × columns × channels, as windows lie."""
    return weight.detach().permute(0, 1, 3, 4, 2).to(dtype).contiguous()


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
        "H": high, "W": wide, "C": channels, "OUT": outputs, "KH": taps[0], "KW": taps[1],
        "PAD_H": padding[0], "PAD_W": padding[1], "PRECISION": precision,
        "WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "VEC": gcd(channels, together), "OUT_VEC": gcd(outputs, together),
    }  # fmt: skip


def output_tile(x: Tensor, inputs: int, outputs: int, precision: str) -> dict[str, int]:
    """Positions × outputs of a program of `convolve`, and how much of a window it takes at a time."""
    if _exact(x, precision):
        tile = {"BLOCK_M": 64, "BLOCK_O": _block(outputs, 64), "BLOCK_K": _block(inputs, 16)}
        return tile | {"num_warps": 4, "num_stages": 2}
    tile = {"BLOCK_M": 128, "BLOCK_O": _block(outputs, 128), "BLOCK_K": _block(inputs, 128 // x.element_size())}
    return tile | {"num_warps": 4, "num_stages": 3}


def pooled_tile(x: Tensor, inputs: int, outputs: int, precision: str) -> dict[str, int]:
    """Pooled positions × outputs of a program of `convolve_and_pool`, which takes windows whole."""
    block = 32 if _exact(x, precision) else 64
    return {"BLOCK_M": block, "BLOCK_O": _block(outputs, 32), "BLOCK_K": _block(inputs, FEW), "num_warps": 4}


def weight_tile(x: Tensor, inputs: int, outputs: int, precision: str, pooled: bool) -> dict[str, int]:
    """Inputs × outputs of a program of `weight_gradient`, and how many positions it takes at a time."""
    if _exact(x, precision):
        tile = {"BLOCK_M": 16, "BLOCK_O": _block(outputs, 64), "BLOCK_K": _block(inputs, 32)}
        return tile | {"num_warps": 4, "num_stages": 2}
    positions = 16 if pooled else 64 if inputs <= FEW else 32  # a pooled one stands for four
    tile = {"BLOCK_M": positions, "BLOCK_O": _block(outputs, 64), "BLOCK_K": _block(inputs, 128)}
    return tile | {"num_warps": 4, "num_stages": 3}


def _exact(x: Tensor, precision: str) -> bool:
    """Whether products run without tensor cores: tiles must then be small to fit in registers."""
    return precision == "ieee" and x.element_size() >= 4


def _block(size: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _convolve(
    x: Tensor, packed: Tensor, bias: Tensor | None, padding: Padding, precision: str, backwards: bool = False
) -> Tensor:
    networks, outputs, *taps, channels = packed.shape
    images, high, wide, _ = x.shape
    high, wide = high + 2 * padding[0] - taps[0] + 1, wide + 2 * padding[1] - taps[1] + 1
    y = x.new_empty(images, high, wide, outputs)
    images //= networks
    tile = output_tile(x, taps[0] * taps[1] * channels, outputs, precision)
    block = tile["BLOCK_M"]
    rows = high * triton.cdiv(images * wide, block) if any(padding) else triton.cdiv(images * high * wide, block)
    grid = (rows, networks, triton.cdiv(outputs, tile["BLOCK_O"]))
    shape = _shape(x, outputs, (taps[0], taps[1]), padding, precision)
    with torch.cuda.device_of(x):
        kernels.convolve[grid](
            x, packed, x if bias is None else bias, y, images, **shape, **tile, BACKWARDS=backwards,
            BIASED=bias is not None,
        )  # fmt: skip
    return y


def _convolve_and_pool(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """The pooled outputs, and which of the four each was."""
    networks, outputs, channels, *taps = weight.shape
    images, high, wide, _ = x.shape
    y = x.new_empty(images, (high - taps[0] + 1) // 2, (wide - taps[1] + 1) // 2, outputs)
    which = torch.empty_like(y, dtype=torch.uint8)
    images //= networks
    tile = pooled_tile(x, taps[0] * taps[1] * channels, outputs, precision)
    rows = triton.cdiv(y[:images, ..., 0].numel(), tile["BLOCK_M"])
    shape = _shape(x, outputs, (taps[0], taps[1]), (0, 0), precision)
    with torch.cuda.device_of(x):
        kernels.convolve_and_pool[(rows, networks, triton.cdiv(outputs, tile["BLOCK_O"]))](
            x, _packed(weight, x.dtype), x if bias is None else bias, y, which, images, **shape, **tile,
            BIASED=bias is not None,
        )  # fmt: skip
    return y, which


def _input_gradient(grad: Tensor, weight: Tensor, padding: Padding, precision: str) -> Tensor:
    """An input has a part in the windows around it: a convolution of the outputs' gradient, taps reversed."""
    packed = _packed(weight.transpose(1, 2), grad.dtype)
    around = (weight.shape[3] - 1 - padding[0], weight.shape[4] - 1 - padding[1])
    return _convolve(grad, packed, None, around, precision, backwards=True).permute(0, 3, 1, 2)


def _weight_gradient(
    x: Tensor, grad: Tensor, weight: Tensor, biased: bool, padding: Padding, precision: str, which: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    networks, outputs, channels, *taps = weight.shape
    inputs = taps[0] * taps[1] * channels + biased
    images = len(x) // networks
    tile = weight_tile(x, inputs, outputs, precision, which is not None)
    blocks = triton.cdiv(inputs, tile["BLOCK_K"]) * triton.cdiv(outputs, tile["BLOCK_O"])
    positions = images * grad.shape[1] * grad.shape[2]
    share = _share(positions, tile["BLOCK_M"], PROGRAMS // (networks * blocks))
    splits = triton.cdiv(positions, share)
    size = weight.numel() + (networks * outputs if biased else 0)
    partial = torch.empty(splits, size, dtype=_wide(x.dtype), device=x.device)
    shape = _shape(x, outputs, (taps[0], taps[1]), padding, precision)
    with torch.cuda.device_of(x):
        kernels.weight_gradient[(blocks, splits, networks)](
            x, grad, grad if which is None else which, partial, images, share, **shape, **tile, BIASED=biased,
            POOLED=which is not None,
        )  # fmt: skip
    sums = (partial.sum(0) if splits > 1 else partial[0]).to(weight.dtype)
    bias = sums[weight.numel() :].view(networks, outputs) if biased else None
    return sums[: weight.numel()].view_as(weight), bias


def _share(positions: int, block: int, splits: int) -> int:
    """How many positions a part of the sum has: whole blocks, and four at least.

    >>> _share(57600, 64, 42), _share(90, 64, 42)
    (1408, 256)
    """
    return triton.cdiv(max(triton.cdiv(positions, max(splits, 1)), 4 * block), block) * block


def _unpool(grad: Tensor, which: Tensor) -> Tensor:
    images, high, wide, channels = grad.shape
    out = grad.new_empty(images, 2 * high, 2 * wide, channels)
    _pool(kernels.unpool, (grad, which, out), out.shape)
    return out


def _pool(kernel: Any, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> None:
    images, high, wide, channels = shape
    programs = images * triton.cdiv(high // 2 * (wide // 2) * channels, POOL_BLOCK)
    vec = gcd(channels, 16 // tensors[0].element_size())
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*tensors, H=high, W=wide, C=channels, VEC=vec, BLOCK=POOL_BLOCK, num_warps=4)
