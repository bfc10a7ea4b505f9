"""Dynamic network surgery: connections are cut while training and spliced back when they turn out to matter.

Guo, Yao, Chen: Dynamic network surgery for efficient DNNs; NeurIPS 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deephoyer.errors import not_negative
from deephoyer.lab.methods.method import Method, Stage, multiplied, write
from deephoyer.scores import Magnitude


class NetworkSurgery(Method):
    """trains all weights through masks that cut below 0.9·t and splice back above 1.1·t (Guo et al. 2016)

    t is the mean of a layer's |w| plus `c` standard deviations, as the stage begins. At step i masks are looked at with
    probability 1 / (1 + gamma·i), and not at all in the last tenth of the stage.
    """

    stages = ("regularize",)
    capturable = True

    def __init__(self, c: float = 1.0, gamma: float = 1e-3):
        super().__init__()
        self.c, self.gamma = not_negative(c, "method surgery: c"), not_negative(gamma, "method surgery: gamma")

    def begin(self, stage: Stage) -> None:
        self.model, self.units = stage.model, stage.units()
        self.last = int(0.9 * stage.epochs * stage.steps)
        if stage.fresh:
            worth = [Magnitude().of(unit).detach() for unit in self.units]
            bars = [(r.mean() + self.c * r.std(correction=0)).clamp(max=r.max()) for r in worth]
            self.tensors = {f"bar.{i}": bar for i, bar in enumerate(bars)}
            for i, r in enumerate(worth):
                self.tensors[f"open.{i}"] = surgery(torch.ones_like(r, dtype=torch.bool), r, bars[i])
        device = self.units[0].tensors[0].device
        self.step = torch.tensor(float(stage.steps_done), dtype=torch.float64, device=device)
        self.tensors = {name: t.to(device) for name, t in self.tensors.items()}

    def weights(self) -> dict[str, Tensor]:
        """Masked weights, whose gradient reaches the cut ones as if they were whole."""
        gates = [self.tensors[f"open.{i}"].float() for i in range(len(self.units))]
        plain = {n: t for unit in self.units for n, t in zip(unit.names, unit.tensors, strict=True)}
        return {n: plain[n] + (masked - plain[n]).detach() for n, masked in multiplied(self.units, gates).items()}

    @torch.no_grad()
    def after_step(self) -> None:
        looked = torch.rand_like(self.step) * (1 + self.gamma * self.step) < 1
        self.step += 1
        looked &= self.step <= self.last
        for i, unit in enumerate(self.units):
            gate = self.tensors[f"open.{i}"]
            gate.copy_(torch.where(looked, surgery(gate, Magnitude().of(unit), self.tensors[f"bar.{i}"]), gate))

    def end(self) -> None:
        write(self.model, {name: w.detach() for name, w in self.weights().items()})


def surgery(open_: Tensor, r: Tensor, bar: Tensor) -> Tensor:
    """Which groups are in the network now: small ones are cut, large ones come back, the rest stay as they were."""
    return (open_ & (r >= 0.9 * bar)) | (r >= 1.1 * bar) | (r >= r.max())
