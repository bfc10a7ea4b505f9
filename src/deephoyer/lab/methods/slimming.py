"""Network slimming: an l1 penalty on the scales of norms, and channels with small scales are pruned.

Liu, Li, Shen, Huang, Yan, Zhang: Learning efficient convolutional networks through network slimming; ICCV 2017.
"""

from __future__ import annotations

import torch

from deephoyer.errors import UserError, positive
from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import NORMS, NormScale, Score


class NetworkSlimming(Method):
    """adds strength·Σ|γ| over the scales of norms to the loss; channels are scored by their scale (Liu et al. 2017)"""

    stages = ("regularize",)
    capturable = True

    def __init__(self, strength: float = 1e-4):
        super().__init__()
        self.strength = positive(strength, "method slimming: strength")

    def begin(self, stage: Stage) -> None:
        norms = [m.weight for m in stage.model.modules() if isinstance(m, NORMS) and isinstance(m.weight, torch.Tensor)]
        self.scales = [w for w in norms if w.requires_grad]
        if not self.scales:
            raise UserError("method slimming: works on the scales of norms, and this network has none.")

    @torch.no_grad()
    def after_backward(self) -> None:
        for w in self.scales:
            if w.grad is not None:
                w.grad.add_(w.sign(), alpha=self.strength)

    def score(self, stage: Stage) -> Score:
        return NormScale()
