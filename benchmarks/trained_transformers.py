"""What the trained transformers share: the stages of a study, the trainer of each stage, and the command line.

`character_gpt.py` and `cifar_vit.py` are the scripts; each defines what is trained on what (a `Task`). Every network
starts from a dense one, is trained on with a penalty (Group-HS, group lasso) or without one (magnitude, random), loses
the channels with the smallest scores, is finetuned with the zeros fixed, and compacted; the dense one is trained on
for the same number of steps under the same schedule. Finished stages are kept in a folder, so that the same command
resumes; `--together` gives each seed a process. `--speeds` times the kept networks, afterwards, when nothing else runs.
Tables and figures are made in `trained_fronts.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import deephoyer as dh
import measuring
import trained_fronts
from deephoyer.files import write_atomically
from deephoyer.lab.train import gpu_sharing
from deephoyer.lab.train.compiling import Compiled, repeated

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network and numbers of its training; each is an option of the command line."""

    layers: int = 6
    heads: int = 6
    width: int = 384
    batch: int = 64
    dropout: float = 0.2
    rate: float = 1e-3
    later_rate: float = 5e-4  # of everything after the dense training
    dense_steps: int = 2500
    penalty_steps: int = 1000
    finetune_steps: int = 1500
    warmup: int = 100
    check_every: int = 500

    @property
    def more(self) -> int:
        """Steps after the dense training, the same number for all."""
        return self.penalty_steps + self.finetune_steps


METHODS: dict[str, tuple[str | None, str]] = {
    "group-hs": ("hoyer-square", "magnitude"),
    "group-lasso": ("l1", "magnitude"),
    "magnitude": (None, "magnitude"),
    "random": (None, "random"),
}
"""The penalty on coupled channels, if any, and the score that decides which of them are pruned."""


class Task(ABC):
    """A network, its data on a device, its loss, and its score."""

    sizes_type: ClassVar[type[Sizes]]
    brief: ClassVar[Sizes]
    data_help: ClassVar[str]
    strengths: ClassVar[dict[str, tuple[float, ...]]]
    """The strengths that are tried for each penalty, the same number for all."""
    weight_decay: ClassVar[float]
    betas: ClassVar[tuple[float, float]]
    shown: ClassVar[trained_fronts.Shown]

    device: str
    sizes: Any

    @abstractmethod
    def __init__(self, data: Path | None, sizes: Any, device: str, brief: bool): ...

    @abstractmethod
    def fresh(self) -> nn.Module: ...

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Small tensors of the same shapes each time, endlessly: a captured step reads them in one place."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    @abstractmethod
    def scores(self, model: nn.Module) -> dict[str, float]:
        """In eval mode: `score` and, if data is held out for choosing strengths, `held_out`."""

    @abstractmethod
    def inputs(self, count: int) -> Tensor:
        """Real inputs, for tracing and timing."""

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")


def cosine(highest: float, warmup: int, total: int) -> Callable[[int], float]:
    """The learning rate at each of `total` steps: a warm-up, then half a cosine down to a tenth."""

    def rate(step: int) -> float:
        if step < warmup:
            return highest * (step + 1) / (warmup + 1)
        share = (step - warmup) / max(1, total - warmup)
        return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    return rate


class Unusable(RuntimeError):
    """Compiling or capturing does not work here; `word` is the option that switches it off."""

    def __init__(self, word: str, why: Exception):
        super().__init__(f"{type(why).__name__}: {' '.join(str(why).split()[:30])}")
        self.word = word


