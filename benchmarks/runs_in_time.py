"""A list of runs within a time: those done before are read, those begun go on, others follow in order; then records.

What the lists are is said by those who use it (`tiny_imagenet.py`, `cifar_fronts.py`). Two ways to work one off: each
run to its end in this process, which begins nothing that would not end in time (`in_this_process`); or several at once,
each a process, stopped when the time is up (`at_once`). Either way the same command goes on where it was stopped, and
runs resume bit for bit. For machines that are given back, `pack` puts what the rest of a list needs into a few files;
`python benchmarks/runs_in_time.py FOLDER` does so with all of `runs/`, those of comparisons and searches, too.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import measuring
from deephoyer.errors import UserError
from deephoyer.export import load
from deephoyer.files import folder_at, write_atomically
from deephoyer.lab import models, recipe, sweep
from deephoyer.lab.processes import DEEPHOYER, ChildRun, Queue
from deephoyer.lab.recipe import Command
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.find import RUNS
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.schema import STAGES, Recipe, is_file
from deephoyer.lab.stages import Training
from deephoyer.lab.train.result import COMPACT, finish, read_record
from deephoyer.lab.train.run import Run
from deephoyer.latency import measure as measure_latency

PART, MOST = 15 * 2**20, 60 * 2**20
"""Bytes of each file that `pack` writes, and of all."""
STARTING = 30.0
"""Seconds until a process trains: with less time left than that, none is started."""


@dataclass(eq=False)
class Job:
    """A run: what its row is called, and the words that start it."""

    network: str
    method: str
    aim: str
    base: str
    overrides: tuple[str, ...]
    is_row: bool = True
    tags: tuple[str, ...] = ()
    keep_weights: bool = False
    record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe: Recipe = self.command.read()
        self.folder: Path = RUNS / recipe.folder_name(self.base, self.overrides)

    @property
    def command(self) -> Command:
        return Command(self.base, self.overrides)

    @property
    def words(self) -> str:
        """By which other runs name the network that this one ends with."""
        return shlex.join([self.base, *sorted(self.overrides)])

    @property
    def row(self) -> str:
        return f"{self.method}{', ' * bool(self.aim)}{self.aim}"

    @property
    def title(self) -> str:
        return f"{self.network}, {self.row}, seed {self.recipe.seed}"

    @property
    def identity(self) -> tuple[str, int]:
        return self.recipe.digest(), self.recipe.seed

    def start(self) -> str:
        """The override that begins another run with what this one ends with."""
        return f"start={json.dumps(self.words)}"

    def done(self) -> bool:
        return (self.folder / "summary.json").exists()

    def epochs_left(self) -> int:
        return 0 if self.done() else self.recipe.epochs - len(RunFolder(self.folder).metrics())

    @cached_property
    def builds_on(self) -> list[tuple[str, int]]:
        """The identities of the runs whose networks it starts from or learns from."""
        named = [words for _, words in self.recipe.networks() if isinstance(words, str)]
        made = [Command.parse(words).read() for words in named if not is_file(words)]
        return [(one.digest(), one.seed) for one in made]


def scaled(base: str, overrides: Sequence[str], scale: float) -> tuple[str, ...]:
    """The overrides of a recipe, and those that multiply the epochs of all its stages."""
    given, made = tuple(overrides), recipe.read(base, overrides)
    if scale == 1:
        return given
    for name in STAGES:
        stage = getattr(made, name)
        if not isinstance(stage, Training):
            continue
        epochs = max(1, math.ceil(scale * stage.epochs))
        given += (f"{name}.epochs={epochs}",)
        if stage.lr_warmup > epochs:
            given += (f"{name}.lr_warmup={epochs}",)
        if stage.milestones:
            given += (f"{name}.milestones={sorted({max(1, round(scale * m)) for m in stage.milestones})}",)
    return given


def once(jobs: Iterable[Job]) -> list[Job]:
    """Each run once, where several parts of a list want the same."""
    seen: dict[tuple[str, int], Job] = {}
    for job in jobs:
        seen.setdefault(job.identity, job)
    return list(seen.values())


class Records:
    """Publishes finished runs, one after the other, in a process of its own."""

    def __init__(self, results: Path | None):
        self.results = results
        self.known = self.there()
        self.waiting: list[Job] = []
        self.now: subprocess.Popen[bytes] | None = None

    def add(self, job: Job) -> None:
        if self.results is not None and job.is_row and job.identity not in self.known:
            self.known.add(job.identity)
            self.waiting.append(job)
            self.go_on()

    def there(self) -> set[tuple[str, int]]:
        """The identities of the runs that have been published there."""
        files = self.results.glob("*/*/*.json") if self.results is not None else ()
        every = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        return {(one["digest"], one["recipe"].get("seed", 0)) for one in every if "digest" in one and "recipe" in one}

    def go_on(self) -> bool:
        """Begins with the next one where none is being written; whether one is."""
        if self.now is not None and self.now.poll() is None:
            return True
        if self.results is None or not self.waiting:
            return False
        job = self.waiting.pop(0)
        call = ["nice", *DEEPHOYER, "publish", str(job.folder), "--as", job.row, "--results", str(self.results)]
        call += [] if job.keep_weights else ["--no-weights"]
        self.now = subprocess.Popen([*call, *(word for tag in job.tags for word in ("--tag", tag))])
        return True

    def finish(self, until: float) -> None:
        while self.go_on() and time.monotonic() < until:
            time.sleep(0.2)
        if self.now is not None and self.now.poll() is None:
            self.now.terminate()
            self.now.wait()


# One at a time, in this process


_data: dict[str, Any] = {}
"""What was read is held, or every run would decode all images again."""


def _do(job: Job) -> dict[str, Any]:
    """One run to its end."""
    began = time.monotonic()
    run = Run(job.recipe, job.folder, command=job.command)
    record = finish(run.execute())
    _data[job.network] = run.data
    epoch = min(line["seconds"] for line in run.folder.metrics())
    rate = len(run.pool) / epoch
    del run
    gc.collect()  # a run's captured graphs hold memory on the device
    accuracy = [f"{title} {share:.2%}" for title, share in record["accuracy"].items()]
    print(f"{job.title}: {', '.join(accuracy)}; {time.monotonic() - began:.0f} s", flush=True)
    return record | {"fastest epoch": epoch, "images a second": rate}


def in_this_process(
    jobs: Sequence[Job], seconds: float, records: Records, pace: Mapping[str, float], around: float
) -> list[str]:
    """Does them in order; those that are not expected to end in time, and what starts from them, are left and told.

    `pace` is a guess of the seconds an epoch by network, until one has been seen; a run takes `around` besides.
    """
    began, left, known = time.monotonic(), [], dict(pace)
    for job in jobs:
        if job.done():
            job.record = read_record(RunFolder(job.folder))
            records.add(job)
            continue
        expected = job.epochs_left() * known[job.network] + around
        if time.monotonic() - began + expected > seconds:
            left.append(f"{job.title}: would take {expected:.0f} s")
            continue
        try:
            job.record = _do(job)
        except UserError as why:
            left.append(f"{job.title}: {str(why).splitlines()[0]}")
            continue
        known[job.network] = 1.05 * job.record["fastest epoch"]
        records.add(job)
        records.go_on()
    records.finish(began + seconds)
    return left


# Several at once


class TimeIsUp(Exception):
    """Stops what is running; it goes on another time."""


class InOrder(Queue):
    """The first run of a list that is not done and has what it builds on; none any more when the time is up."""

    def __init__(self, jobs: Sequence[Job], until: float, records: Records):
        self.jobs, self.until, self.records = once(jobs), until, records
        self.by_identity = {job.identity: job for job in self.jobs}
        self.busy: set[tuple[str, int]] = set()
        self.failed: dict[tuple[str, int], str] = {}
        for job in self.jobs:
            if job.done():
                self.records.add(job)

    def waits_for(self, job: Job) -> list[Job]:
        """Runs of the list that must be done first."""
        before = (self.by_identity[i] for i in job.builds_on if i in self.by_identity)
        return [one for one in before if not one.done()]

    def _open(self) -> list[Job]:
        """Those that may still be begun, now or when what runs is done."""
        lost = set(self.failed)
        found: list[Job] = []
        for job in self.jobs:
            if job.done() or job.identity in self.busy:
                continue
            if job.identity in lost or any(before.identity in lost for before in self.waits_for(job)):
                lost.add(job.identity)
            else:
                found.append(job)
        return found

    def next(self) -> ChildRun | None:
        if time.monotonic() > self.until - STARTING:
            return None
        for job in self._open():
            if not self.waits_for(job):
                self.busy.add(job.identity)
                return ChildRun([job.base, *job.overrides], job.folder, about={"job": job})
        return None

    def open(self) -> bool:
        return time.monotonic() < self.until - STARTING and bool(self._open())

    def ended(self, child: ChildRun) -> None:
        job: Job = child.about["job"]
        self.busy.discard(job.identity)
        if child.result() is None:
            self.failed[job.identity] = child.log_tail()
        else:
            self.records.add(job)

    def interrupted(self, child: ChildRun) -> None:
        self.busy.discard(child.about["job"].identity)

    def tick(self, busy: Sequence[ChildRun]) -> None:
        self.records.go_on()
        if time.monotonic() > self.until:
            raise TimeIsUp

    def left(self) -> list[str]:
        """What is not done, and why."""
        found = []
        for job in self.jobs:
            if not job.done():
                why = self.failed.get(job.identity)
                before = [one.title for one in self.waits_for(job)]
                told = f"failed: {why}" if why else f"waits for {before[0]}" if before else "not to its end"
                found.append(f"{job.title}: {told}; {job.epochs_left()} of {job.recipe.epochs} epochs left")
        return found


def at_once(
    jobs: Sequence[Job],
    seconds: float,
    count: int,
    records: Records,
    *,
    mps: bool = True,
    say: Callable[[str], None] = print,
) -> list[str]:
    """`count` of them at a time, until all are done or the time is up; what is left, a line each.

    Of several at once none times its network, for the others would be in the way: that is for who publishes them.
    """
    queue = InOrder(jobs, time.monotonic() + seconds, records)
    devices = [job.recipe.device for job in queue.jobs]
    with suppress(TimeIsUp):
        if count:
            sweep.run_queue([], queue, count, devices, mps=mps, say=say, timed=count == 1)
    records.finish(queue.until)
    for job in queue.jobs:
        if job.done():
            job.record = read_record(RunFolder(job.folder))
    return queue.left()


# What a list comes to, told before and after


def rates(jobs: Sequence[Job], images: tuple[int, ...], device: str) -> dict[str, float]:
    """Images a second of the dense network and of what these runs of it ended with, in turns.

    On a GPU compiled, in bfloat16 and channels last; nothing else should run there.
    """
    if not jobs:
        return {}
    of, fast = jobs[0].recipe.model, device == "cuda"
    networks = [models.of(of), *(load(job.folder / COMPACT, models.of(of)) for job in jobs)]
    layout = {"dtype": torch.bfloat16 if fast else torch.float32, "memory_format": torch.channels_last}
    networks = [network.eval().to(device, **layout) for network in networks]
    example = torch.randn(*images).to(device, **layout)
    times = measure_latency(networks, example, [images[0]], seconds=3.0, mode="compiled" if fast else "eager")
    names = ["dense", *(job.title for job in jobs)]
    return {name: images[0] / taken[0].median_ms * 1e3 for name, taken in zip(names, times, strict=True)}


def plan_rows(jobs: Sequence[Job], pace: Mapping[str, float], items: Mapping[str, Sequence[Job]]) -> list[list[str]]:
    """Runs, epochs and seconds of each item of a list; a run that several items want counts in the first."""
    rows, seen = [["item", "runs", "done", "epochs", "left", "seconds left"]], set[tuple[str, int]]()
    for title, own in items.items():
        new = [job for job in once(own) if job.identity not in seen]
        seen |= {job.identity for job in new}
        left = sum(job.epochs_left() * pace[job.network] for job in new)
        counts = [len(new), sum(job.done() for job in new), sum(job.recipe.epochs for job in new)]
        rows.append([title, *map(str, counts), str(sum(job.epochs_left() for job in new)), f"{left:.0f}"])
    total = once(jobs)
    left = sum(job.epochs_left() * pace[job.network] for job in total)
    counts = [len(total), sum(job.done() for job in total), sum(job.recipe.epochs for job in total)]
    rows.append(["all", *map(str, counts), str(sum(job.epochs_left() for job in total)), f"{left:.0f}"])
    return rows


def list_words(about: str | None, networks: Sequence[str], seeds: Sequence[int], jobs: int) -> argparse.ArgumentParser:
    """What every list that is worked off several at once takes."""
    parser = measuring.words(about)
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time; the same command resumes")
    parser.add_argument("--jobs", type=int, default=jobs, help="parallel runs; 0: only publish and pack")
    parser.add_argument("--no-mps", action="store_true", help="processes take turns on a GPU")
    parser.add_argument("--publish", type=Path, help="write records into this folder")
    parser.add_argument("--pack", type=Path, help="write what another machine needs to resume into this folder")
    parser.add_argument("--plan", action="store_true", help="only print what is left to do")
    parser.add_argument("changes", nargs="*", help="overrides for all runs, as of `deephoyer run`")
    return parser


# From one machine to another


ALWAYS = ("command.json", "recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "method.safetensors")


def pack(
    folders: Iterable[Path], place: Path, most: int, needed: Callable[[Path], bool] = lambda folder: True
) -> list[str]:
    """Writes what goes on elsewhere with these runs into the folder `place`, as parts of one archive.

    `cat place/runs-* | tar xz` unpacks it. Of a run that is done its record, and its network where that is `needed`; of
    one that is not, the newest checkpoint. At most `most` bytes, finished runs first; what found no room is named, and
    would begin again.
    """
    stream, left = io.BytesIO(), []
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for folder in sorted(folders, key=lambda folder: not (folder / "summary.json").exists()):
            run, files = RunFolder(folder), [folder / name for name in ALWAYS]
            made = run.recipe() if (folder / "recipe.yaml").exists() else None
            if made is None:
                continue
            if not (folder / "summary.json").exists():
                numbers = checkpoint.numbers(run.checkpoints)
                files += [run.checkpoints / f"{n:06d}.safetensors" for n in numbers[-1:]]
            elif needed(folder):
                files += [folder / made.result_file, folder / COMPACT]
            there = [file for file in files if file.exists()]
            archive.fileobj.flush()  # type: ignore[union-attr]
            if stream.tell() + sum(file.stat().st_size for file in there) > most:
                left.append(str(folder))
                continue
            for file in there:
                archive.add(file)
    content = stream.getvalue()
    for old in folder_at(place).glob("runs-*"):
        old.unlink()
    for i, at in enumerate(range(0, len(content), PART)):
        write_atomically(place / f"runs-{i:02d}", content[at : at + PART])
    return left


def pack_jobs(jobs: Sequence[Job], place: Path, records: Records) -> list[str]:
    """The same for a list, told in words: networks go along that runs still build on, or that are to be published."""
    needed = {identity for job in jobs if not job.done() for identity in job.builds_on}
    needed |= {job.identity for job in jobs if job.is_row} - records.there()
    kept = {job.folder for job in jobs if job.identity in needed}
    left = pack([job.folder for job in once(jobs)], place, MOST, lambda folder: folder in kept)
    return [_packed(place), *(f"no room for {folder}" for folder in left)]


def _packed(place: Path) -> str:
    size = sum(file.stat().st_size for file in place.glob("runs-*"))
    return f"packed into {place}: {size / 2**20:.1f} MiB; `cat {place}/runs-* | tar xz` unpacks it"


def main() -> None:
    """Packs all of `runs/`, whatever began them."""
    left = pack((path.parent for path in RUNS.glob("*/command.json")), Path(sys.argv[1]), MOST)
    print(_packed(Path(sys.argv[1])), *(f"no room for {folder}" for folder in left), sep="\n")


if __name__ == "__main__":
    main()
