"""Soft filter pruning: after every epoch the smallest filters become zero, but go on training and may return.

He, Kang, Dong, Fu, Yang: Soft filter pruning for accelerating deep convolutional neural networks; IJCAI 2018.
"""

from __future__ import annotations

from deephoyer.lab.methods.method import Method, Stage, portion, share
from deephoyer.masks import prune
from deephoyer.rules import Density
from deephoyer.scores import Magnitude, Score


class SoftFilterPruning(Method):
    """zeroes the smallest groups of each layer after every epoch but keeps training them (SFP, He et al. 2018)

    `keep` is the share of each layer's groups that is left, by default the recipe's target of density.
    """

    stages = ("regularize",)
    knows_size = True
    capturable = True
    title = "soft-filters"

    def __init__(self, keep: float | None = None):
        super().__init__()
        self.keep = portion(self.title, "keep", keep)

    def check(self, stage: Stage) -> None:
        share(self.title, stage, self.keep)

    def begin(self, stage: Stage) -> None:
        self.stage, self.rule = stage, Density(share(self.title, stage, self.keep))

    def before_epoch(self, epoch: int) -> None:
        if epoch > 0:
            self._zero()

    def end(self) -> None:
        self._zero()

    def _zero(self) -> None:
        stage = self.stage
        prune(stage.model, self.rule, stage.groups, stage.parameters, allow_empty=True, score=self.score(stage))

    def score(self, stage: Stage) -> Score:
        return Magnitude()
