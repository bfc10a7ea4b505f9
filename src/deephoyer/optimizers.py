"""Optimizers as hooks need them: without the wrappers that training libraries put around them; and parameters that
hooks work on, which must not be replaced behind their back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.sharded import is_sharded
from deephoyer.weights import unwrap


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


def within_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` is called by its own `step`, where torch calls the hooks again.

    A subclass does that by `super().step()`; it depends on what the process made before whether torch wraps both.
    """
    wrapper = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None and depth < 2:
        depth += frame.f_code is wrapper and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth > 1


def silence(handle: Any) -> None:
    """Makes a hook do nothing from now on, for when an object is collected.

    That may be at any moment, as while an optimizer calls its hooks, when none may be removed.
    """
    hooks = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks:
        hooks[handle.id] = _do_nothing


def _do_nothing(*_: Any) -> None:
    return None


class Replaced:
    """Tells when a parameter was replaced in its model: a hook and an optimizer would go on with the old tensor.

    `load_state_dict(assign=True)` does that, and so does writing a new `nn.Parameter` into a layer. A sharded one is
    swapped for its whole by FSDP itself, and not looked at.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[Tensor], after: str):
        self.model, self.after = unwrap(model), after
        ids = {id(t) for t in tensors if not is_sharded(t)}
        modules = self.model.modules()
        own = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items()]
        self.places = [(owner, name, p) for owner, name, p in own if p is not None and id(p) in ids]

    def check(self) -> None:
        for parameters, name, tensor in self.places:
            if parameters.get(name) is not tensor and all(p is not tensor for p in self.model.parameters()):
                raise UserError(
                    f"{name} of shape {'×'.join(map(str, tensor.shape))} was replaced in the model after {self.after} "
                    f"(load_state_dict(assign=True)?): the optimizer trains the old one. Make the optimizer, then "
                    f"{self.after}, after replacing."
                )
