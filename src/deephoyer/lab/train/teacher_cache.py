"""A cache on disk for the predictions of a teacher: for every training image in every shifted and flipped position.

A file is named by a digest of the teacher, the images and the settings, so another teacher, other data or other
positions never get its content. Settings that only change rounding are not in the digest: the device, compiled
blocks, the memory format. Probabilities are stored as float16, 20 bytes for ten classes.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.export import container
from deephoyer.files import folder_at, kept_in, write_atomically
from deephoyer.lab.data import Dataset

FORM = 1
"""Increased when the content of a file changes for the same teacher, images and settings."""


def digest(teacher: nn.Module, data: Dataset, *settings: object) -> str:
    """The name of the file with the predictions of `teacher` for the training images of `data`."""
    hash = hashlib.sha256(repr((FORM, str(teacher), data.mean, data.std, settings)).encode())
    for name, tensor in [*teacher.named_parameters(), *teacher.named_buffers(), ("train_x", data.train_x)]:
        hash.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hash.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hash.hexdigest()[:24]


def load_or_compute(name: str, positions: int, computed: Iterator[Tensor], say: Callable[[str], None]) -> Tensor:
    """The predictions called `name` as (position, image, class): from the cache, or from `computed`, one per position.

    If several processes need the same, one computes and the others wait for it. Predictions that can't be written are
    used without being cached.
    """
    try:
        path = folder_at(kept_in("teachers")) / f"{name}.safetensors"
    except UserError as why:
        say(f"{why} The predictions are not cached.")
        return _compute(positions, computed, say)
    cached = _read(path, say)
    if cached is not None:
        return cached
    with _locked(path.with_suffix(".lock"), say):
        cached = _read(path, lambda text: None)  # a damaged file was reported above
        if cached is not None:
            return cached
        predictions = _compute(positions, computed, say)
        try:
            write_atomically(path, container.seal({"answers": predictions}, {"kind": "answers"}))
            say(f"cached in {path} ({path.stat().st_size / 1e6:.0f} MB)")
        except UserError as why:
            say(f"{why} The predictions are not cached.")
    return predictions


def _read(path: Path, say: Callable[[str], None]) -> Tensor | None:
    if not path.is_file():
        return None
    try:
        return container.unseal(path)[0]["answers"]
    except UserError as why:
        say(f"{why} The predictions are computed again.")
        return None


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process has the lock; where locks do not work, without one."""
    try:
        lock = open(path, "w")  # noqa: SIM115 (closed below, and by the system when the process ends)
    except OSError:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is computing the same predictions; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


def _compute(positions: int, computed: Iterator[Tensor], say: Callable[[str], None]) -> Tensor:
    parts = []
    for part in computed:
        parts.append(part.half().cpu())
        if len(parts) % max(1, positions // 10) == 0:
            say(f"predictions of the teacher: {len(parts)} of {positions} positions")
    return torch.stack(parts)
