"""Networks in files: a run's folder, a file that `deephoyer.save` wrote, or plain weights with a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.export import container, load, provenance
from deephoyer.lab import models
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.schema import named


def open_network(path: Path, model: str | None = None) -> tuple[nn.Module, Tensor]:
    """The network in eval mode, and random inputs that it takes.

    The model's name comes from what the file says of its own making, unless one is given.
    """
    if path.is_dir():
        path = path / "finetuned.safetensors"
        if not path.exists():
            raise UserError(f"{path.parent} has no {path.name}: is it the folder of a finished run?")
    plain = _is_plain(path)
    if model is None and plain:
        raise UserError(f"{path} holds plain weights, not one of deephoyer's networks; give the model with --model.")
    settings = {"choice": model} if model is not None else _own_model(path)
    name = settings.pop("choice")
    network = models.make(name, **settings)
    if plain:
        checkpoint.fill(network, path, "the file")
    else:
        network = load(path, network)
    example = torch.randn(2, *models.input_shape(name), generator=torch.Generator().manual_seed(0))
    return network.eval(), example


def _is_plain(path: Path) -> bool:
    """Whether it is a safetensors file that `deephoyer.save` did not write; `load` tells what is wrong with others."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return bool((file.metadata() or {}).get("format") != container.FORMAT)
    except (OSError, safetensors.SafetensorError):
        return False


def _own_model(path: Path) -> dict[str, Any]:
    """What the file says of its own making: a model's name, as `choice`, and its settings."""
    recipe = provenance(path).get("recipe")
    chosen = recipe.get("model") if isinstance(recipe, Mapping) else None
    if not isinstance(chosen, str | Mapping):
        raise UserError(f"{path} does not say which model it holds; give its name with --model.")
    return named(chosen)
