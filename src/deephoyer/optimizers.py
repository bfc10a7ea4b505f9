"""Optimizers as hooks need them: without the wrappers that training libraries put around them; and parameters that
hooks work on, which must not be replaced behind their back."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.sharded import is_sharded
from deephoyer.weights import named_parameters, unwrap


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose `step` is really called; Accelerate's and Lightning's wrappers keep it in `.optimizer`.

    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> bare(sgd) is sgd
    True
    """
    inner = optimizer
    while not _calls_hooks(inner):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise UserError(f"{type(optimizer).__name__} is not a PyTorch optimizer, nor a wrapper with one inside.")
    found: torch.optim.Optimizer = inner
    return found


def _calls_hooks(optimizer: Any) -> bool:
    """Whether it is an optimizer itself, and no wrapper.

    One that never called its parent's `__init__`, as most kinds of Lookahead don't, has no hooks or does not call
    them: it gets what is missing.
    """
    own = getattr(optimizer, "__dict__", {})
    if isinstance(optimizer, torch.optim.Optimizer) and "param_groups" in own:
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            own.setdefault(hooks, OrderedDict())
        optimizer._patch_step_function()
    return "_optimizer_step_pre_hooks" in own


def nested(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer and, as SAM and Lookahead have one, that inside it with the very same weights, which moves them.

    SAM's own step is seldom called: a loop calls `first_step` and `second_step` instead, and these the inner step.
    """
    found = [optimizer]
    while True:
        inside = [o for o in vars(found[-1]).values() if isinstance(o, torch.optim.Optimizer) and o not in found]
        same = [o for o in inside if held_by(o) == held_by(optimizer)]
        if len(same) != 1:
            return found
        found.append(bare(same[0]))


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that a step is called with, as hooks before it see the call; None where there is none."""
    return args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> Any:
    """The same call with another closure, for a hook to return."""
    return ((args[0], closure), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


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

    `load_state_dict(assign=True)` does that, and so does writing a new `nn.Parameter` into a layer, or a new layer into
    the model. A sharded one is swapped for its whole by FSDP itself, and not looked at.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[Tensor], after: str):
        self.model, self.after = unwrap(model), after
        ids = {id(t) for t in tensors if not is_sharded(t)}
        self.names = {name: p for name, p in named_parameters(self.model) if id(p) in ids}
        self._note_places()

    def _note_places(self) -> None:
        """Where the model holds these parameters, and the modules with them: reading that takes next to no time."""
        ids = {id(p) for p in self.names.values()}
        self.places: list[tuple[dict[str, Any], str, Any]] = []
        for module in self.model.modules():
            self.places += [(module._parameters, n, p) for n, p in module._parameters.items() if id(p) in ids]
            inside = ((n, m) for n, m in module._modules.items() if m is not None)
            self.places += [(module._modules, n, m) for n, m in inside if any(id(p) in ids for p in m.parameters())]

    def check(self) -> None:
        if all(owner.get(name) is thing for owner, name, thing in self.places):
            return
        now = dict(named_parameters(self.model))
        ids = {id(p) for p in now.values()}
        for name, tensor in self.names.items():
            if name in now and id(tensor) not in ids:
                raise UserError(
                    f"{name} of shape {'×'.join(map(str, tensor.shape))} was replaced in the model after {self.after} "
                    f"(load_state_dict(assign=True)?): the optimizer trains the old one. Make the optimizer, then "
                    f"{self.after}, after replacing."
                )
        self._note_places()  # it was only moved, or taken out
