"""Compiles the repeated blocks of a network, for training steps only.

Each kind and shape of block is compiled once and is shared by all like it, so a deep network takes little
longer than a shallow one. Outside of `Compiled.on` the modules are unchanged: evaluation, tracing,
checkpoints and names are not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

OFTEN = 3
BACKEND = "inductor"
ENTRIES = 64  # what one class may be compiled to: a stage's width, its first block, each precision


def repeated(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with parts whose class occurs at least three times; containers don't count.

    >>> from deephoyer.lab import models
    >>> len(repeated(models.make("resnet-20"))), len(repeated(models.make("lenet-5")))
    (9, 0)
    """
    often = Counter(type(m) for m in model.modules() if _has_parts(m))

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if _has_parts(child) and often[type(child)] >= OFTEN:
                yield child
            else:
                yield from below(child)

    return list(below(model))


def _has_parts(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return next(module.children(), None) is not None and not isinstance(module, containers)


class Compiled:
    """The forward methods of modules, compiled when they are first called within `on()`."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            (module, torch.compile(module.forward, dynamic=False, backend=BACKEND)) for module in modules
        ]
        if modules:
            config = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, ENTRIES)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The modules run compiled inside."""
        for module, forward in self._forwards:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.forward
