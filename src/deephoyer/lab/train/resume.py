"""Checkpoints of a run: when one is written, what it holds, and how a run is restored from it after a kill.

The file itself is the business of `runs/checkpoint.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deephoyer.errors import UserError, shown
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.state import State
from deephoyer.masks import Masks

if TYPE_CHECKING:
    from deephoyer.lab.train.run import Run

SAVE_SECONDS = 5.0
"""A checkpoint is written at the end of an epoch when the last one is older than this."""
SAVE_WITHIN = 120.0
"""And within an epoch of streamed images, which may take hours, when it is older than this."""
SAVE_SHARE = 0.05
"""At most this share of the time goes into writing checkpoints, so large networks have fewer of them."""


@dataclass
class StageTensors:
    """Tensors that live only as long as a training stage; between stages a checkpoint has none."""

    best: dict[str, Tensor] = field(default_factory=dict)
    """The weights of the stage's best epoch so far."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """The optimizer's state, flattened."""


class Checkpoints:
    """Writes and restores the checkpoints of one run."""

    def __init__(self, run: Run):
        self.run = run
        self._written, self._cost = time.monotonic(), 0.0

    # Saving

    def due(self, seconds: float) -> bool:
        """Whether the last checkpoint is older than this, and than `SAVE_SHARE` allows."""
        if not self.run.processes.main:
            return False
        return time.monotonic() - self._written > max(seconds, self._cost / SAVE_SHARE)

    def save(self, stage: StageTensors) -> None:
        run = self.run
        if not run.processes.main:
            return
        began = time.monotonic()
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": run.model.state_dict(),
            "best": stage.best,
            "masks": run.masks or {},
            "method": run.method.state(),
            "optimizer": stage.optimizer,
        }
        tensors = {f"{part}.{name}": tensor for part, content in parts.items() for name, tensor in content.items()}
        run.state.metrics_size = run.folder.metrics_size()
        checkpoint.save(run.folder.checkpoints, tensors, asdict(run.state))
        self._written = time.monotonic()
        self._cost = self._written - began

    # Restoring

    def read_state(self) -> dict[str, Tensor] | None:
        """Sets the run's state to that of the newest checkpoint, and returns its tensors; None where there is none."""
        newest = self.run.processes.on_main(self._newest)
        if newest is None:
            return None
        tensors, state, damaged = newest
        self.run.state = State.read(state)
        for why in damaged:
            self.run.progress.note(f"{why} The one before it is used.")
        self._check_position()
        return tensors

    def _newest(self) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
        """The newest checkpoint of the folder, which must be of the run's recipe."""
        run, newest = self.run, checkpoint.newest(self.run.folder.checkpoints)
        state = State.read(newest[1]) if newest else run.state
        if newest is not None or run.folder.has_networks():  # nothing is lost of a run that has trained nothing yet
            run.folder.check(run.recipe, state.stage, state.epoch + (state.step > 0), state.round)
        if newest is None and (run.folder / "summary.json").exists():
            raise UserError(
                f"run folder {run.folder.path}: contains the result of a run whose checkpoints were deleted, which "
                "would be overwritten. Give another folder with --out, or delete this one."
            )
        return newest

    def _check_position(self) -> None:
        """The stage, epoch and round of the checkpoint must be ones that this recipe has."""
        run, state = self.run, self.run.state
        stage = getattr(run.recipe, state.stage, None)
        if state.stage not in (*run.stages, "done"):
            raise self._misfit(f"its stage is {shown(state.stage)}")
        if state.epoch > getattr(stage, "epochs", 0):
            raise self._misfit(f"its epoch is {state.epoch} of stage {state.stage}")
        if state.round >= max(1, run.recipe.rounds):
            raise self._misfit(f"its round is {state.round}")

    def restore(self, tensors: Mapping[str, Tensor]) -> StageTensors:
        """Puts the tensors of a checkpoint into the run's network, masks and method; returns those of its stage."""
        run = self.run
        parts: dict[str, dict[str, Tensor]] = {n: {} for n in ("model", "best", "masks", "method", "optimizer")}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part not in parts:
                raise self._misfit(f"it has {shown(name)} in it")
            parts[part][rest] = tensor
        try:
            run.model.load_state_dict(parts["best"] or parts["model"])  # both must fit
            run.model.load_state_dict(parts["model"])
            best = {name: tensor.to(run.device) for name, tensor in parts["best"].items()}
            if parts["masks"]:
                run.masks = Masks.from_state_dict(parts["masks"], run.model)
            run.method.load(parts["method"])
        except (RuntimeError, KeyError, ValueError, TypeError) as why:
            raise self._misfit(str(why).strip().splitlines()[-1].strip()) from None
        return StageTensors(best, parts["optimizer"])

    def _misfit(self, why: str) -> UserError:
        """A checkpoint that is intact, but not one of this run."""
        folder = self.run.folder.checkpoints
        path = folder / f"{checkpoint.numbers(folder)[-1]:06d}.safetensors"
        return UserError(f"{path}: does not fit this run: {why}. Delete it to resume from the one before it.")
