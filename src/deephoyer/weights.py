"""Which parameters of a module are meant, and which of their dimensions are outputs and inputs.

Groupings, rules and the accounting all start from the list that `find_weights` gives. Not here:
what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deephoyer.errors import UserError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter with its place: dimension 0 is whole, dimension 1 is cut by convolution groups."""

    name: str
    tensor: Tensor
    out_dim: int = 0
    in_dim: int = 1
    groups: int = 1


def find_weights(model: nn.Module, parameters: str | Iterable[str] | None = None, frozen: bool = False) -> list[Weight]:
    """The parameters that match the glob patterns `parameters`, each once however often it is tied.

    By default the weights of linear and convolution layers: no biases, norms or embeddings. A pattern
    that starts with `!` takes out what earlier ones took in, or of the default if there are only such.
    Frozen parameters are left alone unless `frozen` is true; empty ones always are.

    >>> [w.name for w in find_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))]
    ['0.weight']
    >>> [w.name for w in find_weights(nn.Linear(3, 2), "*")]
    ['weight', 'bias']
    """
    patterns = [parameters] if isinstance(parameters, str) else None if parameters is None else list(parameters)
    layers = {name: module for name, module in _named_modules(model) if isinstance(module, LAYERS)}
    default = {f"{name}.weight".removeprefix(".") for name in layers}
    layer_of = {id(module._parameters.get("weight")): module for module in reversed(layers.values())}
    if patterns is None:
        _refuse_computed(layers)
    found: dict[int, Weight] = {}
    unmatched = set(patterns or ())
    only_out = all(p.startswith("!") for p in patterns or ())
    for name, tensor in named_parameters(model):
        wanted = _wanted(name, patterns or (), unmatched, only_out and name in default)
        if not wanted or id(tensor) in found or not (tensor.requires_grad or frozen):
            continue
        if is_lazy(tensor):
            raise UserError(f"{name} has no shape yet, as its layer is lazy: run one batch through the model first.")
        if tensor.numel():
            found[id(tensor)] = _place(name, tensor, layer_of.get(id(tensor)))
    positive = {p for p in unmatched if not p.startswith("!")}
    if positive:
        names = [n for n, _ in named_parameters(model)]
        shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        raise UserError(f"parameters: no parameter matches {sorted(positive)[0]!r}. The model has {shown or 'none'}.")
    if not found and patterns:
        raise UserError(f"parameters: {', '.join(map(repr, patterns))} leaves no trainable parameter to work on.")
    if not found:
        raise UserError("no parameters to work on: the model has no trainable linear or convolution weights.")
    return list(found.values())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters under the names they have in the plain module, whatever it is wrapped in; tied ones repeated.

    So a mask made while training through torch.compile, DistributedDataParallel or activation
    checkpointing fits the module that was wrapped.
    """
    for name, tensor in unwrap(model).named_parameters(remove_duplicate=False):
        yield _plain(name), tensor


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        yield _plain(f"{name}.").removesuffix("."), module


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and the data-parallel wrappers."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _refuse_computed(layers: Mapping[str, nn.Module]) -> None:
    """A layer left out in silence would be neither regularized nor pruned, and nobody would know."""
    for name, module in layers.items():
        if module._parameters.get("weight") is None:
            raise UserError(
                f"{name or 'the layer'}.weight is computed from other tensors (weight norm, a parametrization, a mask "
                "of torch.nn.utils.prune). Make it plain again, or say with parameters= which parameters are meant."
            )


def _wanted(name: str, patterns: Iterable[str], unmatched: set[str], wanted: bool) -> bool:
    for pattern in patterns:
        if fnmatchcase(name, pattern.removeprefix("!")):
            unmatched.discard(pattern)
            wanted = not pattern.startswith("!")
    return wanted


def _place(name: str, tensor: Tensor, layer: nn.Module | None) -> Weight:
    if isinstance(layer, TRANSPOSED):
        return Weight(name, tensor, out_dim=1, in_dim=0, groups=layer.groups)
    if isinstance(layer, CONVOLUTIONS):
        return Weight(name, tensor, groups=layer.groups)
    return Weight(name, tensor)
