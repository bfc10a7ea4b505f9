"""A strength that finds itself: corrected after every epoch, so that the effective density ends where it is asked to.

How fast the density falls depends on the penalty, on the network and most of all on how large its weights are,
so a strength that suits one network is far off for the next. The fall that was seen in one epoch says how strong
the penalty should have been.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST = 2.0
"""One correction changes the strength by no more than this factor."""
REST = 0.2
"""The share of the learning rates that is kept for coming to rest: the density is to be there before it, and stay."""


def correction(before: float, now: float, aim: float, rates: Sequence[float], done: int) -> float:
    """What to multiply the strength by after `done` epochs, the last of which took the density from `before` to `now`.

    `rates` are the learning rates of all epochs: an epoch is expected to take its share of what is left, in
    proportion to its rate. Only the root of what is found missing is corrected, for one epoch's fall is partly chance.

    >>> correction(0.8, 0.4, 0.1, rates=[0.1] * 5, done=2)  # it halved, and has two epochs to halve twice
    1.0
    >>> correction(0.8, 0.8, 0.1, rates=[0.1] * 5, done=2), correction(0.8, 0.1, 0.1, rates=[0.1] * 5, done=2)
    (2.0, 0.5)
    """
    left = sum(rates[done:]) - REST * sum(rates)
    if left < 1e-6 * rates[0]:  # at rest: nothing is made up for any more, and what still falls is let go
        return 1 / MOST if now <= aim else 1.0
    wanted = math.log(now / aim) * min(1.0, rates[done] / left)
    expected = math.log(before / now) * rates[done] / rates[done - 1]
    if wanted <= 0:
        return 1 / MOST
    if expected <= 0:
        return MOST
    return min(MOST, max(1 / MOST, math.sqrt(wanted / expected)))
