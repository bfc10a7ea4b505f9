"""A run: those of pretrain, regularize, prune and finetune that its recipe has, resumable after a kill at any moment.

One loop serves all stages. Which model, which data and which penalty are names in the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, shown
from deephoyer.groups import Grouping, groupings
from deephoyer.lab import data as datasets
from deephoyer.lab import models
from deephoyer.lab.choices import Choices, named, several
from deephoyer.lab.data import TEST, Images
from deephoyer.lab.data.source import UNREADABLE
from deephoyer.lab.methods import METHODS, Method
from deephoyer.lab.methods import Stage as MethodStage
from deephoyer.lab.recipe import Command
from deephoyer.lab.runs import checkpoint, environment, find
from deephoyer.lab.runs.folder import FAILED, RunFolder
from deephoyer.lab.runs.state import State
from deephoyer.lab.schema import TITLES, Recipe
from deephoyer.lab.stages import Regularize, Training
from deephoyer.lab.train import batches
from deephoyer.lab.train.batches import Epoch, Streamed
from deephoyer.lab.train.distill import Teachers, teachers_of
from deephoyer.lab.train.distributed import Processes, joined, own_device, without_sync
from deephoyer.lab.train.evaluate import Correct, counted
from deephoyer.lab.train.objective import Objective, logits
from deephoyer.lab.train.optim import make_optimizer, rate_at, rates_in
from deephoyer.lab.train.progress import Silent
from deephoyer.lab.train.pruning import pruned, warning_of_loss
from deephoyer.lab.train.step import CapturedStep, PlainStep
from deephoyer.lab.train.strength_control import Pursuit, aim_of
from deephoyer.masks import Empties, Hold, Masks
from deephoyer.penalties import PENALTIES
from deephoyer.regularizer import Regularizer
from deephoyer.targets import OutOfReach

METHOD_FILE = "method.safetensors"
"""What a method trained besides the weights, for runs that start from this one's network."""
SAVE_SECONDS = 5.0
"""A checkpoint is written at the end of an epoch when the last one is older than this."""
SAVE_WITHIN = 120.0
"""And within an epoch of streamed images, which may take hours, when it is older than this."""
SAVE_SHARE = 0.05
"""But so much of the time may go into writing checkpoints; large networks have fewer of them."""

WATCHED_AT_ONCE = {"cpu": 1000, "cuda": 5000}
"""Images in a batch when the accuracy is watched between epochs."""
LARGE_AT_ONCE = {"cpu": 50, "cuda": 250}
"""And those that are cropped to a size, which are larger."""


class Diverged(UserError):
    """The loss is no longer a number."""


