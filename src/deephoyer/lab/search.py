"""A search for good settings with Optuna: each trial is an ordinary run, several workers share one study.

A worker asks the study for settings, executes a run with them, and reports its results. Workers share the study's
storage: a journal file by default (on a shared disk also between machines), or another storage of Optuna's by its URL,
such as PostgreSQL. A worker writes heartbeats while its trial runs; a trial without them is resumed by another worker,
from its last checkpoint if the folder is shared.

`accuracy` is measured on the images that select epochs: held-out ones unless the recipe says otherwise.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError, first_line, unknown
from deephoyer.files import folder_at
from deephoyer.lab import recipe as recipes
from deephoyer.lab.processes import ChildRun, Queue
from deephoyer.lab.runs.folder import RunFolder

SILENT_AFTER = 120.0
"""Seconds without a heartbeat after which a trial's worker is considered dead."""
RETRIES = 3
"""How often a trial is retried before it counts as failed."""

MEASURES: dict[str, Callable[[Path, dict[str, Any]], float]] = {
    "accuracy": lambda folder, summary: _selected_accuracy(folder, summary),
    "nonzeros": lambda folder, summary: summary["sparse"]["total"]["nonzeros"],
    "macs": lambda folder, summary: _compacted(summary)["macs_executed"],
    "parameters": lambda folder, summary: _compacted(summary)["parameters"],
    "seconds": lambda folder, summary: sum(summary["seconds"].values()),
}
"""The objectives, computed from a finished run's folder and summary."""


