"""MNIST (LeCun, Cortes, Burges), shipped inside the package: the four original files, xz-compressed.

9.2 MB for 54.9 MB. Each is checked against the original's md5 when it is read. Of the orders that were
tried before compression (transposed, by pixel, by differences, by nibbles, by 2 × 2 cells, by pairs of
rows), only the last beats the plain one, by half a percent: not worth the code that undoes it.
"""

from __future__ import annotations

import hashlib
import lzma
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.lab.data.dataset import Dataset, first

FOLDER = Path(__file__).with_name("mnist")
DIGESTS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
# Mean and standard deviation of the 60,000 training images in [0, 1].
MEAN, STD = 0.13066047627384283, 0.30810780384983544


def mnist(normalize: bool = False, limit: int | None = None) -> Dataset:
    """60,000 + 10,000 handwritten digits, 28 × 28, ten classes; comes with the package

    Inputs are raw in [0, 1] unless `normalize` is set; `limit` takes the first so many training images.
    """
    if not isinstance(normalize, bool):
        raise UserError(f"data: normalize is {normalize!r}; it must be true or false.")
    n = first(limit, 60000)
    train_x, train_y, test_x, test_y = read(FOLDER)
    mean, std = ((MEAN,), (STD,)) if normalize else ((0.0,), (1.0,))
    return Dataset("mnist", train_x[:n], train_y[:n], test_x, test_y, 10, mean, std)


@cache
def read(folder: Path) -> tuple[Tensor, ...]:
    """The four tensors, in the order of `DIGESTS`; images get their channel dimension, labels are int64."""
    return tuple(_tensor(_checked(folder / f"{name}.xz", digest)) for name, digest in DIGESTS.items())


def _checked(path: Path, digest: str) -> bytes:
    try:
        raw = lzma.decompress(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError) as why:
        raise UserError(f"data file {path} can't be read ({why}); install deephoyer again.") from None
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != digest:
        raise UserError(f"data file {path} is damaged: its digest is not MNIST's; install deephoyer again.")
    return raw


def _tensor(raw: bytes) -> Tensor:
    """idx format: two zero bytes, the type, the number of dimensions, the sizes big-endian, the bytes."""
    dims = raw[3]
    shape = np.frombuffer(raw, ">u4", count=dims, offset=4).tolist()
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)
    # Converted by NumPy: torch would start its threads, and a process that has them can't be forked (`fork_server.py`).
    return torch.from_numpy(values.astype(np.int64)) if dims == 1 else torch.from_numpy(values.copy()).unsqueeze(1)
