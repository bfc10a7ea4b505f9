"""A run: the stages pretrain, regularize, prune and finetune, those that its recipe has; resumable after a kill.

How a stage trains is in `loop.py`, how the network is pruned in `pruning.py`, checkpoints in `resume.py`. Which model,
which data and which penalty are names in the recipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.groups import Grouping, groupings
from deephoyer.lab import data as datasets
from deephoyer.lab import models
from deephoyer.lab.choices import Choices, named, several
from deephoyer.lab.data import TEST, Images
from deephoyer.lab.data.source import UNREADABLE
from deephoyer.lab.methods import METHODS, Method
from deephoyer.lab.methods import Stage as MethodStage
from deephoyer.lab.processes import is_child_run
from deephoyer.lab.recipe import Command
from deephoyer.lab.runs import checkpoint, environment, find
from deephoyer.lab.runs.folder import FAILED, RunFolder
from deephoyer.lab.runs.state import State
from deephoyer.lab.schema import TITLES, Recipe
from deephoyer.lab.train import batches
from deephoyer.lab.train.distill import Teachers, teachers_of
from deephoyer.lab.train.distributed import Processes, local_device, process_group
from deephoyer.lab.train.evaluate import Correct, count_correct, count_outputs
from deephoyer.lab.train.loop import Diverged, TrainingLoop
from deephoyer.lab.train.memory_format import memory_format
from deephoyer.lab.train.progress import Silent
from deephoyer.lab.train.pruning import pruned, warning_of_loss
from deephoyer.lab.train.resume import Checkpoints, StageTensors
from deephoyer.masks import Empties, Hold, Masks
from deephoyer.targets import OutOfReach
from deephoyer.weights import find_weights

METHOD_FILE = "method.safetensors"
"""What a method trained besides the weights, for runs that start from this one's network."""
EVALUATION_BATCH = 1000
"""Images in a batch when the accuracy is measured."""
FASTER_BATCH = {"cpu": 1000, "cuda": 5000}
"""And between epochs, where no memory is needed for anything else."""
CROPPED_BATCH = {"cpu": 50, "cuda": 250}
"""And of images that are cropped to a size, which are larger."""