@dataclass(frozen=True)
class Axis:
    """One key and its domain: a list of values, or a range on a linear or logarithmic scale.

    >>> Axis.read("regularize.strength=1e-5..1e-2:log")
    Axis(key='regularize.strength', low=1e-05, high=0.01, log=True, whole=False, values=())
    >>> Axis.read("regularize.penalty=l1,hoyer-square").values
    ('l1', 'hoyer-square')
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    values: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> Axis:
        key, _, domain = text.partition("=")
        if not key or not domain:
            raise UserError(f"--vary {text!r}: write key=low..high, key=low..high:log or key=value,value,…")
        bounds = re.fullmatch(r"([^.:,]+(?:\.\d+)?(?:e[-+]?\d+)?)\.\.([^:,]+)(:log)?", domain, re.IGNORECASE)
        if bounds is None:
            values = tuple(recipes.values_in(domain))
            if len(set(values)) < max(2, len(values)):
                raise UserError(f"--vary {text!r}: give at least two different values, or a range like 1e-4..1e-2:log.")
            return cls(key, values=values)
        try:
            low, high = float(bounds[1]), float(bounds[2])
        except ValueError:
            raise UserError(f"--vary {text!r}: {bounds[1]} and {bounds[2]} are not both numbers.") from None
        log = bounds[3] is not None
        if not low < high or (log and low <= 0):
            raise UserError(
                f"--vary {text!r}: a range goes from a smaller to a larger number; both must be above 0 for :log."
            )
        whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (bounds[1], bounds[2]))
        return cls(key, low, high, log, whole)

    def ends(self) -> list[str]:
        """Values to validate the recipe with before anything starts."""
        return list(self.values) or [self._text(self.low), self._text(self.high)]

    def suggest(self, trial: Any) -> str:
        """The override for a trial."""
        if self.values:
            return f"{self.key}={trial.suggest_categorical(self.key, list(self.values))}"
        if self.whole:
            return f"{self.key}={trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)}"
        return f"{self.key}={self._text(trial.suggest_float(self.key, self.low, self.high, log=self.log))}"

    def _text(self, value: float) -> str:
        """Four digits are enough, and keep overrides readable."""
        return str(int(value)) if self.whole else f"{value:.4g}"


@dataclass(frozen=True)
class SearchGoal:
    """An objective and its direction."""

    measure: str
    maximize: bool

    def __str__(self) -> str:
        return f"{'maximize' if self.maximize else 'minimize'} {self.measure}"


def goals(maximize: Sequence[str], minimize: Sequence[str]) -> list[SearchGoal]:
    """The validated objectives."""
    objectives = [SearchGoal(m, True) for m in maximize] + [SearchGoal(m, False) for m in minimize]
    for goal in objectives:
        if goal.measure not in MEASURES:
            raise unknown("measure", goal.measure, MEASURES)
    if not objectives or len({goal.measure for goal in objectives}) < len(objectives):
        raise UserError("give each objective once, like --maximize accuracy --minimize macs.")
    return objectives


class Search(Queue):
    """One worker's view of a study; a queue of trials for `processes.run_children`."""

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        axes: Sequence[Axis],
        aims: Sequence[SearchGoal],
        trials: int,
        folder: Path,
        storage: str | None = None,
        seed: int = 0,
        silent_after: float = SILENT_AFTER,
    ):
        if len({axis.key for axis in axes}) < max(1, len(axes)):
            raise UserError("--vary: give at least one key, each once.")
        self.recipe, self.overrides, self.axes, self.aims = recipe, list(overrides), list(axes), list(aims)
        self.trials, self.folder, self.silent_after = trials, folder, silent_after
        for axis in axes:  # mistakes show before anything starts
            for value in axis.ends():
                self._read([f"{axis.key}={value}"])
        self.study = self._open(storage, seed)
        self._last_heartbeat = 0.0

    def _read(self, chosen: Sequence[str]) -> Any:
        return recipes.read(self.recipe, [*self.overrides, *chosen])

    def _open(self, storage: str | None, seed: int) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        place: Any = storage
        name = self.folder.absolute().name
        if storage is None:
            journal = folder_at(self.folder) / "study.journal"
            try:
                place = _storage_in(journal)
                names = optuna.get_all_study_names(place)
            except (ValueError, KeyError, OSError) as why:
                told = _damage(journal) or f"can't be read: {first_line(why)}."
                raise UserError(f"{journal}: {told}") from None
            name = name if name in names else next(iter(names), name)  # the folder may have been renamed
        elif "://" not in storage:
            raise UserError(f"--storage {storage!r}: give an address like postgresql://user@host/database.")
        settings = {
            "recipe": self.recipe,
            "overrides": self.overrides,
            "vary": [repr(axis) for axis in self.axes],
            "goals": [str(aim) for aim in self.aims],
        }
        try:
            study = optuna.create_study(
                storage=place,
                study_name=name,
                directions=["maximize" if aim.maximize else "minimize" for aim in self.aims],
                load_if_exists=True,
            )
        except Exception as why:  # each storage has errors of its own
            raise UserError(f"the study {name} can't be opened: {first_line(why)}.") from None
        # Workers must not draw the same settings: in containers they may have the same process number.
        own = f"{seed} {socket.gethostname()} {os.getpid()} {len(study.trials)}"
        sampler = optuna.samplers.TPESampler(seed=zlib.crc32(own.encode()), multivariate=len(self.axes) > 1)
        study.sampler = sampler
        stored = study.user_attrs.get("search")
        if stored is None:
            study.set_user_attr("search", settings)
        elif stored != settings:
            other = next(key for key in settings if stored.get(key) != settings[key])
            raise UserError(
                f"{self.folder}: contains another search: its {other} is {stored.get(other)}, now {settings[other]}."
                " Choose another folder with --out."
            )
        return study

    def device(self) -> str:
        return self._read([f"{axis.key}={axis.ends()[0]}" for axis in self.axes]).device

    # The queue

    def next(self) -> ChildRun | None:
        self._requeue_silent()
        if not self._room():
            return None
        trial = self.study.ask()
        if sum(t.number < trial.number for t in self._counted()) >= self.trials:
            self._close(trial.number, "surplus")  # another worker asked at the same time for the last trial
            return None
        chosen = [axis.suggest(trial) for axis in self.axes]
        trial.set_user_attr("overrides", chosen)
        trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
        self._heartbeat(trial.number)
        folder = self.folder / recipes.folder_name(self.recipe, [*self.overrides, *chosen])
        return ChildRun(chosen, folder, about={"trial": trial.number})

    def open(self) -> bool:
        """Whether there may still be a trial for this worker, such as that of another worker that dies."""
        return any(trial.state.name == "RUNNING" for trial in self._all()) or self._room()

    def ended(self, child: ChildRun) -> None:
        number = child.about["trial"]
        summary = child.result()
        if summary is None:
            self._fail(number, child.log_tail())
            return
        try:
            values = [float(MEASURES[aim.measure](child.folder, summary)) for aim in self.aims]
        except UserError as why:
            self._fail(number, str(why))
        else:
            self.study.tell(number, values, skip_if_finished=True)

    def interrupted(self, child: ChildRun) -> None:
        self._requeue(child.about["trial"], died=False)

    def tick(self, busy: Sequence[ChildRun]) -> None:
        """Writes the heartbeats of this worker's trials."""
        if time.monotonic() - self._last_heartbeat > min(20.0, self.silent_after / 4):
            self._last_heartbeat = time.monotonic()
            for child in busy:
                self._heartbeat(child.about["trial"])

    def _fail(self, number: int, why: str) -> None:
        from optuna.trial import TrialState

        self._note(number, "why", why)
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    # Trials

    def _all(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def _counted(self) -> list[Any]:
        """Trials that count towards the requested number: one that was retried counts once."""
        return [t for t in self._all() if "given_up" not in t.user_attrs]

    def _room(self) -> bool:
        """Whether a trial may start: one that waits to be resumed, or a new one."""
        return sum(t.state.name != "WAITING" for t in self._counted()) < self.trials

    def _note(self, number: int, key: str, value: Any) -> None:
        """Sets an attribute of any worker's trial, by the trial's id in the storage; not of one that has ended.

        Another worker may have ended it: this one was stopped, or its machine slept.
        """
        import optuna

        id_in_storage = next(t._trial_id for t in self._all() if t.number == number)
        with suppress(RuntimeError):  # it has ended
            optuna.trial.Trial(self.study, id_in_storage).set_user_attr(key, value)

    def _heartbeat(self, number: int) -> None:
        self._note(number, "alive", time.time())

    def _requeue_silent(self) -> None:
        for trial in self._all():
            if trial.state.name == "RUNNING":
                began = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
                if time.time() - trial.user_attrs.get("alive", began) > self.silent_after:
                    self._requeue(trial.number)

    def _requeue(self, number: int, died: bool = True) -> None:
        """Ends the trial and queues its settings again; if several workers do this at the same time, one succeeds.

        A trial whose worker died is retried a limited number of times, as it may have been the cause.
        """
        trial = next(t for t in self._all() if t.number == number)
        tries = trial.user_attrs.get("tries", 1) + died
        again = tries <= RETRIES + 1
        if self._close(number, "retried" if again else None) and again and trial.params:
            self.study.enqueue_trial(trial.params, user_attrs={"tries": tries, "retry_of": number})

    def _close(self, number: int, given_up: str | None) -> bool:
        """Ends a running trial without a value; False if another worker did it first."""
        from optuna.trial import TrialState

        try:
            if given_up:
                self._note(number, "given_up", given_up)
            self.study.tell(number, state=TrialState.FAIL)
        except (ValueError, RuntimeError):  # it ended meanwhile
            return False
        return True

    # Results

    def rows(self) -> list[tuple[list[str], list[float], bool]]:
        """Finished trials with their values, and whether they are Pareto-optimal; sorted by the first objective."""
        best = {t.number for t in self.study.best_trials} if self.done() else set()
        finished = [t for t in self._all() if t.state.name == "COMPLETE"]
        finished.sort(key=lambda t: (-1 if self.aims[0].maximize else 1) * t.values[0])
        return [(t.user_attrs["overrides"], list(t.values), t.number in best) for t in finished]

    def done(self) -> int:
        return sum(t.state.name == "COMPLETE" for t in self._all())

    def failures(self) -> list[tuple[list[str], str]]:
        """Settings whose run failed, and why."""
        failed = [t for t in self._counted() if t.state.name == "FAIL"]
        return [(t.user_attrs.get("overrides", []), t.user_attrs.get("why", "its worker died")) for t in failed]


def _storage_in(journal: Path) -> Any:
    """Optuna's storage in a file that a full disk does not spoil.

    Optuna would write its next line behind the half of one that is left, which nobody can read then.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    class Lock(JournalFileSymlinkLock):
        def acquire(self) -> bool:
            acquired = super().acquire()
            with suppress(OSError):  # then it can't be written either, which Optuna says
                _cut_incomplete_line(journal)
            return acquired

    return JournalStorage(JournalFileBackend(str(journal), lock_obj=Lock(str(journal))))


def _cut_incomplete_line(path: Path) -> None:
    with open(path, "rb+") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def _damage(journal: Path) -> str | None:
    """Which line of the file is no JSON, and what can be done; what follows it may depend on it."""
    try:
        lines = journal.read_bytes().splitlines()
    except OSError:
        return None
    for whole, line in enumerate(lines):
        try:
            json.loads(line)
        except ValueError:
            return (
                f"line {whole + 1} of {len(lines)} is damaged. To go on with the trials before it, keep only the lines "
                f"before it (head -n {whole}); or choose another folder with --out."
            )
    return None


def _compacted(summary: dict[str, Any]) -> dict[str, Any]:
    if "compact" not in summary:
        raise UserError(f"its network was not compacted: {summary.get('not_compacted')}")
    return summary["compact"]["total"]


def _selected_accuracy(folder: Path, summary: dict[str, Any]) -> float:
    """The accuracy on the images that select epochs, in the epoch that was kept of the last stage."""
    if "selection_accuracy" in summary:
        return float(summary["selection_accuracy"])
    lines = RunFolder(folder).metrics()
    stage = lines[-1]["stage"] if lines else None
    epoch = summary["selected"].get(stage, lines[-1]["epoch"]) if lines else None
    kept = [line for line in lines if line["stage"] == stage and line["epoch"] == epoch]
    if not kept:
        raise UserError(f"{folder}: metrics.jsonl has no epoch that was kept. Delete the folder, and run it again.")
    return kept[-1]["held_out"] if "held_out" in kept[-1] else kept[-1]["test"]
