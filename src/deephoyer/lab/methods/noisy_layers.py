"""Layers whose weights are random: what sparse variational dropout and Bayesian compression have in common.

A layer computes with the means of its weights, which are the model's own parameters; hooks add noise to its outputs
with the variance that random weights would give them (the local reparametrization of Kingma, Salimans, Welling 2015).
So the model stays as it is, and without the hooks it computes with the means.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deephoyer.errors import UserError, positive
from deephoyer.groups import Unit
from deephoyer.lab.methods.method import Method, Stage
from deephoyer.scores import Calibration, Score, means
from deephoyer.weights import find_weights

LOG_VARIANCE = -9.0
"""Where the logarithm of each weight's variance starts."""

NO_WORTH = torch.finfo(torch.float32).max ** 0.25
"""The score of groups that a method says nothing of: they stay."""


class NoisyLayers(Method):
    """Keeps a log variance for every weight of linear and convolution layers, and hooks that draw."""

    stages = ("regularize",)
    capturable = True
    title = "noisy layers"

    def __init__(self, strength: float = 1.0, warmup: int = 10):
        super().__init__()
        self.strength = positive(strength, f"method {self.title}: strength")
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise UserError(f"method {self.title}: warmup is {warmup!r}; it is a number of epochs, 0 or more.")
        self.warmup = warmup

    def begin(self, stage: Stage) -> None:
        self.model, self.examples = stage.model, stage.examples
        self.epochs, self.steps = stage.epochs, stage.steps
        self.layers = layers_of(stage, self.title)
        device = weight_of(next(iter(self.layers.values()))).device
        self.step = torch.tensor(float(stage.steps_done), dtype=torch.float64, device=device)
        self.trained: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            for key, start in self.starts(layer).items():
                value = start if stage.fresh else self.tensors[f"{key}.{name}"]
                self.trained[f"{key}.{name}"] = nn.Parameter(value.to(weight_of(layer).device))
        for key, start in self.globals().items():
            value = start if stage.fresh else self.tensors[key]
            self.trained[key] = nn.Parameter(value.to(device))
        self.tensors = {name: p.detach() for name, p in self.trained.items()}  # the same storage
        self.hooks: list[RemovableHandle] = []
        for name, layer in self.layers.items():
            self.hooks.append(layer.register_forward_pre_hook(lambda _, x, n=name: (self.read(n, x[0]), *x[1:])))
            self.hooks.append(layer.register_forward_hook(lambda _, x, out, n=name: self.noisy(n, x[0], out)))

    def starts(self, layer: nn.Module) -> dict[str, Tensor]:
        """What is trained for a layer besides its means, and where it starts."""
        return {"log_variance": torch.full_like(weight_of(layer), LOG_VARIANCE)}

    def globals(self) -> dict[str, Tensor]:
        """What is trained for the whole network, and where it starts."""
        return {}

    def of(self, key: str, name: str) -> Tensor:
        return self.trained[f"{key}.{name}"]

    def trained_layers(self, stage: Stage) -> dict[str, nn.Module]:
        """The layers after training, possibly in a later run that starts from it."""
        layers = layers_of(stage, self.title)
        if any(f"log_variance.{name}" not in self.tensors for name in layers):
            raise UserError(
                f"method {self.title}: what it trains besides the weights is not there. Start from a run of this "
                "method, in whose folder it is, or have a regularize stage."
            )
        device = weight_of(next(iter(layers.values()))).device
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return layers

    def parameters(self) -> list[nn.Parameter]:
        return list(self.trained.values())

    def after_step(self) -> None:
        self.step += 1

    def weighed(self, divergence: Tensor) -> Tensor:
        """A divergence as it counts in the loss: strength/N, rising to that over the first `warmup` epochs."""
        warmed = ((self.step + 1) / max(1, self.warmup * self.steps)).clamp(max=1.0)
        return (self.strength * warmed / self.examples).to(divergence) * divergence

    def read(self, name: str, x: Tensor) -> Tensor:
        """The input as the layer reads it."""
        return x

    def noisy(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """The output with its noise."""
        raise NotImplementedError

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()


class ElementScore(Score):
    """a score for every weight; a group has the mean of its weights"""

    def __init__(self, worth: dict[str, Tensor]):
        self.worth = worth

    def every(self, units: list[Unit], calibration: Calibration) -> list[Tensor]:  # type: ignore[override]
        found = []
        for unit in units:
            mean, count = means(unit, [self.worth.get(name) for name in unit.names])
            # Biases and norms that stand by themselves have no worth by this method: they stay.
            found.append(torch.where(count > 0, mean, torch.full_like(mean, NO_WORTH)))
        return found

    def __repr__(self) -> str:
        return "ElementScore()"


def layers_of(stage: Stage, method: str) -> dict[str, nn.Module]:
    """The selected layers, by name; kinds of layers that are not supported are refused."""
    chosen = {id(w.tensor) for w in find_weights(stage.model, stage.parameters)}
    found: dict[str, nn.Module] = {}
    for name, module in stage.model.named_modules():
        if id(module._parameters.get("weight")) not in chosen:
            continue
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            found[name] = module
        elif isinstance(module, nn.modules.conv._ConvTransposeNd):
            raise UserError(
                f"method {method}: {name} is a {type(module).__name__}; only Linear and Conv layers are supported."
            )
    if not found:
        raise UserError(f"method {method}: no linear or convolution layer is among the parameters.")
    return found


def weight_of(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def applied(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """A layer with another weight and no bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    assert isinstance(layer, nn.modules.conv._ConvNd)
    return layer._conv_forward(x, weight, None)


def drawn(mean: Tensor, variance: Tensor) -> Tensor:
    """A draw from a normal distribution, differentiable in both; without variance there is nothing to draw."""
    return mean + variance.clamp(min=1e-16).sqrt() * torch.randn_like(mean)
