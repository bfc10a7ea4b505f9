"""What depends on the input, marked as it passes through a network: NaN in tensors of numbers, a list of all others.

Arithmetic hands NaN on by itself, but not everything does: a comparison makes true or false of it, `sign`
makes 0, fused attention on a CPU makes 0 as well, and whole numbers and masks have no NaN at all. Here each
operation is watched, and what it lost is put back. Not here: what layers do to their channels (`fold_constants.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deephoyer.inference import Examples
from deephoyer.structure.inputs import tensors_in

CHOOSES = ("where", "masked_fill", "masked_fill_", "copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like")
"""Element-wise, but an element may be left out of what is given, so NaN in it says nothing."""


DECIDES = ("_local_scalar_dense", "is_nonzero", "equal")
"""What takes a value out of a tensor."""


class Unknown(TorchDispatchMode):
    """Runs a network on unknown inputs; `inputs` are those: NaN, or the whole numbers and masks that were given.

    >>> with (unknown := Unknown(torch.zeros(2))):
    ...     (unknown.inputs > 0).float()
    tensor([nan, nan])
    """

    def __init__(self, inputs: Examples) -> None:
        super().__init__()
        # By identity; the tensors are held too, or another could get a dead one's id.
        self._listed: dict[int, Tensor] = {}
        self._asleep = False
        self.inputs = pytree.tree_map(self._unknown, inputs)

    def unseen(self, hook: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The hook, in which nothing is watched."""

        def asleep(*args: Any) -> Tensor:
            self._asleep = True
            try:
                return hook(*args)
            finally:
                self._asleep = False

        return asleep

    def _unknown(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():
            return torch.full_like(leaf, float("nan"))
        self._note(leaf := leaf.clone())
        return leaf

    def _note(self, tensor: Tensor) -> None:
        self._listed[id(tensor)] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._asleep:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        listed = any(id(t) in self._listed for t in given)
        lost = [t.isnan() for t in given if t.is_floating_point()]  # before an operation in place changes it
        name = func.overloadpacket.__name__
        if name in DECIDES and (listed or any(bool(mask.any()) for mask in lost)):
            raise RuntimeError("what a network decides by the values of its input can't be known")
        blinded = func.namespace != "aten" and any(id(t) in self._listed or _has_nan(t) for t in given[1:])
        if blinded:  # places that another library's kernel looks at: it may look for NaN beyond the end of a tensor
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda t: t if t is given[0] or not _has_nan(t) else t.nan_to_num(), (args, kwargs)
            )
        out = func(*args, **kwargs)
        attention = name.startswith("_scaled_dot_product")
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not attention  # other numbers the next time
        everything = listed or blinded or drawn or (attention and any(bool(m.any()) for m in lost))
        for tensor in tensors_in(out):
            if not tensor.is_floating_point():
                if listed or any(bool(mask.any()) for mask in lost):
                    self._note(tensor)
            elif everything:
                tensor.fill_(float("nan"))
            elif torch.Tag.pointwise in func.tags and name not in CHOOSES:
                for mask in lost:
                    tensor.masked_fill_(mask.expand(tensor.shape), float("nan"))
        return out


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())
