"""Where the images of a folder lie, and of which class each is. One is decoded only when it is asked for.

Four layouts are told apart by what is there:
- `train/<class>/…` and `val/<class>/…`, as most people and ImageNet's usual preparation have it;
- Tiny-ImageNet's own: `train/<class>/images/…`, `val/images/…` with the classes in `val/val_annotations.txt`;
- `val/<class>/…` alone, for evaluation;
- `train/<class>/…` or `<class>/…` alone, of which a share of each class is set aside for validation.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from deephoyer.errors import UserError

ANNOTATIONS = "val_annotations.txt"
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".avif")
)
"""Files with other names are passed over, and counted."""
ALIKE = {"train": ("training", "Train", "TRAIN"), "val": ("valid", "validation", "test", "Val", "VAL", "Test")}
"""What others call the two folders."""
FILES_COMPARED = 100
"""Of a split: so many files' sizes tell a folder from another with the same names, without looking at a million."""
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
    others: Counter[str] = field(default_factory=Counter)
    """How many files beside the images were passed over, by how their names end."""

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, i: int) -> Path:
        return self.root / os.fsdecode(self.paths[i])

    def name(self, i: int) -> str:
        """What an image is called in messages: its split, its class and its file."""
        return f"{self.root.name}/{self.paths[i].decode(errors='replace')}"


def find(root: Path, key: str, val_split: float | None = None) -> tuple[Files | None, Files]:
    """The training and the validation images below `root`; `key` says in errors whose folder it is.

    Where there is no folder val, the share `val_split` of each class is for validation.
    """
    if not root.is_dir():
        raise UserError(
            f"{key}: {_not_a_folder(root)}; data.path is the folder that has train/<class>/ and val/<class>/ in it."
        )
    has = {split: (root / split).is_dir() for split in ALIKE}
    if not has["train"] and _called(root, "train"):
        raise UserError(f"{key}: {root} has no folder train.{_hint(root)}")
    if has["val"] and val_split is not None:
        raise UserError(f"{key}: {root} has a folder val, so there is nothing to split: leave out data.val_split.")
    if not has["val"] and val_split is None:
        hint = _hint(root) or " Or set images of each class aside for it: data.val_split=0.2."
        raise UserError(f"{key}: {root} has no folder val; it should have train/<class>/ and val/<class>/ in it.{hint}")
    if val_split is not None:
        return _divided(_by_folder(root / "train" if has["train"] else root, key), val_split, key)
    train = _by_folder(root / "train", key) if has["train"] else None
    annotated = (root / "val" / ANNOTATIONS).is_file()
    val = _annotated(root / "val", train, key) if annotated else _by_folder(root / "val", key)
    if train is not None and train.classes != val.classes:
        raise UserError(f"{key}: {_difference(train.classes, val.classes)}; both need the same class folders.")
    return train, val


def _divided(files: Files, share: float, key: str) -> tuple[Files, Files]:
    """Images for training and for validation: a share of each class, drawn by the images' paths.

    So they are the same in every run and on every machine.
    """
    validation = np.zeros(len(files), dtype=bool)
    for label, name in enumerate(files.classes):
        own = np.flatnonzero(files.labels == label)
        if len(own) < 2:
            raise UserError(f"{key}: class {name} has a single image; data.val_split needs two or more of each class.")
        drawn = sorted(own, key=lambda i: hashlib.sha256(bytes(files.paths[i])).digest())
        validation[drawn[: min(max(1, round(share * len(own))), len(own) - 1)]] = True
    train, val = (
        replace(files, paths=files.paths[chosen], labels=files.labels[chosen]) for chosen in (~validation, validation)
    )
    return train, replace(val, others=Counter())  # counted once


