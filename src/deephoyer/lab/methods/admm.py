"""ADMM pruning: training is pulled towards the nearest network of the target sparsity.

Zhang, Ye, Zhang, Tang, Wen, Fardad, Wang: A systematic DNN weight pruning framework using alternating direction method
of multipliers; ECCV 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deephoyer.errors import positive, positive_whole
from deephoyer.groups import Unit
from deephoyer.lab.methods.method import Method, Stage, portion, share
from deephoyer.rules import Density, Scores
from deephoyer.scores import Magnitude


class ADMM(Method):
    """adds ρ/2·‖W − Z + U‖² to the loss, Z the nearest sparse copy of W + U, U += W − Z (Zhang et al. 2018)

    Z and U are renewed after every `every` epochs. `scope` as of the density rule.
    """

    stages = ("regularize",)
    knows_size = True
    capturable = True

    def __init__(self, rho: float = 1e-3, every: int = 3, keep: float | None = None, scope: str = "global"):
        super().__init__()
        self.rho, self.every = positive(rho, "method admm: rho"), positive_whole(every, "method admm: every")
        self.keep, self.scope = portion("admm", "keep", keep), scope

    def check(self, stage: Stage) -> None:
        share("admm", stage, self.keep)

    def begin(self, stage: Stage) -> None:
        self.units = stage.of_layers().units()
        self.rule = Density(share("admm", stage, self.keep), self.scope)
        self.w = {n: t for unit in self.units for n, t in zip(unit.names, unit.tensors, strict=True)}
        if stage.fresh:
            self.u = {name: torch.zeros_like(w) for name, w in self.w.items()}
            self.z = projected(self.units, self.w, self.rule)
        else:
            self.u = {name: self.tensors[f"u.{name}"].to(w.device) for name, w in self.w.items()}
            self.z = {name: self.tensors[f"z.{name}"].to(w.device) for name, w in self.w.items()}
        self.tensors = {f"{k}.{name}": t for k, of in (("u", self.u), ("z", self.z)) for name, t in of.items()}

    @torch.no_grad()
    def before_epoch(self, epoch: int) -> None:
        if epoch == 0 or epoch % self.every:
            return
        for name, w in self.w.items():  # in place, so that `tensors` has them too
            self.u[name] += w
        for name, z in projected(self.units, self.u, self.rule).items():
            self.z[name].copy_(z)
            self.u[name] -= z

    @torch.no_grad()
    def after_backward(self) -> None:
        for name, w in self.w.items():
            if w.grad is not None:
                w.grad.add_(w - self.z[name] + self.u[name], alpha=self.rho)


@torch.no_grad()
def projected(units: list[Unit], values: dict[str, Tensor], rule: Density) -> dict[str, Tensor]:
    """The projection onto the weights with as many nonzero groups as the rule keeps."""
    by_name = {n: t for unit in units for n, t in zip(unit.names, unit.tensors, strict=True)}
    before = {name: tensor.clone() for name, tensor in by_name.items()}
    for name, tensor in by_name.items():
        tensor.copy_(values[name])
    verdicts = rule.judge([Scores(unit.names, Magnitude().of(unit), 0.0) for unit in units])
    found = {name: tensor.clone() for name, tensor in by_name.items()}
    for unit, verdict in zip(units, verdicts, strict=True):
        for name, gone in zip(unit.names, unit.spread((~verdict.keep).to(torch.float32)), strict=True):
            found[name] *= gone == 0
    for name, tensor in by_name.items():
        tensor.copy_(before[name])
    return found
