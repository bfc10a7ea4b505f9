"""Networks by name: those of the paper's tables, `make("lenet-5")`, and any of torchvision's and timm's.

`deephoyer list models` shows them. Each is a plain `nn.Module` and knows nothing of penalties, masks or data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from deephoyer.errors import UserError, first_line, shown, unknown
from deephoyer.lab.choices import Choice, named
from deephoyer.lab.models import by_library
from deephoyer.lab.models.alexnet import AlexNet
from deephoyer.lab.models.lenet import LeNet5, LeNet300
from deephoyer.lab.models.resnet_cifar import CIFAR_DEPTHS, cifar_resnet
from deephoyer.lab.models.resnet_imagenet import resnet50
from deephoyer.registry import Registry

MODELS: Registry[nn.Module] = Registry("model", "models")
MOST_MODULES = 20_000
"""Layers and what holds them, of a network that a file names."""
_INPUT_SHAPES: dict[str, tuple[int, ...]] = {}


def register(name: str, maker: Callable[..., nn.Module], input_shape: tuple[int, ...]) -> None:
    """Gives a network a name, and says what one input looks like (without the batch dimension)."""
    MODELS.add(name, maker)
    _INPUT_SHAPES[name] = input_shape


def make(name: str, /, **settings: Any) -> nn.Module:
    """The network called `name`, freshly initialised.

    >>> sum(p.numel() for p in make("lenet-300-100").parameters() if p.dim() > 1)
    266200
    """
    made = maker(name)  # an unknown name gets an error with a guess
    try:
        return _made(made, settings) if by_library.is_library(name) else MODELS.make(name, **settings)
    except UserError as why:
        text = str(why)
        raise UserError(text if text.startswith("model ") else f"model {name!r}: {text}") from None


def of(choice: Choice) -> nn.Module:
    """The network that a recipe names by `model:`, freshly initialised.

    >>> of({"name": "lenet-300-100", "dropout": 0.2}).training
    True
    """
    name, settings = named(choice)
    return make(name, **settings)


@contextmanager
def at_most(parameters: int) -> Iterator[None]:
    """Inside, a network with more parameters is refused while it is being built, before memory is filled for it.

    >>> with at_most(300_000): make("lenet-300-100").training
    True
    """
    count = {"parameters": 0, "modules": 0}

    def add(kind: str, more: int, most: int) -> None:
        count[kind] += more
        if count[kind] > most:
            raise UserError(f"it would have more than {most:,} {kind}.")

    hooks = [
        register_module_parameter_registration_hook(
            lambda module, name, tensor: add("parameters", 0 if tensor is None else tensor.numel(), parameters)
        ),
        register_module_module_registration_hook(lambda module, name, child: add("modules", 1, MOST_MODULES)),
    ]
    try:
        yield
    except RuntimeError as why:  # torch's, of a single tensor that is larger than the machine
        raise UserError(f"it can't be built: {first_line(why)}.") from None
    finally:
        for hook in hooks:
            hook.remove()


def maker(name: str) -> Callable[..., nn.Module]:
    """What makes the network of that name; a `UserError` where there is none."""
    if by_library.is_library(name):
        return by_library.maker(name)
    near = any(_letters(own) == _letters(name) for own in MODELS)  # lenet5: nothing is imported for its error
    if not near and by_library.in_torchvision(name):
        raise UserError(f"{name!r} is not a model of ours. Did you mean torchvision:{name}?")
    if name not in MODELS:
        hint = "`deephoyer list models` shows all; one of your own needs DEEPHOYER_IMPORT=FILE.py."
        raise unknown("model", name, MODELS, hint)
    return MODELS[name]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _made(maker: Callable[..., nn.Module], settings: dict[str, Any]) -> nn.Module:
    try:
        return maker(**settings)
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError) as why:
        raise UserError(f"with {shown(settings)} it can't be made: {first_line(why)}.") from None


def describe() -> list[tuple[str, str]]:
    """A line for each."""
    return [*MODELS.describe(), *by_library.DESCRIPTIONS]


def input_shape(name: str) -> tuple[int, ...]:
    """What one input of the network looks like, without the batch dimension.

    >>> input_shape("lenet-5")
    (1, 28, 28)
    """
    if by_library.is_library(name):
        return by_library.input_shape(name)
    MODELS[name]  # an unknown name gets the registry's error, with its guess
    return _INPUT_SHAPES[name]


register("lenet-300-100", LeNet300, (1, 28, 28))
register("lenet-5", LeNet5, (1, 28, 28))
for _depth in CIFAR_DEPTHS:
    register(f"resnet-{_depth}", cifar_resnet(_depth), (3, 32, 32))
register("alexnet", AlexNet, (3, 227, 227))
register("resnet-50", resnet50, (3, 224, 224))
