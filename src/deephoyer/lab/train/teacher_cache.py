"""What one teacher says of every training image in every position, kept on disk for all runs that ask the same.

A file is named by a digest of the teacher, the images and how it is asked, so a teacher trained again, other
data or other positions never meet old answers. What only rounds differently has one name: the device,
compiled blocks, the memory format. Probabilities are kept as float16, 20 bytes for ten classes.
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
"""Goes up when the content of a file changes for the same digest."""


def digest(teacher: nn.Module, data: Dataset, *settings: object) -> str:
    """Names what `teacher` says of the training images of `data`, asked as `settings` say."""
    found = hashlib.sha256(repr((FORM, str(teacher), data.mean, data.std, settings)).encode())
    for name, tensor in [*teacher.named_parameters(), *teacher.named_buffers(), ("train_x", data.train_x)]:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:24]


def kept(name: str, positions: int, asked: Iterator[Tensor], say: Callable[[str], None]) -> Tensor:
    """The answers called `name` as (position, image, class): read, or else taken from `asked`, a position at a time.

    Of several processes that want the same, one asks and the others wait for it. Answers that can't be
    written are used all the same.
    """
    try:
        path = folder_at(kept_in("teachers")) / f"{name}.safetensors"
    except UserError as why:
        say(f"{why} The answers are not kept.")
        return _gathered(positions, asked, say)
    found = _read(path, say)
    if found is not None:
        return found
    with _alone(path.with_suffix(".lock"), say):
        found = _read(path, lambda trouble: None)  # it has been told
        if found is not None:
            return found
        answers = _gathered(positions, asked, say)
        try:
            write_atomically(path, container.seal({"answers": answers}, {"kind": "answers"}))
            say(f"kept in {path} ({path.stat().st_size / 1e6:.0f} MB)")
        except UserError as why:
            say(f"{why} The answers are not kept.")
    return answers


def _read(path: Path, say: Callable[[str], None]) -> Tensor | None:
    if not path.is_file():
        return None
    try:
        return container.unseal(path)[0]["answers"]
    except UserError as why:
        say(f"{why} The teacher is asked again.")
        return None


@contextmanager
def _alone(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process works on the same; where nothing can be locked, all of them do."""
    try:
        lock = open(path, "w")  # noqa: SIM115 (closed below, and by the system when the process ends)
    except OSError:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is asking the same teacher; waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


def _gathered(positions: int, asked: Iterator[Tensor], say: Callable[[str], None]) -> Tensor:
    parts = []
    for part in asked:
        parts.append(part.half().cpu())
        if len(parts) % max(1, positions // 10) == 0:
            say(f"teacher: {len(parts)} of {positions} positions")
    return torch.stack(parts)
