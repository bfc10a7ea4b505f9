"""The sides of a comparison, as calls: autograd loops, torch-pruning's penalty, ours, and a bare training step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deephoyer as dh

STRENGTH = 1e-12  # so that thousands of calls leave the gradients as they are
TRACEABLE = ("lenet-300-100", "resnet-56", "resnet-50")  # torch-pruning traces a network that runs


def has_torch_pruning() -> bool:
    return importlib.util.find_spec("torch_pruning") is not None


def hoyer_square(r: Tensor) -> Tensor:
    return r.sum() ** 2 / (r**2).sum()


def group_hoyer_square(w: Tensor) -> Tensor:
    over = list(range(w.dim()))
    rows, columns = ((w**2).sum([d for d in over if d != keep]).sqrt() for keep in (0, 1))
    return hoyer_square(rows) + hoyer_square(columns)


def autograd_loop(model: nn.Module, groups: str, asks_host: bool) -> Callable[[], None]:
    """The penalty as it is usually written; `asks_host` as in the paper's scripts: is this tensor all zero?"""
    penalty = hoyer_square if groups == "elements" else group_hoyer_square
    weights = list(model.parameters())

    def call() -> None:
        total: Any = 0
        for w in weights:
            if asks_host and not w.abs().sum() > 0:
                continue
            total = total + penalty(w.abs() if groups == "elements" else w)
        (STRENGTH * total).backward()

    return call


def ours(model: nn.Module, groups: str, backend: str) -> Callable[[], None]:
    return dh.Regularizer(model, "hoyer-square", groups, STRENGTH, backend=backend).add_grad_


def torch_pruning(name: str, device: str) -> Callable[[], None]:
    """Its group norm penalty, on the same network with its batch norms: another formula, the same purpose."""
    import torch_pruning as tp

    from deephoyer.lab import models

    model = models.make(name).to(device)
    example = torch.randn(1, *models.input_shape(name), device=device)
    importance = tp.importance.GroupMagnitudeImportance(p=2)
    pruner = tp.pruner.GroupNormPruner(model, example, importance=importance, reg=STRENGTH)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    pruner.update_regularizer()
    return lambda: pruner.regularize(model)


def bare_step(device: str) -> Callable[[], None]:
    """A training step of LeNet-300-100 without any regularizer: batch 100, Adam."""
    layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = torch.rand(100, 784, device=device), torch.randint(10, (100,), device=device)

    def call() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return call
