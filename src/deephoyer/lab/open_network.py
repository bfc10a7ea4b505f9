"""Networks in files: a run's folder, a file that `deephoyer.save` wrote, or plain weights with a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, shown
from deephoyer.export import container, load, provenance
from deephoyer.files import plain_file
from deephoyer.lab import data as datasets
from deephoyer.lab import models
from deephoyer.lab import recipe as recipes
from deephoyer.lab.choices import Choice, named
from deephoyer.lab.runs import checkpoint, find
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.schema import TORCH_FILES

SMALL = 2**26
"""Parameters of a network that any file may name: as many as AlexNet has."""
WEIGHTS_A_BYTE = 256
LARGEST = 1_000_000
"""A number among the settings of a network that a file names."""
LARGEST_SIDE = 4096
"""Of an image that a file says its network takes."""


def open_network(path: Path, model: Choice | None = None) -> tuple[nn.Module, Tensor]:
    """The network in eval mode, and random inputs that it takes.

    The model's name comes from what the file says of its own making, unless one is given.
    """
    path = file_of(path)
    plain = _is_plain(path)
    if not plain:
        provenance(path)  # which says what is wrong with a file that can't be read
    chosen = model if model is not None else _own_model(path)
    network = models.of(chosen) if model is not None else built_for(path, chosen)
    if plain:
        checkpoint.fill(network, path, "the file")
    else:
        network = load(path, network)
    data = find.recipe_of(path).get("data")
    shape = input_shape(chosen, data if isinstance(data, str | dict) else None)
    return network.eval(), torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def input_shape(model: Choice, data: Choice | None) -> tuple[int, ...]:
    """What one input looks like: as the data that a network was trained on has it, or as its model's are usually.

    >>> input_shape("torchvision:resnet18", {"name": "folder", "size": 64})
    (3, 64, 64)
    """
    try:
        shape = datasets.input_shape(data) if data is not None else None
    except UserError:  # data that this version does not know
        shape = None
    if shape is None:
        return models.input_shape(named(model)[0])
    if not 1 <= min(shape) <= max(shape) <= LARGEST_SIDE:
        raise UserError(f"its data has images of {shown('×'.join(map(str, shape)))}; at most {LARGEST_SIDE:,} pixels.")
    return shape


def chosen_model(text: str | None) -> Choice | None:
    """What stands after --model: a name, or a mapping as in recipes.

    >>> chosen_model("{name: resnet-20, classes: 3}")
    {'name': 'resnet-20', 'classes': 3}
    """
    return None if text is None else recipes.choices([f"model={text}"]).get("model")


def built_for(path: Path, model: Choice) -> nn.Module:
    """The fresh network that a file, and not the user, names; refused where the file can't hold weights for it.

    A byte of a packed tensor stands for 256 weights at most: a few bytes must not name a model that fills the memory.
    """
    try:
        _check_numbers(named(model)[1])
        with models.at_most(max(SMALL, WEIGHTS_A_BYTE * plain_file(path).stat().st_size)):
            return models.of(model)
    except (UserError, OSError) as why:
        raise UserError(f"{path}: the model it names can't be built: {why}") from None


def _check_numbers(value: Any) -> None:
    """Settings are lists and numbers that a network may have: some makers count up to them first."""
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    if (isinstance(value, int | float) and not abs(value) <= LARGEST) or len(inner) > 1000:
        raise UserError(f"{shown(value)} is too large.")
    for part in inner:
        _check_numbers(part)


def file_of(path: Path) -> Path:
    """The file itself, or that of the final network in a run's folder."""
    if not path.is_dir():
        return path
    recipe = RunFolder(path).recipe()
    file = path / (recipe.result_file if recipe else "finetuned.safetensors")
    if not file.exists() or not (path / "summary.json").exists():
        raise UserError(f"{path} has no {file.name}: is it the folder of a finished run?")
    return file


def _is_plain(path: Path) -> bool:
    """Whether it is a file of weights that `deephoyer.save` did not write; `load` tells what is wrong with others."""
    plain_file(path)
    if path.suffix in TORCH_FILES:
        return True
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return bool((file.metadata() or {}).get("format") != container.FORMAT)
    except (OSError, safetensors.SafetensorError):
        return False


def _own_model(path: Path) -> Choice:
    """The model that the file says it holds, or the run's recipe beside it."""
    chosen = find.recipe_of(path).get("model")
    if not isinstance(chosen, str | dict):
        raise UserError(
            f"{path} does not say which model it holds; give its name with --model (model=… for evaluate). "
            "A model of your own is loaded in Python: dh.load(path, model=...)."
        )
    return chosen
