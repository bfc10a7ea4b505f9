"""Runs of one small network in lock-step, as one batched network: many trainings in little more than the time of one.

Each member is an ordinary `Run` with a folder of its own; its network is a slice of the stacked one, so that pruning,
counting and saving are a run's own, and a member that was cut off can go on alone or in another stack. Members may
differ in their seed, in penalty, groups and strength, and in how they are pruned. What dropout leaves out is drawn for
the stack as a whole, so with it a member's numbers are not those of the same run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.kernels import choose
from deephoyer.masks import Hold
from deephoyer.penalties import Penalty
from deephoyer.regularizer import Regularizer
from deephoyer.train import batches, checkpoint, environment
from deephoyer.train.objective import Objective, logits
from deephoyer.train.rates import make_optimizer, rates_in
from deephoyer.train.run import Run
from deephoyer.train.schema import STAGES, Prune, Recipe, Regularize, Training
from deephoyer.train.stacked import count_right, lend_gradients, stacked
from deephoyer.train.step import CapturedStep, PlainStep

SAVE_SECONDS = 60.0
"""Members are saved within a stage when the last time is longer ago than this."""
LOOK = 10
"""The penalty is looked at in every so many epochs: network by network it takes as long as many steps."""


def alike(recipe: Recipe) -> str:
    """What members of one stack have in common, as text to compare by.

    >>> from deephoyer.train.recipe import read
    >>> alike(read("demo", ["seed=1", "regularize.strength=1e-3"])) == alike(read("demo"))
    True
    """
    shared = {key: getattr(recipe.regularize, key) for key in Training.model_fields}
    plain = Regularize(**shared, strength=1.0, density=recipe.regularize.density)
    return recipe.model_copy(update={"seed": 0, "prune": Prune(value=0.0), "regularize": plain}).model_dump_json()


class Together:
    """The regularizers of all members, in as many launches as one takes."""

    def __init__(self, regularizers: Sequence[Regularizer], lend: Callable[[], None]):
        self.regularizers, self.lend = regularizers, lend
        terms = [term for regularizer in regularizers for term in regularizer.terms]
        shared: dict[str, Penalty] = {}
        for term in terms:  # one launch serves all terms of one penalty
            term.penalty = shared.setdefault(repr(term.penalty), term.penalty)
        self.backend = choose(terms)

    @torch.no_grad()
    def add_grad_(self, advance: bool = True) -> None:
        self.lend()
        self.backend.add_grad_()
        if advance:
            self.step()

    def step(self) -> None:
        for regularizer in self.regularizers:
            regularizer.step()

    @property
    def settled(self) -> bool:
        """Whether no strength changes any more."""
        return all(regularizer.settled for regularizer in self.regularizers)


class Stack:
    """Takes runs through their stages together. `failed` says which could not go on, and why."""

    def __init__(self, runs: Iterable[Run], say: Callable[[str], None] = lambda text: None):
        self.runs = list(runs)
        if len({alike(run.recipe) for run in self.runs}) > 1:
            raise UserError("stack: the recipes differ in more than seed, penalty, groups, strength and pruning.")
        if any(run.recipe.regularize.density is not None for run in self.runs):
            raise UserError(
                "stack: regularize.density corrects strengths after every epoch, stacks don't; leave out --stack."
            )
        self.say = say
        self.failed: dict[Run, UserError] = {}

    def execute(self) -> Stack:
        """Runs what is left to run of every member."""
        resumed: dict[Run, dict[str, Tensor]] = {}
        try:
            for run in self.runs:
                with self._excused(run):
                    run.folder.open()
                    resumed[run] = run.prepare()
            with environment.tuned(self.runs[0].recipe.precision):
                while team := self._next():
                    self._stage(team, [resumed.pop(run, {}) for run in team])
        finally:
            for run in self.runs:
                run.folder.close()
        return self

    def _next(self) -> list[Run]:
        """The members that stand furthest back: resumed ones may stand elsewhere than others."""
        open_ = [run for run in self.runs if run not in self.failed and not run.finished()]
        if not open_:
            return []
        place = min(_place(run) for run in open_)
        return [run for run in open_ if _place(run) == place]

    def _stage(self, team: list[Run], resumed: list[dict[str, Tensor]]) -> None:
        stage = team[0].state.stage
        began = time.monotonic()
        spent = [run.state.seconds.get(stage, 0.0) for run in team]
        settings = getattr(team[0].recipe, stage)
        if stage == "prune":
            for run in team:
                with self._excused(run):
                    run.prune()
        elif stage == "pretrain" and settings.checkpoint:
            for run in team:
                with self._excused(run):
                    run.take_checkpoint()
        else:
            Lockstep(self, team, stage, resumed).train(began, spent)
        for run, before in zip(team, spent, strict=True):
            if run not in self.failed:
                with self._excused(run):
                    run.close_stage(began - before)

    def _excused(self, run: Run) -> _Excused:
        return _Excused(self, run)


class _Excused:
    """A member's own failure is noted and leaves the others alone."""

    def __init__(self, stack: Stack, run: Run):
        self.stack, self.run = stack, run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, why: BaseException | None, trace: Any) -> bool:
        if not isinstance(why, UserError):
            return False
        self.stack.failed[self.run] = why
        self.stack.say(f"{self.run.folder.path} failed: {why}")
        return True


