"""Weights of published runs: each file once, named by its content, and found again by the recipe that made it.

`results/weights/` holds the files; a record beside it says which one is its own. What a record says of
its run is in `record.py`; nothing is measured here.
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
"""So many digits of a file's sha256 are its name."""


def store(content: bytes, results: Path) -> tuple[str, str]:
    """Keeps a file's content in `results/weights`; its name there, and its sha256."""
    digest = hashlib.sha256(content).hexdigest()
    place = folder_at(results / WEIGHTS) / f"{digest[:NAMED_BY]}.safetensors"
    if not place.exists():
        write_atomically(place, content)
    return place.name, digest


def find_stored_weights(
    digest: str, seed: int, results: Path = RESULTS, same_images: Callable[[str | None], bool] = lambda images: True
) -> Path | None:
    """The stored network of the published run with this recipe (`Recipe.digest()`) and seed; None where there is none.

    `same_images` tells from a record's fingerprint whether it is of the images that are meant.
    Only the few words that are asked about are read of each record, so that a damaged one stands in nobody's way.
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
    """A stored file whose content is what its record says; anything else is a `UserError`."""
    path = results / WEIGHTS / Path(name).name
    try:
        content = path.read_bytes()
    except OSError as why:
        raise UserError(f"{path}: can't be read: {why.strerror}.") from None
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise UserError(f"{path}: is not the file that was published: its sha256 is {actual}.")
    return path
