"""Whether what is fast is right: against float64 autograd, the same bits twice, no waits, no large temporaries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import deephoyer as dh
from deephoyer.bench.sides import hoyer_square


def checks(model: nn.Module, groups: str, backend: str, device: str) -> dict[str, Any]:
    """Against float64 autograd, tensor by tensor; the same bits twice; waits for the device; memory taken."""
    regularizer = dh.Regularizer(model, "hoyer-square", groups, 1.0, backend=backend)
    layers = {layer.weight: layer for layer in model.children()}
    weights: list[Any] = list(layers)
    regularizer.add_grad_()  # builds tables and compiles, which may wait
    runs = []
    for _ in range(2):
        for p in weights:
            p.grad.zero_()
        runs.append(_watched(regularizer.add_grad_, device))
        if len(runs) == 1:
            first = [p.grad.clone() for p in weights]
    same = all(torch.equal(p.grad, g) for p, g in zip(weights, first, strict=True))
    size = sum(p.numel() * p.element_size() for p in weights)
    return {
        "relative error": max(_error(p, layer, groups) for p, layer in layers.items()),
        "repeats": same,
        "waits": runs[-1]["waits"],
        "extra memory / weights": None if runs[-1]["extra"] is None else runs[-1]["extra"] / size,
    }


def _watched(call: Callable[[], None], device: str) -> dict[str, Any]:
    if device == "cpu":
        call()
        return {"waits": None, "extra": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    waits: Any = False
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as why:
        waits = str(why)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {"waits": waits, "extra": torch.cuda.max_memory_allocated() - before}


def _error(p: Any, layer: nn.Module, groups: str) -> float:
    exact = p.detach().double().requires_grad_()
    if groups == "elements":
        hoyer_square(exact.abs()).backward()
    else:
        dh.Regularizer(_holding(exact, layer), "hoyer-square", groups, 1.0).loss().backward()
    gradient = exact.grad
    assert gradient is not None and p.grad is not None
    return ((p.grad.double() - gradient).norm() / gradient.norm()).item()


def _holding(exact: Tensor, like: nn.Module) -> nn.Module:
    """A layer that is cut into groups as the other is, but holds `exact`."""
    layer = copy.copy(like)
    weight = nn.Parameter(exact)
    layer._parameters = {"weight": weight}
    exact.grad = None
    weight.register_post_accumulate_grad_hook(lambda w: setattr(exact, "grad", w.grad))
    return nn.Sequential(layer)
