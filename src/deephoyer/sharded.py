"""Weights that live in pieces on several processes (DTensor: `fully_shard`, tensor parallel).

A process sums over its own piece; the sums of all tensors travel together, in one all-reduce for
each dimension of the mesh; each process then adds to its own piece of the gradient. So value and
gradient are those of the unsharded weights. Without torch.distributed nothing here does anything.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deephoyer.groups import SliceUnit, Unit

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Loading their module takes a second, and who has one has loaded it."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's piece."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def reshard(model: nn.Module) -> None:
    """Puts weights that `fully_shard` left whole after a forward pass back into pieces, the ones that are trained."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None and hasattr(module, "FSDPModule") and isinstance(model, nn.Module):
        for part in model.modules():
            if isinstance(part, module.FSDPModule):
                part.reshard()


def offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where this process's piece begins in the whole tensor, for each dimension."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]


def same_cut(tensor: Tensor, grad: Tensor) -> bool:
    """Whether the gradient lies on the same processes in the same pieces as the tensor."""
    if not is_sharded(tensor) or not is_sharded(grad):
        return not is_sharded(tensor) and not is_sharded(grad)
    if any(p.is_partial() for p in tensor.placements):
        return False
    return tensor.placements == grad.placements and tensor.device_mesh == grad.device_mesh


def whole(unit: Unit) -> Unit:
    """The unit with every sharded tensor gathered, differentiably; the unit itself if none is."""
    if not any(is_sharded(t) for t in unit.tensors):
        return unit
    gathered = copy.copy(unit)
    gathered.tensors = [t.full_tensor() if is_sharded(t) else t for t in unit.tensors]
    if isinstance(gathered, SliceUnit):
        pairs = zip(gathered.parts, gathered.tensors, strict=True)
        gathered.parts = [replace(part, tensor=tensor) for part, tensor in pairs]
    return gathered


def share_of(full: Tensor, tensor: Tensor) -> Tensor:
    """A whole gradient, cut as the tensor is."""
    if not is_sharded(tensor):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * tensor.device_mesh.ndim
    everywhere = DTensor.from_local(full, tensor.device_mesh, replicated, run_check=False)
    return everywhere.redistribute(tensor.device_mesh, tensor.placements)


@dataclass(frozen=True, eq=False)
class Reduction:
    """An all-reduce of one vector that holds the sums of all tensors, over every mesh dimension that cuts any."""

    steps: tuple[tuple[Any, Tensor | None], ...]  # a process group, and which entries it sums (None: all)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], lengths: Sequence[int], device: torch.device) -> Reduction:
        """`lengths[i]` entries of the vector belong to `tensors[i]`."""
        cut: dict[Any, list[bool]] = {}
        for i, tensor in enumerate(tensors):
            for group in _cutting(tensor):
                cut.setdefault(group, [False] * len(tensors))[i] = True
        repeats = torch.tensor(list(lengths))
        masks = [torch.repeat_interleave(torch.tensor(flags), repeats) for flags in cut.values()]
        pairs = zip(cut, masks, strict=True)
        return cls(tuple((g, None if bool(m.all()) else m.to(device)) for g, m in pairs))

    def __call__(self, sums: Tensor) -> Tensor:
        for group, mask in self.steps:
            total = sums.clone()
            dist.all_reduce(total, group=group)
            sums = total if mask is None else torch.where(mask, total, sums)
        return sums


def _cutting(tensor: Tensor) -> list[Any]:
    """The process groups along which the tensor is cut."""
    if not is_sharded(tensor):
        return []
    return [tensor.device_mesh.get_group(dim) for dim, p in enumerate(tensor.placements) if not p.is_replicate()]
