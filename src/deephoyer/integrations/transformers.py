"""A plan as a callback of Hugging Face's `Trainer`.

    callback = PlanCallback(dh.Target(parameters=0.5), example_inputs, monitor="eval_accuracy")
    trainer = Trainer(model, args, callbacks=[callback], ...)
    trainer.train()
    small = dh.from_pretrained(args.output_dir)

After training the trainer's own model is the smaller one, so that `evaluate`, `predict`, `save_model` and `push_to_hub`
go on with it; it is written to the output folder as well. The plan counts epochs, or steps where the arguments have
`max_steps`. Its state is written into each of the trainer's checkpoints, and read from there when training is resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from deephoyer.errors import UserError
from deephoyer.export import save
from deephoyer.inference import Examples
from deephoyer.integrations.in_place import become
from deephoyer.plan import Plan
from deephoyer.plan_report import PlanReport
from deephoyer.targets import Target

STATE = "deephoyer_plan.pt"
"""The plan's file in a checkpoint's folder."""
SMALL = "small.safetensors"
"""The smaller model's file in the output folder, where it is none of Hugging Face's own; `dh.load` reads it."""


class PlanCallback(TrainerCallback):
    """Takes the model to the target while the trainer trains it; `small` and `report` are there after `train`.

    `monitor` is the name of a metric of the trainer's evaluations, which must be as often as epochs (or, where the plan
    counts steps, every so many of them); `higher_is_better=False` for a loss. The rest as in `Plan`. The trainer
    is not to load its best model at the end: the plan chooses the epoch it keeps.
    """

    def __init__(
        self,
        target: Target,
        example_inputs: Examples,
        *,
        monitor: str | None = None,
        higher_is_better: bool = True,
        resume_from: str | Path | None = None,
        **settings: Any,
    ):
        self.target, self.example_inputs, self.settings = target, example_inputs, settings
        self.monitor, self.sign = monitor, 1.0 if higher_is_better else -1.0
        self.resume_from = resume_from
        self.plan: Plan | None = None
        self.small: nn.Module | None = None
        self._waits = False

    @property
    def report(self) -> PlanReport | None:
        return None if self.plan is None else self.plan.report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        length: dict[str, Any] = {"steps": state.max_steps}
        if args.max_steps <= 0:
            if args.num_train_epochs != int(args.num_train_epochs):
                raise UserError(f"PlanCallback: {args.num_train_epochs} epochs are not whole; say max_steps instead.")
            length = {"epochs": int(args.num_train_epochs)}
        if args.load_best_model_at_end:
            raise UserError("PlanCallback: set load_best_model_at_end=False; the plan chooses the epoch it keeps.")
        if self.target.drop is not None and self.monitor is None:
            raise UserError("PlanCallback: a drop is of a score; say which with monitor=.")
        often = "epoch" if "epochs" in length else "steps"
        if self.monitor is not None and args.eval_strategy != often:
            raise UserError(f"PlanCallback: to monitor {self.monitor!r} here it takes eval_strategy={often!r}.")
        self.plan = Plan(
            kwargs["model"], self.example_inputs, kwargs["optimizer"], self.target, **length, **self.settings
        )
        if state.global_step:
            self.plan.load_state_dict(self._saved(args, state))

    def _saved(self, args: Any, state: Any) -> dict[str, Any]:
        folder = Path(self.resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
        if not (folder / STATE).exists():
            raise UserError(f"PlanCallback: {folder} has no {STATE} to go on from; say resume_from= which folder has.")
        found: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
        return found

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plan = self._there()
        if plan.by_steps:
            self._waits = self.monitor is not None and control.should_evaluate
            if not self._waits:
                plan.step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plan = self._there()
        if not plan.by_steps:
            self._waits = self.monitor is not None and control.should_evaluate  # not before eval_delay is over
            if not self._waits:
                plan.epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if not self._waits or self.plan is None:
            return
        self._waits = False
        name = self.monitor if self.monitor in (metrics or {}) else f"eval_{self.monitor}"  # either, as in the trainer
        if name not in (metrics or {}):
            known = ", ".join(name for name in metrics or {} if not name.startswith("plan/"))
            raise UserError(f"PlanCallback: {self.monitor!r} is not evaluated. There are {known}.")
        score = self.sign * float(metrics[name])
        self.plan.step(score) if self.plan.by_steps else self.plan.epoch(score)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and self.plan is not None and self.plan.report is None:
            # The trainer logs the score itself, before the plan is told of it.
            logs.update({f"plan/{name}": value for name, value in self.plan.metrics().items() if name != "score"})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(self._there().state_dict(), folder / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plan = self._there()
        self.small = plan.finish()
        become(plan.model, self.small)
        if not state.is_world_process_zero:
            return
        if callable(own := getattr(self.small, "save_pretrained", None)):
            own(args.output_dir)
        else:
            save(self.small, Path(args.output_dir) / SMALL)

    def _there(self) -> Plan:
        assert self.plan is not None, "training has begun"
        return self.plan
