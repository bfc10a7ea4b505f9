"""A comparison of methods by one protocol: the same dense start, the same epochs, the same number of settings each.

For each method and size, the setting with the best mean held-out accuracy over a few seeds is chosen; a grid whose best
value is at its end is extended there. The chosen setting is then run with fresh seeds, and their test accuracies are
compared. Every run is an ordinary one in `runs/`, so the same command resumes; results that a file has already are not
run again. A network whose training does not depend on the size is shared by all sizes. The middle size is finished
first, for all methods, so that a comparison that is stopped early has one complete table. The YAML files are read in
`comparison_protocol.py`, the results files in `report/comparison_results.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError, unknown
from deephoyer.lab import recipe as recipes
from deephoyer.lab.comparison_protocol import Entry, Epochs, read
from deephoyer.lab.processes import ChildRun, Queue
from deephoyer.lab.runs.find import RUNS
from deephoyer.lab.runs.folder import FAILED, RunFolder
from deephoyer.lab.schema import STAGES, Recipe, ordered
from deephoyer.lab.search import MEASURES

FORMAT = "deephoyer-comparison-3"
TOLERANCE = 0.01
"""The largest relative deviation from the target size."""
DECADE = 10.0
"""The largest factor between the best strength of a penalty and the neighbours that are also run."""


def near(ratio: float) -> bool:
    """Whether a strength is within a decade of another."""
    return abs(math.log(ratio)) < 1.001 * math.log(DECADE)


@dataclass(frozen=True)
class Job:
    """One network to be measured: a method with a setting and a seed, pruned to a size."""

    method: str
    value: float
    seed: int
    size: float


@dataclass(frozen=True)
class ComparedRun:
    """The result of a job. `seconds` are the method's own training and finetuning, without dense training.

    Only that of the first fresh seed has its command: those of the others differ in the seed alone.
    """

    method: str
    value: float
    seed: int
    size: float
    share: float
    held_out: float
    accuracy: float
    seconds: float
    command: str | None
    commit: str | None
    device: str | None

    @property
    def met(self) -> bool:
        """Whether it has the size that was asked for."""
        return abs(self.share / self.size - 1) <= TOLERANCE


class Comparison(Queue):
    """A queue of runs for `processes.run_children`: which are needed follows from the results so far."""

    def __init__(
        self, name: str, overrides: Sequence[str] = (), only: Sequence[str] = (), minutes: float | None = None
    ):
        self.source, self.name, self.protocol = name, Path(name).stem, read(name)
        typed = {word.partition("=")[0] for word in overrides}
        default = (*self.protocol.epochs.words(), *self.protocol.words)
        self.overrides = (*(word for word in default if word.partition("=")[0] not in typed), *overrides)
        for method in only:
            if method not in self.protocol.methods:
                raise unknown("method of this comparison", method, self.protocol.methods)
        self.methods = {name: entry for name, entry in self.protocol.methods.items() if not only or name in only}
        self.own = self._recipe_of_all()
        # A file may be changed between two commands, and then its runs are others.
        self.own_digest = self.own.digest() if recipes.is_own(self.protocol.base) else ""
        base = self._read(self._target(self.protocol.middle))
        self._refuse_what_is_not_for_all(base)
        assert base.pretrain and base.regularize and base.finetune
        self.dense_epochs, self.training_epochs = base.pretrain.epochs, base.regularize.epochs
        self.epochs = base.regularize.epochs + base.finetune.epochs
        self.device = base.device
        self.sizes = sorted(self.protocol.sizes, key=lambda size: size != self.protocol.middle)
        self.chain, self.folder = cache(self._chain), cache(self._folder)
        self._done: dict[Path, bool] = {}
        self._chosen: dict[tuple[str, float], float | None] = {}
        for method, entry in self.methods.items():  # mistakes show before anything is run
            self._check(method, Job(method, entry.values[0], 0, self.protocol.sizes[0]))
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._busy: set[Path] = set()
        self._failed: dict[Path, str] = {}
        self._outcomes: dict[Job, ComparedRun] = {}
        self._failures: dict[Job, str] = {}
        self._recalled: set[Job] = set()

    def _recipe_of_all(self) -> Recipe:
        """The recipe that the comparison names, as it is; it must have all stages, or the overrides must bring them."""
        try:
            own = recipes.read(self.protocol.base)
        except UserError as why:
            raise UserError(f"comparison {self.source}: {why}") from None
        missing = [s for s in STAGES if not getattr(own, s) and not any(w.startswith(f"{s}=") for w in self.overrides)]
        if missing:
            raise UserError(
                f"comparison {self.source}: {self.protocol.base} must have all four stages; it has no "
                f"{' and no '.join(missing)}."
            )
        return own

    def _refuse_what_is_not_for_all(self, base: Recipe) -> None:
        """Refuses what only some methods would have: they would not be compared by one protocol."""
        missing = [stage for stage in STAGES if getattr(base, stage) is None]
        if missing:
            raise UserError(f"comparison {self.source}: its runs need all four stages; {missing[0]} was taken out.")
        undo = [*(["rounds=1"] if base.rounds > 1 else []), *(["distill=null"] if base.distill else [])]
        if undo:
            raise UserError(
                f"comparison {self.source}: {self.protocol.base} has what not every method would have, "
                f"{' and '.join(word.partition('=')[0] for word in undo)}. Add to the comparison: "
                f"words: [{', '.join((*self.protocol.words, *undo))}]"
            )

    def _check(self, method: str, job: Job) -> None:
        """Refuses a method whose overrides change what must be equal for all methods."""
        chain = [self._read(words, method) for words in self.chain(job)]
        epochs, all_epochs = sum(recipe.epochs for recipe in chain), self.dense_epochs + self.epochs
        if epochs != all_epochs:
            raise UserError(f"comparison {self.source}: {method} trains for {epochs} epochs, the others {all_epochs}.")
        for recipe in chain:
            if recipe.epoch_selection != "held-out":
                raise UserError(
                    f"comparison {self.source}: settings are chosen on held-out images, so {method} needs "
                    f"epoch_selection=held-out, not {recipe.epoch_selection}."
                )

    def recall(self, content: Mapping[str, Any]) -> int:
        """Takes the results of a file, so that those runs are not needed again; returns their number.

        Results with other epochs or overrides are not taken: they must not be in one table with these.
        """
        if not self.has_settings_of(content):
            return 0
        for row in (*content["outcomes"], *content["failed"]):
            job = Job(*(row[field.name] for field in fields(Job)))
            if "why" in row:
                self._failures[job] = row["why"]
            else:
                self._outcomes[job] = ComparedRun(**row)
        self._recalled = {*self._outcomes, *self._failures}
        return len(self._recalled)

    def jobs_to_publish(self) -> list[Job]:
        """The first fresh seed of each method at the middle size."""
        middle, seed = self.protocol.middle, self.protocol.fresh_seeds[0]
        values = {method: self.chosen(method, middle) for method in self.methods}
        return [Job(method, value, seed, middle) for method, value in values.items() if value is not None]

    def recipe(self, job: Job) -> Recipe:
        """The recipe of the run that a job measures."""
        return self._read(self.chain(job)[-1])

    def result_folder(self, job: Job) -> Path:
        """The folder of the run that a job measures."""
        return self.folder(self.chain(job)[-1])

    def run_again(self, jobs: Iterable[Job]) -> None:
        """Forgets the recalled results of these jobs: their runs are needed, unless they are finished in `runs/`."""
        for job in jobs:
            self._outcomes.pop(job, None)
            self._recalled.discard(job)

    def has_settings_of(self, content: Mapping[str, Any]) -> bool:
        """Whether the runs of a results file have the same epochs and overrides."""
        settings = self._settings()
        same = all(content.get(key) == settings.get(key) for key in ("epochs", "recipe"))
        return same and sorted(content["words"]) == sorted(settings["words"])

    def _settings(self) -> dict[str, Any]:
        """The epochs and overrides that all runs have in common."""
        stages = (self.dense_epochs, self.training_epochs, self.epochs - self.training_epochs)
        return {
            "epochs": dict(zip(Epochs.model_fields, stages, strict=True)),
            "words": [word for word in self.overrides if not word.partition("=")[0].endswith(".epochs")],
            **({"recipe": self.own_digest} if self.own_digest else {}),
        }

    # Which runs there are

    def _read(self, words: Sequence[str], method: str | None = None) -> Recipe:
        """The recipe of a run; errors name the method."""
        try:
            return recipes.read(self.protocol.base, (*self.overrides, *words))
        except UserError as why:
            raise UserError(f"comparison {self.source}: {f'methods.{method}: ' if method else ''}{why}") from None

    def _words(self, words: tuple[str, ...]) -> str:
        """What identifies a run: its recipe, and its overrides in an order of their own."""
        return ordered(shlex.join([self.protocol.base, *self.overrides, *words]))

    def _target(self, size: float) -> tuple[str, ...]:
        """The overrides that prune to a size, in place of the recipe's own value or target."""
        value = ["prune.value=null"] if self.own.prune is not None and self.own.prune.value is not None else []
        return (*value, f"prune.target={{{self.protocol.target}: {size:g}}}")

    def _start(self, words: tuple[str, ...]) -> str:
        """The override that starts a run from the network of another run."""
        return f"start={json.dumps(self._words(words))}"

    def _dense(self, seed: int) -> tuple[str, ...]:
        return ("regularize=null", "prune=null", "finetune=null", f"seed={seed}")

    def _chain(self, job: Job) -> list[tuple[str, ...]]:
        """The overrides of the runs of a job, each of which starts from the one before; the last one is measured."""
        entry, seed = self.methods[job.method], f"seed={job.seed}"
        target = self._target(job.size)
        setting = entry.word(job.value)
        if entry.way == "scratch":
            epochs = f"pretrain.epochs={self.dense_epochs + self.epochs}"
            return [(*entry.words, setting, epochs, "regularize=null", "finetune=null", *target, seed)]
        dense = self._dense(job.seed)
        if entry.way == "cut":
            epochs = f"finetune.epochs={self.epochs}"
            words = (*entry.words, setting, epochs, "pretrain=null", "regularize=null", *target, seed)
            return [dense, (*words, self._start(dense))]
        if entry.each_size:
            return [dense, (*entry.words, setting, "pretrain=null", *target, seed, self._start(dense))]
        training = [w for w in (*entry.words, setting) if not w.startswith("prune")]
        pruning = [w for w in (*entry.words, setting) if not w.startswith("regularize")]
        trained = (*training, "pretrain=null", "prune=null", "finetune=null", seed, self._start(dense))
        return [dense, trained, (*pruning, "pretrain=null", "regularize=null", *target, seed, self._start(trained))]

    def _folder(self, words: tuple[str, ...]) -> Path:
        """A run's folder, named by a digest of its overrides: reading thousands of recipes would take too long."""
        seed = next(word.partition("=")[2] for word in words if word.startswith("seed="))
        digest = hashlib.sha256((self._words(words) + self.own_digest).encode()).hexdigest()
        return RUNS / f"compare-{self.name}-{digest[:10]}-s{seed}"

    def values(self, method: str, size: float) -> list[float]:
        """A method's grid, extended where its best value is at an end."""
        entry = self.methods[method]
        values = list(entry.values)
        for _ in range(self.protocol.extensions):
            if not all(self._settled(job) for job in self._search(method, values, size)):
                break
            best = self._best(method, values, size)
            end = None if best is None else 0 if best == values[0] else -1 if best == values[-1] else None
            following = None if end is None else entry.beyond(values, end)
            if following is None:
                break
            values.insert(0 if end == 0 else len(values), following)
        return values

    def _search(self, method: str, values: Sequence[float], size: float) -> Iterator[Job]:
        """The jobs from which a setting is chosen."""
        return (Job(method, value, seed, size) for value in values for seed in range(self.protocol.choose))

    def _best(self, method: str, values: Sequence[float], size: float) -> float | None:
        """The value with the best mean held-out accuracy of those where no seed failed; of equal ones the first."""
        means: dict[float, float] = {}
        for value in values:
            outcomes = [self.outcome(job) for job in self._search(method, [value], size)]
            if all(outcomes):
                # Rounded, so that equal numbers of correct images have equal means.
                means[value] = round(statistics.fmean(run.held_out for run in outcomes if run is not None), 6)
        return max(means, key=lambda value: means[value]) if means else None

    def chosen(self, method: str, size: float) -> float | None:
        """The setting to run with fresh seeds; None if it is not known yet, or if none can be pruned to this size."""
        size = size if self.protocol.chooses_at(size) else self.protocol.middle
        if (method, size) not in self._chosen:
            values = self.values(method, size)
            if not all(self._settled(job) for job in self._search(method, values, size)):
                return None
            self._chosen[method, size] = self._best(method, values, size)
        return self._chosen[method, size]

    def jobs(self) -> Iterator[Job]:
        """The jobs needed so far, the middle size first; more follow when settings have been chosen."""
        for size in self.sizes:
            for method in self.methods if self.protocol.chooses_at(size) else ():
                yield from self._search(method, self.values(method, size), size)
            for method in self.methods:
                value = self.chosen(method, size)
                if value is not None:
                    yield from (Job(method, value, seed, size) for seed in self.protocol.fresh_seeds)
            for method in self.methods if size == self.protocol.middle else ():
                yield from self._search(method, self.strengths_near_best(method), size)

    def strengths_near_best(self, method: str) -> list[float]:
        """A penalty's strengths within a decade of its best one at the middle size, its grid extended as needed.

        They show how much a wrong strength costs; none is chosen from them.
        """
        entry, best = self.methods[method], self.chosen(method, self.protocol.middle)
        if best is None or not entry.penalizes:
            return []
        values = self.values(method, self.protocol.middle)
        for end in (0, -1):
            for _ in range(self.protocol.extensions):
                following = entry.beyond(values, end)
                if following is not None and near(following / best):
                    values.insert(0 if end == 0 else len(values), following)
        return [value for value in values if near(value / best)]

    def cost(self) -> tuple[dict[Path, int], set[Path]]:
        """The epochs of every run, fresh seeds included, and the folders of those that are finished.

        Settings that are not chosen yet are assumed to differ between sizes, and no grid to be extended.
        """
        runs: dict[Path, int] = {}
        for method, entry in self.methods.items():
            for place, size in enumerate(self.sizes):
                value = self.chosen(method, size)
                searched = self.protocol.chooses_at(size)
                if value is None:
                    value = entry.values[place % len(entry.values) if searched else 0]
                jobs = [*self._search(method, entry.values, size)] if searched else []
                for job in (*jobs, *(Job(method, value, seed, size) for seed in self.protocol.fresh_seeds)):
                    if job in self._recalled:
                        continue
                    epochs = self._epochs(entry)
                    runs |= {self.folder(words): n for words, n in zip(self.chain(job), epochs, strict=True)}
        return runs, {folder for folder in runs if self._is_done(folder)}

    def _epochs(self, entry: Entry) -> list[int]:
        """The epochs of each run of a method's chain."""
        if entry.way == "scratch":
            return [self.dense_epochs + self.epochs]
        if entry.way == "cut" or entry.each_size:
            return [self.dense_epochs, self.epochs]
        return [self.dense_epochs, self.training_epochs, self.epochs - self.training_epochs]

    # Results

    def outcome(self, job: Job) -> ComparedRun | None:
        if job not in self._outcomes:
            chain = self.chain(job)
            if all(self._is_done(self.folder(words)) for words in reversed(chain)):
                self._outcomes[job] = self._measured(job, chain)
        return self._outcomes.get(job)

    def _is_done(self, folder: Path) -> bool:
        """Looked up once; `ended` keeps it up to date."""
        if folder not in self._done:
            self._done[folder] = (folder / "summary.json").exists()
            if not self._done[folder] and (folder / FAILED).exists():
                with suppress(UserError):  # where that is damaged, it is run again
                    self._failed[folder] = str(RunFolder(folder).read_json(FAILED))
        return self._done[folder]

    def _measured(self, job: Job, chain: list[tuple[str, ...]]) -> ComparedRun:
        from deephoyer.lab.train.result import read_record  # torch takes seconds to load

        summaries = [read_record(RunFolder(self.folder(words))) for words in chain]
        last, total = summaries[-1], summaries[-1]["sparse"]["total"]
        if self.protocol.target == "live":
            share = total["nonzeros"] / total["weights"]
        else:
            share = MEASURES["macs"](self.folder(chain[-1]), last) / total["macs_executed"]
        without_dense = summaries if len(chain) == 1 else summaries[1:]
        environment = last.get("environment", {})
        return ComparedRun(
            **asdict(job),
            share=round(share, 7),
            held_out=round(MEASURES["accuracy"](self.folder(chain[-1]), last), 7),
            accuracy=next(reversed(last["accuracy"].values())),
            seconds=round(sum(sum(s["seconds"].values()) for s in without_dense), 1),
            command=str(self._command(chain[-1])) if job.seed == self.protocol.choose else None,
            commit=(environment.get("git") or {}).get("commit", "")[:12] or None,
            device=environment.get("device_name"),
        )

    def _command(self, words: Sequence[str]) -> recipes.Command:
        return recipes.Command(self.protocol.base, (*self.overrides, *words))

    def failure(self, job: Job) -> str | None:
        """Why a job failed: the error of the first failed run of its chain."""
        if job in self._failures:
            return self._failures[job]
        for folder in map(self.folder, self.chain(job)):
            if not self._is_done(folder) and folder in self._failed:
                return self._failed[folder]
        return None

    def _settled(self, job: Job) -> bool:
        return self.outcome(job) is not None or self.failure(job) is not None

    def content(self) -> dict[str, Any]:
        """The content of a results file: chosen settings, outcomes of all seeds, and failures."""
        jobs = list(dict.fromkeys(self.jobs()))
        outcomes = [asdict(run) for job in jobs if (run := self.outcome(job)) is not None]
        failed = [{**asdict(job), "why": why} for job in jobs if (why := self.failure(job)) is not None]
        chosen = [
            {"method": method, "size": size, "value": value}
            for method in self.methods
            for size in self.protocol.sizes
            if (value := self.chosen(method, size)) is not None
        ]
        return {
            "format": FORMAT,
            "name": self.name,
            "protocol": self.protocol.digest(),
            "methods": {method: entry.digest() for method, entry in self.methods.items()},
            **self._settings(),
            "chosen": chosen,
            "outcomes": outcomes,
            "failed": failed,
        }

    # The queue

    def next(self) -> ChildRun | None:
        for words, title in self._waiting() if time.monotonic() < self._until else ():
            folder = self.folder(words)
            if folder not in self._busy:
                self._busy.add(folder)
                return ChildRun(list(words), folder, name=title)
        return None

    def _waiting(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """The next run of each unsettled job, with its title; then the dense networks for the fresh seeds."""
        unsettled = [job for job in self.jobs() if not self._settled(job)]
        for job in unsettled:
            yield next(
                (words, self._title(job, words)) for words in self.chain(job) if not self._is_done(self.folder(words))
            )
        still_choosing = any(job.seed < self.protocol.choose for job in unsettled)
        if still_choosing and any(entry.way != "scratch" for entry in self.methods.values()):
            for seed in self.protocol.fresh_seeds:
                words = self._dense(seed)
                if not self._is_done(folder := self.folder(words)) and folder not in self._failed:
                    yield words, f"dense, seed {seed}"

    def _title(self, job: Job, words: tuple[str, ...]) -> str:
        """A short name for a run of a job's chain: its overrides contain those of all runs before it."""
        if words == self._dense(job.seed):
            return f"dense, seed {job.seed}"
        size = f", {100 * job.size:g} %" if words == self.chain(job)[-1] else ", trained"
        return f"{job.method}, {job.value:g}{size}, seed {job.seed}"

    def open(self) -> bool:
        return time.monotonic() < self._until and any(not self._settled(job) for job in self.jobs())

    def ended(self, child: ChildRun) -> None:
        self._busy.discard(child.folder)
        self._done[child.folder] = child.result() is not None
        if not self._done[child.folder]:
            self._failed[child.folder] = child.log_tail().removeprefix("deephoyer: ")

    def interrupted(self, child: ChildRun) -> None:
        self._busy.discard(child.folder)
