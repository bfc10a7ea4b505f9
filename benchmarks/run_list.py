"""Works off a list of runs within a limited time, and publishes those that are finished.

Each list is in a script of its own (`tiny_imagenet.py`, `cifar_fronts.py`, `printed_results.py`). Finished runs are
only read, interrupted ones resume, the others follow in order. `one_by_one` executes each in this process, and starts
none that would not end in time; `in_parallel` executes several, each in a process, and stops them when the time is up.
Either way the same command resumes bit for bit: on another machine after `pack_runs.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import subprocess
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
from deephoyer.lab import models, recipe, sweep
from deephoyer.lab.processes import DEEPHOYER, ChildRun, Queue
from deephoyer.lab.recipe import Command
from deephoyer.lab.runs.find import RUNS
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.schema import STAGES, Recipe, is_file
from deephoyer.lab.stages import Training
from deephoyer.lab.train.result import COMPACT, finish, read_record
from deephoyer.lab.train.run import Run
from deephoyer.latency import measure as measure_latency

STARTING = 30.0
"""Seconds until a process trains: with less time left than that, none is started."""


@dataclass(eq=False)
class Job:
    """A run of the list: the title of its row in tables, and the recipe and overrides that start it."""

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
        """The name by which other runs start from, or learn from, the network that this one ends with."""
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
        """The override that starts another run from the network that this one ends with."""
        return f"start={json.dumps(self.words)}"

    def done(self) -> bool:
        return (self.folder / "summary.json").exists()

    def epochs_left(self) -> int:
        return 0 if self.done() else self.recipe.epochs - len(RunFolder(self.folder).metrics())

    @cached_property
    def builds_on(self) -> list[tuple[str, int]]:
        """The identities of the runs whose networks it starts from or learns from."""
        names = [name for _, name in self.recipe.networks() if isinstance(name, str)]
        recipes = [Command.parse(name).read() for name in names if not is_file(name)]
        return [(recipe.digest(), recipe.seed) for recipe in recipes]


def with_scaled_epochs(base: str, overrides: Sequence[str], scale: float) -> tuple[str, ...]:
    """The overrides of a recipe, and those that multiply the epochs of all its stages."""
    scaled = [*overrides]
    unscaled = recipe.read(base, overrides)
    for name in STAGES if scale != 1 else ():
        stage = getattr(unscaled, name)
        if not isinstance(stage, Training):
            continue
        epochs = max(1, math.ceil(scale * stage.epochs))
        scaled.append(f"{name}.epochs={epochs}")
        if stage.lr_warmup > epochs:
            scaled.append(f"{name}.lr_warmup={epochs}")
        if stage.milestones:
            scaled.append(f"{name}.milestones={sorted({max(1, round(scale * m)) for m in stage.milestones})}")
    return tuple(scaled)


def without_repeats(jobs: Iterable[Job]) -> list[Job]:
    """Each run once, where several parts of a list want the same."""
    seen: dict[tuple[str, int], Job] = {}
    for job in jobs:
        seen.setdefault(job.identity, job)
    return list(seen.values())


class Publisher:
    """Publishes finished runs in the folder `results`, each in a process, one after the other; without it nothing."""

    def __init__(self, results: Path | None):
        self.results = results
        self.known = self.published()
        self.waiting: list[Job] = []
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, job: Job) -> None:
        if self.results is not None and job.is_row and job.identity not in self.known:
            self.known.add(job.identity)
            self.waiting.append(job)
            self.publish_next()

    def published(self) -> set[tuple[str, int]]:
        """The identities of the runs that have records in the folder."""
        files = self.results.glob("*/*/*.json") if self.results is not None else ()
        records = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        return {(r["digest"], r["recipe"].get("seed", 0)) for r in records if "digest" in r and "recipe" in r}

    def publish_next(self) -> bool:
        """Starts with the next run unless one is being published; returns whether one is now."""
        if self.process is not None and self.process.poll() is None:
            return True
        if self.results is None or not self.waiting:
            return False
        job = self.waiting.pop(0)
        call = ["nice", *DEEPHOYER, "publish", str(job.folder), "--as", job.row, "--results", str(self.results)]
        call += [] if job.keep_weights else ["--no-weights"]
        self.process = subprocess.Popen([*call, *(word for tag in job.tags for word in ("--tag", tag))])
        return True

    def finish(self, until: float) -> None:
        while self.publish_next() and time.monotonic() < until:
            time.sleep(0.2)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


# One at a time, in this process


_data: dict[str, Any] = {}
"""The data of earlier runs are kept in memory, or every run would decode all images again."""


def _execute(job: Job) -> dict[str, Any]:
    """Executes a run to its end."""
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


def one_by_one(
    jobs: Sequence[Job], seconds: float, publisher: Publisher, seconds_per_epoch: Mapping[str, float], overhead: float
) -> list[str]:
    """Executes runs in order. Those that would not end in time, and what starts from them, are left out: one line each.

    `seconds_per_epoch` is a guess for each network, until one of its epochs has been timed; `overhead` are the seconds
    that a run takes besides its epochs.
    """
    began, left, known = time.monotonic(), [], dict(seconds_per_epoch)
    for job in jobs:
        if job.done():
            job.record = read_record(RunFolder(job.folder))
            publisher.add(job)
            continue
        expected = job.epochs_left() * known[job.network] + overhead
        if time.monotonic() - began + expected > seconds:
            left.append(f"{job.title}: would take {expected:.0f} s")
            continue
        try:
            job.record = _execute(job)
        except UserError as why:
            left.append(f"{job.title}: {str(why).splitlines()[0]}")
            continue
        known[job.network] = 1.05 * job.record["fastest epoch"]
        publisher.add(job)
        publisher.publish_next()
    publisher.finish(began + seconds)
    return left


# Several at once


class TimeIsUp(Exception):
    """Stops the runs; the same command resumes them."""


class InOrder(Queue):
    """Gives the first run of a list that is not done and whose start and teachers are; none when the time is up."""

    def __init__(self, jobs: Sequence[Job], until: float, publisher: Publisher):
        self.jobs, self.until, self.publisher = without_repeats(jobs), until, publisher
        self.by_identity = {job.identity: job for job in self.jobs}
        self.busy: set[tuple[str, int]] = set()
        self.failed: dict[tuple[str, int], str] = {}
        for job in self.jobs:
            if job.done():
                self.publisher.add(job)

    def waits_for(self, job: Job) -> list[Job]:
        """Runs of the list that must be done first."""
        before = (self.by_identity[i] for i in job.builds_on if i in self.by_identity)
        return [earlier for earlier in before if not earlier.done()]

    def _startable(self) -> list[Job]:
        """Runs that can be started now or later: neither they nor any that they wait for have failed."""
        lost = set(self.failed)
        startable: list[Job] = []
        for job in self.jobs:
            if job.done() or job.identity in self.busy:
                continue
            if job.identity in lost or any(before.identity in lost for before in self.waits_for(job)):
                lost.add(job.identity)
            else:
                startable.append(job)
        return startable

    def next(self) -> ChildRun | None:
        if time.monotonic() > self.until - STARTING:
            return None
        for job in self._startable():
            if not self.waits_for(job):
                self.busy.add(job.identity)
                return ChildRun([job.base, *job.overrides], job.folder, about={"job": job})
        return None

    def open(self) -> bool:
        return time.monotonic() < self.until - STARTING and bool(self._startable())

    def ended(self, child: ChildRun) -> None:
        job: Job = child.about["job"]
        self.busy.discard(job.identity)
        if child.result() is None:
            self.failed[job.identity] = child.log_tail()
        else:
            self.publisher.add(job)

    def interrupted(self, child: ChildRun) -> None:
        self.busy.discard(child.about["job"].identity)

    def tick(self, busy: Sequence[ChildRun]) -> None:
        self.publisher.publish_next()
        if time.monotonic() > self.until:
            raise TimeIsUp

    def left(self) -> list[str]:
        """The runs that are not done, and why: one line each."""
        lines = []
        for job in self.jobs:
            if not job.done():
                error = self.failed.get(job.identity)
                before = [earlier.title for earlier in self.waits_for(job)]
                why = f"failed: {error}" if error else f"waits for {before[0]}" if before else "not to its end"
                lines.append(f"{job.title}: {why}; {job.epochs_left()} of {job.recipe.epochs} epochs left")
        return lines


def in_parallel(
    jobs: Sequence[Job],
    seconds: float,
    count: int,
    publisher: Publisher,
    *,
    mps: bool = True,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Executes `count` runs at a time, until all are done or the time is up; returns one line for each that is left.

    With more than one at a time none measures the speed of its network, which the others would distort: that is done
    when it is published.
    """
    queue = InOrder(jobs, time.monotonic() + seconds, publisher)
    devices = [job.recipe.device for job in queue.jobs]
    with suppress(TimeIsUp):
        if count:
            sweep.run_queue([], queue, count, devices, mps=mps, say=say, timed=count == 1)
    publisher.finish(queue.until)
    for job in queue.jobs:
        if job.done():
            job.record = read_record(RunFolder(job.folder))
    return queue.left()


