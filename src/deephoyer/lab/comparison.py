"""One protocol for many methods: the same dense start, the same epochs, as many settings each, held-out images choose.

A comparison is a YAML file (`comparisons/`): a recipe, three sizes, and a list of methods with a setting to search. For
each method and size the setting with the best mean held-out accuracy over a few seeds is chosen; a grid whose best lies
at its end goes on there. The chosen setting then gets fresh seeds, and their test accuracy is what is compared. Every
run is an ordinary one in `runs/`, so that the same command goes on where it was stopped; a network that was trained
without knowing the size serves all sizes. The middle size comes first, all methods of it to their end: whoever stops
then has a table that is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deephoyer.errors import UserError, unknown
from deephoyer.files import plain_file
from deephoyer.lab import bounded_yaml
from deephoyer.lab import recipe as recipes
from deephoyer.lab.processes import Member, Queue
from deephoyer.lab.runs.find import RUNS
from deephoyer.lab.runs.folder import FAILED
from deephoyer.lab.schema import Recipe
from deephoyer.lab.search import MEASURES

FOLDER = Path(__file__).parent / "comparisons"
FORMAT = "deephoyer-comparison-1"
TOLERANCE = 0.01
"""How far from the size asked for a network may be, as a share of it."""
DECADE = 10.0
"""How far on both sides of its best a penalty's strength is looked at, as a factor."""


def near(ratio: float) -> bool:
    """Whether a strength is within a decade of another."""
    return abs(math.log(ratio)) < 1.001 * math.log(DECADE)


class Entry(BaseModel):
    """A method: the words that choose it, and the word with the setting that is searched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    words: tuple[str, ...] = ()
    vary: str
    """One word with VALUE in it."""
    values: tuple[float, ...] = Field(min_length=2)
    way: Literal["train", "cut", "scratch"] = "train"
    """Trained and cut; cut at once, with all epochs for finetuning; or pruned before it is trained from scratch."""
    each_size: bool = False
    """Whether it must know the size while it trains: then nothing is shared between sizes."""
    least: float | None = None
    most: float | None = None
    """Where a grid that goes on has to stop."""

    @model_validator(mode="after")
    def _can_be_searched(self) -> Entry:
        if "VALUE" not in self.vary:
            raise UserError(f"vary: {self.vary!r} has no VALUE in it, like regularize.strength=VALUE.")
        if list(self.values) != sorted(set(self.values)) or self.values[0] <= 0:
            raise UserError(f"values: {list(self.values)} must increase and be above 0.")
        return self

    @property
    def penalizes(self) -> bool:
        """Whether what is searched is a penalty's strength."""
        return self.vary == "regularize.strength=VALUE"

    def word(self, value: float) -> str:
        return self.vary.replace("VALUE", f"{value:g}")

    def beyond(self, values: Sequence[float], end: int) -> float | None:
        """The next value of a grid after its first (end 0) or last (end −1), a factor on; None where there is none."""
        ratio = values[-1] / values[-2] if end else values[0] / values[1]
        following = float(f"{values[end] * ratio:.2g}")
        if all(value == int(value) for value in self.values):
            following = float(max(1, round(following)))
        inside = (self.least or 0) <= following and (self.most is None or following <= self.most)
        return following if inside and following not in values else None


