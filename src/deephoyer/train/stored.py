"""Networks that lie in files: a run's folder, a file that `deephoyer.save` wrote, or plain weights with a model's name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from deephoyer import models
from deephoyer.errors import UserError
from deephoyer.export import load, provenance
from deephoyer.train import checkpoint
from deephoyer.train.recipe import named


def open_network(path: Path, model: str | None = None) -> tuple[nn.Module, Tensor]:
    """The network in eval mode, and random inputs that it takes.

    The model's name comes from what the file says of its own making, unless one is given.
    """
    if path.is_dir():
        path = path / "finetuned.safetensors"
    if model is None:
        model_of = provenance(path).get("recipe", {}).get("model")
        if model_of is None:
            raise UserError(f"{path} does not say which model it holds; give its name with --model.")
        settings = named(model_of)
        name = settings.pop("choice")
        network = load(path, models.make(name, **settings))
    else:
        name, network = model, models.make(model)
        checkpoint.fill(network, path, "the file")
    example = torch.randn(2, *models.input_shape(name), generator=torch.Generator().manual_seed(0))
    return network.eval(), example
