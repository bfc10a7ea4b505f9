"""Compacted Hugging Face models, to a folder and back.

`compact` notes the shape of such a model in its configuration, so that the model's own `save_pretrained` writes all
that is needed; `from_pretrained` builds the model from the configuration, brings it into that shape and fills it.
Nothing of `transformers` is imported before somebody loads a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.structure.shape import check_joints, describe, reshape_

KEY = "deephoyer_shape"


def note_shape(model: nn.Module) -> None:
    """Writes the sizes of the layers into the model's configuration, where it has one that is saved with it."""
    config = getattr(model, "config", None)
    if hasattr(model, "save_pretrained") and hasattr(config, "to_json_string"):
        setattr(config, KEY, describe(model))


def from_pretrained(folder: str | Path, model_class: Any = None) -> nn.Module:
    """The compacted Hugging Face model that `save_pretrained` wrote to this folder, in eval mode.

    Its class is the one that the configuration names, or `model_class`, which must be one of yours where
    `transformers` does not have it. Nothing is downloaded.
    """
    folder = Path(folder)
    shape = _config(folder).get(KEY)
    if shape is None:
        raise UserError(f"{folder}: its config.json has no shape of a compacted model; load it with from_pretrained.")
    model = _built(folder, model_class)
    try:
        reshape_(model, shape)
        _fill(model, folder)
        check_joints(model)
    except UserError as why:
        raise UserError(f"{folder}: {why}") from None
    note_shape(model)
    return model.eval()


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except OSError as why:
        raise UserError(f"{folder} has no config.json that can be read: {why.strerror}.") from None
    except ValueError as why:
        raise UserError(f"{folder / 'config.json'} is not JSON: {why}.") from None
    return found if isinstance(found, dict) else {}


def _built(folder: Path, model_class: Any) -> nn.Module:
    """A fresh model of the configuration, with its precision."""
    try:
        import transformers
    except ImportError:
        raise UserError("from_pretrained needs the package transformers.") from None
    if model_class is None:
        names = _config(folder).get("architectures") or [""]
        model_class = getattr(transformers, str(names[0]), None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            raise UserError(f"{folder}: transformers has no model {names[0]!r}; pass its class as model_class=.")
    config = model_class.config_class.from_pretrained(folder, local_files_only=True)
    made: nn.Module = model_class._from_config(config)
    return made


def _fill(model: nn.Module, folder: Path) -> None:
    """Loads the folder's safetensors: every name once, nothing missing but further names of tied tensors."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            state |= load_file(file)
        except Exception as why:
            raise UserError(f"{file.name} can't be read: {why}") from None
    if not files:
        raise UserError("it has no safetensors files; save with save_pretrained(…, safe_serialization=True).")
    wanted = model.state_dict(keep_vars=True)
    strange = [name for name in state if name not in wanted]
    if strange:
        raise UserError(f"its files have {strange[0]!r}, which the model has not.")
    there = {id(wanted[name]) for name in state}
    missing = [name for name, tensor in wanted.items() if name not in state and id(tensor) not in there]
    if missing:
        raise UserError(f"its files lack the model's {missing[0]!r}.")
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(f"{name} is {list(tensor.shape)} in the files, {list(wanted[name].shape)} in the model.")
    model.load_state_dict(state, strict=False)
