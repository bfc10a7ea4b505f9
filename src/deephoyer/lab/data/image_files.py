"""Where the images of a folder lie, and of which class each is. One is decoded only when it is asked for.

Three layouts are told apart by what is there:
- `train/<class>/…` and `val/<class>/…`, as most people and ImageNet's usual preparation have it;
- Tiny-ImageNet's own: `train/<class>/images/…`, `val/images/…` with the classes in `val/val_annotations.txt`;
- `val/<class>/…` alone, for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from deephoyer.errors import UserError

ANNOTATIONS = "val_annotations.txt"
MOST_PIXELS = 100_000_000
"""Of one image; one that is larger counts as one that can't be read."""


@dataclass(frozen=True)
class Files:
    """Images by number, in an order that is the same on every machine: their paths below `root`, and their classes.

    Paths are one array of bytes, not a list of a million strings: worker processes share its memory.
    """

    root: Path
    paths: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, i: int) -> Path:
        return self.root / self.paths[i].decode()

    def name(self, i: int) -> str:
        """What an image is called in messages: its split, its class and its file."""
        return f"{self.root.name}/{self.paths[i].decode()}"


def find(root: Path, key: str) -> tuple[Files | None, Files]:
    """The training and the validation images below `root`; `key` says in errors whose folder it is."""
    if not root.is_dir():
        raise UserError(f"{key}: there is no folder {root}; it should have train/<class>/ and val/<class>/ in it.")
    train = _by_folder(root / "train", key) if (root / "train").is_dir() else None
    if not (root / "val").is_dir():
        raise UserError(f"{key}: {root} has no folder val; it should have train/<class>/ and val/<class>/ in it.")
    annotated = (root / "val" / ANNOTATIONS).is_file()
    val = _annotated(root / "val", train, key) if annotated else _by_folder(root / "val", key)
    if train is not None and train.classes != val.classes:
        raise UserError(f"{key}: {_difference(train.classes, val.classes)}; both need the same class folders.")
    return train, val


def read_image(path: Path) -> Image.Image | None:
    """An image file, decoded, in red, green and blue; None where that can't be done."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with Image.open(path) as image:
            return image.convert("RGB") if image.width * image.height <= MOST_PIXELS else None
    except Exception:  # on damaged bytes decoders raise whatever comes up
        return None


def _by_folder(folder: Path, key: str) -> Files:
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, numbers = find_classes(str(folder))
        samples = make_dataset(str(folder), numbers, IMG_EXTENSIONS)
    except FileNotFoundError as why:
        if any(folder.glob("*.JPEG")):
            raise UserError(
                f"{key}: {folder} has images but no class folders. ImageNet's validation images come like that; "
                "move each into the folder of its class (val/n01440764/…) first."
            ) from None
        raise UserError(f"{key}: {folder} has no classes to read: {str(why).splitlines()[0]}") from None
    except OSError as why:
        raise UserError(f"{key}: {folder} can't be read: {why.strerror or why}.") from None
    start = len(str(folder)) + 1
    return _files(folder, [path[start:] for path, _ in samples], [label for _, label in samples], classes)


def _annotated(folder: Path, train: Files | None, key: str) -> Files:
    """Tiny-ImageNet's validation images: lines of a file's name, its class and a box, divided by tabs."""
    try:
        text = (folder / ANNOTATIONS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise UserError(f"{key}: {folder / ANNOTATIONS} can't be read: {why}.") from None
    lines = [line.split("\t") for line in text.splitlines() if line]
    if any(len(line) < 2 for line in lines) or not lines:
        raise UserError(f"{key}: {folder / ANNOTATIONS} is not Tiny-ImageNet's: each line has a file and a class.")
    classes = sorted({line[1] for line in lines})
    if train is not None and set(classes) > set(train.classes):  # some use the first hundred of its classes
        classes = list(train.classes)
        lines = [line for line in lines if line[1] in set(classes)]
    number = {name: i for i, name in enumerate(classes)}
    lines.sort(key=lambda line: (line[1], line[0]))
    return _files(folder, [f"images/{line[0]}" for line in lines], [number[line[1]] for line in lines], classes)


def _files(root: Path, paths: Sequence[str], labels: Sequence[int], classes: Sequence[str]) -> Files:
    encoded = np.array([path.encode() for path in paths])
    return Files(root, encoded, np.array(labels, dtype=np.int64), tuple(classes))


def _difference(train: Sequence[str], val: Sequence[str]) -> str:
    missing, extra = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    said = [f"{_some(names)} {where}" for names, where in ((missing, "only in train"), (extra, "only in val")) if names]
    return f"train has {len(train)} classes, val {len(val)}: {', '.join(said)}"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
