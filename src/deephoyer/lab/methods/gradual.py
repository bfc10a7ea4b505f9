"""Gradual magnitude pruning: the density falls while the network trains, fast at first and slower towards the end.

Zhu, Gupta: To prune, or not to prune: exploring the efficacy of pruning for model compression; ICLR workshop 2018.
"""

from __future__ import annotations

from deephoyer.errors import positive_whole
from deephoyer.lab.methods.method import SPARE, Method, Stage, portion, share
from deephoyer.masks import prune
from deephoyer.rules import Density
from deephoyer.scores import Magnitude, Score


class GradualMagnitude(Method):
    """prunes the smallest weights after every `every` steps, most of them early (Zhu & Gupta 2018)

    The density reaches that of the target after the share `until` of the stage; the rest of it trains what is left.
    `scope` as of the density rule.
    """

    stages = ("regularize",)
    knows_size = True

    def __init__(self, until: float = 0.6, every: int = 100, scope: str = "global"):
        super().__init__()
        self.until = portion("gradual-magnitude", "until", until) or 1.0
        self.every = positive_whole(every, "method gradual-magnitude: every")
        self.scope = Density(1.0, scope).scope

    def check(self, stage: Stage) -> None:
        share("gradual-magnitude", stage)

    def begin(self, stage: Stage) -> None:
        self.stage, self.step = stage.of_layers(), stage.steps_done
        self.last = max(1, round(self.until * stage.epochs * stage.steps))
        self.end_density = min(1.0, SPARE * share("gradual-magnitude", stage))

    def after_step(self) -> None:
        self.step += 1
        if self.step == self.last or (self.step < self.last and self.step % self.every == 0):
            rule = Density(density_at(self.step / self.last, self.end_density), self.scope)
            stage = self.stage
            stage.hold(prune(stage.model, rule, stage.groups, stage.parameters, score=Magnitude()))

    def score(self, stage: Stage) -> Score:
        return Magnitude()


def density_at(done: float, end: float) -> float:
    """The density when this share of the steps is done: the pruned share grows with 1 − (1 − done)³.

    >>> [round(density_at(done, 0.1), 3) for done in (0, 0.25, 0.5, 1)]
    [1.0, 0.48, 0.213, 0.1]
    """
    return end + (1 - end) * (1 - done) ** 3
