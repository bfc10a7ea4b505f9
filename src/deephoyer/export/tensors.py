"""One tensor or mask, to and from what a file holds of it.

A packed tensor is `name:where` and `name:values`, a mask `name:mask`. Before anything is unpacked its
shape is compared to the model's, so that no file can ask for more memory than the model takes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.export.manifest import MaskForm, Packed
from deephoyer.packing import PackingError, pack_pattern, packed_size, unpack_pattern
from deephoyer.structure.indices import as_pattern, from_pattern

Path = str | os.PathLike[str]
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
WIDER = {
    (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float64),
    (torch.bfloat16, torch.float64), (torch.float32, torch.float64),
}  # fmt: skip
"""What a file holds and what a model has, where every number of the first is one of the second."""


def same_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors, and for each further name of a tied tensor the first."""
    first: dict[tuple[object, ...], str] = {}
    distinct: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for name, tensor in state.items():
        _check(name, tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if first.setdefault(key, name) == name:
            distinct[name] = tensor.detach().cpu().contiguous()
        else:
            same[name] = first[key]
    return distinct, same


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise UserError(f"save: {name} is a {type(tensor).__name__}; only tensors can be saved.")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
        what = "gather the model's state first" if kind == "DTensor" else "save the network before it is quantized"
        raise UserError(f"save: {name} is a {kind}, which files can't hold: {what}.")
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise UserError(f"save: {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}: it can't be saved.")
    if ":" in name:
        raise UserError(f"save: {name!r} has a colon in it, which files use for parts of packed tensors.")


def pack(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Packed | None]:
    """The tensor as it is, or in two parts where that is smaller; indices as the pattern of what they choose."""
    index = as_pattern(tensor)
    if index is not None:
        form, where = pack_pattern(index[1].numpy())
        packed = Packed(shape=list(tensor.shape), form=form, holds=index[0])
        return {f"{name}:where": torch.from_numpy(where)}, packed
    pattern = tensor != 0
    if packed_size(pattern.numpy(), tensor.element_size()) == tensor.numel() * tensor.element_size():
        return {name: tensor.clone()}, None
    form, where = pack_pattern(pattern.numpy())
    parts = {f"{name}:where": torch.from_numpy(where), f"{name}:values": tensor[pattern]}
    return parts, Packed(shape=list(tensor.shape), form=form)


def unpack(path: Path, name: str, like: Tensor, form: Packed | None, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor again, in the shape and type of `like`, the model's own; a narrower float type is widened, exactly."""
    if form is not None and form.holds != "values":
        return _unpack_index(path, name, like, form, tensors[f"{name}:where"])
    stored = tensors[name] if form is None else tensors[f"{name}:values"]
    shape = tuple(stored.shape) if form is None else tuple(form.shape)
    if shape != tuple(like.shape):
        raise UserError(f"{path} does not fit the model: {name} is {_by(shape)} in the file, not {_by(like.shape)}.")
    if stored.dtype != like.dtype and (stored.dtype, like.dtype) not in WIDER:
        raise UserError(
            f"{path} does not fit the model: {name} is {stored.dtype} in the file, not {like.dtype}; "
            "load it into a model of that dtype, and convert it then."
        )
    if stored.dtype == torch.bool and (stored.view(torch.uint8) > 1).any():
        raise UserError(f"{path} is damaged: {name} has values that are neither true nor false.")
    stored = stored.to(like.dtype)
    if form is None:
        return stored
    pattern = _pattern(path, name, form.form, tensors[f"{name}:where"], like.shape)
    if stored.dim() != 1 or len(stored) != int(pattern.sum()):
        raise UserError(f"{path} is damaged: {name} has {int(pattern.sum())} nonzeros and {stored.numel()} values.")
    whole = torch.zeros(shape, dtype=stored.dtype)
    whole[pattern] = stored
    return whole


def _unpack_index(path: Path, name: str, like: Tensor, form: Packed, where: Tensor) -> Tensor:
    # How much the indices choose from is not stored; it is no more than the bytes can speak of.
    over = like.shape if form.holds == "ranks" else torch.Size([len(where) * (8 if form.form == "bitmap" else 256)])
    index = from_pattern(form.holds, _pattern(path, name, form.form, where, over))
    if like.dtype != index.dtype or index.shape != like.shape or list(index.shape) != form.shape:
        raise UserError(f"{path} does not fit the model: {name} is {_by(index.shape)} indices in the file.")
    return index


def pack_mask(name: str, mask: Tensor, tensor: Tensor | None) -> tuple[dict[str, Tensor], MaskForm]:
    """A mask; one that says exactly what the nonzeros say takes no room."""
    if tensor is None or mask.shape != tensor.shape or mask.dtype != torch.bool:
        raise UserError(f"save: the mask of {name!r} is not a boolean tensor in the shape of one of the model's.")
    mask, nonzero = mask.detach().cpu(), tensor != 0
    if (nonzero & ~mask).any():
        raise UserError(f"save: {name} has weights where its mask has none; apply the masks before saving.")
    if torch.equal(mask, nonzero):
        return {}, MaskForm(form="nonzeros")
    form, where = pack_pattern(mask.contiguous().numpy())
    return {f"{name}:mask": torch.from_numpy(where)}, MaskForm(form=form)


def unpack_mask(path: Path, name: str, mask: MaskForm, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The mask again, on the tensor's device; the tensor must be zero where it says so."""
    if mask.form == "nonzeros":
        return tensor != 0
    pattern = _pattern(path, name, mask.form, tensors[f"{name}:mask"], tensor.shape).to(tensor.device)
    if (tensor != 0)[~pattern].any():
        raise UserError(f"{path} is damaged: {name} has weights where its mask has none.")
    return pattern


def _pattern(path: Path, name: str, form: str, where: Tensor, shape: torch.Size) -> Tensor:
    if where.dtype != torch.uint8 or where.dim() != 1:
        raise UserError(f"{path} is damaged: {name}'s pattern is not a row of bytes.")
    try:
        flat = unpack_pattern(form, where.numpy(), shape.numel())
    except PackingError as why:
        raise UserError(f"{path} is damaged: {name}: {why}.") from None
    return torch.from_numpy(flat).view(shape)


def _by(shape: tuple[int, ...] | torch.Size) -> str:
    return "×".join(map(str, shape)) or "a number"
