"""A small network and images that it can learn, for tests of plans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from deephoyer.counting import count

X = torch.zeros(2, 3, 8, 8)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 48),
        nn.ReLU(),
        nn.Linear(48, 4),
    )


def batches(epoch, count=6, size=(3, 8, 8), of=16):
    """Images of four kinds that differ by where they are bright."""
    draw = torch.Generator().manual_seed(epoch)
    for _ in range(count):
        y = torch.randint(0, 4, (of,), generator=draw)
        x = torch.randn(of, *size, generator=draw)
        half = size[-1] // 2
        for i, kind in enumerate(y.tolist()):
            x[i, :, half * (kind // 2) :, half * (kind % 2) :] += 1.0
        yield x, y


def train(model, optimizer, epoch, **settings):
    model.train()
    for x, y in batches(epoch, **settings):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def macs_share(small, model, example=X):
    return count(small, example)[1].macs_executed / count(model, example)[1].macs_executed


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)