class Trainer:
    """A network, its optimizer and a schedule that several stages may continue.

    On a GPU, after a few plain steps, a step is captured as a CUDA graph and replayed; blocks may be compiled.
    """

    WARM_UP = 3

    def __init__(
        self,
        network: nn.Module,
        task: Task,
        seed: int,
        rate: Callable[[int], float],
        step: int = 0,
        compiled: Compiled | None = None,
        capture: bool = True,
    ):
        self.network, self.task, self.rate, self.step, self.compiled = network.train(), task, rate, step, compiled
        matrices = [p for p in network.parameters() if p.dim() > 1]
        others = [p for p in network.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": task.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.captures = capture and task.device == "cuda"
        first = torch.tensor(rate(step), device=task.device) if self.captures else rate(step)
        self.optimizer = torch.optim.AdamW(groups, first, task.betas, fused=True, capturable=self.captures)
        self.regularizer: dh.Regularizer | None = None
        self.batches = task.batches(seed)
        torch.manual_seed(seed)

    def once(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        if self.compiled is None:
            loss = self.task.loss(self.network, batch)
        else:
            with self.compiled.on():
                loss = self.task.loss(self.network, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        if self.regularizer is not None:
            self.regularizer.add_grad_(advance=False)
        self.optimizer.step()

    def run(self, steps: int) -> dict[str, Any]:
        """Trains; returns the scores of the last step, and of the best one that was evaluated."""
        scores: list[dict[str, float]] = []
        graph: torch.cuda.CUDAGraph | None = None
        inputs = next(self.batches)
        began, first_step = time.monotonic(), 0
        for i in range(1, steps + 1):
            for group in self.optimizer.param_groups:
                if self.captures:
                    group["lr"].fill_(self.rate(self.step))
                else:
                    group["lr"] = self.rate(self.step)
            if graph is None and self.captures and i > self.WARM_UP:
                inputs = tuple(t.clone() for t in inputs)  # the tensors that the graph reads
                graph = self._captured(inputs)
                began, first_step = time.monotonic(), i - 1
            if graph is None:
                self._aside(next(self.batches))
            else:
                for tensor, new in zip(inputs, next(self.batches), strict=True):
                    tensor.copy_(new)
                graph.replay()
            self.step += 1
            if i % self.task.sizes.check_every == 0 or i == steps:
                scores.append(self.task.scores(self.network.eval()) | {"step": self.step})
                self.network.train()
                pace = (time.monotonic() - began) / (i - first_step)
                print(f"  step {self.step}: {scores[-1]['score']:.4f}; {1e3 * pace:.2f} ms a step", flush=True)
                if math.isnan(scores[-1]["score"]):
                    raise SystemExit(f"the score is NaN at step {self.step}")
        self.network.zero_grad()
        best = self.task.shown.best(scores, key=lambda s: s["score"])
        numbers: dict[str, Any] = {"last": scores[-1]["score"], "best": best["score"], "best_step": best["step"]}
        return numbers | ({"held_out": scores[-1]["held_out"]} if "held_out" in scores[-1] else {})

    def _captured(self, inputs: Batch) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.once(inputs)
        except Exception as why:
            raise Unusable("--no-capture", why) from why
        return graph

    def _aside(self, batch: Batch) -> None:
        """A step by itself; where one is to be captured on a stream of its own, as captures want their warm-up."""
        try:
            if not self.captures:
                return self.once(batch)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.once(batch)
            torch.cuda.current_stream().wait_stream(stream)
        except Exception as why:
            if self.compiled is None:
                raise
            raise Unusable("--no-compile", why) from why


class Study:
    """The stages of one folder and seed: each is executed once, and its network and numbers are kept.

    One network object goes through all of them, so that it is compiled and its channels are coupled only once.
    """

    def __init__(
        self, folder: Path, seed: int, task: Task, end: float = math.inf, compiles: bool = False, captures: bool = True
    ):
        self.folder, self.seed, self.task, self.sizes, self.end = folder, seed, task, task.sizes, end
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"seed-{seed}.json"
        self.results: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        known = self.results.setdefault("sizes", asdict(self.sizes))
        if known != asdict(self.sizes):
            raise SystemExit(f"{folder} holds networks of other sizes: {known}")
        self.network = task.fresh()
        self.compiled = Compiled(repeated(self.network) or [self.network]) if compiles else None
        self.captures = captures
        self.states: dict[str, dict[str, Tensor]] = {}

    @cached_property
    def groups(self) -> dh.Coupled:
        return dh.Coupled(self.network.eval(), self.task.inputs(2))

    def trainer(self, seed: int, rate: Callable[[int], float] | None = None, step: int = 0) -> Trainer:
        rate = rate or cosine(self.sizes.later_rate, self.sizes.warmup, self.sizes.more)
        return Trainer(self.network, self.task, seed, rate, step, self.compiled, self.captures)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def begin(self, name: str) -> None:
        if time.monotonic() > self.end:
            raise TimeoutError
        print(name, flush=True)

    def keep(self, name: str, model: nn.Module, numbers: dict[str, Any]) -> None:
        dh.save(model, self.path(name))
        self.results[name] = numbers
        self.write()

    def write(self) -> None:
        write_atomically(self.file, (json.dumps(self.results, indent=1) + "\n").encode())

    def reach(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Gives the network this stage's weights; trains them if they are not there yet."""
        if name not in self.states:
            if name in self.results and self.path(name).exists():
                self.network.load_state_dict(dh.load(self.path(name), self.network).state_dict())
            else:
                self.keep(name, self.network, work())
            self.states[name] = {key: tensor.clone() for key, tensor in self.network.state_dict().items()}
        self.network.load_state_dict(self.states[name])

    def dense(self) -> None:
        def work() -> dict[str, Any]:
            self.begin(f"dense-{self.seed}")
            torch.manual_seed(self.seed)
            self.network.load_state_dict(self.task.fresh().state_dict())
            rate = cosine(self.sizes.rate, self.sizes.warmup, self.sizes.dense_steps)
            numbers = self.trainer(self.seed, rate).run(self.sizes.dense_steps)
            return numbers | self.costs(self.network)

        self.reach(f"dense-{self.seed}", work)

    def continued(self) -> None:
        name = f"continued-{self.seed}"
        if name not in self.results:
            self.dense()
            self.begin(name)
            numbers = self.trainer(self.seed + 1000).run(self.sizes.more)
            self.keep(name, self.network, numbers | self.costs(self.network))

    def penalised(self, method: str, strength: float) -> None:
        """Trains the dense network on, with the penalty of the method if it has one."""
        penalty, _ = METHODS[method]
        name = f"plain-{self.seed}" if penalty is None else f"{method}-{strength:g}-{self.seed}"

        def work() -> dict[str, Any]:
            self.dense()
            self.begin(name)
            regularizer = penalty and dh.Regularizer(self.network, penalty, self.groups, strength, weigh="size")
            trainer = self.trainer(self.seed + 1000)  # after the groups, which need the network in eval mode
            trainer.regularizer = regularizer or None
            return trainer.run(self.sizes.penalty_steps)

        self.reach(name, work)

    def pruned(self, method: str, strength: float, density: float) -> None:
        name = f"{method}-{strength:g}-{density:g}-{self.seed}"
        if name in self.results:
            return
        self.penalised(method, strength)
        self.begin(name)
        torch.manual_seed(self.seed)
        masks = dh.prune(self.network, dh.Density(density), self.groups, score=METHODS[method][1])
        after = self.task.scores(self.network.eval())["score"]
        trainer = self.trainer(self.seed + 2000, step=self.sizes.penalty_steps)
        masks.hold(trainer.optimizer)
        numbers = {"pruned": after} | trainer.run(self.sizes.finetune_steps)
        small = dh.compact(self.network.eval(), self.task.inputs(2), groups=self.groups)
        numbers |= {"compacted": self.task.scores(small)["score"]}
        self.keep(name, small, numbers | self.costs(small))

    def costs(self, model: nn.Module) -> dict[str, Any]:
        """Parameters, and MACs that one input takes, in eval mode."""
        total = dh.summary(model.eval(), self.task.inputs(2), latency=False).total
        return {"parameters": total.parameters, "macs": total.macs_executed}

    def speeds(self, turns: int = 5, budget: float = 0.05) -> None:
        """Times the networks that the table shows, in turns with the dense one.

        Weights are bfloat16 on a GPU, and a forward pass is a CUDA graph unless that is refused.
        """
        key = f"{self.task.shown.unit}_per_second"
        shown = trained_fronts.rows(trained_fronts.read(self.folder), self.task.shown)
        names = [name for row in shown if (name := f"{row.name}-{self.seed}") in self.results]
        if missing := [name for name in names if not self.path(name).exists()] or ["at all"] * (not names):
            raise SystemExit(f"{self.folder} has no network {missing[0]} to time.")
        x = self.task.inputs(self.sizes.batch)
        units = x.numel() if self.task.shown.unit == "tokens" else len(x)
        dense = self._forward(f"dense-{self.seed}", x)
        for name in names:
            times: dict[str, list[float]] = {"dense": [], "own": []}
            own = self._forward(name, x)
            for _ in range(turns):
                for side, call in (("dense", dense), ("own", own)):
                    times[side].append(measuring.milliseconds(call, self.task.device, budget))
            plain, now = (units / statistics.median(ms) * 1e3 for ms in times.values())
            self.results[name] |= {key: now, "times_dense": now / plain}
            print(f"{name}: {now:,.0f} {self.task.shown.unit}/s, {now / plain:.2f} × the dense one's", flush=True)
        self.results["timed_on"] = measuring.machine(self.task.device) | {"batch": self.sizes.batch}
        self.write()

    def _forward(self, name: str, x: Tensor) -> Callable[[], object]:
        model = dh.load(self.path(name), self.task.fresh()).eval()
        if self.task.device == "cuda":
            model, x = model.to(torch.bfloat16), x.to(torch.bfloat16) if x.is_floating_point() else x

        def call() -> None:
            with torch.no_grad():
                model(x)

        if self.task.device == "cuda":
            try:
                return measuring.replayed(call)
            except RuntimeError as why:
                print(f"{name}: timed without a CUDA graph ({why})", flush=True)
        return call


def main(kind: type[Task], about: str | None) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help=kind.data_help)
    parser.add_argument("--out", type=Path, required=True, help="a folder for networks and seed-N.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--strengths", type=float, nargs="+", help="strengths of both penalties, instead of the defaults"
    )
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing new after this time")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=False, help="compile blocks with inductor"
    )
    parser.add_argument(
        "--capture", action=argparse.BooleanOptionalAction, default=True, help="capture steps as CUDA graphs"
    )
    parser.add_argument("--brief", action="store_true", help="tiny, on synthetic data, only to show that it runs")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--together",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="all seeds in parallel, one process each",
    )
    mode.add_argument("--speeds", action="store_true", help="only time the networks that the table shows")
    mode.add_argument("--table", action="store_true", help="only print the table of existing results")
    mode.add_argument("--figure", type=Path, help="only draw the figure of existing results into this folder")
    mode.add_argument("--page", type=Path, help="only write table and figure into this page, between its marks")
    for field in fields(kind.sizes_type):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    chosen = parser.parse_args()
    typed = {f.name: value for f in fields(kind.sizes_type) if (value := getattr(chosen, f.name)) is not None}
    sizes = kind.sizes_type(**((asdict(kind.brief) if chosen.brief else {}) | typed))
    end = time.monotonic() + chosen.seconds
    if chosen.together:
        _side_by_side(chosen.out, chosen.seeds)
    elif not (chosen.table or chosen.figure or chosen.page):
        task = kind(chosen.data, sizes, chosen.device, chosen.brief)
        try:
            for seed in chosen.seeds:
                study = Study(chosen.out, seed, task, end, chosen.compile, chosen.capture)
                _all(study, chosen)
        except TimeoutError:
            print("the time is over; the same command resumes", flush=True)
        except Unusable as why:
            # A new process, since a failed capture leaves much behind; it finds all stages that are done.
            print(f"{why}\ncontinuing with {why.word}", flush=True)
            left = ["--seconds", str(end - time.monotonic())]
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], why.word, *left])
    results = trained_fronts.read(chosen.out)
    if chosen.figure:
        print(*trained_fronts.save(results, kind.shown, chosen.figure), sep="\n")
    elif chosen.page:
        print(*trained_fronts.put(results, kind.shown, chosen.page), sep="\n")
    else:
        print(trained_fronts.table(results, kind.shown))


