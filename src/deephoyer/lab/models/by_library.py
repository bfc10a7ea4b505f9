"""Networks of torchvision and timm by name: `torchvision:resnet18`, `timm:convnext_tiny`. Nothing is downloaded.

Settings go on to the library's own constructor; `classes` is called the same for all. Weights come from a file
(`start:` in a recipe), not from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from deephoyer.errors import UserError, positive_whole

DESCRIPTIONS = [
    ("torchvision:NAME", "any classification network of torchvision, like torchvision:resnet18"),
    ("timm:NAME", "any network of timm, like timm:convnext_tiny (pip install 'deephoyer[timm]')"),
]


def is_library(name: str) -> bool:
    return ":" in name


def maker(name: str) -> Callable[..., nn.Module]:
    """What makes the network; a library or a network that is not there is a `UserError`."""
    library, _, network = name.partition(":")
    if library not in _LIBRARIES:
        raise UserError(f"{name!r} is not a model: a library is one of {', '.join(_LIBRARIES)}.")
    return _LIBRARIES[library](network)


def input_shape(name: str) -> tuple[int, ...]:
    """What one input looks like, as the library has it."""
    library, _, network = name.partition(":")
    maker(name)
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(network)
        return tuple(config.input_size) if config is not None else (3, 224, 224)
    side = 299 if network == "inception_v3" else 224
    return 3, side, side


def _torchvision(network: str) -> Callable[..., nn.Module]:
    torchvision = _imported("torchvision", "deephoyer[lab]")
    known = torchvision.models.list_models(module=torchvision.models)
    if network not in known:
        raise _unknown("torchvision", network, known)
    return partial(_make_torchvision, network)


def _make_torchvision(network: str, classes: int = 1000, **settings: Any) -> nn.Module:
    import torchvision

    if network in ("googlenet", "inception_v3"):  # their outputs for training alone would be a second kind of result
        settings = {"aux_logits": False, "init_weights": True} | settings
    model: nn.Module = torchvision.models.get_model(
        network, weights=None, num_classes=positive_whole(classes, "classes"), **settings
    )
    return model


def _timm(network: str) -> Callable[..., nn.Module]:
    timm = _imported("timm", "deephoyer[timm]")
    if not timm.is_model(network):
        raise _unknown("timm", network, timm.list_models())
    return partial(_make_timm, network)


def _make_timm(network: str, classes: int = 1000, **settings: Any) -> nn.Module:
    import timm

    if "checkpoint_path" in settings:  # older versions of timm unpickle it
        raise UserError("weights come from a file that a recipe's start names, not from checkpoint_path.")
    model: nn.Module = timm.create_model(
        network, pretrained=False, num_classes=positive_whole(classes, "classes"), **settings
    )
    return model


_LIBRARIES: dict[str, Callable[[str], Callable[..., nn.Module]]] = {"torchvision": _torchvision, "timm": _timm}


def in_torchvision(name: str) -> bool:
    """Whether torchvision has a network of this name; timm's thousand would take seconds to look through."""
    try:
        maker(f"torchvision:{name}")
    except UserError:
        return False
    return True


def _imported(library: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ImportError as why:
        raise UserError(f"{library} can't be imported ({why}). `pip install '{package}'` installs it.") from None


def _unknown(library: str, network: str, known: list[str]) -> UserError:
    near = difflib.get_close_matches(network, known, n=3, cutoff=0.5)
    guess = f"Did you mean {' or '.join(f'{library}:{n}' for n in near)}?" if near else f"It has {len(known)} others."
    return UserError(f"{library} has no network {network!r}. {guess}")
