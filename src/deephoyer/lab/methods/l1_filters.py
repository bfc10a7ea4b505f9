"""Filters with a small l1 norm are pruned at once, and the rest is finetuned.

Li, Kadav, Durdanovic, Samet, Graf: Pruning filters for efficient ConvNets; ICLR 2017.
"""

from __future__ import annotations

from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import Magnitude, Score


class L1Filters(Method):
    """prunes once by the mean of |w| over a group, without training before it (Li et al. 2017)"""

    def score(self, stage: Stage) -> Score:
        return Magnitude(norm=1)
