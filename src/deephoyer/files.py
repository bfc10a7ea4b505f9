"""Files that are either the old one or the new one, whole, whenever the machine stops; and where shared ones lie.

Checkpoints, exports and reports are written through here. What is in them is not known here.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from deephoyer.errors import UserError, shown

LONGEST_PATH = 4096
"""Characters; systems take no more."""


def kept_in(name: str) -> Path:
    """The folder for what is fetched or computed once for many runs: in $DEEPHOYER_DATA, or the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DEEPHOYER_DATA") or Path(cache) / "deephoyer") / name


def folder_at(path: Path) -> Path:
    """`path`, made if it is not there, with all above it; a `UserError` where that can't be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise UserError(f"{path}: can't be made: {why.strerror or why}.") from None
    return path


def path_of(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path; a `UserError` where it is something else."""
    try:
        found = Path(path)
    except TypeError:
        raise UserError(f"{shown(path)} is not a path; give a string or a pathlib.Path.") from None
    if "\0" in str(found) or len(str(found)) > LONGEST_PATH:
        raise UserError(f"{shown(str(found))} is not a path: it is too long, or has a null in it.")
    return found


def path_on_disk(text: str) -> Path:
    """A path as a recipe has it, with ~ and environment variables filled in as a shell does.

    >>> path_on_disk("data/$NO_SUCH_VARIABLE").name
    '$NO_SUCH_VARIABLE'
    """
    return path_of(os.path.expanduser(os.path.expandvars(text)))


def plain_file(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path; a `UserError` for a device, a pipe or a folder, which may never end or can't be read at all.

    What is not there is left to whoever opens it.
    """
    found = path_of(path)
    if os.path.exists(found) and not found.is_file():
        raise UserError(f"{found}: can't be read: it is not a plain file.")
    return found


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` to a temporary file beside `path`, syncs it, and renames it into place.

    A disk that is full or read-only, or a folder that does not exist, is a `UserError` naming the path;
    what was at `path` before is then still there and no temporary file is left. A link stays one, to the new file.
    """
    target = path_of(os.path.realpath(path_of(path)))
    try:
        temporary = _write_beside(target, content)
        try:
            os.replace(temporary, target)
        except BaseException:
            _remove(temporary)
            raise
        _sync_folder(target.parent)
    except OSError as why:
        raise UserError(f"{target}: can't be written: {why.strerror or why}.") from why


def remove_leftovers(folder: Path) -> None:
    """Temporary files of writers that were killed; only for a folder in which nobody else writes now."""
    for path in folder.glob(".*.tmp"):
        _remove(str(path))


def _write_beside(target: Path, content: bytes) -> str:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
    except BaseException:
        # Ctrl-C too: an interrupted write must not leave its half behind.
        _remove(temporary)
        raise
    return temporary


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _umask() -> int:
    """mkstemp makes files that only their owner can read; a result should have the usual rights."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """The new name is on disk only once its folder is. Some file systems can't sync a folder: then it's theirs."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