class Run:
    """Takes a recipe through its stages in a folder. `execute()` starts or resumes.

    `command` is what was typed, for the folder to keep.
    """

    def __init__(
        self, recipe: Recipe, folder: str | Path, progress: Silent | None = None, command: Command | None = None
    ):
        self.recipe, self.folder, self.command = recipe, RunFolder(folder), command
        self.stages = recipe.stages()
        self.progress = progress or Silent()
        self.state = State(stage=self.stages[0])
        self.masks: Masks | None = None
        self.method = METHODS.make(recipe.method) if recipe.method else Method()
        self._optimizer: torch.optim.Optimizer | None = None
        self._held: Hold | None = None
        self._best: dict[str, Tensor] = {}
        self._ahead: tuple[int, Epoch] | None = None
        self._saved, self._save_cost, self._stage_began = time.monotonic(), 0.0, time.monotonic()
        self._pursued: Pursuit | None = None
        self.processes = Processes()

    def execute(self) -> Run:
        """Runs what is left to run; afterwards `model`, `masks` and `state` are the final ones."""
        self.device = own_device(environment.pick_device(self.recipe.device))
        resumable = f"Run the same command again to resume from the last checkpoint in {self.folder.path}."
        with joined(self.device, resumable) as self.processes:
            self.processes.by_main(self.folder.open)
            try:
                with self.progress, environment.tuned(self.recipe.precision):
                    resumed = self.prepare()
                    while not self.finished():
                        self._stage(self.state.stage, resumed)
                        resumed = {}
            except (Diverged, Empties, OutOfReach) as why:
                if self.processes.main:
                    self.folder.write_json(FAILED, str(why))
                raise
            finally:
                self.folder.close()
        self.processes = Processes()  # what is left to do is rank 0's alone
        return self

    def finished(self) -> bool:
        return self.state.stage not in self.stages

    # Starting and resuming

    def prepare(self) -> dict[str, Tensor]:
        """Builds everything, and takes up the newest checkpoint: returns its tensors."""
        self.device = own_device(environment.pick_device(self.recipe.device))
        found = self.processes.by_main(self._newest)
        if found:
            self.state = State.read(found[1])
            for trouble in found[2]:
                self.progress.note(f"{trouble} The one before it is used.")
            self._check_place()
        self.processes.together(self._build)
        if self.processes.main:
            if not self.finished():
                self.folder.write_words(self.command, self.recipe)
                where = environment.describe(self.device) | {"processes": self.processes.count}
                self.folder.write_json("environment.json", where)
            self.folder.cut_metrics(self.state.metrics_size)
        return self._restore(found[0]) if found else {}

    def _newest(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """The newest checkpoint of the folder, which must be of this recipe."""
        found = checkpoint.newest(self.folder.checkpoints)
        state = State.read(found[1]) if found else self.state
        self.folder.check(self.recipe, state.stage, state.epoch + (state.step > 0), state.round)
        if found is None and (self.folder / "summary.json").exists():
            raise UserError(
                f"run folder {self.folder.path}: holds the result of a run whose checkpoints are gone, which would be "
                "overwritten. Give another folder with --out, or delete this one."
            )
        return found

    def _build(self) -> None:
        if not self.finished():
            # Before the first stage trains for hours; what it started from is in its own checkpoint later.
            begun = self.state.stage != "start"
            find.all_there([one for one in self.recipe.networks() if not (begun and one[0] == "start")])
        self.data = datasets.on_device(self.recipe.data, self.device)
        if self.data.passed_over:
            self.progress.note(self.data.passed_over)
        if self.data.crops and (self.recipe.shift or self.recipe.flip):
            raise UserError(
                f"shift and flip are for images that are not cropped; {self.data.name} is cropped and mirrored by "
                "settings of its own (data.crop, data.flip)."
            )
        torch.manual_seed(batches.seed_of(self.recipe.seed, "weights"))
        self.model = self.fresh_model()
        if self.recipe.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self._try_one_image()
        count = self.data.count("train")
        everything = torch.arange(count)
        if self.recipe.epoch_selection == "held-out":
            # The same images for every seed, so that runs can be compared on them.
            everything = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        held = round(self.recipe.held_out * count) if self.recipe.epoch_selection == "held-out" else 0
        self.held_out = everything[:held].to(self.device if self.data.in_memory else "cpu")
        self.pool = everything[held:].sort().values  # on the CPU, where epochs are drawn
        if len(self.pool) < 1:
            raise UserError(f"held_out: {self.recipe.held_out} of {count} images leaves none to train on.")
        if self.recipe.epoch_selection == "held-out" and not held:
            raise UserError(
                f"held_out: {self.recipe.held_out} of {count} images is none to select epochs by; hold out more, "
                "or keep the last epoch (epoch_selection=last)."
            )
        self._check_batch(min(self.recipe.batch_size, len(self.pool)))
        if self.recipe.method and self.processes.count > 1:
            raise UserError(f"method {self.recipe.method}: runs in one process; leave out torchrun.")

    def _check_batch(self, batch: int) -> None:
        count, parts = self.processes.count, self.recipe.accumulate
        if batch % (count * parts):
            among = [f"{count} processes"] * (count > 1) + [f"{parts} parts (accumulate)"] * (parts > 1)
            raise UserError(
                f"batch_size: {batch} images can't be divided equally among {' × '.join(among)}; "
                f"it counts the images of a whole step, so make it a multiple of {count * parts}."
            )

    def _try_one_image(self) -> None:
        """A model that can't read the data, or has not an output for each class of it, is a mistake in the recipe."""
        image = self.data.first(Images("train"), 1)
        try:
            with torch.no_grad():
                outputs = self.model.eval()(image).shape[1]
        except RuntimeError as why:
            seen = "×".join(map(str, image.shape[1:]))
            raise UserError(f"model: {self.recipe.model} can't read images of {seen}: {why}.") from None
        if outputs != self.data.classes:
            name = named(self.recipe.model)[0]
            raise UserError(
                f"model: {name} has {outputs} outputs, but the data has {self.data.classes} classes; write "
                f"model: {{name: {name}, classes: {self.data.classes}}}."
            )
        self.model.train()

    def _restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("model", "best", "masks", "method", "optimizer")
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part not in parts:
                raise self._misfit(f"it has {shown(name)} in it")
            parts[part][rest] = tensor
        try:
            self.model.load_state_dict(parts["best"] or parts["model"])  # both must fit
            self.model.load_state_dict(parts["model"])
            self._best = {n: t.to(self.device) for n, t in parts["best"].items()}
            if parts["masks"]:
                self.masks = Masks.from_state_dict(parts["masks"], self.model)
            self.method.load(parts["method"])
        except (RuntimeError, KeyError, ValueError, TypeError) as why:
            raise self._misfit(str(why).strip().splitlines()[-1].strip()) from None
        if not self.finished() and (self.state.epoch or self.state.step):
            within = f" and step {self.state.step} of the next" if self.state.step else ""
            where = f"in stage {self.state.stage} after epoch {self.state.epoch}{within}"
            self.progress.note(f"resumes {self.folder.path} {where}")
        return parts["optimizer"]

    def _misfit(self, why: str) -> UserError:
        """A checkpoint that is whole, but not one of this run."""
        newest = checkpoint.numbers(self.folder.checkpoints)[-1]
        path = self.folder.checkpoints / f"{newest:06d}.safetensors"
        return UserError(f"{path}: does not fit this run: {why}. Delete it to go on from the one before it.")

    def _check_place(self) -> None:
        """Where the checkpoint says the run stands must be a place that this recipe has."""
        state, stage = self.state, getattr(self.recipe, self.state.stage, None)
        if state.stage not in (*self.stages, "done"):
            raise self._misfit(f"its stage is {shown(state.stage)}")
        if state.epoch > getattr(stage, "epochs", 0):
            raise self._misfit(f"its epoch is {state.epoch} of stage {state.stage}")
        if state.round >= max(1, self.recipe.rounds):
            raise self._misfit(f"its round is {state.round}")

    # Stages

    def _stage(self, stage: str, resumed: dict[str, Tensor]) -> None:
        began = time.monotonic() - self.state.seconds.get(stage, 0.0)
        if stage == "prune":
            self.prune()
        elif stage == "start":
            self.take_start()
        else:
            self._train(stage, getattr(self.recipe, stage), resumed, began)
        self.close_stage(began)

    def prune(self) -> None:
        self.masks = self.processes.together(lambda: pruned(self))
        if self.processes.count > 1:
            masks = self.masks
            self.masks = Masks.from_state_dict(self.processes.by_main(lambda: dict(masks.items())), self.model)

    def take_start(self) -> None:
        """Begins with the network that the recipe names."""
        assert self.recipe.start is not None
        found = find.network(self.recipe.start, "start")
        self.progress.note(f"starts from {found.path}")
        new = checkpoint.fill(self.model, found.path, "start", classes_may_differ=True)
        if new:
            self.progress.note(f"the classifier ({', '.join(new)}) is new: the file's has another number of classes")
        if self.recipe.method and (found.path.parent / METHOD_FILE).exists():
            self.method.load(safetensors.torch.load_file(found.path.parent / METHOD_FILE))

    def close_stage(self, began: float) -> None:
        """Notes what the stage came to and steps to the next; `began` is when it would have if never cut off."""
        stage = self.state.stage
        title = TITLES[stage]
        if stage in ("pretrain", "regularize") and self.processes.main:
            checkpoint.write_tensors(self.folder / f"{title}.safetensors", self.model.state_dict())
            checkpoint.write_tensors(self.folder / METHOD_FILE, self.method.state())
        score, place = self.score(TEST), self.stages.index(stage)
        self._unreadable()
        self.state.accuracy[title] = score.accuracy
        if score.top5 is not None:
            self.state.top5[title] = score.top5
        before = self.state.accuracy[TITLES[self.stages[place - 1]]] if place else None
        if stage == "prune" and (told := warning_of_loss(before, score.accuracy)):
            self.progress.note(told)
        self.state.seconds[stage] = time.monotonic() - began
        if stage == "prune" and self.state.round + 1 < self.recipe.rounds:
            self.state.round += 1
            self.state.stage = "regularize"
        else:
            self.state.stage = (*self.stages, "done")[place + 1]
        self.state.epoch, self.state.best, self.state.best_epoch = 0, -1.0, 0
        self.state.regularizer, self.state.optimizer = None, {}
        self._best = {}
        self._save({})

    def _train(self, stage: str, settings: Training, resumed: dict[str, Tensor], began: float) -> None:
        steps = max(1, len(self.pool) // min(self.recipe.batch_size, len(self.pool)))
        method = self.method if stage in self.method.stages else Method()
        captured = self.captures() and (method is not self.method or method.capturable)
        regularizer: Regularizer | None = None
        if isinstance(settings, Regularize) and settings.penalizes:
            regularizer = self.make_regularizer(settings, steps)
        if method is self.method:
            method.begin(self.method_stage(stage, settings.epochs, steps))
        optimizer = self._optimizer = make_optimizer(settings, self.model.parameters(), captured)
        if method.parameters():
            optimizer.add_param_group({"params": method.parameters(), "weight_decay": 0.0})
        if resumed or self.state.optimizer:
            checkpoint.refill(optimizer, resumed, self.state.optimizer)
        if self.masks is not None:
            self.hold(self.masks)
        teachers = self.teachers if self.recipe.distill and stage != "pretrain" else None
        pursuit = self._pursuit(settings, regularizer)
        spread = self.processes.spread(self.model, self.device)
        objective = Objective(self.model, self.data, self.recipe, teachers, spread, method)
        step = (CapturedStep if captured else PlainStep)(
            objective,
            optimizer,
            regularizer,
            self.device,
            self.recipe.accumulate,
            without_sync(spread),
            self.processes.mean,
            method,
        )
        self._stage_began, self._pursued = began, pursuit
        self.progress.stage(stage, settings.epochs, self.state.epoch)
        for epoch in range(self.state.epoch, settings.epochs):
            line = self._epoch(settings, epoch, step)
            if pursuit is not None:
                line |= pursuit.correct(line["effective_density"], self.state.epoch)
            self.state.seconds[stage] = time.monotonic() - began
            if self.processes.main:
                self.folder.add_metrics(line)
            self.progress.epoch(line)
            if self._time_to_save(SAVE_SECONDS) and epoch + 1 < settings.epochs:
                self.save_within(*checkpoint.flatten(optimizer.state_dict()), regularizer)
        if pursuit is not None:
            self.progress.note(f"regularize: {pursuit.outcome()}")
        method.end()
        self.take_best()
        self._optimizer = self._held = None

    def hold(self, masks: Masks) -> None:
        """Holds these masks from now on, in place of those held so far."""
        if self._held is not None:
            self._held.release()
        self.masks = masks
        self._held = masks.hold(self._optimizer, self.model) if self._optimizer else None

    def method_stage(self, stage: str, epochs: int = 0, steps: int = 1) -> MethodStage:
        """What a method may know of a stage, and ask for."""
        target = self.recipe.prune.target if self.recipe.prune else None
        meant = self.recipe.prune or self.recipe.regularize
        return MethodStage(
            stage,
            self.model,
            list(self.groups(meant.groups)) if meant else ["elements"],
            meant.parameters if meant else None,
            epoch=self.state.epoch,
            step=self.state.step,
            epochs=epochs,
            steps=steps,
            examples=len(self.pool),
            seed=batches.seed_of(self.recipe.seed, "method"),
            keep=(target.density or target.live) if target else None,
            masks=self.masks,
            cut=lambda done, score: pruned(self, done, score),
            hold=self.hold,
        )

    def _pursuit(self, settings: Training, regularizer: Regularizer | None) -> Pursuit | None:
        """What corrects the strength of a stage that is to end at a density."""
        if not isinstance(settings, Regularize) or regularizer is None or settings.effective_density is None:
            return None
        if self.state.density_at_start is None:
            self.state.density_at_start = start = regularizer.effective_density().item()
            if start <= settings.effective_density:
                raise UserError(
                    f"regularize.effective_density: it is {start:.3g} from the start; ask for less than that."
                )
        aim = aim_of(
            settings.effective_density, self.state.density_at_start, (self.state.round + 1) / self.recipe.rounds
        )
        rates = [rate_at(settings, epoch, 1) for epoch in range(settings.epochs)]
        pursuit = Pursuit(regularizer, aim, rates)
        if self.state.density_before is not None:  # the epoch began before the checkpoint
            pursuit.density = self.state.density_before
        return pursuit

    def _epoch(self, settings: Training, epoch: int, step: PlainStep) -> dict[str, Any]:
        began = time.monotonic()
        drawn, rank = self.draw(epoch), self.processes.rank
        self.model.train()
        rates = rates_in(settings, epoch, len(drawn))
        if not self.state.step:
            step.method.before_epoch(epoch)
            self.model.train()
        if isinstance(drawn, Streamed):
            self._stream(drawn, rates, step)
        else:
            seed = self.seed_of(epoch)
            torch.manual_seed(batches.seed_of(seed, rank) if rank else seed)  # for dropout
            step.restart()
            step.epoch(drawn, rates)
        network = partial(step.method, self.model)  # computed as in training
        at_once = (LARGE_AT_ONCE if self.data.crops else WATCHED_AT_ONCE)[self.device.type]
        right, right5, images = self._counts(lambda x: logits(network, x, self.recipe), self.watched, at_once)
        numbers = {"loss": step.loss, "right": right, "right5": right5, "images": images}
        if isinstance(step.regularizer, Regularizer):
            with torch.no_grad():
                numbers["penalty"] = step.regularizer.loss()
                numbers["effective_density"] = step.regularizer.effective_density()
        if epoch + 1 < settings.epochs and self.device.type == "cuda" and self.data.in_memory:
            self.draw(epoch + 1)  # while the device is busy with this one
        found = _read(numbers)
        self.state.epoch = epoch + 1
        score = Correct.read(torch.tensor([found.pop(key) for key in ("right", "right5", "images")]), self.data)
        line = self.close_epoch(settings, found.pop("loss") / len(drawn), score.accuracy)
        if score.top5 is not None:
            line["held_out_top5" if self.recipe.epoch_selection == "held-out" else "test_top5"] = score.top5
        line |= self._unreadable()
        return line | found | {"seconds": round(time.monotonic() - began, 3)}

    def _stream(self, drawn: Streamed, rates: list[float], step: PlainStep) -> None:
        """The rest of an epoch of streamed images, with checkpoints on the way.

        Each step has its own seed for dropout, so that an epoch can be taken up again anywhere.
        """

        def before(i: int) -> None:
            torch.manual_seed(batches.seed_of(drawn.seed, "step", i, self.processes.rank))

        def after(i: int) -> None:
            if i + 1 < len(drawn) and self._time_to_save(SAVE_WITHIN):
                self.state.step, self.state.loss = i + 1, float(step.loss)
                self.state.density_before = self._pursued.density if self._pursued else None
                self.state.seconds[self.state.stage] = time.monotonic() - self._stage_began
                regularizer = step.regularizer if isinstance(step.regularizer, Regularizer) else None
                self.save_within(*checkpoint.flatten(step.optimizer.state_dict()), regularizer)

        step.restart(self.state.loss)
        step.rest_of(drawn, rates, self.state.step, before, after)
        self.state.step, self.state.loss, self.state.density_before = 0, 0.0, None

    def _unreadable(self) -> dict[str, int]:
        """How many images could not be read so far, for the line of metrics; new ones are named to the user."""
        if not self.data.crops:
            return {}
        data, known = self.data, set(self.state.unreadable)
        names = known.union(*self.processes.gathered(list(data.unreadable.values())))
        if names - known:
            new, more = sorted(names - known), f" and {len(names - known) - 10} more" if len(names - known) > 10 else ""
            self.progress.note(f"left out, for they can't be read: {', '.join(new[:10])}{more}")
        if len(names) > data.skip_at_most:
            self.processes.by_main(lambda: data.refuse(sorted(names)))
        self.state.unreadable = sorted(names)
        return {"unreadable": len(names)} if names else {}

    def seed_of(self, epoch: int) -> int:
        """The seed of all that is random in an epoch of this stage."""
        again = (self.state.round,) if self.state.round else ()
        return batches.seed_of(self.recipe.seed, self.state.stage, epoch, *again)

    def draw(self, epoch: int) -> Epoch | Streamed:
        """The batches of an epoch of this stage: those drawn ahead, or new ones."""
        seed = self.seed_of(epoch)
        if self._ahead is not None and self._ahead[0] == seed:
            return self._ahead[1]
        made = batches.of_epoch(self.data, self.pool, self.recipe, seed, self.processes.rank, self.processes.count)
        if isinstance(made, Streamed):
            return made
        self._ahead = seed, made.to(self.device)
        return self._ahead[1]

    @property
    def watched(self) -> Images:
        """The images whose accuracy this run may select by."""
        return Images("train", self.held_out) if self.recipe.epoch_selection == "held-out" else TEST

    def close_epoch(self, settings: Training, loss: float, accuracy: float) -> dict[str, Any]:
        """Keeps the weights of an epoch that is the best so far; gives its line of metrics."""
        state = self.state
        if not math.isfinite(loss):
            raise Diverged(
                f"{state.stage}: the loss is {loss} in epoch {state.epoch}. A lower lr or strength may help; "
                f"good checkpoints, if it came to any, are in {self.folder.checkpoints}."
            )
        if accuracy > state.best and state.stage != "regularize":
            state.best, state.best_epoch = accuracy, state.epoch
            if self.recipe.epoch_selection != "last":
                self._keep_best()
        return {
            "stage": state.stage,
            **({"round": state.round + 1} if state.round else {}),
            "epoch": state.epoch,
            "loss": loss,
            "lr": rate_at(settings, state.epoch - 1, 1),
            "held_out" if self.recipe.epoch_selection == "held-out" else "test": accuracy,
        }

    def _keep_best(self) -> None:
        for name, tensor in self.model.state_dict().items():
            if name in self._best:
                self._best[name].copy_(tensor)
            else:
                self._best[name] = tensor.clone()

    def take_best(self) -> None:
        """The weights of the best epoch, at a stage's end; or those of the last one, as they are."""
        if self.state.stage == "regularize" or not self.state.best_epoch:
            return
        last = self.recipe.epoch_selection == "last"
        if not last:
            self.model.load_state_dict(self._best)
        self.state.selected[self.state.stage] = self.state.epoch if last else self.state.best_epoch

    # Parts of a step

    @cached_property
    def teachers(self) -> Teachers:
        """The teachers of the recipe, asked once for all stages where they answer from a table."""
        return teachers_of(self.recipe, self.data, self.device, self.progress.note)

    def captures(self) -> bool:
        alone = self.processes.count == 1
        return self.device.type == "cuda" and self.recipe.capture == "auto" and self.data.in_memory and alone

    def make_regularizer(self, settings: Regularize, steps_an_epoch: int) -> Regularizer:
        made = Regularizer(
            self.model,
            PENALTIES.make(settings.penalty),
            self.groups(settings.groups),
            settings.schedules(steps_an_epoch),
            settings.parameters,
            weigh=settings.weigh,
        )
        if self.state.regularizer:
            made.load_state_dict(self.state.regularizer)
        return made

    def groups(self, choices: Choices) -> list[Grouping]:
        """The groupings that a recipe names; some are made from the network itself."""
        return groupings(several(choices), self.model, self.data.example())

    def accuracy(self, images: Images) -> float:
        """The share of images that the model gets right, in eval mode and in float32."""
        return self.score(images).accuracy

    def score(self, images: Images) -> Correct:
        return Correct.read(self._counts(self.model, images, self._at_once()), self.data)

    def _counts(self, network: Callable[[Tensor], Tensor], images: Images, at_once: int) -> Tensor:
        """What `counted` gives in all processes together; does not wait for the device."""
        self.model.eval()
        self.processes.share_buffers(self.model)
        mine = images.share(self.data, self.processes.rank, self.processes.count)
        return self.processes.sum(counted(network, self.data, mine, at_once).to(self.device))

    def _at_once(self) -> int:
        return LARGE_AT_ONCE[self.device.type] if self.data.crops else 1000

    @torch.inference_mode()
    def predictions(self, model: nn.Module) -> Tensor:
        """The class that a model takes each test image for, in eval mode; of those that can be read."""
        model.eval()
        return torch.cat([model(x).argmax(1)[y != UNREADABLE] for x, y in self.data.shown(TEST, self._at_once())])

    def fresh_model(self) -> nn.Module:
        """A newly made network of the recipe's kind, where the run takes place."""
        return models.of(self.recipe.model).to(self.device)

    # Saving

    def save_within(
        self, optimizer: Mapping[str, Tensor], rest: Mapping[str, Any], regularizer: Regularizer | None
    ) -> None:
        """Saves in the middle of a stage; `optimizer` and `rest` are its state, flattened."""
        self.state.optimizer = dict(rest)
        self.state.regularizer = regularizer.state_dict() if regularizer else None
        self._save(optimizer)

    def _time_to_save(self, least: float) -> bool:
        """Whether the last checkpoint is old enough, and the time since is long beside what writing one takes."""
        if not self.processes.main:
            return False
        return time.monotonic() - self._saved > max(least, self._save_cost / SAVE_SHARE)

    def _save(self, optimizer: Mapping[str, Tensor]) -> None:
        if not self.processes.main:
            return
        began = time.monotonic()
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.model.state_dict(),
            "best": self._best,
            "masks": self.masks or {},
            "method": self.method.state(),
            "optimizer": optimizer,
        }
        tensors = {f"{part}.{name}": tensor for part, content in parts.items() for name, tensor in content.items()}
        self.state.metrics_size = self.folder.metrics_size()
        checkpoint.save(self.folder.checkpoints, tensors, asdict(self.state))
        self._saved = time.monotonic()
        self._save_cost = self._saved - began


def _read(numbers: dict[str, Tensor]) -> dict[str, float]:
    """Numbers from the device, all at once: the one time that an epoch waits for it."""
    return dict(zip(numbers, torch.stack([n.double() for n in numbers.values()]).tolist(), strict=True))
