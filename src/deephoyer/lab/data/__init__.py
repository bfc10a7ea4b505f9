"""Data sets by name, as tensors: `load("mnist")`. `deephoyer list data` shows them.

Nothing here knows of models or training; batches are cut where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deephoyer.lab.data import cifar10 as _cifar10
from deephoyer.lab.data.cifar10 import cifar10 as read_cifar10
from deephoyer.lab.data.dataset import Dataset
from deephoyer.lab.data.mnist import mnist as read_mnist
from deephoyer.registry import Registry

__all__ = ["DATASETS", "Dataset", "fetch", "load"]

DATASETS: Registry[Dataset] = Registry("data set", "data")
DATASETS.add("mnist", read_mnist)
DATASETS.add("cifar10", read_cifar10)


def load(name: str, **settings: Any) -> Dataset:
    """The data set called `name`; what it takes to read it is done once a process.

    >>> load("mnist", limit=100).train_x.shape
    torch.Size([100, 1, 28, 28])
    """
    return DATASETS.make(name, **settings)


def fetch(name: str, source: str | None = None, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """Brings a data set from `source`, or from where it is published, and says where it is kept.

    None for one that comes with the package, which is read and checked instead.
    """
    if name in _FETCHERS:
        return _FETCHERS[name](source, say)
    load(name)
    return None


_FETCHERS = {"cifar10": _cifar10.fetch}
