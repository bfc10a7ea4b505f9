"""Optimizers as hooks need them: without the wrappers that training libraries put around them."""

from __future__ import annotations

from typing import Any

import torch

from deephoyer.errors import UserError


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose `step` is really called; Accelerate's and Lightning's wrappers keep it in `.optimizer`.

    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> bare(sgd) is sgd
    True
    """
    inner = optimizer
    while "_optimizer_step_pre_hooks" not in getattr(inner, "__dict__", {}):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise UserError(f"{type(optimizer).__name__} is not a PyTorch optimizer, nor a wrapper with one inside.")
    found: torch.optim.Optimizer = inner
    return found
