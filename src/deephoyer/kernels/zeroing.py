"""Zeroes where boolean tensors say so, in many tensors: one launch on CUDA, a bitwise and for each tensor on a CPU, and
a fill, the plain twin of both, for whatever is neither.

On a CPU a fill asks for every element by itself, which takes ten to twenty times as long as an and of whole words with
a mask of the weights' own size. Only tensors are known here; what is dropped, and why, is for `masks.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deephoyer.kernels.layout import walks_alike
from deephoyer.kernels.pointer_tables import PointerTables

_HAS_TRITON = importlib.util.find_spec("triton") is not None

Dropped = tuple[Tensor, Tensor]  # a tensor, and True where it is to be zero
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Zeroing:
    """Keeps what launches need from one call to the next."""

    def __init__(self) -> None:
        self._pointers: dict[torch.device, PointerTables] = {}
        self._untraced: Callable[[torch.device, list[Dropped]], None] | None = None
        self._kept: dict[tuple[int, torch.dtype], Dropped] = {}

    def __call__(self, pairs: Sequence[Dropped]) -> None:
        fused: dict[tuple[torch.device, int], list[Dropped]] = {}
        for tensor, drop in pairs:
            if _HAS_TRITON and _can_be_fused(tensor, drop):
                fused.setdefault((tensor.device, tensor.element_size()), []).append((tensor, drop))
            elif _can_be_anded(tensor, drop):
                self.anded(tensor, drop)
            else:
                tensor.masked_fill_(drop, 0)
        for (device, _), some in fused.items():
            if self._untraced is None:  # a compiler would see tables of addresses, not the tensors that are written
                self._untraced = torch.compiler.disable(self.fused)
            self._untraced(device, some)

    def anded(self, tensor: Tensor, drop: Tensor) -> None:
        """All bits of a word stay or none: what is dropped becomes +0.0, NaNs included, and all else keeps its bits."""
        words = _WORDS[tensor.element_size()]
        of, keep = self._kept.get((id(drop), words), (None, drop))
        if of is not drop:
            keep = drop.to(words) - 1  # no bit where it is dropped, else all
            self._kept[id(drop), words] = (drop, keep)
        tensor.detach().view(words).bitwise_and_(keep)

    def fused(self, device: torch.device, pairs: list[Dropped]) -> None:
        """One launch for tensors of one device, with elements of one size, that lie as their masks do."""
        from deephoyer.kernels.triton_zeroing import launch

        pointers = self._pointers.setdefault(device, PointerTables(device))
        tensors, drops = ([pair[i] for pair in pairs] for i in (0, 1))
        addresses = [tuple(t.data_ptr() for t in some) for some in (tensors, drops)]
        lengths = tuple(t.numel() for t in tensors)
        table = pointers.table((addresses[0], addresses[1], lengths))
        launch(table, len(pairs), max(lengths), tensors[0].element_size(), device)


def _can_be_fused(tensor: Tensor, drop: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and type(drop) is Tensor
    return plain and tensor.is_cuda and not tensor.is_complex() and walks_alike(tensor, drop)


def _can_be_anded(tensor: Tensor, drop: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and type(drop) is Tensor and tensor.layout == torch.strided
    # A compiler fuses a fill with the step itself.
    return plain and tensor.is_cpu and tensor.element_size() in _WORDS and not torch.compiler.is_compiling()


def laid_like(drop: Tensor, tensor: Tensor) -> Tensor:
    """The same mask, on the tensor's device and in its order of dimensions in memory."""
    if drop.device == tensor.device and drop.stride() == tensor.stride():
        return drop
    if type(tensor) not in (Tensor, nn.Parameter):
        return drop.to(tensor.device)
    return torch.empty_like(tensor, dtype=torch.bool, requires_grad=False).copy_(drop)
