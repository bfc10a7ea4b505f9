"""Random pruning: what any method has to beat.

Mittal, Bhardwaj, Khapra, Ravindran: Recovering from random pruning; WACV 2018.
"""

from __future__ import annotations

from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import Random, Score


class RandomPruning(Method):
    """one cut at random, no training before it (Mittal et al. 2018); drawn from the run's seed, or from `seed`"""

    def __init__(self, seed: int | None = None):
        super().__init__()
        self.seed = seed

    def score(self, stage: Stage) -> Score:
        return Random(stage.seed if self.seed is None else self.seed)
