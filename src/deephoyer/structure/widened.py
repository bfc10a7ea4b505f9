"""Networks of half precision computed in float32, for a proof: rounding in them hides what a mistake makes different.

Nothing is copied: each operation widens what it is given, so that of the weights only those at hand are there twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HALF = (torch.float16, torch.bfloat16)


class Widened(TorchDispatchMode):
    """Within it every operation that would compute in half precision computes in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and args and _is_half(args[0]):  # written into a buffer of the network's own
            dtype = args[0].dtype
            return func(*pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_wide(leaf) else leaf, args), **kwargs)
        if any(given.alias_info is not None for given in func._schema.returns):
            return func(*args, **kwargs)  # a view, into which may be written
        return func(*pytree.tree_map(_widened, args), **pytree.tree_map(_widened, kwargs))


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in HALF


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32


def _widened(leaf: Any) -> Any:
    if _is_half(leaf):
        return leaf.float()
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALF else leaf
