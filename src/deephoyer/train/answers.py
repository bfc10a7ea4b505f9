"""What one teacher says of every training image in every position, kept on disk for all runs that ask the same.

A file is named by a digest of all that its content depends on, so a teacher trained again, other data or
other positions never meet old answers. Probabilities are kept as float16, 20 bytes for ten classes.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from deephoyer.data import Dataset
from deephoyer.errors import UserError
from deephoyer.export import container
from deephoyer.files import folder_at, kept_in, write_atomically

FORM = 1
"""Goes up when the content of a file changes for the same digest."""


def digest(teacher: nn.Module, data: Dataset, *settings: object) -> str:
    """Names what `teacher` says of the training images of `data`, asked as `settings` say."""
    found = hashlib.sha256(repr((FORM, str(teacher), data.mean, data.std, settings)).encode())
    for name, tensor in [*teacher.state_dict().items(), ("train_x", data.train_x)]:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:24]


def kept(name: str, positions: int, asked: Iterator[Tensor], say: Callable[[str], None]) -> Tensor:
    """The answers called `name` as (position, image, class): read, or else taken from `asked`, a position at a time.

    Of several processes that want the same, one asks and the others wait for it.
    """
    path = folder_at(kept_in("teachers")) / f"{name}.safetensors"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            try:
                return container.unseal(path)[0]["answers"]
            except UserError as why:
                say(f"{why} The teacher is asked again.")
        answers = _gathered(positions, asked, say)
        write_atomically(path, container.seal({"answers": answers}, {"kind": "answers"}))
    say(f"kept in {path}")
    return answers


def _gathered(positions: int, asked: Iterator[Tensor], say: Callable[[str], None]) -> Tensor:
    parts = []
    for part in asked:
        parts.append(part.half().cpu())
        if len(parts) % max(1, positions // 10) == 0:
            say(f"teacher: {len(parts)} of {positions} positions")
    return torch.stack(parts)
