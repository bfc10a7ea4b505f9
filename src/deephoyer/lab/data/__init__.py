"""Data sets by name: `load("mnist")`. `deephoyer list data` shows them.

Nothing here knows of models or training; batches are cut where they are used. Two kinds: in memory (`dataset.py`) and
streaming (`streaming.py`); what both are to the rest is `source.py`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from deephoyer.lab.choices import Choice, named
from deephoyer.lab.data import cifar10 as _cifar10
from deephoyer.lab.data.cifar10 import cifar10 as read_cifar10
from deephoyer.lab.data.dataset import Dataset
from deephoyer.lab.data.mnist import mnist as read_mnist
from deephoyer.lab.data.source import TEST, Images, Source
from deephoyer.lab.data.streaming import folder, imagenet, tiny_imagenet
from deephoyer.registry import Registry

__all__ = ["DATASETS", "TEST", "Dataset", "Images", "Source", "fetch", "input_shape", "load", "on_device"]

DATASETS: Registry[Source] = Registry("data set", "data")
DATASETS.add("mnist", read_mnist)
DATASETS.add("cifar10", read_cifar10)
DATASETS.add("folder", folder)
DATASETS.add("imagenet", imagenet)
DATASETS.add("tiny-imagenet", tiny_imagenet)


def load(name: str | dict[str, Any], **settings: Any) -> Any:
    """The data set called `name`, or a mapping with a name and settings; one is read into memory once a process.

    >>> load("mnist", limit=100).train_x.shape
    torch.Size([100, 1, 28, 28])
    """
    return DATASETS.make(name, **settings)


def input_shape(choice: Choice) -> tuple[int, ...] | None:
    """What one image looks like where the data's settings have a size, without the data; None where they have none.

    >>> input_shape({"name": "folder", "size": 64}), input_shape("imagenet"), input_shape("mnist")
    ((3, 64, 64), (3, 224, 224), None)
    """
    name, settings = named(choice)
    takes = inspect.signature(DATASETS[name]).parameters
    size = settings.get("size", takes["size"].default) if "size" in takes else None
    return (3, size, size) if isinstance(size, int) else None


_shared: WeakValueDictionary[tuple[str, torch.device], Source] = WeakValueDictionary()


def on_device(choice: str | dict[str, Any], device: torch.device) -> Source:
    """A recipe's data, ready for training on the device. Runs of one process share one copy of what lies in memory."""
    key = json.dumps(choice, sort_keys=True), device
    if key in _shared:
        return _shared[key]
    source = load(choice).to(device)
    if isinstance(source, Dataset):
        source = source.in_floats()
    if source.in_memory:
        _shared[key] = source
    return source


def fetch(name: str, source: str | None = None, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """Brings a data set from `source`, or from where it is published, and says where it is kept.

    None for one that comes with the package, which is read and checked instead.
    """
    if name in _FETCHERS:
        return _FETCHERS[name](source, say)
    load(name)
    return None


_FETCHERS = {"cifar10": _cifar10.fetch}