def _all(study: Study, chosen: argparse.Namespace) -> None:
    if chosen.speeds:
        return study.speeds(1 if chosen.brief else 5)
    study.dense()
    study.continued()
    for method, strength in _tries(chosen.methods, chosen.strengths, study.task.strengths):
        for density in chosen.densities:
            study.pruned(method, strength, density)
    return None


def _side_by_side(folder: Path, seeds: list[int]) -> None:
    """Each seed in its own process, with its output in `seed-N.log`.

    They take turns on a GPU, as each of them fills it. When three shared an H200 by MPS and compiled for the first
    time, they ended with NaN; without MPS, and with the code that had been compiled by then, they did not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"seed-{seed}.log" for seed in seeds]
    with ExitStack() as stack:
        environment = {**os.environ, **gpu_sharing.one_thread()}
        running = []
        for seed, log in zip(seeds, logs, strict=True):
            words = [sys.executable, *sys.orig_argv[1:], "--no-together", "--seeds", str(seed)]
            file = stack.enter_context(log.open("a"))
            running.append(subprocess.Popen(words, env=environment, stdout=file, stderr=subprocess.STDOUT))
        failed = [log for log, process in zip(logs, running, strict=True) if process.wait()]
    for log in failed:
        print(f"{log}: …\n{log.read_text()[-2000:]}", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(seeds)} seeds failed; the same command resumes them")


def _tries(
    methods: list[str], chosen: list[float] | None, strengths: dict[str, tuple[float, ...]]
) -> list[tuple[str, float]]:
    """Methods and strengths: first the first strength of all methods, so that an interrupted run compares them."""
    tries = {m: (chosen or strengths[m]) if METHODS[m][0] else [0.0] for m in methods}
    return [(m, tries[m][i]) for i in range(max(map(len, tries.values()))) for m in methods if i < len(tries[m])]
