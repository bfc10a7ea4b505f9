"""CIFAR-10 (Krizhevsky 2009), read from the six files of its binary version and checked against their md5s.

It does not come with the package: `fetch` (the command `deephoyer data cifar10`) brings it once, from
what is at hand, into a folder of its own. How other forms become these six files is in `cifar10_forms.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.files import folder_at, kept_in, write_atomically
from deephoyer.lab.data import cifar10_forms as forms
from deephoyer.lab.data.dataset import Dataset, first

DIGESTS = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
# Of the 50,000 training images in [0, 1], a channel each.
MEAN = (0.49139967861920936, 0.48215840840079704, 0.446530914459704)
STD = (0.24703223245050313, 0.24348512800288716, 0.2615878417317208)
_HOW = "`deephoyer data cifar10` fetches it; `deephoyer data cifar10 --from PATH` takes a folder or archive you have"


def cifar10(normalize: bool = True, limit: int | None = None, folder: str | None = None) -> Dataset:
    """50,000 + 10,000 photographs, 32 × 32 in colour, ten classes; `deephoyer data cifar10` fetches it

    `folder` is where its six binary files are, if not where `fetch` puts them.
    """
    if not isinstance(normalize, bool):
        raise UserError(f"data: normalize is {normalize!r}; it must be true or false.")
    n = first(limit, 50000)
    train_x, train_y, test_x, test_y = read(home() if folder is None else Path(folder))
    mean, std = (MEAN, STD) if normalize else ((0.0,), (1.0,))
    return Dataset("cifar10", train_x[:n], train_y[:n], test_x, test_y, 10, mean, std)


def home() -> Path:
    """Where it is kept once it is fetched."""
    return kept_in("cifar10")


def fetch(source: str | None = None, say: Callable[[str], None] = lambda text: None) -> Path:
    """Brings CIFAR-10 into `home()`, from a folder or archive, or else from where it is published.

    Every file is checked before any is written; `say` is told what is being tried.
    """
    target = home()
    if source is None and complete(target):
        for name, digest in DIGESTS.items():
            _checked(target / f"{name}.bin", digest)
        return target
    found = forms.from_path(Path(source)) if source is not None else forms.from_network(say)
    for name, content in found.items():
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != DIGESTS[name]:
            raise UserError(f"cifar10: {name} from {source or 'the network'} is not CIFAR-10's: its digest differs.")
    folder_at(target)
    for name, content in found.items():
        write_atomically(target / f"{name}.bin", content)
    return target


def complete(folder: Path) -> bool:
    """Whether all six files are there (whether they are sound is seen when they are read)."""
    return all((folder / f"{name}.bin").is_file() for name in DIGESTS)


@cache
def read(folder: Path) -> tuple[Tensor, ...]:
    """Training images and labels, test images and labels."""
    if not complete(folder):
        raise UserError(f"cifar10: {folder} does not have its six files. {_HOW}.")
    batches = [_checked(folder / f"{name}.bin", digest) for name, digest in DIGESTS.items()]
    train, test = np.concatenate(batches[:-1]), batches[-1]
    return (*_split(train), *_split(test))


def _checked(path: Path, digest: str) -> np.ndarray:
    try:
        raw = path.read_bytes()
    except OSError as why:
        raise UserError(f"data file {path} can't be read: {why.strerror or why}.") from None
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != digest:
        raise UserError(f"data file {path} is damaged: its digest is not CIFAR-10's; remove it. {_HOW}.")
    return np.frombuffer(raw, np.uint8).reshape(-1, forms.RECORD)


def _split(records: np.ndarray) -> tuple[Tensor, Tensor]:
    """A record is a label and the red, green and blue planes."""
    whole = torch.from_numpy(records.copy())
    return whole[:, 1:].reshape(-1, 3, 32, 32), whole[:, 0].long()