class Epochs(BaseModel):
    """The epochs of the stages, the same for every method: a comparison has a thousand runs, and a recipe's own may be
    too many for that."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pretrain: int | None = Field(default=None, ge=1)
    regularize: int | None = Field(default=None, ge=1)
    finetune: int | None = Field(default=None, ge=1)

    def words(self) -> list[str]:
        return [f"{stage}.epochs={epochs}" for stage, epochs in self if epochs is not None]


class Protocol(BaseModel):
    """What a comparison's file says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    base: str
    """The recipe that all runs are made from."""
    epochs: Epochs = Epochs()
    """In place of the recipe's own."""
    words: tuple[str, ...] = ()
    """More overrides for all runs; those that are typed count more."""
    target: Literal["live", "macs"]
    sizes: tuple[float, ...] = Field(min_length=1)
    choose: int = Field(default=3, ge=1)
    """Seeds to choose by: 0, 1, …"""
    choose_at: Literal["each size", "the middle size"] = "each size"
    """Whether every size has a setting of its own, or all have the one that is chosen at the middle one."""
    extensions: int = Field(default=3, ge=0)
    """How many values a grid may grow by at an end where its best lies."""
    final: int = Field(default=10, ge=1)
    """Seeds of the chosen settings: those that follow."""
    methods: dict[str, Entry]

    @property
    def fresh_seeds(self) -> range:
        """The seeds of the chosen settings."""
        return range(self.choose, self.choose + self.final)

    def digest(self) -> str:
        """What tells protocols from each other, whatever they are titled; keys at their defaults do not count."""
        said = self.model_dump(mode="json", exclude={"about"}, exclude_defaults=True)
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def chooses_at(self, size: float) -> bool:
        return self.choose_at == "each size" or size == self.middle

    @property
    def middle(self) -> float:
        """The size that comes first."""
        return self.sizes[len(self.sizes) // 2]


@dataclass(frozen=True)
class Job:
    """One network to be measured."""

    method: str
    value: float
    seed: int
    size: float


@dataclass(frozen=True)
class ComparedRun:
    """What came of a job. `seconds` are the method's training and finetuning; dense training is not counted."""

    method: str
    value: float
    seed: int
    size: float
    share: float
    held_out: float
    accuracy: float
    seconds: float
    command: str
    commit: str | None
    device: str | None

    @property
    def met(self) -> bool:
        return abs(self.share / self.size - 1) <= TOLERANCE


def names() -> list[str]:
    """The comparisons that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(name: str) -> Protocol:
    """The comparison of that name, or of a file."""
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in names():
        raise unknown("comparison", name, names())
    try:
        content = bounded_yaml.load(plain_file(path).read_text(encoding="utf-8"))
        return Protocol.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise UserError(f"comparison {name}: can't be read: {why}.") from None
    except ValidationError as why:
        first = why.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"comparison {name}: {place}: {first.get('ctx', {}).get('error') or first['msg']}") from None


class Comparison(Queue):
    """A queue of runs for `processes.conduct`: what is needed follows from what is there."""

    def __init__(
        self, name: str, overrides: Sequence[str] = (), only: Sequence[str] = (), minutes: float | None = None
    ):
        self.source, self.name, self.protocol = name, Path(name).stem, read(name)
        typed = {word.partition("=")[0] for word in overrides}
        own = (*self.protocol.epochs.words(), *self.protocol.words)
        self.overrides = (*(word for word in own if word.partition("=")[0] not in typed), *overrides)
        for method in only:
            if method not in self.protocol.methods:
                raise unknown("method of this comparison", method, self.protocol.methods)
        self.methods = {n: e for n, e in self.protocol.methods.items() if not only or n in only}
        base = self._read(())
        if not (base.pretrain and base.regularize and base.prune and base.finetune):
            raise UserError(f"comparison {name}: {self.protocol.base} must have all four stages.")
        self.dense_epochs, self.training_epochs = base.pretrain.epochs, base.regularize.epochs
        self.epochs = base.regularize.epochs + base.finetune.epochs
        self.device = base.device
        self.sizes = sorted(self.protocol.sizes, key=lambda size: size != self.protocol.middle)
        self.chain, self.folder = cache(self._chain), cache(self._folder)
        self._done: dict[Path, bool] = {}
        self._chosen: dict[tuple[str, float], float | None] = {}
        for method, entry in self.methods.items():  # a slip shows before anything starts
            self._check(method, Job(method, entry.values[0], 0, self.protocol.sizes[0]))
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._busy: set[Path] = set()
        self._failed: dict[Path, str] = {}
        self._outcomes: dict[Job, ComparedRun] = {}

    def _check(self, method: str, job: Job) -> None:
        """What makes a comparison fair, of which own words of a method could be the end."""
        made = [self._read(words) for words in self.chain(job)]
        epochs, all_epochs = sum(recipe.epochs for recipe in made), self.dense_epochs + self.epochs
        if epochs != all_epochs:
            raise UserError(f"comparison {self.name}: {method} trains for {epochs} epochs, the others {all_epochs}.")
        for recipe in made:
            if recipe.epoch_selection != "held-out":
                raise UserError(
                    f"comparison {self.name}: settings are chosen on held-out images, so that {method} needs "
                    f"epoch_selection=held-out, not {recipe.epoch_selection}."
                )

    # Which runs there are

    def _read(self, words: Sequence[str]) -> Recipe:
        return recipes.read(self.protocol.base, (*self.overrides, *words))

    def _words(self, words: tuple[str, ...]) -> str:
        """All that names a run, in an order of its own."""
        return shlex.join([self.protocol.base, *sorted((*self.overrides, *words))])

    def _from(self, words: tuple[str, ...]) -> str:
        """The override that starts a run from the network that these words make."""
        return f"start={json.dumps(self._words(words))}"

    def _dense(self, seed: int) -> tuple[str, ...]:
        return ("regularize=null", "prune=null", "finetune=null", f"seed={seed}")

    def _chain(self, job: Job) -> list[tuple[str, ...]]:
        """The overrides of the runs that a job takes, one after another; the last is its own."""
        entry, seed = self.methods[job.method], f"seed={job.seed}"
        target = f"prune.target={{{self.protocol.target}: {job.size:g}}}"
        setting = entry.word(job.value)
        if entry.way == "scratch":
            epochs = f"pretrain.epochs={self.dense_epochs + self.epochs}"
            return [(*entry.words, setting, epochs, "regularize=null", "finetune=null", target, seed)]
        dense = self._dense(job.seed)
        if entry.way == "cut":
            epochs = f"finetune.epochs={self.epochs}"
            words = (*entry.words, setting, epochs, "pretrain=null", "regularize=null", target, seed)
            return [dense, (*words, self._from(dense))]
        if entry.each_size:
            return [dense, (*entry.words, setting, "pretrain=null", target, seed, self._from(dense))]
        training = [w for w in (*entry.words, setting) if not w.startswith("prune")]
        pruning = [w for w in (*entry.words, setting) if not w.startswith("regularize")]
        trained = (*training, "pretrain=null", "prune=null", "finetune=null", seed, self._from(dense))
        return [dense, trained, (*pruning, "pretrain=null", "regularize=null", target, seed, self._from(trained))]

    def _folder(self, words: tuple[str, ...]) -> Path:
        """A run's folder, by its words alone: thousands of recipes would have to be read for their identities."""
        seed = next(word.partition("=")[2] for word in words if word.startswith("seed="))
        digest = hashlib.sha256(self._words(words).encode()).hexdigest()
        return RUNS / f"compare-{self.name}-{digest[:10]}-s{seed}"

    def values(self, method: str, size: float) -> list[float]:
        """A method's grid, gone on with where its best lies at an end."""
        entry = self.methods[method]
        values = list(entry.values)
        for _ in range(self.protocol.extensions):
            if not all(self._settled(job) for job in self._choosing(method, values, size)):
                break
            best = self._best(method, values, size)
            end = None if best is None else 0 if best == values[0] else -1 if best == values[-1] else None
            following = None if end is None else entry.beyond(values, end)
            if following is None:
                break
            values.insert(0 if end == 0 else len(values), following)
        return values

    def _choosing(self, method: str, values: Sequence[float], size: float) -> Iterator[Job]:
        return (Job(method, value, seed, size) for value in values for seed in range(self.protocol.choose))

    def _best(self, method: str, values: Sequence[float], size: float) -> float | None:
        """The value with the best mean held-out accuracy, of those at which every seed came through."""
        means: dict[float, float] = {}
        for value in values:
            found = [self.outcome(job) for job in self._choosing(method, [value], size)]
            if all(found):
                means[value] = statistics.fmean(one.held_out for one in found if one is not None)
        return max(means, key=lambda value: means[value]) if means else None

    def chosen(self, method: str, size: float) -> float | None:
        """The setting that gets fresh seeds; None while it is not known, or where no setting can be pruned that far."""
        size = size if self.protocol.chooses_at(size) else self.protocol.middle
        if (method, size) not in self._chosen:
            values = self.values(method, size)
            if not all(self._settled(job) for job in self._choosing(method, values, size)):
                return None
            self._chosen[method, size] = self._best(method, values, size)
        return self._chosen[method, size]

    def jobs(self) -> Iterator[Job]:
        """All that is wanted by now, the middle size first; more when settings have been chosen."""
        for size in self.sizes:
            for method in self.methods if self.protocol.chooses_at(size) else ():
                yield from self._choosing(method, self.values(method, size), size)
            for method in self.methods:
                value = self.chosen(method, size)
                if value is not None:
                    yield from (Job(method, value, seed, size) for seed in self.protocol.fresh_seeds)
            for method in self.methods if size == self.protocol.middle else ():
                yield from self._choosing(method, self.around(method), size)

    def around(self, method: str) -> list[float]:
        """A penalty's strengths within a decade of its best at the middle size, its grid gone on with where it is too
        short for that: what it costs to miss the best. They choose nothing."""
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
        """Every run with its epochs, those of the chosen settings too, and which are done.

        As if every size that has a choice of its own chose otherwise, and no grid went on.
        """
        runs: dict[Path, int] = {}
        for method, entry in self.methods.items():
            for place, size in enumerate(self.sizes):
                value = self.chosen(method, size)
                own = self.protocol.chooses_at(size)
                assumed = entry.values[place % len(entry.values) if own else 0] if value is None else value
                jobs = [*self._choosing(method, entry.values, size)] if own else []
                for job in (*jobs, *(Job(method, assumed, seed, size) for seed in self.protocol.fresh_seeds)):
                    epochs = self._epochs(entry)
                    runs |= {self.folder(words): n for words, n in zip(self.chain(job), epochs, strict=True)}
        return runs, {folder for folder in runs if self._is_done(folder)}

    def _epochs(self, entry: Entry) -> list[int]:
        """The epochs of the runs of a chain."""
        if entry.way == "scratch":
            return [self.dense_epochs + self.epochs]
        if entry.way == "cut" or entry.each_size:
            return [self.dense_epochs, self.epochs]
        return [self.dense_epochs, self.training_epochs, self.epochs - self.training_epochs]

    # What came of them

    def outcome(self, job: Job) -> ComparedRun | None:
        if job not in self._outcomes:
            chain = self.chain(job)
            if all(self._is_done(self.folder(words)) for words in reversed(chain)):
                self._outcomes[job] = self._measured(job, chain)
        return self._outcomes.get(job)

    def _is_done(self, folder: Path) -> bool:
        """Looked up once; what ends after that is told to `ended`."""
        if folder not in self._done:
            self._done[folder] = (folder / "summary.json").exists()
            if not self._done[folder] and (folder / FAILED).exists():
                self._failed[folder] = _json(folder / FAILED)
        return self._done[folder]

    def _measured(self, job: Job, chain: list[tuple[str, ...]]) -> ComparedRun:
        summaries = [_json(self.folder(words) / "summary.json") for words in chain]
        last, total = summaries[-1], summaries[-1]["sparse"]["total"]
        if self.protocol.target == "live":
            share = total["nonzeros"] / total["weights"]
        else:
            share = MEASURES["macs"](self.folder(chain[-1]), last) / total["macs_executed"]
        own = summaries if len(chain) == 1 else summaries[1:]
        environment = last.get("environment", {})
        return ComparedRun(
            **asdict(job),
            share=share,
            held_out=MEASURES["accuracy"](self.folder(chain[-1]), last),
            accuracy=next(reversed(last["accuracy"].values())),
            seconds=round(sum(sum(s["seconds"].values()) for s in own), 1),
            command=str(recipes.Command(self.protocol.base, (*self.overrides, *chain[-1]))),
            commit=(environment.get("git") or {}).get("commit"),
            device=environment.get("device_name"),
        )

    def failure(self, job: Job) -> str | None:
        """Why a job can't be done: what the run said that failed on the way to it."""
        for folder in map(self.folder, self.chain(job)):
            if not self._is_done(folder) and folder in self._failed:
                return self._failed[folder]
        return None

    def _settled(self, job: Job) -> bool:
        return self.outcome(job) is not None or self.failure(job) is not None

    def content(self) -> dict[str, Any]:
        """What a results file keeps: every outcome, those that chose and the final ones, and what failed."""
        wanted = list(dict.fromkeys(self.jobs()))
        found = [asdict(one) for job in wanted if (one := self.outcome(job)) is not None]
        failed = [{**asdict(job), "why": why} for job in wanted if (why := self.failure(job)) is not None]
        chosen = [
            {"method": method, "size": size, "value": value}
            for method in self.methods
            for size in self.protocol.sizes
            if (value := self.chosen(method, size)) is not None
        ]
        of_stages = (self.dense_epochs, self.training_epochs, self.epochs - self.training_epochs)
        return {
            "format": FORMAT,
            "name": self.name,
            "protocol": self.protocol.digest(),
            "epochs": dict(zip(Epochs.model_fields, of_stages, strict=True)),
            "words": [word for word in self.overrides if not word.partition("=")[0].endswith(".epochs")],
            "chosen": chosen,
            "outcomes": found,
            "failed": failed,
        }

    # The queue

    def next(self) -> Member | None:
        for words, title in self._waiting() if time.monotonic() < self._until else ():
            folder = self.folder(words)
            if folder not in self._busy:
                self._busy.add(folder)
                return Member(list(words), folder, name=title)
        return None

    def _waiting(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """The next run of each job that is not settled, with a title; then what the chosen settings will start from."""
        for job in self.jobs():
            if not self._settled(job):
                yield next(
                    (words, self._title(job, words))
                    for words in self.chain(job)
                    if not self._is_done(self.folder(words))
                )
        if any(entry.way != "scratch" for entry in self.methods.values()):
            for seed in self.protocol.fresh_seeds:
                words = self._dense(seed)
                if not self._is_done(folder := self.folder(words)) and folder not in self._failed:
                    yield words, f"dense, seed {seed}"

    def _title(self, job: Job, words: tuple[str, ...]) -> str:
        """What a run of a job's chain is, for people: its words name the whole chain before it."""
        if words == self._dense(job.seed):
            return f"dense, seed {job.seed}"
        size = f", {100 * job.size:g} %" if words == self.chain(job)[-1] else ", trained"
        return f"{job.method}, {job.value:g}{size}, seed {job.seed}"

    def open(self) -> bool:
        return time.monotonic() < self._until and any(not self._settled(job) for job in self.jobs())

    def ended(self, member: Member) -> None:
        self._busy.discard(member.folder)
        self._done[member.folder] = member.result() is not None
        if not self._done[member.folder]:
            self._failed[member.folder] = member.log_tail()

    def interrupted(self, member: Member) -> None:
        self._busy.discard(member.folder)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# Which of two is better


def sign_flips(differences: Sequence[float]) -> float:
    """The exact two-sided p of a paired permutation test: how often chance alone makes a mean that far from 0.

    >>> sign_flips([1.0, 2.0, 1.5, 0.5, 1.0])
    0.0625
    """
    count = len(differences)
    if not 1 <= count <= 20:
        raise UserError(f"a paired test needs 1 to 20 seeds, not {count}.")
    # Accuracies are multiples of one image's share, so that ties are common: rounding must not break them.
    observed = abs(sum(differences)) - 1e-9 * sum(map(abs, differences))
    extreme = 0
    for signs in range(2**count):
        total = sum(-d if signs >> i & 1 else d for i, d in enumerate(differences))
        extreme += abs(total) >= observed
    return extreme / 2**count


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction for as many tests as there are: the chance of even one false difference stays under the level.

    >>> holm({"a": 0.01, "b": 0.04})
    {'a': 0.02, 'b': 0.04}
    """
    adjusted: dict[str, float] = {}
    least = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = least
    return adjusted
