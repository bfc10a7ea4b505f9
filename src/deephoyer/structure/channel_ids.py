"""The channel number of every element of every tensor, while a network is being followed.

Numbers are nodes of `Joined`; 0 stands for no channel. Which operation does what to them is not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deephoyer.structure.channels import Joined
from deephoyer.structure.layers import loose_tensors

READINGS = ("larger", "first")


class Numbers:
    """Tensors and their numbers; `loose` holds those of parameters and buffers outside the layers.

    Where a dimension is seen as two, the code that does it knows one of the sizes and takes what is left
    for the other. Which one can't be seen: `reading` says whether the larger or the first is what is left.
    """

    def __init__(self, model: nn.Module, reading: str = "larger") -> None:
        self.reading, self.ambiguous = reading, False
        self.joined = Joined()
        self.loose: dict[str, Tensor] = {}
        # By identity; the tensors are held too, or another could get a dead one's id.
        self._of: dict[int, tuple[Tensor, Tensor]] = {}
        self._constants = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._owners = {id(tensor): name for name, tensor in loose_tensors(model)}

    def get(self, tensor: Tensor) -> Tensor | None:
        """The tensor's numbers; a loose tensor's elements are numbered when first met."""
        if id(tensor) in self._of:
            return self._of[id(tensor)][1]
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
        self._of[id(tensor)] = (tensor, numbers)

    def drop(self, tensor: Tensor) -> None:
        self._of.pop(id(tensor), None)

    def set_constant(self, tensor: Tensor) -> None:
        self._constants[id(tensor)] = tensor

    def is_constant(self, tensor: Tensor) -> bool:
        """Part of the network or made within it, of nothing that it was given."""
        return id(tensor) in self._constants

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
