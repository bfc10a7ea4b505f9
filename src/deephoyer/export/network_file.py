"""`save` and `load`: a network, as small as it is, in one safetensors file.

Sparse tensors are stored packed when that is smaller. `load` takes a freshly built model, shrinks a
copy of it to the shapes in the file, and fills it; a file that does not fit leaves the model as it was.
"""

from __future__ import annotations

import copy
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, first_line, shown
from deephoyer.export.container import seal, unseal
from deephoyer.export.manifest import Manifest, MaskForm, Packed, validate
from deephoyer.export.tensors import pack, pack_mask, same_tensors, unpack, unpack_mask
from deephoyer.files import write_atomically
from deephoyer.masks import Masks
from deephoyer.structure.coupled import computed_attributes
from deephoyer.structure.shape import check_joints, describe, reshape_
from deephoyer.weights import unwrap, with_values

Path = str | os.PathLike[str]


def save(
    model: nn.Module,
    path: Path,
    *,
    masks: Mapping[str, Tensor] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> int:
    """Writes the model to `path` atomically, and returns the size of the file in bytes.

    `provenance` is anything that JSON can hold: the recipe, versions, results.

    >>> import tempfile, torch; folder = tempfile.mkdtemp()
    >>> model = nn.Linear(3, 2)
    >>> size = save(model, folder + "/small.safetensors", provenance={"seed": 0})
    >>> torch.equal(load(folder + "/small.safetensors", model=nn.Linear(3, 2)).weight, model.weight)
    True
    """
    if provenance is not None and not isinstance(provenance, Mapping):
        raise UserError(f"save: provenance is {shown(provenance)}; it must be a mapping of what JSON can hold.")
    content = encode(model, masks or {}, dict(provenance or {}))
    write_atomically(path, content)
    return len(content)


def encode(model: nn.Module, masks: Mapping[str, Tensor], provenance: dict[str, Any]) -> bytes:
    """The bytes that `save` writes; of a wrapped model those of the one inside."""
    model = with_values(model)
    state, same = same_tensors(model.state_dict())
    stored: dict[str, Tensor] = {}
    packed: dict[str, Packed] = {}
    for name, tensor in state.items():
        parts, form = pack(name, tensor)
        stored.update(parts)
        if form is not None:
            packed[name] = form
    forms: dict[str, MaskForm] = {}
    for name, mask in masks.items():
        parts, forms[name] = pack_mask(name, mask, state.get(same.get(name, name)))
        stored.update(parts)
    manifest = Manifest(
        packed=packed,
        same=same,
        masks=forms,
        structure=describe(model),
        versions=_versions(model),
        provenance=_plain(provenance),
    )
    return seal(stored, manifest.plain())


def load(path: Path, model: nn.Module) -> nn.Module:
    """A copy of the freshly built `model`, shrunk to the shapes in the file and filled with its weights."""
    tensors, manifest = _read(path)
    small = with_values(model, meta=True)
    small = copy.deepcopy(small, computed_attributes(small))
    try:
        fill_meta(small)
        if manifest.structure is not None:
            reshape_(small, manifest.structure)
        state = OrderedDict(_state(path, small, tensors, manifest))
        state._metadata = _metadata(small, manifest)  # type: ignore[attr-defined]
        small.load_state_dict(state)
        check_joints(small)
    except UserError as why:
        text = str(why)
        raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    return small


def load_masks(path: Path, model: nn.Module) -> Masks:
    """The masks that were saved with a network; `model` is the network that `load` gave."""
    tensors, manifest = _read(path)
    model = unwrap(model)
    state = _state(path, model, tensors, manifest)
    masks = {name: unpack_mask(path, name, form, state[name], tensors) for name, form in manifest.masks.items()}
    return Masks(masks, model)


def fill_meta(model: nn.Module) -> None:
    """Room in memory for what a model on the meta device has, to be filled by a state dict; tied stays tied."""
    room: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if name in module._non_persistent_buffers_set:
                    full = f"{prefix}.{name}".removeprefix(".")
                    raise UserError(f"the model is on the meta device, and {full} is in no file: build it on the CPU.")
                if id(tensor) not in room:
                    empty = torch.empty_like(tensor, device="cpu")
                    like = isinstance(tensor, nn.Parameter)
                    room[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if like else empty
                own[name] = room[id(tensor)]


def _versions(model: nn.Module) -> dict[str, int]:
    """Versions that modules give to the meaning of their state, where that is not the first."""
    known = getattr(model.state_dict(), "_metadata", {})
    return {
        name: entry["version"]
        for name, entry in known.items()
        if type(entry.get("version")) is int and entry["version"] != 1
    }


def _metadata(model: nn.Module, manifest: Manifest) -> dict[str, dict[str, int]]:
    """What `load_state_dict` tells each module about its state: the version it was saved in, or else its own."""
    versions = _versions(model) if manifest.versions is None else manifest.versions
    return {name: {"version": versions.get(name, 1)} for name, _ in model.named_modules()}


def provenance(path: Path) -> dict[str, Any]:
    """What `save` was told about where the network comes from."""
    return _read(path)[1].provenance


def _read(path: Path) -> tuple[dict[str, Tensor], Manifest]:
    tensors, manifest = unseal(path)
    return tensors, validate(path, manifest)


def _state(path: Path, model: nn.Module, tensors: dict[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """What the file holds for each name in the model's state dict."""
    wanted = model.state_dict()
    _check_names(path, wanted, tensors, manifest)
    state = {}
    for name, like in wanted.items():
        source = manifest.same.get(name, name)
        state[name] = unpack(path, source, like, manifest.packed.get(source), tensors)
    return state


def _check_names(path: Path, wanted: dict[str, Any], tensors: dict[str, Tensor], manifest: Manifest) -> None:
    """Everything that the model wants is there, and nothing else is."""
    own = set(wanted) - set(manifest.same)
    expected = {part for name in own & set(manifest.packed) for part in manifest.packed[name].parts(name)}
    expected |= own - set(manifest.packed)
    expected |= {f"{name}:mask" for name, mask in manifest.masks.items() if mask.form != "nonzeros"}
    listed = {*manifest.packed, *manifest.same, *manifest.same.values(), *manifest.masks}
    strange = sorted((set(tensors) - expected) | (listed - set(wanted)) | (set(manifest.same.values()) - own))
    missing = sorted(expected - set(tensors))
    if strange or missing:
        what = f"has {strange[0]!r}, which the model has not" if strange else f"lacks the model's {missing[0]!r}"
        raise UserError(f"{path} does not fit the model: it {what}.")


def _plain(provenance: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(provenance, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as why:
        raise UserError(f"save: provenance must be what JSON can hold: {first_line(why)}.") from None
    return found
