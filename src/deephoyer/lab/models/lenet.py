"""The two LeNets of the paper's MNIST tables (layer sizes as in LeCun et al. 1998's Caffe descendants)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import positive_whole, share


class LeNet300(nn.Module):
    """784-300-100-10 with ReLU: 266,200 weights"""

    def __init__(self, classes: int = 10, dropout: float = 0.0, input_dropout: float = 0.0):
        super().__init__()
        self.drop = _dropout("dropout", dropout)
        self.drop_pixels = _dropout("input_dropout", input_dropout)
        self.fc1 = nn.Linear(784, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, positive_whole(classes, "classes"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.fc1(self.drop_pixels(x.flatten(1)))))
        return self.fc3(self.drop(F.relu(self.fc2(x))))


class LeNet5(nn.Module):
    """two 5×5 convolutions (20, 50) and two linear layers (500, 10): 430,500 weights"""

    def __init__(self, classes: int = 10, dropout: float = 0.0):
        super().__init__()
        self.drop = _dropout("dropout", dropout)
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, positive_whole(classes, "classes"))

    def forward(self, x: Tensor) -> Tensor:
        # Pooled first, which gives the same values and gradients from a quarter of the ReLU's work.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(self.drop(F.relu(self.fc1(x.flatten(1)))))


def _dropout(name: str, rate: float) -> nn.Module:
    """Before linear layers while training; the paper's LeNets have none."""
    return nn.Dropout(rate) if share(rate, name) else nn.Identity()
