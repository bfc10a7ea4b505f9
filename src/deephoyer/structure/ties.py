"""Choices between numbers that are equal but for rounding: which of two boxes of the same score a detector keeps.

Two networks that compute the same may choose otherwise, and all that follows is then something else. Here the choices
of one are noted, and made again by the other wherever the numbers that it chooses by are the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deephoyer.structure.inputs import tensors_in

CHOICES = ("topk", "sort", "argsort", "nms", "argmax", "argmin", "kthvalue")


class Choices(TorchDispatchMode):
    """Notes what every operation that puts numbers in order was given, and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Tensor], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in CHOICES:
            self.made.append((name, [t.clone() for t in tensors_in((args, kwargs))], out))
        return out


class ChosenAlike(TorchDispatchMode):
    """Makes the choices that were noted, in the same order, for numbers that `agree`."""

    def __init__(self, choices: Choices, agree: Any) -> None:
        super().__init__()
        self._made = iter(choices.made)
        self._agree = agree

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in CHOICES:
            before, given, out = next(self._made, ("", [], None))
            mine = tensors_in((args, kwargs))
            if before == name and len(given) == len(mine) and all(map(self._agree, given, mine)):
                return out
        return func(*args, **(kwargs or {}))
