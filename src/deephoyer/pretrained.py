"""Compacted Hugging Face models, to a folder and back.

`compact` notes the shape of such a model in its configuration, so that the model's own `save_pretrained` writes all
that is needed (`pretrained_config.py` says it in words that the plain class understands, where there are such words);
`from_pretrained` builds the model from the configuration, brings it into that shape and fills it.
Nothing of `transformers` is imported before somebody loads a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from deephoyer.errors import UserError, first_line
from deephoyer.files import path_of
from deephoyer.inference import Examples
from deephoyer.pretrained_config import say_sizes
from deephoyer.structure.joints import Joint
from deephoyer.structure.shape import check_joints, describe, part_for, reshape_

KEY = "deephoyer_shape"


def note_shape(model: nn.Module, inputs: Examples | None = None) -> None:
    """Writes the sizes of the layers into the model's configuration, where it has one that is saved with it.

    With example inputs, in the configuration's own words too, where those can be proven to say all: then the model's
    own class loads it. Hugging Face models inside of it are told theirs, where they have a configuration of their own.
    """
    if inputs is not None and _is_hugging_face(model):
        say_sizes(model, inputs)
    noted: set[int] = set()
    for inner in [module for module in model.modules() if _is_hugging_face(module)]:  # outer ones come first
        for module in inner.modules():
            if isinstance(module, Joint):
                module.bear_name(next(inner.parameters()))
        if id(config := inner.config) not in noted:
            noted.add(id(config))
            setattr(config, KEY, describe(inner))


def _is_hugging_face(model: Any) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string")


def from_pretrained(folder: str | Path, model_class: Any = None) -> nn.Module:
    """The compacted Hugging Face model that `save_pretrained` wrote to this folder, in eval mode.

    Its class is the one named in the configuration, or `model_class`, which you must pass if `transformers`
    does not have it. Nothing is downloaded.
    """
    folder = path_of(folder)
    shape = _config(folder).get(KEY)
    if shape is None:
        raise UserError(f"{folder}: its config.json has no shape of a compacted model; load it with from_pretrained.")
    if not list(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no safetensors files; save with save_pretrained(…, safe_serialization=True).")
    model_class = _class(folder, model_class)

    class Shaped(model_class):
        """The model in the shape that its files have, so that its own library fills it as it fills any other."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            part = part_for(self, shape or {})
            now, then = _vocabulary(self, part)
            if now != then:  # it was resized after it was compacted, and is again
                config.get_text_config().vocab_size = then
                super().__init__(config, *args, **kwargs)
            reshape_(self, part)
            if now != then:
                self.resize_token_embeddings(now, mean_resizing=False)

    Shaped.__name__, Shaped.__module__ = model_class.__name__, model_class.__module__  # its library knows it by these
    try:
        model, found = Shaped.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
        model.__class__ = model_class
        check_joints(model)
    except UserError as why:
        raise UserError(f"{folder}: {why}") from None
    except Exception as why:
        raise UserError(f"{folder} can't be loaded: {type(why).__name__}: {first_line(why)}") from why
    for what, names in (("lack", found["missing_keys"]), ("have besides the model's", found["unexpected_keys"])):
        if names:
            raise UserError(f"{folder}: its files {what} {sorted(names)[0]!r}.")
    loaded: nn.Module = model.eval()
    return loaded


def _vocabulary(model: Any, shape: Any) -> tuple[int, int]:
    """How many rows the output layer of a fresh model has, and how many it has in the shape."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None:
        return 0, 0
    modules = shape.get("modules") if isinstance(shape, dict) else None
    entry = modules.get(name) if isinstance(modules, dict) else None
    said = entry.get("out") if isinstance(entry, dict) else None
    return len(head.weight), said if isinstance(said, int) and 0 < said < 2**31 else len(head.weight)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except OSError as why:
        raise UserError(f"{folder} has no config.json that can be read: {why.strerror}.") from None
    except ValueError as why:
        raise UserError(f"{folder / 'config.json'} is not JSON: {why}.") from None
    return found if isinstance(found, dict) else {}


def _class(folder: Path, model_class: Any) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("from_pretrained needs the package transformers.") from None
    if model_class is None:
        names = _config(folder).get("architectures") or [""]
        model_class = getattr(transformers, str(names[0]), None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            raise UserError(f"{folder}: transformers has no model {names[0]!r}; pass its class as model_class=.")
    return model_class