# What a list takes, and what came of it


def rates(jobs: Sequence[Job], images: tuple[int, ...], device: str) -> dict[str, float]:
    """Images per second of the dense network and of the compacted ones that these runs of it ended with, in turns.

    On a GPU compiled, in bfloat16 and channels last; nothing else should run there.
    """
    if not jobs:
        return {}
    dense, fast = jobs[0].recipe.model, device == "cuda"
    networks = [models.of(dense), *(load(job.folder / COMPACT, models.of(dense)) for job in jobs)]
    layout = {"dtype": torch.bfloat16 if fast else torch.float32, "memory_format": torch.channels_last}
    networks = [network.eval().to(device, **layout) for network in networks]
    example = torch.randn(*images).to(device, **layout)
    times = measure_latency(networks, example, [images[0]], seconds=3.0, mode="compiled" if fast else "eager")
    names = ["dense", *(job.title for job in jobs)]
    return {name: images[0] / latency.median_ms * 1e3 for name, (latency,) in zip(names, times, strict=True)}


def plan_rows(
    jobs: Sequence[Job], seconds_per_epoch: Mapping[str, float], items: Mapping[str, Sequence[Job]]
) -> list[list[str]]:
    """Runs, epochs and seconds of each item of a list, then of all; a run of several items counts in the first."""

    def row(title: str, runs: Sequence[Job]) -> list[str]:
        seconds = sum(job.epochs_left() * seconds_per_epoch[job.network] for job in runs)
        counts = [len(runs), sum(job.done() for job in runs), sum(job.recipe.epochs for job in runs)]
        return [title, *map(str, counts), str(sum(job.epochs_left() for job in runs)), f"{seconds:.0f}"]

    rows, counted = [["item", "runs", "done", "epochs", "left", "seconds left"]], set[tuple[str, int]]()
    for title, members in items.items():
        new = [job for job in without_repeats(members) if job.identity not in counted]
        counted |= {job.identity for job in new}
        rows.append(row(title, new))
    return [*rows, row("all", without_repeats(jobs))]


def list_parser(about: str | None, networks: Sequence[str], seeds: Sequence[int], jobs: int) -> argparse.ArgumentParser:
    """A parser with the options of every list whose runs are executed in parallel."""
    parser = measuring.make_parser(about)
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
