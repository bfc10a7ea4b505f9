"""Sparse variational dropout: every weight has its own dropout rate, and weights that are only noise are pruned.

Molchanov, Ashukha, Vetrov: Variational dropout sparsifies deep neural networks; ICML 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deephoyer.lab.methods.method import Stage
from deephoyer.lab.methods.noisy_layers import ElementScore, NoisyLayers, applied, drawn, weight_of
from deephoyer.scores import Score

K1, K2, K3 = 0.63576, 1.87320, 1.48695


class SparseVariationalDropout(NoisyLayers):
    """learns the noise of each weight; weights are scored by θ²/σ² = 1/α (Molchanov et al. 2017)

    The divergence counts `strength`/N, rising to that over the first `warmup` epochs. The paper's threshold log α > 3
    is a prune stage with the rule absolute and the value 0.0498.
    """

    title = "sparse-vd"

    def log_alpha(self, name: str) -> Tensor:
        return log_alpha(weight_of(self.layers[name]), self.of("log_variance", name))

    def noisy(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        if not self.model.training:
            return out
        return drawn(out, applied(self.layers[name], x.square(), self.of("log_variance", name).exp()))

    def loss(self) -> Tensor:
        return self.weighed(torch.stack([divergence(self.log_alpha(name)).sum() for name in self.layers]).sum())

    @torch.no_grad()
    def score(self, stage: Stage) -> Score:
        worth = {}
        for name, layer in self.trained_layers(stage).items():
            log_variance = self.tensors[f"log_variance.{name}"]
            worth[f"{name}.weight".removeprefix(".")] = (-log_alpha(weight_of(layer), log_variance)).exp()
        return ElementScore(worth)


def log_alpha(theta: Tensor, log_variance: Tensor) -> Tensor:
    """log σ²/θ², clipped to the range where float32 is accurate."""
    return (log_variance - theta.square().clamp(min=1e-16).log()).clamp(-8, 8)


def divergence(log_alpha: Tensor) -> Tensor:
    """KL(q‖p) of a weight with a log-uniform prior, up to 0.0016 (the paper's eq. 14), 0 where α is infinite."""
    return K1 * (1 - torch.sigmoid(K2 + K3 * log_alpha)) + 0.5 * torch.log1p(torch.exp(-log_alpha))
