"""A plan as a callback of Lightning's `Trainer`.

    callback = PlanCallback(dh.Target(macs=0.4), monitor="val_acc")
    trainer = Trainer(max_epochs=90, callbacks=[callback])
    trainer.fit(module)
    trainer.test(module)

After `fit` the module holds the smaller network, so that `test`, `predict` and `save_checkpoint` go on with it; it is
`callback.small` as well, and lies in the trainer's `default_root_dir` as `small.safetensors` for `dh.load`. The plan
counts epochs where the trainer has `max_epochs`, and steps where it has `max_steps` alone; those after which the
trainer validates have a score. Its state is in Lightning's checkpoints, so a run that is resumed from one goes on where
it was cut off.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from deephoyer.errors import UserError
from deephoyer.export import save
from deephoyer.inference import Examples
from deephoyer.integrations.in_place import become
from deephoyer.plan import Plan
from deephoyer.plan_report import PlanReport
from deephoyer.targets import Target

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback, LightningModule
else:
    from lightning.pytorch import Callback, LightningModule

SMALL = "small.safetensors"
"""The smaller network's file in the trainer's folder; `dh.load` reads it."""


class PlanCallback(Callback):
    """Takes the module's network to the target while Lightning trains it; `small` and `report` are there after `fit`.

    `network` is the attribute of the module that holds the network; it may be left out where there is only one with
    parameters, or where the module is the network itself, with a `forward` over several layers. `example_inputs` may be
    left out where the module has an `example_input_array`. `monitor` is what the module logs as its validation score;
    `higher_is_better=False` for a loss. The rest as in `Plan`.
    """

    def __init__(
        self,
        target: Target,
        example_inputs: Examples | None = None,
        *,
        monitor: str | None = None,
        higher_is_better: bool = True,
        network: str | None = None,
        **settings: Any,
    ):
        self.target, self.example_inputs, self.network = target, example_inputs, network
        self.monitor, self.sign = monitor, 1.0 if higher_is_better else -1.0
        self.settings = settings
        self.plan: Plan | None = None
        self.small: nn.Module | None = None
        self._saved: dict[str, Any] | None = None
        self._validated = False  # whether there is a score that was not used yet

    @property
    def report(self) -> PlanReport | None:
        return None if self.plan is None else self.plan.report

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.small = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.target.drop is not None and self.monitor is None:
            raise UserError("PlanCallback: a drop is of a score; say which with monitor=.")
        for callback in map(type, trainer.callbacks):
            if {"WeightAveraging", "StochasticWeightAveraging"} & {cls.__name__ for cls in callback.mro()}:
                raise UserError(
                    f"PlanCallback: {callback.__name__} validates and keeps averages of weights, in which those that "
                    "are pruned are not zero; leave it out."
                )
        epochs, steps = trainer.max_epochs, trainer.max_steps
        if (epochs is None or epochs < 1) and steps < 1:
            raise UserError("PlanCallback: a plan has a length: give the trainer max_epochs or max_steps.")
        length = {"epochs": epochs} if epochs is not None and epochs > 0 else {"steps": steps}
        inputs = self.example_inputs
        if inputs is None:
            inputs = getattr(pl_module, "example_input_array", None)
        if inputs is None:
            raise UserError("PlanCallback: give example_inputs=, or the module an example_input_array.")
        inputs = trainer.precision_plugin.convert_input(inputs)  # Lightning gives the network its precision, too
        network = pl_module.get_submodule(_network(pl_module, self.network))
        self.plan = Plan(network, inputs, list(trainer.optimizers), self.target, **length, **self.settings)
        if self._saved is not None:
            self.plan.load_state_dict(self._saved)
            self._saved = None  # a later fit is a plan of its own
        if self.target.drop is not None and not self.plan.by_steps and trainer.check_val_every_n_epoch != 1:
            raise UserError("PlanCallback: a drop takes a score of every epoch: check_val_every_n_epoch=1.")
        self._validated = False

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Before checkpoints are written, which Lightning's own callback does here, too: a callback that comes last."""
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking  # otherwise somebody validates by itself
        if self.plan is None or not fitting:
            return
        self._validated = True
        if self.plan.by_steps:
            self._steps_over(trainer, trainer.global_step, self._score(trainer))
        elif trainer.is_last_batch:
            self._epoch_over(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._epoch_over(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Where there is a score, the last step waits for it: the network may be validated next."""
        self._steps_over(trainer, trainer.global_step - (self.monitor is not None))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps_over(trainer, trainer.global_step)
        self.small = self._there().finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.plan is not None:
            self.plan.stop()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """When the last checkpoint is written: those hold the whole network, with which training can go on."""
        if self.small is None:
            return
        if name := _network(pl_module, self.network):
            pl_module.set_submodule(name, self.small)
        else:
            become(pl_module, self.small)
            pl_module.trainer = trainer  # a copy of a module belongs to no trainer
        if trainer.is_global_zero and not trainer.fast_dev_run:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)  # Lightning makes it for logs and checkpoints of its own only
            save(self.small, folder / SMALL)

    def _epoch_over(self, trainer: Any) -> None:
        plan = self._there()
        if plan.by_steps or plan.done > trainer.current_epoch:  # this epoch's is over already
            return
        plan.epoch(self._score(trainer))
        self._log(trainer)

    def _steps_over(self, trainer: Any, until: int, score: float | None = None) -> None:
        plan = self._there()
        until = min(until, plan.total)
        while plan.by_steps and plan.done < until:
            plan.step(score if plan.done == until - 1 else None)
        if plan.by_steps and score is not None:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        plan = self._there()
        for logger in trainer.loggers:
            metrics = {f"plan/{name}": value for name, value in plan.metrics().items()}
            logger.log_metrics(metrics, step=trainer.global_step)

    def _score(self, trainer: Any) -> float | None:
        """None where nothing was validated since it was asked last: what is logged then is an older network's."""
        if self.monitor is None or (trainer.enable_validation and not self._validated):
            return None
        self._validated = False
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise UserError(f"PlanCallback: the module logs no {self.monitor!r} to be monitored. Logged: {known}.")
        return self.sign * float(trainer.callback_metrics[self.monitor])

    def _there(self) -> Plan:
        assert self.plan is not None, "training has begun"
        return self.plan

    def state_dict(self) -> dict[str, Any]:
        return {} if self.plan is None else self.plan.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None


def _network(module: nn.Module, name: str | None) -> str:
    """Which of the module's attributes holds the network; none ("") where the module itself is it."""
    if name is not None:
        try:
            module.get_submodule(name)
        except AttributeError:
            raise UserError(f"PlanCallback: the module has no network {name!r}.") from None
        return name
    held = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(held) > 1 and type(module).forward is not LightningModule.forward:
        return ""
    if len(held) != 1:
        names = ", ".join(held) or "none"
        raise UserError(f"PlanCallback: which of the module's networks is meant? Say network=…; it holds {names}.")
    return held[0]
