"""Networks in files: a run's folder, a file that `deephoyer.save` wrote, or plain weights with a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.export import container, load, provenance
from deephoyer.lab import models
from deephoyer.lab.choices import Choice, named
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.folder import RunFolder


def open_network(path: Path, model: Choice | None = None) -> tuple[nn.Module, Tensor]:
    """The network in eval mode, and random inputs that it takes.

    The model's name comes from what the file says of its own making, unless one is given.
    """
    path = file_of(path)
    plain = _is_plain(path)
    if model is None and plain:
        raise UserError(f"{path} holds plain weights, not one of deephoyer's networks; give the model with --model.")
    chosen = model if model is not None else _own_model(path)
    network = models.of(chosen)
    if plain:
        checkpoint.fill(network, path, "the file")
    else:
        network = load(path, network)
    example = torch.randn(2, *models.input_shape(named(chosen)[0]), generator=torch.Generator().manual_seed(0))
    return network.eval(), example


def file_of(path: Path) -> Path:
    """The file itself, or that of the final network in a run's folder."""
    if not path.is_dir():
        return path
    recipe = RunFolder(path).recipe()
    file = path / (recipe.result_file if recipe else "finetuned.safetensors")
    if not file.exists() or not (path / "summary.json").exists():
        raise UserError(f"{path} has no {file.name} of its end: is it the folder of a finished run?")
    return file


def _is_plain(path: Path) -> bool:
    """Whether it is a file of weights that `deephoyer.save` did not write; `load` tells what is wrong with others."""
    if path.suffix in (".pt", ".pth"):
        return True
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return bool((file.metadata() or {}).get("format") != container.FORMAT)
    except (OSError, safetensors.SafetensorError):
        return False


def _own_model(path: Path) -> Choice:
    """The model that the file itself says it holds."""
    recipe = provenance(path).get("recipe")
    chosen = recipe.get("model") if isinstance(recipe, Mapping) else None
    if not isinstance(chosen, str | dict):
        raise UserError(f"{path} does not say which model it holds; give its name with --model.")
    return chosen
