"""Controls the strength of a penalty: corrected after every epoch, so that the effective density reaches a target.

How fast the density falls depends on the penalty, on the network and most of all on how large its weights are,
so a strength that suits one network is far off for the next. The fall that was seen in one epoch says how strong
the penalty should have been.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deephoyer.regularizer import Regularizer

TINY = 1e-9
MAX_FACTOR = 2.0
"""The largest factor of one correction."""
SETTLING = 0.1
"""The share of the learning rates left over for the end: the target is to be reached before it, and kept."""
NOISE = 0.002
"""A decrease of the density's logarithm that may be chance."""


def correction(before: float, now: float, target: float, rates: Sequence[float], done: int) -> float:
    """What to multiply the strength by after `done` epochs, the last of which took the density from `before` to `now`.

    `rates` are the learning rates of all epochs: each epoch is expected to contribute in proportion to its rate. Only
    the square root of the missing factor is corrected, as the decrease in one epoch is partly chance.

    >>> rates = [0.1] * 10
    >>> correction(0.8, 0.4, 0.1, rates, done=7)  # it halved, and has two epochs to halve twice
    1.0
    >>> correction(0.8, 0.8, 0.1, rates, done=7), correction(0.8, 0.1, 0.1, rates, done=7)
    (2.0, 0.5)
    """
    before, now = max(before, TINY), max(now, TINY)
    left = sum(rates[done:]) - SETTLING * sum(rates)
    if left < 1e-6 * rates[0]:  # near the end: a strength is only lowered
        return 1 / MAX_FACTOR if now <= target else 1.0
    wanted = math.log(now / target) * min(1.0, rates[done] / left)
    expected = math.log(before / now) * rates[done] / rates[done - 1]
    missing = (max(0.0, wanted) + NOISE) / (max(0.0, expected) + NOISE)
    return min(MAX_FACTOR, max(1 / MAX_FACTOR, math.sqrt(missing)))


def round_target(density: float, start: float, done: float) -> float:
    """The density at the end of a round, after the share `done` of all rounds; each multiplies it by the same factor.

    >>> [round(round_target(0.1, start=0.8, done=d), 3) for d in (0.5, 1.0)]
    [0.283, 0.1]
    """
    return float(start ** (1 - done) * density**done)


class StrengthControl:
    """Corrects the strength of a regularizer after every epoch, so that the effective density reaches `target`."""

    def __init__(self, regularizer: Regularizer, target: float, rates: Sequence[float]):
        self.regularizer, self.target, self.rates = regularizer, target, rates
        self.density: float = regularizer.effective_density().item()

    def correct(self, density: float, done: int) -> dict[str, float]:
        """After `done` epochs; returns the strengths of the last one, for its line of metrics."""
        used = self.regularizer.strength_now()
        self.regularizer.strengthen(correction(self.density, density, self.target, self.rates, done))
        self.density = density
        return {f"strength of {k}" if len(used) > 1 else "strength": strength for k, strength in used.items()}

    def outcome(self) -> str:
        strengths = ", ".join(f"{s:.3g}" for s in self.regularizer.strength_now().values())
        return f"effective density {self.density:.3g}, target {self.target:.3g}; final strength {strengths}"
