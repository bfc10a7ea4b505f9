"""Bayesian compression: neurons and filters have a random scale under a sparsity prior; noisy ones are pruned.

Louizos, Ullrich, Welling: Bayesian compression for deep learning; NeurIPS 2017. Group normal-Jeffreys (BC-GNJ) and
group horseshoe (BC-GHS). As there, a scale belongs to an input of a linear layer and to a filter of a convolution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deephoyer.errors import positive
from deephoyer.groups import Unit
from deephoyer.lab.methods.method import Stage, write
from deephoyer.lab.methods.noisy_layers import LOG_VARIANCE, NO_WORTH, NoisyLayers, applied, drawn, weight_of
from deephoyer.lab.methods.variational_dropout import divergence
from deephoyer.penalties import wide
from deephoyer.scores import Score, sums

SAME = 1e-9
"""The relative variance of numbers that are equal but for rounding."""


class _BayesianCompression(NoisyLayers):
    """The common part of both priors: scales z on groups, weights N(μ, σ²) under a standard normal prior."""

    def scale(self, name: str) -> Tensor:
        """A sample of a layer's scales, one per group."""
        raise NotImplementedError

    def settled(self, name: str) -> Tensor:
        """The scales that are used once training is over."""
        raise NotImplementedError

    def worth(self, name: str) -> Tensor:
        """The score of each group."""
        raise NotImplementedError

    def scales_divergence(self) -> Tensor:
        """KL of all scales."""
        raise NotImplementedError

    def _z(self, name: str) -> Tensor:
        return self.scale(name) if self.model.training else self.settled(name)

    def read(self, name: str, x: Tensor) -> Tensor:
        return x * self._z(name) if isinstance(self.layers[name], nn.Linear) else x

    def noisy(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """`x` is what the layer has read: for a linear layer it is scaled already."""
        layer = self.layers[name]
        variance = self.of("log_variance", name).exp()
        if isinstance(layer, nn.Linear):
            return drawn(out, applied(layer, x.square(), variance)) if self.model.training else out
        bias = layer.bias
        shape = (-1, *(1 for _ in weight_of(layer).shape[2:]))
        z = self._z(name).view(shape)
        shift = bias.view(shape) if isinstance(bias, Tensor) else torch.zeros((), device=out.device)
        mean = (out - shift) * z + shift
        if not self.model.training:
            return mean
        return drawn(mean, applied(layer, x.square(), variance) * z.square())

    def loss(self) -> Tensor:
        weights = [normal_divergence(weight_of(layer), self.of("log_variance", n)) for n, layer in self.layers.items()]
        return self.weighed(torch.stack([w.sum() for w in weights]).sum() + self.scales_divergence())

    @torch.no_grad()
    def end(self) -> None:
        """Scales go into the weights."""
        super().end()
        for name, layer in self.layers.items():
            weight = weight_of(layer)
            write(layer, {"weight": weight * laid(layer, self.settled(name))})

    @torch.no_grad()
    def score(self, stage: Stage) -> Score:
        worth = {}
        for name, layer in self.trained_layers(stage).items():
            worth[f"{name}.weight".removeprefix(".")] = laid(layer, self.worth(name)).expand(weight_of(layer).shape)
        return ScaleScore(worth)


class ScaleScore(Score):
    """a score for every scale; a group has the mean of the scales that reach over its part of a tensor

    A row of a linear layer has a weight of each input, whose scales say nothing of the row: it has none, and stays.
    """

    def __init__(self, worth: dict[str, Tensor]):
        self.worth = worth

    def of(self, unit: Unit) -> Tensor:
        total = torch.zeros(len(unit.sizes()), dtype=torch.float64, device=unit.tensors[0].device)
        count = torch.zeros_like(total)
        for place, name in enumerate(unit.names):
            if name not in self.worth:
                continue
            parts = [torch.zeros_like(t, dtype=torch.float64) for t in unit.tensors]
            there, mean, square = (
                sums(unit, [*parts[:place], values, *parts[place + 1 :]])
                for values in (parts[place] + 1, self.worth[name].double(), self.worth[name].double().square())
            )
            mean, square = mean / there.clamp(min=1), square / there.clamp(min=1)
            one_scale = (there > 0) & (square - mean.square() <= SAME * square)
            total += torch.where(one_scale, mean * there, 0.0)
            count += torch.where(one_scale, there, 0.0)
        score = torch.where(count > 0, total / count.clamp(min=1), NO_WORTH)
        return score.to(wide(unit.tensors[0]).dtype)

    def __repr__(self) -> str:
        return "ScaleScore()"


class GroupNormalJeffreys(_BayesianCompression):
    """normal scales under a log-uniform prior; groups are scored by μ²/σ² of their scale (BC-GNJ, Louizos et al. 2017)

    `strength` and `warmup` as of sparse-vd; the paper's thresholds on log α = −log(μ²/σ²) are its own for each layer.
    """

    title = "bc-gnj"

    def starts(self, layer: nn.Module) -> dict[str, Tensor]:
        ones = torch.ones(groups_of(layer), device=weight_of(layer).device)
        return super().starts(layer) | {"z_mean": ones, "z_log_variance": torch.full_like(ones, LOG_VARIANCE)}

    def scale(self, name: str) -> Tensor:
        return drawn(self.of("z_mean", name), self.of("z_log_variance", name).exp())

    def settled(self, name: str) -> Tensor:
        return self.tensors[f"z_mean.{name}"]

    def worth(self, name: str) -> Tensor:
        return self.tensors[f"z_mean.{name}"].square() / self.tensors[f"z_log_variance.{name}"].exp()

    def scales_divergence(self) -> Tensor:
        parts = []
        for name in self.layers:
            mean, log_variance = self.of("z_mean", name), self.of("z_log_variance", name)
            parts.append(divergence(log_variance - mean.square().clamp(min=1e-16).log()).sum())
        return torch.stack(parts).sum()


class GroupHorseshoe(_BayesianCompression):
    """scales under a horseshoe prior, each the root of a product of four log-normals (BC-GHS, Louizos et al. 2017)

    `tau` is the scale of the global half-Cauchy. A group is worth the mode of its scale.
    """

    title = "bc-ghs"

    def __init__(self, strength: float = 1.0, warmup: int = 10, tau: float = 1e-5):
        super().__init__(strength, warmup)
        self.tau = positive(tau, f"method {self.title}: tau")

    def starts(self, layer: nn.Module) -> dict[str, Tensor]:
        zeros = torch.zeros(groups_of(layer), device=weight_of(layer).device)
        quiet = torch.full_like(zeros, LOG_VARIANCE)
        return super().starts(layer) | {
            "a_mean": zeros,
            "a_log_variance": quiet,
            "b_mean": zeros.clone(),
            "b_log_variance": quiet.clone(),
        }

    def globals(self) -> dict[str, Tensor]:
        quiet = torch.tensor(LOG_VARIANCE)
        return {
            "s_a_mean": torch.tensor(0.0),
            "s_a_log_variance": quiet,
            "s_b_mean": torch.tensor(0.0),
            "s_b_log_variance": quiet.clone(),
        }

    def _log_z(self, name: str, source: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of log z: half the sum of four normals."""
        keys = (f"a_{{}}.{name}", f"b_{{}}.{name}", "s_a_{}", "s_b_{}")
        mean = sum(source[k.format("mean")] for k in keys)
        variance = sum(source[k.format("log_variance")].exp() for k in keys)
        assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
        return mean / 2, variance / 4

    def scale(self, name: str) -> Tensor:
        return drawn(*self._log_z(name, dict(self.trained))).exp()

    def settled(self, name: str) -> Tensor:
        mean, variance = self._log_z(name, self.tensors)
        return (mean + variance / 2).exp()

    def worth(self, name: str) -> Tensor:
        mean, variance = self._log_z(name, self.tensors)
        return (mean - variance).exp()

    def scales_divergence(self) -> Tensor:
        t = self.trained
        total = gamma_divergence(t["s_a_mean"], t["s_a_log_variance"], self.tau**2)
        total = total + inverse_gamma_divergence(t["s_b_mean"], t["s_b_log_variance"])
        for name in self.layers:
            total = total + gamma_divergence(self.of("a_mean", name), self.of("a_log_variance", name)).sum()
            total = total + inverse_gamma_divergence(self.of("b_mean", name), self.of("b_log_variance", name)).sum()
        return total


def groups_of(layer: nn.Module) -> int:
    """Inputs of a linear layer, filters of a convolution."""
    weight = weight_of(layer)
    return weight.shape[1] if isinstance(layer, nn.Linear) else weight.shape[0]


def laid(layer: nn.Module, z: Tensor) -> Tensor:
    """One number per group, expanded over a layer's weight."""
    return z if isinstance(layer, nn.Linear) else z.view(-1, *(1 for _ in weight_of(layer).shape[1:]))


def normal_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL of N(μ, σ²) from N(0, 1)."""
    return (log_variance.exp() + mean.square() - 1 - log_variance) / 2


def gamma_divergence(mean: Tensor, log_variance: Tensor, tau: float = 1.0) -> Tensor:
    """KL of a log-normal from Gamma(½, scale τ)."""
    rest = mean + log_variance + 1 + math.log(2) - math.log(tau)
    return (mean + log_variance.exp() / 2).exp() / tau - rest / 2


def inverse_gamma_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL of a log-normal from the inverse Gamma(½, 1): that of 1/x, which is log-normal again, from Gamma(½, 1)."""
    return gamma_divergence(-mean, log_variance)
