"""The channel number of every element of every tensor, while a network is being followed.

Numbers are nodes of `Joined`; 0 stands for no channel. Which operation does what to them is not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from deephoyer.structure.channels import Joined
from deephoyer.structure.layers import loose_tensors


class Numbers:
    """Tensors and their numbers; `loose` holds those of parameters and buffers outside the layers."""

    def __init__(self, model: nn.Module) -> None:
        self.joined = Joined()
        self.loose: dict[str, Tensor] = {}
        self._of = WeakTensorKeyDictionary()
        self._constants = WeakTensorKeyDictionary()
        self._held = loose_tensors(model)  # held, so that an id stays theirs
        self._owners = {id(tensor): name for name, tensor in self._held}

    def get(self, tensor: Tensor) -> Tensor | None:
        """The tensor's numbers; a loose tensor's elements are numbered when first met."""
        if (known := self._of.get(tensor)) is not None:
            return known
        owner = self._owners.get(id(tensor))
        if owner is None or tensor.numel() < 2:
            return None
        self.loose[owner] = self.joined.new(tensor.numel()).view(tensor.shape)
        self.set(tensor, self.loose[owner])
        return self.loose[owner]

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor's numbers, zeros where it has none."""
        numbers = self.get(tensor)
        return torch.zeros(tensor.shape, dtype=torch.long) if numbers is None else numbers

    def set(self, tensor: Tensor, numbers: Tensor) -> None:
        self._of[tensor] = numbers

    def drop(self, tensor: Tensor) -> None:
        self._of.pop(tensor, None)

    def set_constant(self, tensor: Tensor) -> None:
        self._constants[tensor] = True

    def is_constant(self, tensor: Tensor) -> bool:
        """Made within the network, of nothing that it was given."""
        return tensor in self._constants

    def number(self, tensor: Tensor, why_not: str) -> None:
        """Gives each element a channel of its own; they must stay if the tensor isn't a constant."""
        numbers = self.joined.new(tensor.numel()).view(tensor.shape)
        if not self.is_constant(tensor):
            self.joined.fix(numbers, why_not)
        self.set(tensor, numbers)

    def varies(self, numbers: Tensor, dim: int) -> bool:
        """Whether different channels lie along a dimension."""
        if numbers.dim() == 0 or numbers.shape[dim] < 2:
            return False
        roots = self.joined.find(numbers)
        return bool((roots != roots.narrow(dim, 0, 1)).any())

    def fix(self, tensors: list[Tensor], reason: str) -> None:
        for tensor in tensors:
            if (numbers := self.get(tensor)) is not None:
                self.joined.fix(numbers, reason)