def fingerprint(files: Iterable[Files | None]) -> str:
    """A digest of the images' paths and classes, and of the sizes of some files: the same wherever the folder lies."""
    digest = hashlib.sha256()
    for split in files:
        if split is not None:
            some = range(0, len(split), max(1, len(split) // FILES_COMPARED))
            sizes = [split.path(i).stat().st_size if split.path(i).exists() else 0 for i in some]
            digest.update(repr((split.classes, len(split), sizes)).encode(errors="surrogateescape"))
            digest.update(split.labels.tobytes() + b"/".join(split.paths.tolist()))
    return digest.hexdigest()[:16]


def passed_over(files: Iterable[Files | None]) -> str | None:
    """What is told of files that were found among the images and are none."""
    others: Counter[str] = sum((f.others for f in files if f is not None), Counter())
    if not others:
        return None
    kinds = [f"{count:,} {suffix or 'without an ending'}" for suffix, count in others.most_common()]
    return f"files passed over, for their names are not those of images: {_some(kinds)}"


def _not_a_folder(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file, not a folder: unpack it first"
    return f"there is no folder {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}")


def _called(root: Path, split: str) -> str | None:
    """The folder that is likely meant to be this split's."""
    there = {path.name for path in root.iterdir() if path.is_dir()}
    return next((name for name in ALIKE[split] if name in there), None)


def _hint(root: Path) -> str:
    """What may be the matter with a folder that lacks train or val."""
    pairs = [(split, _called(root, split)) for split in ALIKE if not (root / split).is_dir()]
    meant = [f"{name} to {split}" for split, name in pairs if name]
    if meant:
        return f" Rename {' and '.join(meant)}."
    inner = [path.name for path in root.iterdir() if (path / "val").is_dir()]
    return f" {root / inner[0]} has one: is that the folder?" if inner else ""


def read_image(path: Path) -> Image.Image | None:
    """An image file, decoded, in red, green and blue, as it lies in the file; None where that can't be done.

    Of several frames it is the first. What a camera noted about its orientation is not applied, as in torchvision.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd palettes, and of sizes that are checked here
            with Image.open(path) as image:
                return _in_colours(image) if image.width * image.height <= MOST_PIXELS else None
    except Exception:  # on damaged bytes decoders raise whatever comes up
        return None


def _in_colours(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Sixteen bits a pixel, of which Pillow would cut off at 255 what goes up to 65,535.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _by_folder(folder: Path, key: str) -> Files:
    try:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
        found = [list(_below(folder / name, name)) for name in classes]
    except OSError as why:
        raise UserError(f"{key}: {why.filename or folder} can't be read: {why.strerror or why}.") from None
    if not classes:
        raise UserError(
            f"{key}: {folder} has no class folders: move each image into the folder of its class "
            f"({folder.name}/rose/…; ImageNet's validation images into {folder.name}/n01440764/…)."
        )
    images = [[path for path in paths if _suffix(path) in SUFFIXES] for paths in found]
    others = Counter(_suffix(path) for paths in found for path in paths if _suffix(path) not in SUFFIXES)
    empty = [i for i, paths in enumerate(images) if not paths]
    if empty:
        names = _some([f"{folder.name}/{classes[i]}" for i in empty])
        only = sorted({_suffix(path) for path in found[empty[0]]})
        holds = f" ({classes[empty[0]]} has only {_some(only)})" if only else ""
        raise UserError(f"{key}: no images in {names}{holds}; a class needs images in train and in val.")
    labels = [label for label, paths in enumerate(images) for _ in paths]
    return _files(folder, [path for paths in images for path in paths], labels, classes, others)


def _below(folder: Path, name: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of all files below a folder, links followed, in a fixed order; hidden files and folders are no data.

    A link back to a folder above it would lead round for ever.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    inner = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            inner.append(entry)
        else:
            yield f"{name}/{entry.name}"
    for entry in inner:
        yield from _below(Path(entry.path), f"{name}/{entry.name}", (*above, real))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


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


def _files(
    root: Path, paths: Sequence[str], labels: Sequence[int], classes: Sequence[str], others: Counter[str] | None = None
) -> Files:
    encoded = np.array([os.fsencode(path) for path in paths])
    return Files(root, encoded, np.array(labels, dtype=np.int64), tuple(classes), others or Counter())


def _difference(train: Sequence[str], val: Sequence[str]) -> str:
    missing, extra = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    said = [f"{_some(names)} {where}" for names, where in ((missing, "only in train"), (extra, "only in val")) if names]
    return f"train has {len(train)} classes, val {len(val)}: {', '.join(said)}"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
