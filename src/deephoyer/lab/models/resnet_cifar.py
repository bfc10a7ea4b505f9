"""ResNet-20 to -110 for 32 × 32 images (He et al. 2016): three stages of 16, 32 and 64 channels.

`shortcut="pad"` is the published net (parameter-free, see `PadShortcut`); `"conv"` projects with a
1 × 1 convolution and a batch norm where a stage begins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import one_of, positive_whole
from deephoyer.lab.models.pad_shortcut import PadShortcut

CIFAR_DEPTHS = (20, 32, 44, 56, 110)


class Block(nn.Module):
    """Two 3×3 convolutions and what goes past them."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int, kind: str) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class CifarResNet(nn.Module):
    """depth = 6·n + 2, with n blocks in each of three stages"""

    def __init__(self, depth: int, classes: int = 10, shortcut: str = "pad"):
        super().__init__()
        one_of("shortcut", shortcut, ("pad", "conv"))
        n = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, n, 1, shortcut)
        self.layer2 = _stage(16, 32, n, 2, shortcut)
        self.layer3 = _stage(32, 64, n, 2, shortcut)
        self.linear = nn.Linear(64, positive_whole(classes, "classes"))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _stage(inputs: int, outputs: int, blocks: int, stride: int, shortcut: str) -> nn.Sequential:
    first = Block(inputs, outputs, stride, shortcut)
    return nn.Sequential(first, *(Block(outputs, outputs, 1, shortcut) for _ in range(blocks - 1)))


def cifar_resnet(depth: int) -> Callable[..., CifarResNet]:
    """What makes the net of this depth, described for the list of models."""

    def maker(classes: int = 10, shortcut: str = "pad") -> CifarResNet:
        return CifarResNet(depth, classes, shortcut)

    maker.__doc__ = f"the CIFAR ResNet with {depth} layers; shortcut: pad (the paper's) or conv"
    return maker
