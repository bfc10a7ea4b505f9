"""Many runs of one recipe at once: a grid of overrides, a process a run, a table at the end.

Each member is an ordinary `deephoyer run` in a folder of its own, so it can be resumed, shown and verified like
any other, and one that fails leaves the others alone. Several processes share one GPU (`gpu_sharing.py`); one that is
killed there may strike the others down, which then go on by themselves from their last checkpoints.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.live import Live
from rich.table import Table

from deephoyer.errors import UserError
from deephoyer.files import folder_at
from deephoyer.lab import recipe as recipes
from deephoyer.lab.train import gpu_sharing
from deephoyer.lab.train.progress import describe

GPU_TROUBLES = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "cuDNN error")


@dataclass
class Member:
    """One run of the sweep."""

    overrides: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    status: int | None = None
    again: bool = False

    @property
    def title(self) -> str:
        return " ".join(self.overrides) or "as it is"

    def line(self) -> str:
        """What it is doing now."""
        if self.status is not None:
            return "done" if self.status == 0 else f"failed: {self.last_words()}"
        if self.process is None:
            return "waits"
        last = _last_line(self.folder / "metrics.jsonl")
        if not last:
            return "starts"
        try:
            metrics = json.loads(last)
            return f"{metrics['stage']} {metrics['epoch']}: {describe(metrics)}"
        except (ValueError, KeyError):
            return "runs"

    def last_words(self) -> str:
        return _last_line(self.folder / "log.txt") or f"exit status {self.status}"

    @property
    def busy(self) -> bool:
        return self.process is not None and self.status is None

    def struck_down(self) -> bool:
        """Whether it failed on the GPU, for the first time: the fault may have been another's."""
        ended = self.status in (1, -signal.SIGABRT)  # told by Python, or by what lies under it
        words = _text(self.folder / "log.txt")
        return ended and not self.again and any(trouble in words for trouble in GPU_TROUBLES)

    def once_more(self) -> Member:
        self.process, self.status, self.again = None, None, True
        return self

    def result(self) -> dict[str, Any] | None:
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if self.status == 0 and path.exists() else None


def members(recipe: str, overrides: Sequence[str], grid: Iterable[str], folder: Path) -> list[Member]:
    """Every combination of the grid's values, each checked before anything starts.

    >>> [m.title for m in members("demo", [], ["seed=0,1"], Path("runs"))]
    ['seed=0', 'seed=1']
    """
    axes = []
    for axis in grid:
        key, equals, values = axis.partition("=")
        if not equals or not key or not values:
            raise UserError(f"--grid {axis!r}: write key=value,value,… like regularize.strength=1e-4,2e-4.")
        axes.append([f"{key}={value}" for value in values.split(",")])
    made = []
    for chosen in itertools.product(*axes):
        every = [*overrides, *chosen]
        recipes.read(recipe, every)
        made.append(Member(list(chosen), folder / recipes.folder_name(recipe, every)))
    if len({m.folder for m in made}) < len(made):
        raise UserError("--grid: a value stands twice.")
    return made


def run_all(
    recipe: str,
    overrides: Sequence[str],
    team: Sequence[Member],
    jobs: int,
    show: Live | None,
    *,
    mps: bool = True,
    say: Callable[[str], None] = print,
    module: str = "deephoyer",
) -> None:
    """Runs the members, `jobs` at a time, through `python -m module`. On Ctrl-C they are stopped too; the same
    sweep goes on later. Without `mps`, members on one GPU take turns."""
    with ExitStack() as stack:
        environment = dict(os.environ)
        devices = [recipes.read(recipe, [*overrides, *m.overrides]).device for m in team]
        crowd = gpu_sharing.crowd(devices, jobs)
        if crowd > 1:
            environment |= gpu_sharing.quiet_threads()
            environment |= stack.enter_context(gpu_sharing.mps(say, crowd)) if mps else {}
        _conduct([sys.executable, "-m", module, "run", recipe, *overrides], environment, team, jobs, show)


def _conduct(
    words: list[str], environment: dict[str, str], team: Sequence[Member], jobs: int, show: Live | None
) -> None:
    waiting, struck = list(team), list[Member]()
    try:
        while waiting or struck or any(m.busy for m in team):
            busy = [m for m in team if m.busy]
            if not waiting and not busy:  # only now: the GPU's server is in order again when the last has left it
                waiting = [struck.pop(0).once_more()]  # alone, for one of them may have been the cause
            while waiting and len(busy) < jobs:
                busy.append(_start(words, environment, waiting.pop(0)))
            for member in busy:
                assert member.process is not None and member.log is not None
                member.status = member.process.poll()
                if member.status is not None:
                    member.log.close()
                    struck += [member] if jobs > 1 and member.struck_down() else []
            if show is not None:
                show.update(progress_table(team))
            time.sleep(0.2)
    except BaseException:  # Ctrl-C most of all
        running = [m.process for m in team if m.process is not None and m.process.poll() is None]
        for process in running:  # all before any is waited for: a second Ctrl-C must not leave some running
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()
        raise


def _start(words: list[str], environment: dict[str, str], member: Member) -> Member:
    member.log = open(folder_at(member.folder) / "log.txt", "ab" if member.again else "wb")  # noqa: SIM115 (closed when the process ends)
    member.process = subprocess.Popen(
        [*words, *member.overrides, "--out", str(member.folder)],
        env=environment,
        stdout=member.log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches the members through us, once, and not through the terminal as well
    )
    return member


def default_jobs() -> int:
    """Small networks leave most of a GPU idle; on CPUs two trainings at once only get in each other's way."""
    return max(1, min(16, (os.cpu_count() or 2) // 2)) if torch.cuda.is_available() else 1


def progress_table(team: Sequence[Member]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for member in team:
        table.add_row(member.title, member.line())
    return table


def result_table(team: Sequence[Member]) -> Table:
    """What came out, a row a member."""
    table = Table(title="sweep", title_justify="left")
    for title in ("", "nonzeros", "density", "structure", "MACs, paper's counting", "dense", "finetuned"):
        table.add_column(title, justify="left" if not title else "right")
    for member in team:
        record = member.result()
        if record is None:
            table.add_row(member.title, member.line(), "", "", "", "", "")
            continue
        total, accuracy = record["sparse"]["total"], record["accuracy"]
        table.add_row(
            member.title,
            f"{total['nonzeros']:,}",
            f"{total['nonzeros'] / total['weights']:.2%}",
            record["sparse"]["structure"] or "",
            f"{total['macs_paper']:,}",
            f"{accuracy['dense']:.2%}",
            f"{accuracy['finetuned']:.2%}",
        )
    return table


def _last_line(path: Path) -> str:
    lines = _text(path).strip().splitlines()
    return lines[-1] if lines else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