class Lockstep:
    """One training stage of a team."""

    def __init__(self, stack: Stack, team: list[Run], stage: str, resumed: list[dict[str, Tensor]]):
        self.stack, self.team, self.stage = stack, team, stage
        lead = team[0]
        self.lead, self.settings = lead, getattr(lead.recipe, stage)
        self._by_seed = {run.recipe.seed: run for run in team}
        self.models = [run.model for run in team]
        self.twin = stacked(self.models)
        self.steps = len(batches.draw(lead.pool, lead.recipe.batch_size, 0, False, 0))
        self.regularizers = [
            run.make_regularizer(run.recipe.regularize, self.steps) for run in team if stage == "regularize"
        ]
        captured = lead.captures()
        self.optimizer = make_optimizer(self.settings, self.twin.parameters(), captured)
        if any(resumed):
            self._take_up(resumed)
        if any(run.masks for run in team):
            Hold(self.optimizer, self._drops())
        teachers = lead.teachers if lead.recipe.distill and stage != "pretrain" else None
        self.step = (CapturedStep if captured else PlainStep)(
            Objective(self.twin, lead.data, lead.recipe, teachers),
            self.optimizer,
            Together(self.regularizers, self._lend) if self.regularizers else None,
            lead.device,
            (len(team),),
        )

    def train(self, began: float, spent: Sequence[float]) -> None:
        """`spent` are the seconds that each member was in this stage before."""
        saved = time.monotonic()
        first, last = self.lead.state.epoch, self.settings.epochs
        for epoch in range(first, last):
            self._epoch(epoch)
            if all(run in self.stack.failed for run in self.team):
                return
            for run, before in zip(self.team, spent, strict=True):
                run.state.seconds[self.stage] = before + time.monotonic() - began
            if time.monotonic() - saved > SAVE_SECONDS and epoch + 1 < last:
                self._save()
                saved = time.monotonic()
            if epoch + 1 == last or (epoch + 1) % LOOK == 0:
                self.stack.say(f"{self.stage} {epoch + 1} of {last}: {len(self.team)} networks")
        for run in self.team:
            run.take_best()

    def _epoch(self, epoch: int) -> None:
        began = time.monotonic()
        torch.manual_seed(self.lead.seed_of(epoch))  # for dropout
        drawn = self._draw(epoch)
        self.twin.train()
        self.step.restart()
        self.step.epoch(drawn, rates_in(self.settings, epoch, len(drawn)))
        x, y = self.lead.watched
        self.twin.eval()
        right = count_right(self._ask, len(self.team), x, y)
        if epoch + 1 < self.settings.epochs:
            for run in self._by_seed.values():
                run.draw(epoch + 1)  # while the device is busy with this one
        losses = (self.step.loss / len(drawn)).tolist()
        look = (epoch + 1) % LOOK == 0 or epoch + 1 == self.settings.epochs
        for i, (run, loss, count) in enumerate(zip(self.team, losses, right.tolist(), strict=True)):
            if run in self.stack.failed:
                continue
            with self.stack._excused(run):
                run.state.epoch = epoch + 1
                line = run.close_epoch(self.settings, loss, count / len(x))
                if self.regularizers and look:
                    line["penalty"] = self.regularizers[i].loss().item()
                    line["effective_density"] = self.regularizers[i].effective_density().item()
                run.folder.add_metrics(line | {"seconds": round((time.monotonic() - began) / len(self.team), 4)})

    def _draw(self, epoch: int) -> batches.Epoch:
        """The batches of all members; those of one seed are drawn once."""
        drawn = {seed: run.draw(epoch) for seed, run in self._by_seed.items()}
        return batches.side_by_side([drawn[run.recipe.seed] for run in self.team])

    def _ask(self, x: Tensor) -> Tensor:
        return logits(self.twin, self.lead.data.floats(x), self.lead.recipe)

    def _lend(self) -> None:
        lend_gradients(self.twin, self.models)

    def _drops(self) -> list[tuple[Tensor, Tensor]]:
        """For each stacked parameter what the members' masks drop of it."""
        drops: list[tuple[Tensor, Tensor]] = []
        for name, parameter in self.twin.named_parameters():
            masks = [run.masks.get(name) if run.masks else None for run in self.team]
            if any(mask is not None for mask in masks):
                kept = [
                    torch.ones_like(p, dtype=torch.bool) if m is None else m.to(p.device)
                    for p, m in zip(parameter, masks, strict=True)
                ]
                drops.append((parameter, ~torch.stack(kept)))
        return drops

    # Saving and resuming: a member's optimizer state is its slice of the stack's.

    def _save(self) -> None:
        tensors, rest = checkpoint.flatten(self.optimizer.state_dict())
        for i, run in enumerate(self.team):
            if run not in self.stack.failed:
                own = {name: value if name.endswith(".step") else value[i] for name, value in tensors.items()}
                run.save_within(own, rest, self.regularizers[i] if self.regularizers else None)

    def _take_up(self, resumed: list[dict[str, Tensor]]) -> None:
        joined = {
            name: value if name.endswith(".step") else torch.stack([own[name] for own in resumed])
            for name, value in resumed[0].items()
        }
        checkpoint.refill(self.optimizer, joined, self.lead.state.optimizer)


def _place(run: Run) -> tuple[int, int, int]:
    state = run.state
    at = STAGES.index(state.stage)
    looped = state.round if at in (1, 2) else 0 if at < 1 else run.recipe.rounds
    return (looped, at, state.epoch)
