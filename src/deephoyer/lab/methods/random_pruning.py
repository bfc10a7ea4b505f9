"""Random pruning: the baseline for every method.

Mittal, Bhardwaj, Khapra, Ravindran: Recovering from random pruning; WACV 2018.
"""

from __future__ import annotations

from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import Random, Score


class RandomPruning(Method):
    """prunes once at random, without training before it (Mittal et al. 2018); by the run's seed, or by `seed`"""

    def __init__(self, seed: int | None = None):
        super().__init__()
        self.seed = seed

    def score(self, stage: Stage) -> Score:
        return Random(stage.seed if self.seed is None else self.seed)
