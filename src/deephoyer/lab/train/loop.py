"""The training loop of one stage of a run: pretrain, regularize or finetune.

One loop serves all three. Which stages there are, and what happens between them, is in `run.py`.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.lab.methods import Method
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.stages import Regularize, Training
from deephoyer.lab.train import batches, resume
from deephoyer.lab.train.batches import Epoch, Streamed
from deephoyer.lab.train.distributed import without_sync
from deephoyer.lab.train.evaluate import Correct
from deephoyer.lab.train.objective import Objective, logits
from deephoyer.lab.train.optim import make_optimizer, rate_at, rates_in
from deephoyer.lab.train.resume import StageTensors
from deephoyer.lab.train.step import CapturedStep, PlainStep
from deephoyer.lab.train.strength_control import StrengthControl, round_target
from deephoyer.penalties import PENALTIES
from deephoyer.regularizer import Regularizer

if TYPE_CHECKING:
    from deephoyer.lab.train.run import Run


class Diverged(UserError):
    """The loss is no longer a number."""


class TrainingLoop:
    """Trains the run's network from the epoch where its state stands to the last epoch of the stage.

    `resumed` are the tensors of a checkpoint that was written within the stage; `began` is when the stage would have
    begun, had it never been interrupted.
    """

    def __init__(self, run: Run, settings: Training, resumed: StageTensors, began: float):
        self.run, self.state, self.settings, self.began = run, run.state, settings, began
        self.best = resumed.best
        self._ahead: tuple[int, Epoch] | None = None
        stage, steps = self.state.stage, max(1, len(run.pool) // min(run.recipe.batch_size, len(run.pool)))
        self.method = run.method if stage in run.method.stages else Method()
        captured = self._can_capture()
        self.regularizer = self._regularizer(steps)
        if self.method is run.method:
            self.method.begin(run.method_stage(stage, settings.epochs, steps))
        optimizer = run.optimizer = make_optimizer(settings, run.model.parameters(), captured)
        if self.method.parameters():
            optimizer.add_param_group({"params": self.method.parameters(), "weight_decay": 0.0})
        if resumed.optimizer or self.state.optimizer:
            checkpoint.refill(optimizer, resumed.optimizer, self.state.optimizer)
        if run.masks is not None:
            run.hold(run.masks)
        teachers = run.teachers if run.recipe.distill and stage != "pretrain" else None
        self.control = self._strength_control()
        parallel = run.processes.data_parallel(run.model, run.device)
        self.step = (CapturedStep if captured else PlainStep)(
            Objective(run.model, run.data, run.recipe, teachers, parallel, self.method),
            optimizer,
            self.regularizer,
            run.device,
            run.recipe.accumulate,
            without_sync(parallel),
            run.processes.mean,
            self.method,
        )

    def execute(self) -> None:
        run, state, last = self.run, self.state, self.settings.epochs
        run.progress.stage(state.stage, last, state.epoch)
        for epoch in range(state.epoch, last):
            line = self.epoch(epoch)
            if self.control is not None:
                line |= self.control.correct(line["effective_density"], state.epoch)
            state.seconds[state.stage] = time.monotonic() - self.began
            if run.processes.main:
                run.folder.add_metrics(line)
            run.progress.epoch(line)
            if run.checkpoints.due(resume.SAVE_SECONDS) and epoch + 1 < last:
                self.save()
        if self.control is not None:
            run.progress.note(f"regularize: {self.control.outcome()}")
        self.method.end()
        self._select_epoch()
        run.release()

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Trains for an epoch and evaluates; returns its line of metrics."""
        run, step, began = self.run, self.step, time.monotonic()
        drawn = self.draw(epoch)
        run.model.train()
        rates = rates_in(self.settings, epoch, len(drawn))
        if not self.state.step:
            self.method.before_epoch(epoch)
            run.model.train()
        if isinstance(drawn, Streamed):
            self._stream(drawn, rates)
        else:
            seed, rank = self.seed_of(epoch), run.processes.rank
            torch.manual_seed(batches.seed_of(seed, rank) if rank else seed)  # for dropout
            step.restart()
            step.epoch(drawn, rates)
        network = partial(self.method, run.model)  # computed as in training
        counts = run.count_correct(lambda x: logits(network, x, run.recipe), run.selection_images, between_epochs=True)
        numbers = {"loss": step.loss, **dict(zip(("right", "right5", "images"), counts, strict=True))}
        if self.regularizer is not None:
            with torch.no_grad():
                numbers["penalty"] = self.regularizer.loss()
                numbers["effective_density"] = self.regularizer.effective_density()
        if epoch + 1 < self.settings.epochs and run.device.type == "cuda" and run.data.in_memory:
            self.draw(epoch + 1)  # while the device is busy with this one
        values = _read(numbers)
        self.state.epoch = epoch + 1
        score = Correct.read(torch.tensor([values.pop(key) for key in ("right", "right5", "images")]), run.data)
        line = self._close_epoch(values.pop("loss") / len(drawn), score)
        return line | run.note_unreadable() | values | {"seconds": round(time.monotonic() - began, 3)}

    def _stream(self, drawn: Streamed, rates: list[float]) -> None:
        """The rest of an epoch of streamed images, with checkpoints on the way.

        Each step has its own seed for dropout, so that an epoch can be resumed anywhere.
        """
        run, state, step = self.run, self.state, self.step

        def before(i: int) -> None:
            torch.manual_seed(batches.seed_of(drawn.seed, "step", i, run.processes.rank))

        def after(i: int) -> None:
            if i + 1 < len(drawn) and run.checkpoints.due(resume.SAVE_WITHIN):
                state.step, state.loss = i + 1, float(step.loss)
                state.density_before = self.control.density if self.control else None
                state.seconds[state.stage] = time.monotonic() - self.began
                self.save()

        step.restart(state.loss)
        step.resume_epoch(drawn, rates, state.step, before, after)
        state.step, state.loss, state.density_before = 0, 0.0, None

    def _close_epoch(self, loss: float, score: Correct) -> dict[str, Any]:
        """Keeps the weights if this epoch is the best so far; returns the first part of its line of metrics."""
        state, images = self.state, "held_out" if self.run.recipe.epoch_selection == "held-out" else "test"
        if not math.isfinite(loss):
            raise Diverged(
                f"{state.stage}: the loss is {loss} in epoch {state.epoch}. A lower lr or strength may help; "
                f"earlier checkpoints, if there are any, are in {self.run.folder.checkpoints}."
            )
        if score.accuracy > state.best and state.stage != "regularize":
            state.best, state.best_epoch = score.accuracy, state.epoch
            if self.run.recipe.epoch_selection != "last":
                self._keep_best()
        return {
            "stage": state.stage,
            **({"round": state.round + 1} if state.round else {}),
            "epoch": state.epoch,
            "loss": loss,
            "lr": rate_at(self.settings, state.epoch - 1, 1),
            images: score.accuracy,
            **({f"{images}_top5": score.top5} if score.top5 is not None else {}),
        }

    def _keep_best(self) -> None:
        for name, tensor in self.run.model.state_dict().items():
            if name in self.best:
                self.best[name].copy_(tensor)
            else:
                self.best[name] = tensor.clone()

    def _select_epoch(self) -> None:
        """Loads the weights of the best epoch, at the stage's end; or keeps those of the last one."""
        state, last = self.state, self.run.recipe.epoch_selection == "last"
        if state.stage == "regularize" or not state.best_epoch:
            return
        if not last:
            self.run.model.load_state_dict(self.best)
        state.selected[state.stage] = state.epoch if last else state.best_epoch

    def save(self) -> None:
        """Writes a checkpoint in the middle of the stage."""
        tensors, self.state.optimizer = checkpoint.flatten(self.step.optimizer.state_dict())
        self.state.regularizer = self.regularizer.state_dict() if self.regularizer else None
        self.run.checkpoints.save(StageTensors(self.best, tensors))

    # Parts of the loop

    def seed_of(self, epoch: int) -> int:
        """The seed of everything random in an epoch of this stage."""
        again = (self.state.round,) if self.state.round else ()
        return batches.seed_of(self.run.recipe.seed, self.state.stage, epoch, *again)

    def draw(self, epoch: int) -> Epoch | Streamed:
        """The batches of an epoch: those drawn ahead, or new ones."""
        run, seed = self.run, self.seed_of(epoch)
        if self._ahead is not None and self._ahead[0] == seed:
            return self._ahead[1]
        drawn = batches.of_epoch(run.data, run.pool, run.recipe, seed, run.processes.rank, run.processes.count)
        if isinstance(drawn, Streamed):
            return drawn
        self._ahead = seed, drawn.to(run.device)
        return self._ahead[1]

    def _can_capture(self) -> bool:
        """Whether the stage's steps can be replayed as CUDA graphs."""
        run = self.run
        possible = run.device.type == "cuda" and run.data.in_memory and run.processes.count == 1
        return possible and run.recipe.capture == "auto" and (self.method is not run.method or run.method.capturable)

    def _regularizer(self, steps_an_epoch: int) -> Regularizer | None:
        settings = self.settings
        if not isinstance(settings, Regularize) or not settings.penalizes:
            return None
        regularizer = Regularizer(
            self.run.model,
            PENALTIES.make(settings.penalty),
            self.run.groups(settings.groups),
            settings.schedules(steps_an_epoch),
            settings.parameters,
            weigh=settings.weigh,
        )
        if self.state.regularizer:
            regularizer.load_state_dict(self.state.regularizer)
        return regularizer

    def _strength_control(self) -> StrengthControl | None:
        """What corrects the strength of a stage that is to end at an effective density."""
        settings, state = self.settings, self.state
        if not isinstance(settings, Regularize) or self.regularizer is None or settings.effective_density is None:
            return None
        if state.density_at_start is None:
            state.density_at_start = start = self.regularizer.effective_density().item()
            if start <= settings.effective_density:
                raise UserError(f"regularize.effective_density: it is {start:.3g} at the start; choose a smaller one.")
        target = round_target(
            settings.effective_density, state.density_at_start, (state.round + 1) / self.run.recipe.rounds
        )
        rates = [rate_at(settings, epoch, 1) for epoch in range(settings.epochs)]
        control = StrengthControl(self.regularizer, target, rates)
        if state.density_before is not None:  # the epoch began before the checkpoint
            control.density = state.density_before
        return control


def _read(numbers: dict[str, Tensor]) -> dict[str, float]:
    """Numbers from the device, all at once: the one time that an epoch waits for it."""
    return dict(zip(numbers, torch.stack([n.double() for n in numbers.values()]).tolist(), strict=True))
