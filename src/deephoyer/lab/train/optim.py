"""Learning rates as pure functions of time, and the optimizers that recipes name."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from deephoyer.lab.stages import Training


def rate_at(stage: Training, step: int, steps_an_epoch: int) -> float:
    """The learning rate of a stage at a step.

    >>> rate_at(Training(epochs=4, lr=0.1, schedule="step", milestones=(2,)), step=20, steps_an_epoch=10)
    0.010000000000000002
    """
    rate = stage.lr * min(1.0, (step + 1) / (stage.lr_warmup * steps_an_epoch)) if stage.lr_warmup else stage.lr
    if stage.schedule == "step":
        return rate * stage.gamma ** sum(step >= m * steps_an_epoch for m in stage.milestones)
    if stage.schedule == "cosine":
        return rate * (1 + math.cos(math.pi * step / (stage.epochs * steps_an_epoch))) / 2
    return rate


def rates_in(stage: Training, epoch: int, steps: int) -> list[float]:
    """The learning rate of each step of an epoch."""
    return [rate_at(stage, epoch * steps + i, steps) for i in range(steps)]


def make_optimizer(
    stage: Training, parameters: Iterable[nn.Parameter], captured: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of a stage; one for captured steps keeps its rate and step count on the device."""
    trained = [p for p in parameters if p.requires_grad]
    rate = torch.tensor(stage.lr, device=trained[0].device) if captured else stage.lr
    decay = stage.weight_decay
    if stage.optimizer == "sgd":
        return torch.optim.SGD(
            trained, rate, momentum=stage.momentum, nesterov=stage.nesterov, weight_decay=decay, fused=True
        )
    kind = torch.optim.AdamW if stage.optimizer == "adamw" else torch.optim.Adam
    return kind(trained, rate, weight_decay=decay, fused=True, capturable=captured)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
