"""FPGM: soft pruning of the filters nearest to the geometric median of their layer, which the others can replace.

He, Liu, Wang, Hu, Yang: Filter pruning via geometric median for deep convolutional neural networks acceleration; CVPR
2019.
"""

from __future__ import annotations

from deephoyer.lab.methods.method import Stage
from deephoyer.lab.methods.soft_filters import SoftFilterPruning
from deephoyer.scores import GeometricMedian, Score


class FPGM(SoftFilterPruning):
    """soft pruning by the distance to a layer's other groups instead of by size (He et al. 2019)"""

    title = "fpgm"

    def score(self, stage: Stage) -> Score:
        return GeometricMedian()
