"""The folder of a run: its recipe, environment, metrics, checkpoints and results; one process at a time.

Everything is written so that a kill at any moment leaves a folder that can be taken up again.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from deephoyer.errors import UserError
from deephoyer.files import plain_file, remove_leftovers, write_atomically
from deephoyer.lab import recipe as recipes
from deephoyer.lab.choices import named, what_data
from deephoyer.lab.recipe import Command
from deephoyer.lab.schema import DESCRIPTIVE, STAGES, Recipe

COMMAND, RECIPE = "command.json", "recipe.yaml"
FAILED = "failed.json"
"""Why a run fails with its settings; a run that failed without this file may be tried again."""
_locks: set[TextIO] = set()
"""The locks that this process holds."""


def _release_locks() -> None:
    """A forked process, like one that reads images, must not keep its parent's lock after the parent has ended."""
    while _locks:
        _locks.pop().close()


os.register_at_fork(after_in_child=_release_locks)


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics_path = self.path / "metrics.jsonl"
        self._lock: TextIO | None = None
        self._new = False

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def open(self, wait: Callable[[], None] | None = None) -> None:
        """Makes the folder and locks it against a second process.

        If another process has it, that is refused; or calls `wait`, if given, until that one has ended.
        """
        while not self._try_lock():
            if wait is None:
                raise UserError(f"run folder {self.path}: another process is using it.")
            wait()
        (self.path / FAILED).unlink(missing_ok=True)
        for place in (self.path, self.checkpoints):  # of writers that were killed; nobody else writes here now
            remove_leftovers(place)

    def _try_lock(self) -> bool:
        """Makes and locks the folder; False if another process has the lock."""
        try:
            self._new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a")  # noqa: SIM115 (held for the whole run)
        except OSError as why:
            raise UserError(f"run folder {self.path}: can't be created: {why.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        _locks.add(lock)
        with suppress(OSError):  # on a full disk the lock holds all the same
            lock.truncate(0)
            os.write(lock.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())
        return True

    def stopped_holder(self) -> int | None:
        """The process that has the folder, where that is one of this machine that was stopped, as by Ctrl-Z."""
        try:
            number, _, machine = (self.path / ".lock").read_text(encoding="utf-8").strip().partition(" ")
            if machine != socket.gethostname():
                return None
            state = Path(f"/proc/{int(number)}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (OSError, ValueError, IndexError):  # it has just ended, or this is not Linux
            return None
        return int(number) if state == "T" else None

    def close(self) -> None:
        """Unlocks the folder. One that is new and still empty, of a run that was refused, is removed."""
        if self._lock is not None:
            with suppress(OSError):  # somebody else may have put something there by now, or deleted it
                if self._new and [path.name for path in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
            _locks.discard(self._lock)
            self._lock.close()
            self._lock = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder locked for a while; one that is already open here stays open afterwards."""
        if self._lock is not None:
            yield
            return
        self.open()
        try:
            yield
        finally:
            self.close()

    def write_json(self, name: str, content: Any) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def read_json(self, name: str) -> Any:
        path = self.path / name
        try:
            return json.loads(plain_file(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.path} has no {name}: is it the folder of a finished run?") from None
        except (OSError, ValueError) as why:
            raise UserError(f"{path}: can't be read: {why}.") from None

    def recipe(self) -> Recipe | None:
        """The complete recipe of this folder; None where there is none yet."""
        path = self.path / RECIPE
        if not path.exists():
            return None
        if not (self.path / COMMAND).exists():
            raise UserError(
                f"run folder {self.path}: was made by deephoyer 0.1, which can still read it; "
                "to run it again, give another folder with --out, or delete this one."
            )
        try:
            text = plain_file(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as why:
            raise UserError(f"{path}: can't be read: {why}.") from None
        return recipes.parse(text, str(path))

    def command(self) -> Command | None:
        """The command that started the run; None for a run that was started from Python."""
        content = self.read_json(COMMAND)
        base, overrides = (
            (content.get("base"), content.get("overrides", [])) if isinstance(content, dict) else (content, None)
        )
        if not isinstance(overrides, list) or not all(isinstance(word, str) for word in (base or "", *overrides)):
            raise UserError(f"{self.path / COMMAND}: is damaged: it should contain the command that started the run.")
        return Command(base, tuple(overrides)) if base else None

    def has_result_of(self, recipe: Recipe) -> bool:
        """Whether this recipe, with this seed, has finished here, even if its checkpoints have been deleted since."""
        if not (self.path / "summary.json").exists():
            return False
        own = self.recipe()
        if own is None or (own.digest(), own.seed) != (recipe.digest(), recipe.seed):
            return False
        return named(own.data)[1].get("path") == named(recipe.data)[1].get("path")  # else the images are compared

    def has_networks(self) -> bool:
        """Whether a stage has ended here, even if its checkpoints have been deleted since."""
        return any(self.path.glob("*.safetensors"))

    def write_command(self, command: Command | None, recipe: Recipe, images: str | None = None) -> None:
        """Writes the command, the complete recipe, and the run's identity, by which other runs find it.

        `images` is the fingerprint of a folder of images.
        """
        typed = {"base": command.base, "overrides": list(command.overrides)} if command else {"base": None}
        identity = {"digest": recipe.digest(), "seed": recipe.seed} | ({"images": images} if images else {})
        self.write_json(COMMAND, typed | identity)
        write_atomically(self.path / RECIPE, recipe.to_yaml().encode())

    def check(self, wanted: Recipe, stage: str, epoch: int, round: int = 0) -> None:
        """Refuses a recipe that differs from the folder's in a setting that has already been used."""
        have = self.recipe()
        if have is None:
            return
        order = ("start", *STAGES)
        later = order[order.index(stage) + (epoch > 0) :] if stage in order else ()
        later = later[-1:] if round else later  # every stage but finetuning has been used
        free = (*later, "device", *DESCRIPTIVE)  # a run may move
        mine, theirs = (r.model_dump(mode="json") | {"data": what_data(r.data)} for r in (wanted, have))
        for key in mine:
            if mine[key] != theirs[key] and key not in free:
                raise UserError(
                    f"run folder {self.path}: belongs to another recipe ({_difference(key, theirs[key], mine[key])}). "
                    "Give another folder with --out, or delete this one."
                )

    def images(self) -> str | None:
        """The fingerprint of the run's folder of images."""
        content = self.read_json(COMMAND)
        return content.get("images") if isinstance(content, dict) else None

    def check_images(self, images: str | None) -> None:
        """Refuses to resume with other images than those of the folder's run, which may have moved."""
        recipe = self.recipe()
        if recipe is not None and self.images() not in (None, images):
            path = named(recipe.data)[1].get("path")
            raise UserError(
                f"run folder {self.path}: was made with other images{f' (data.path was {path})' if path else ''}. "
                "Give another folder with --out, or delete this one."
            )

    # Metrics: one line per epoch; a resumed run cuts off what came after its checkpoint.

    def metrics_size(self) -> int:
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def cut_metrics(self, size: int) -> None:
        if self.metrics_size() > size:
            os.truncate(self.metrics_path, size)

    def add_metrics(self, line: dict[str, Any]) -> None:
        try:
            with open(self.metrics_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as why:
            raise UserError(f"{self.metrics_path}: can't be written: {why.strerror}.") from None

    def metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_path.exists():
            return []
        try:
            return [json.loads(line) for line in self.metrics_path.read_text(encoding="utf-8").splitlines()]
        except ValueError as why:
            raise UserError(f"{self.metrics_path}: is damaged: {why}.") from None


def _difference(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        inner = next(k for k in new if old.get(k) != new.get(k))
        return _difference(f"{key}.{inner}", old.get(inner), new.get(inner))
    return f"{key} was {old!r}, now {new!r}"
