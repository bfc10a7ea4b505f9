"""The weights of six networks: only their shapes matter, so they are layers in a row that never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn


def lenet_300_100() -> Iterator[nn.Module]:
    yield from (linear(784, 300), linear(300, 100), linear(100, 10))


def resnet_56() -> Iterator[nn.Module]:
    yield conv(3, 16, 3)
    width = 16
    for out in (16, 32, 64):
        for _ in range(18):
            yield conv(width, out, 3)
            width = out
    yield linear(64, 10)


def resnet_50() -> Iterator[nn.Module]:
    yield conv(3, 64, 7)
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from (conv(width, inner, 1), conv(inner, inner, 3), conv(inner, 4 * inner, 1))
            if block == 0:
                yield conv(width, 4 * inner, 1)
            width = 4 * inner
    yield linear(2048, 1000)


def alexnet() -> Iterator[nn.Module]:
    yield from (conv(3, 96, 11), conv(96, 256, 5, 2), conv(256, 384, 3), conv(384, 384, 3, 2), conv(384, 256, 3, 2))
    yield from (linear(9216, 4096), linear(4096, 4096), linear(4096, 1000))


def vit_large() -> Iterator[nn.Module]:
    yield conv(3, 1024, 16)
    for _ in range(24):
        yield from (linear(1024, 3072), linear(1024, 1024), linear(1024, 4096), linear(4096, 1024))
    yield linear(1024, 1000)


def decoder_1b() -> Iterator[nn.Module]:
    for _ in range(22):
        yield from (linear(2048, 2048), linear(2048, 256), linear(2048, 256), linear(2048, 2048))
        yield from (linear(2048, 5632), linear(2048, 5632), linear(5632, 2048))
    yield linear(2048, 32000)


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, groups=groups, bias=False)


NETWORKS: dict[str, Callable[[], Iterator[nn.Module]]] = {
    "lenet-300-100": lenet_300_100,
    "resnet-56": resnet_56,
    "resnet-50": resnet_50,
    "alexnet": alexnet,
    "vit-l": vit_large,
    "decoder-1b": decoder_1b,
}
LARGE = ("vit-l", "decoder-1b")


def tensors_of(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*NETWORKS[name]())
    model = model.to(dtype).to_empty(device=device)
    for p in model.parameters():
        p.data.normal_(std=0.02)
        p.grad = torch.randn_like(p)
    return model
