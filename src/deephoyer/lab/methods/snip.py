"""SNIP: single-shot pruning before training, by how much the loss depends on each connection.

Lee, Ajanthan, Torr: SNIP: Single-shot network pruning based on connection sensitivity; ICLR 2019.
"""

from __future__ import annotations

from deephoyer.errors import positive_whole
from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import Score, Snip


class SnipBeforeTraining(Method):
    """prunes the untrained network by |gradient × weight|, then trains what is left (Lee et al. 2019)"""

    stages = ("pretrain", "regularize", "finetune")
    knows_size = True
    capturable = True

    def __init__(self, batches: int = 1):
        super().__init__()
        self.batches = positive_whole(batches, "method snip: batches")

    def begin(self, stage: Stage) -> None:
        if stage.masks is None:
            stage.hold(stage.cut(1.0, Snip(self.batches)))

    def score(self, stage: Stage) -> Score | None:
        return None  # what is pruned already stays pruned, and nothing more goes
