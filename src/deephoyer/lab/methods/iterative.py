"""Iterative magnitude pruning: train, prune a little, train again, until the size is reached.

Han, Pool, Tran, Dally: Learning both weights and connections for efficient neural networks; NeurIPS 2015.
"""

from __future__ import annotations

from deephoyer.errors import positive_whole
from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import Magnitude, Score


class IterativeMagnitude(Method):
    """prunes the smallest weights in several steps with training in between (Han et al. 2015)

    After each of `steps` equal parts of the stage the network is cut by the same factor; the last cut is the prune
    stage's. Cuts are made between epochs: with more steps than epochs, several are one cut.
    """

    stages = ("regularize",)
    knows_size = True
    capturable = True

    def __init__(self, steps: int = 5):
        super().__init__()
        self.steps = positive_whole(steps, "method iterative-magnitude: steps")

    def begin(self, stage: Stage) -> None:
        self.stage = stage

    def before_epoch(self, epoch: int) -> None:
        done = cuts_by(epoch, self.stage.epochs, self.steps)
        if done > cuts_by(epoch - 1, self.stage.epochs, self.steps):
            self.stage.hold(self.stage.cut(done / self.steps, Magnitude()))

    def score(self, stage: Stage) -> Score:
        return Magnitude()


def cuts_by(epoch: int, epochs: int, steps: int) -> int:
    """The number of pruning steps done when an epoch starts.

    >>> [cuts_by(epoch, 10, 5) for epoch in range(10)]
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """
    return max(0, epoch) * steps // max(1, epochs)
