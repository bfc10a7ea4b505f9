"""A term of the regularizer: strength × penalty(magnitudes of one unit), value and gradient as the formula reads.

Everything that is faster is in `kernels/`, and must agree with this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deephoyer.groups import Unit
from deephoyer.penalties import Penalty
from deephoyer.sharded import whole


class Scale:
    """A strength as tensors: one for each device and precision where weights are, all with the same number."""

    def __init__(self) -> None:
        self.number = 0.0
        self.tensors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def set(self, number: float) -> None:
        self.number = number
        for tensor in self.tensors.values():
            tensor.fill_(number)

    def beside(self, weight: Tensor) -> Tensor:
        """The one for a weight, wherever `model.to(...)` has taken it; the same tensor each time."""
        place = weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32
        if place not in self.tensors:
            self.tensors[place] = torch.full((), self.number, dtype=place[1], device=place[0])
        return self.tensors[place]


@dataclass(eq=False)
class Term:
    """One penalty value: `scale` × penalty(magnitudes of the unit)."""

    kind: str
    unit: Unit
    penalty: Penalty
    strength: Scale

    @property
    def scale(self) -> Tensor:
        return self.strength.beside(self.unit.tensors[0])

    def magnitudes(self) -> Tensor:
        """r of all groups, those of sharded weights too."""
        return whole(self.unit).magnitudes()

    def value(self) -> Tensor:
        # A copy, as autograd keeps the factor until backward, and a schedule may change the scale before that.
        return self.scale.clone() * self.penalty.value(self.magnitudes())

    def gradients(self) -> list[Tensor]:
        """For each tensor of the unit Σ p'(r_g) / r_g · w over an element's groups; 0 where r_g = 0."""
        unit = whole(self.unit)
        c = self.scale * self.penalty.coefficient(unit.magnitudes())
        return [spread * w for spread, w in zip(unit.spread(c), unit.tensors, strict=True)]
