"""l0 regularization: each group has a random gate that is often exactly 0 or 1, and the loss counts the open ones.

Louizos, Welling, Kingma: Learning sparse neural networks through l0 regularization; ICLR 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, positive
from deephoyer.lab.methods.method import Method, Stage, multiplied, write

GAMMA, ZETA = -0.1, 1.1
"""The ends to which a gate in (0, 1) is stretched before it is clamped."""


class HardConcrete(Method):
    """trains gates on groups by the expected number of weights they leave: λ/N · Σ|g|·P(z_g ≠ 0) (Louizos et al. 2018)

    `strength` is λ, N the number of training examples; `closed` is the chance that a gate is closed at first.
    """

    stages = ("regularize",)
    capturable = True

    def __init__(self, strength: float = 0.1, beta: float = 2 / 3, closed: float = 0.1):
        super().__init__()
        self.strength, self.beta = positive(strength, "method l0: strength"), positive(beta, "method l0: beta")
        if not 0 < closed < 1:
            raise UserError(f"method l0: closed is {closed!r}; it is a share between 0 and 1.")
        self.closed = closed

    def begin(self, stage: Stage) -> None:
        self.model, self.units, self.examples = stage.model, stage.units(), stage.examples
        self.sizes = [unit.sizes().to(unit.tensors[0].device) for unit in self.units]
        device = self.sizes[0].device
        if stage.fresh:
            random = torch.Generator().manual_seed(stage.seed)
            first = math.log(1 - self.closed) - math.log(self.closed)
            starts = [first + 0.01 * torch.randn(len(size), generator=random) for size in self.sizes]
        else:
            starts = [self.tensors[f"log_alpha.{i}"] for i in range(len(self.units))]
        self.log_alpha = [nn.Parameter(start.to(device)) for start in starts]
        self.tensors = {f"log_alpha.{i}": a.detach() for i, a in enumerate(self.log_alpha)}  # the same storage

    def parameters(self) -> list[nn.Parameter]:
        return self.log_alpha

    def weights(self) -> dict[str, Tensor]:
        if self.model.training:
            gates = [gate(a, torch.rand_like(a).clamp(1e-6, 1 - 1e-6), self.beta) for a in self.log_alpha]
        else:
            gates = [settled(a) for a in self.log_alpha]
        return multiplied(self.units, gates)

    def loss(self) -> Tensor:
        open_ = [(n * chance(a, self.beta)).sum() for n, a in zip(self.sizes, self.log_alpha, strict=True)]
        return self.strength / self.examples * torch.stack(open_).sum()

    def end(self) -> None:
        self.model.eval()
        write(self.model, {name: w.detach() for name, w in self.weights().items()})


def gate(log_alpha: Tensor, u: Tensor, beta: float) -> Tensor:
    """A gate for a draw u from (0, 1)."""
    s = torch.sigmoid((u.log() - (1 - u).log() + log_alpha) / beta)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def settled(log_alpha: Tensor) -> Tensor:
    """The gate that is used once training is over."""
    return (log_alpha.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def chance(log_alpha: Tensor, beta: float) -> Tensor:
    """P(z ≠ 0)."""
    return torch.sigmoid(log_alpha - beta * math.log(-GAMMA / ZETA))
