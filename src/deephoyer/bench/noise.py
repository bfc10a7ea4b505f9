"""Random images in CIFAR-10's shape: they take the same time to train on, and nobody has to fetch them.

Importing this makes `noise` a data set of this process.
"""

from __future__ import annotations

from functools import cache

import torch

from deephoyer.lab.data import DATASETS, Dataset


@cache
def noise() -> Dataset:
    """random images in CIFAR-10's shape"""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60_000, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (60_000,), generator=g)
    return Dataset("noise", x[:50_000], y[:50_000], x[50_000:], y[50_000:], 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


DATASETS.add("noise", noise)
