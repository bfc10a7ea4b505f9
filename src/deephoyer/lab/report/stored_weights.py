"""Weights of published runs: files in `results/weights`, each named by its content, found by the recipe of their run.

Records (`record.py`) name their file. Nothing is measured here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from deephoyer.errors import UserError
from deephoyer.files import folder_at, write_atomically

RESULTS, WEIGHTS = Path("results"), "weights"
NAMED_BY = 16
"""The number of digits of its sha256 that a file is named by."""


def store(content: bytes, results: Path) -> tuple[str, str]:
    """Writes a file into `results/weights`; returns its name there, and its sha256."""
    digest = hashlib.sha256(content).hexdigest()
    path = folder_at(results / WEIGHTS) / f"{digest[:NAMED_BY]}.safetensors"
    if not path.exists():
        write_atomically(path, content)
    return path.name, digest


def find_stored_weights(
    digest: str, seed: int, results: Path = RESULTS, same_images: Callable[[str | None], bool] = lambda images: True
) -> Path | None:
    """The stored network of the published run with this recipe (`Recipe.digest()`) and seed; None if there is none.

    `same_images` decides by a record's fingerprint whether it is of the right images. Only a few keys of a record are
    read, so that a damaged one does not matter.
    """
    for path in sorted(results.rglob("*.json")) if results.is_dir() else ():
        try:
            content = path.read_bytes()
            if digest.encode() not in content:  # most of hundreds: not worth parsing
                continue
            record = json.loads(content)
            if record["digest"] != digest or record["recipe"].get("seed", 0) != seed:
                continue
            if not same_images(record.get("images")):
                continue
            file = record["weights"]["file"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if isinstance(file, str) and (results / WEIGHTS / Path(file).name).is_file():
            return results / WEIGHTS / Path(file).name
    return None


def read_weights(results: Path, name: str, digest: str) -> Path:
    """The path of a stored file; a `UserError` unless it has the sha256 that its record says."""
    path = results / WEIGHTS / Path(name).name
    try:
        content = path.read_bytes()
    except OSError as why:
        raise UserError(f"{path}: can't be read: {why.strerror}.") from None
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise UserError(f"{path}: is not the file that was published: its sha256 is {actual}.")
    return path
