"""A strength that finds itself: corrected after every epoch, so that the effective density ends where it is asked to.

How fast the density falls depends on the penalty, on the network and most of all on how large its weights are,
so a strength that suits one network is far off for the next. The fall that was seen in one epoch says how strong
the penalty should have been.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deephoyer.regularizer import Regularizer

TINY = 1e-9
MOST = 2.0
"""One correction changes the strength by no more than this factor."""
REST = 0.1
"""The share of the learning rates that is kept for coming to rest: the density is to be there before it, and stay."""
NOISE = 0.002
"""A fall of the density's logarithm that is within chance."""


def correction(before: float, now: float, aim: float, rates: Sequence[float], done: int) -> float:
    """What to multiply the strength by after `done` epochs, the last of which took the density from `before` to `now`.

    `rates` are the learning rates of all epochs: an epoch is expected to take its share of what is left, in
    proportion to its rate. Only the root of what is found missing is corrected, for one epoch's fall is partly chance.

    >>> rates = [0.1] * 10
    >>> correction(0.8, 0.4, 0.1, rates, done=7)  # it halved, and has two epochs to halve twice
    1.0
    >>> correction(0.8, 0.8, 0.1, rates, done=7), correction(0.8, 0.1, 0.1, rates, done=7)
    (2.0, 0.5)
    """
    before, now = max(before, TINY), max(now, TINY)
    left = sum(rates[done:]) - REST * sum(rates)
    if left < 1e-6 * rates[0]:  # at rest: nothing is made up for any more, and what still falls is let go
        return 1 / MOST if now <= aim else 1.0
    wanted = math.log(now / aim) * min(1.0, rates[done] / left)
    expected = math.log(before / now) * rates[done] / rates[done - 1]
    missing = (max(0.0, wanted) + NOISE) / (max(0.0, expected) + NOISE)
    return min(MOST, max(1 / MOST, math.sqrt(missing)))


def aim_of(density: float, start: float, done: float) -> float:
    """The density to end a round at, when `done` is the share of rounds after it: each takes the same part of the way.

    >>> [round(aim_of(0.1, start=0.8, done=d), 3) for d in (0.5, 1.0)]
    [0.283, 0.1]
    """
    return float(start ** (1 - done) * density**done)


class Pursuit:
    """Takes the strength of a regularizer, epoch by epoch, to where the density asked for is met."""

    def __init__(self, regularizer: Regularizer, aim: float, rates: Sequence[float]):
        self.regularizer, self.aim, self.rates = regularizer, aim, rates
        self.density: float = regularizer.effective_density().item()

    def correct(self, density: float, done: int) -> dict[str, float]:
        """After `done` epochs; gives what the last one had, for its line of metrics."""
        had = self.regularizer.strength_now()
        self.regularizer.strengthen(correction(self.density, density, self.aim, self.rates, done))
        self.density = density
        return {f"strength of {k}" if len(had) > 1 else "strength": strength for k, strength in had.items()}

    def outcome(self) -> str:
        found = ", ".join(f"{s:.3g}" for s in self.regularizer.strength_now().values())
        return f"the density is {self.density:.3g}, {self.aim:.3g} was asked for; the strength ended at {found}"