LOOK_EVERY = 0.5
"""Seconds between two looks at a folder that another process is using."""
STOPPED_FOR = 60.0
"""Seconds for which that process may be stopped until it is not waited for any longer."""


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
        self.optimizer: torch.optim.Optimizer | None = None  # of the stage that trains
        self._held: Hold | None = None
        self.checkpoints = Checkpoints(self)
        self.processes = Processes()
        self._waited, self._stopped_since = False, math.inf

    def execute(self) -> Run:
        """Runs what is left to run; afterwards `model`, `masks` and `state` are the final ones."""
        self.device = local_device(environment.pick_device(self.recipe.device))
        resumable = f"Run the same command again to resume from the last checkpoint in {self.folder.path}."
        with process_group(self.device, resumable) as self.processes:
            self.processes.on_main(lambda: self.folder.open(self._wait if is_child_run() else None))
            try:
                with self.progress, environment.tuned(self.recipe.precision):
                    resumed = self.prepare()
                    while not self.finished():
                        self.run_stage(resumed)
                        resumed = StageTensors()
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

    def _wait(self) -> None:
        """For the process that does the same run, as another worker of the search, whose result is then read."""
        if not self._waited:
            self.progress.note(f"another process is using {self.folder.path}; waiting for it")
            self._waited = True
        stopped = self.folder.stopped_holder()
        if stopped is None:
            self._stopped_since = math.inf
        elif (since := min(self._stopped_since, time.monotonic())) + STOPPED_FOR > time.monotonic():
            self._stopped_since = since
        else:
            raise UserError(
                f"run folder {self.folder.path}: process {stopped} is using it and is stopped. Continue it "
                f"(kill -CONT {stopped}) or end it, then run the same command again."
            )
        time.sleep(LOOK_EVERY)

    # Preparing

    def prepare(self) -> StageTensors:
        """Loads the data, builds the network and restores the newest checkpoint, if there is one.

        Returns the tensors that it has of an unfinished stage.
        """
        self.device = local_device(environment.pick_device(self.recipe.device))
        tensors = self.checkpoints.read_state()
        self.processes.together(self._build)
        if tensors is not None:
            self.processes.on_main(lambda: self.folder.check_images(self.data.fingerprint))
        if self.processes.main:
            if not self.finished():
                self.folder.write_command(self.command, self.recipe, self.data.fingerprint)
                where = environment.describe(self.device) | {"processes": self.processes.count}
                self.folder.write_json("environment.json", where)
            self.folder.cut_metrics(self.state.metrics_size)
        if tensors is None:
            return StageTensors()
        resumed = self.checkpoints.restore(tensors)
        if not self.finished() and (self.state.epoch or self.state.step):
            within = f" and step {self.state.step} of the next" if self.state.step else ""
            where_from = f"in stage {self.state.stage} after epoch {self.state.epoch}{within}"
            self.progress.note(f"resuming {self.folder.path} {where_from}")
        return resumed

    def _build(self) -> None:
        if not self.finished():
            # Before the first stage trains for hours; what it started from is in its own checkpoint later.
            begun = self.state.stage != "start"
            find.check_networks([(key, name) for key, name in self.recipe.networks() if not (begun and key == "start")])
        self.data = datasets.on_device(self.recipe.data, self.device)
        if self.data.passed_over:
            self.progress.note(self.data.passed_over)
        if self.data.crops and (self.recipe.shift or self.recipe.flip):
            raise UserError(
                f"shift and flip are for images that are not cropped; {self.data.name} is cropped and flipped by its "
                "own settings (data.crop, data.flip)."
            )
        torch.manual_seed(batches.seed_of(self.recipe.seed, "weights"))
        self.model = self.fresh_model()
        self._try_one_image()
        self._split()
        self._check_later_stages()
        self._check_batch(min(self.recipe.batch_size, len(self.pool)))
        if self.recipe.method and self.processes.count > 1:
            raise UserError(f"method {self.recipe.method}: runs in one process; leave out torchrun.")

    def _split(self) -> None:
        """`held_out` are the images that select epochs, `pool` those to train on; both by their numbers."""
        count, held = self.data.count("train"), 0
        order = torch.arange(count)
        if self.recipe.epoch_selection == "held-out":
            # The same images for every seed, so that runs can be compared on them.
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
            held = round(self.recipe.held_out * count)
        self.held_out = order[:held].to(self.device if self.data.in_memory else "cpu")
        self.pool = order[held:].sort().values  # on the CPU, where epochs are drawn
        if len(self.pool) < 1:
            raise UserError(f"held_out: {self.recipe.held_out} of {count} images leaves none to train on.")
        if self.recipe.epoch_selection == "held-out" and not held:
            raise UserError(
                f"held_out: {self.recipe.held_out} of {count} images is none to select epochs by; hold out more, "
                "or keep the last epoch (epoch_selection=last)."
            )

    def _check_batch(self, batch: int) -> None:
        count, parts = self.processes.count, self.recipe.accumulate
        if batch % (count * parts):
            among = [f"{count} processes"] * (count > 1) + [f"{parts} parts (accumulate)"] * (parts > 1)
            raise UserError(
                f"batch_size: {batch} images can't be divided equally among {' × '.join(among)}; "
                f"it counts the images of a whole step, so make it a multiple of {count * parts}."
            )

    def _try_one_image(self) -> None:
        """The model must accept the data's images, and have one output for each of its classes."""
        name = named(self.recipe.model)[0]
        outputs = count_outputs(self.model.eval(), self.data.first(Images("train"), 1), f"model: {name}")
        if outputs != self.data.classes:
            raise UserError(
                f"model: {name} has {outputs} outputs, but the data has {self.data.classes} classes; write "
                f"model: {{name: {name}, classes: {self.data.classes}}}."
            )
        self.model.train()

    def _check_later_stages(self) -> None:
        """What stages say of the network, and a method needs, before the first of them trains for hours."""
        for name in ("regularize", "prune"):
            stage = getattr(self.recipe, name)
            try:
                if stage is not None and stage.parameters is not None:
                    find_weights(self.model, stage.parameters)
            except UserError as why:
                raise UserError(f"{name}.{why}") from None
        if self.recipe.method:
            self.method.check(self.method_stage("pretrain"))

    # Stages

    def run_stage(self, resumed: StageTensors) -> None:
        """Runs the stage that comes next and steps to the one after it."""
        stage = self.state.stage
        began = time.monotonic() - self.state.seconds.get(stage, 0.0)
        if stage == "prune":
            self.prune()
        elif stage == "start":
            self.take_start()
        else:
            TrainingLoop(self, getattr(self.recipe, stage), resumed, began).execute()
        self.close_stage(began)

    def prune(self) -> None:
        self.masks = self.processes.together(lambda: pruned(self))
        if self.processes.count > 1:
            masks = self.masks
            self.masks = Masks.from_state_dict(self.processes.on_main(lambda: dict(masks.items())), self.model)

    def take_start(self) -> None:
        """Loads the network that the recipe starts from."""
        assert self.recipe.start is not None
        start = find.network(self.recipe.start, "start")
        self.progress.note(f"starts from {start.path}")
        new = checkpoint.fill(self.model, start.path, "start", classes_may_differ=True)
        if new:
            self.progress.note(f"the classifier ({', '.join(new)}) is new: the file's has another number of classes")
        if self.recipe.method and (start.path.parent / METHOD_FILE).exists():
            self.method.load(safetensors.torch.load_file(start.path.parent / METHOD_FILE))

    def close_stage(self, began: float) -> None:
        """Records the stage's accuracy and time, and steps to the next stage.

        `began` is when it would have begun, had it never been interrupted.
        """
        stage = self.state.stage
        title = TITLES[stage]
        if stage in ("pretrain", "regularize") and self.processes.main:
            checkpoint.write_tensors(self.folder / f"{title}.safetensors", self.model.state_dict())
            checkpoint.write_tensors(self.folder / METHOD_FILE, self.method.state())
        score, place = self.score(TEST), self.stages.index(stage)
        self.note_unreadable()
        self.state.accuracy[title] = score.accuracy
        if score.top5 is not None:
            self.state.top5[title] = score.top5
        if stage == self.stages[-1] and not getattr(getattr(self.recipe, stage), "epochs", 0):
            self.state.selection_accuracy = self.accuracy(self.selection_images)
        before = self.state.accuracy[TITLES[self.stages[place - 1]]] if place else None
        if stage == "prune" and (warning := warning_of_loss(before, score.accuracy)):
            self.progress.note(warning)
        self.state.seconds[stage] = time.monotonic() - began
        if stage == "prune" and self.state.round + 1 < self.recipe.rounds:
            self.state.round += 1
            self.state.stage = "regularize"
        else:
            self.state.stage = (*self.stages, "done")[place + 1]
        self.state.epoch, self.state.best, self.state.best_epoch = 0, -1.0, 0
        self.state.regularizer, self.state.optimizer = None, {}
        self.checkpoints.save(StageTensors())

    # What the stages share

    def hold(self, masks: Masks) -> None:
        """Holds these masks from now on, in place of those held so far; while training, in the stage's optimizer."""
        if self._held is not None:
            self._held.release()
        self.masks = masks
        self._held = masks.hold(self.optimizer, self.model) if self.optimizer else None

    def release(self) -> None:
        """A stage's training is over, and its optimizer with it; the masks stay the run's."""
        self.optimizer = self._held = None

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
            hold=self._hold_other,
        )

    def _hold_other(self, masks: Masks) -> None:
        """A method changes what is there: epochs before this had another network, and none of them is selected."""
        self.hold(masks)
        self.state.best, self.state.best_epoch = -1.0, 0

    @cached_property
    def teachers(self) -> Teachers:
        """The teachers of the recipe, for all stages: a table of their predictions is computed once."""
        return teachers_of(self.recipe, self.data, self.device, self.progress.note)

    def groups(self, choices: Choices) -> list[Grouping]:
        """The groupings that a recipe names; some are made from the network itself."""
        return groupings(several(choices), self.model, self.data.example())

    def fresh_model(self) -> nn.Module:
        """A new network of the recipe's model, on the run's device and in its memory format."""
        model = models.of(self.recipe.model).to(self.device)
        return model.to(memory_format=memory_format(self.recipe, self.device))

    # Evaluating

    def note_unreadable(self) -> dict[str, int]:
        """How many images could not be read so far, for the line of metrics; new ones are named to the user."""
        data, known = self.data, set(self.state.unreadable)
        if not data.crops:
            return {}
        names = known.union(*self.processes.gathered(list(data.unreadable.values())))
        if new := sorted(names - known):
            more = f" and {len(new) - 10} more" if len(new) > 10 else ""
            self.progress.note(f"left out because they can't be read: {', '.join(new[:10])}{more}")
        if len(names) > data.skip_at_most:
            self.processes.on_main(lambda: data.refuse(sorted(names)))
        self.state.unreadable = sorted(names)
        return {"unreadable": len(names)} if names else {}

    @property
    def selection_images(self) -> Images:
        """The images whose accuracy selects epochs, and meets targets."""
        return Images("train", self.held_out) if self.recipe.epoch_selection == "held-out" else TEST

    def accuracy(self, images: Images) -> float:
        """The share of images that the model gets right, in eval mode and in float32."""
        return self.score(images).accuracy

    def score(self, images: Images) -> Correct:
        return Correct.read(self.count_correct(self.model, images), self.data)

    def count_correct(
        self, network: Callable[[Tensor], Tensor], images: Images, between_epochs: bool = False
    ) -> Tensor:
        """The counts of `evaluate.count_correct`, over all processes; does not wait for the device."""
        self.model.eval()
        self.processes.share_buffers(self.model)
        mine = images.share(self.data, self.processes.rank, self.processes.count)
        counts = count_correct(network, self.data, mine, self._evaluation_batch(between_epochs))
        return self.processes.sum(counts.to(self.device))

    @torch.inference_mode()
    def predictions(self, model: nn.Module) -> Tensor:
        """The class that a model predicts for each test image that can be read, in eval mode."""
        model.eval()
        shown = self.data.shown(TEST, self._evaluation_batch())
        return torch.cat([model(x).argmax(1)[y != UNREADABLE] for x, y in shown])

    def _evaluation_batch(self, between_epochs: bool = False) -> int:
        if self.data.crops:
            return CROPPED_BATCH[self.device.type]
        return FASTER_BATCH[self.device.type] if between_epochs else EVALUATION_BATCH
