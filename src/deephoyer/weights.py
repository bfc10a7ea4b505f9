"""Which parameters of a module are meant, and which of their dimensions are outputs and inputs.

Groupings, rules and the accounting all start from the list that `find_weights` gives. Not here:
what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from deephoyer.errors import UserError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter with its place: dimension 0 is whole, dimension 1 is cut by convolution groups."""

    name: str
    tensor: Tensor
    out_dim: int = 0
    in_dim: int = 1
    groups: int = 1


def find_weights(model: nn.Module, select: str | Iterable[str] | None = None, frozen: bool = False) -> list[Weight]:
    """The parameters that match the glob patterns `select`, each once however often it is tied.

    By default the weights of linear and convolution layers: no biases, norms or embeddings. A pattern
    that starts with `!` takes out what earlier ones took in. Frozen parameters are left alone
    unless `frozen` is true.

    >>> [w.name for w in find_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))]
    ['0.weight']
    >>> [w.name for w in find_weights(nn.Linear(3, 2), "*")]
    ['weight', 'bias']
    """
    patterns = [select] if isinstance(select, str) else None if select is None else list(select)
    layer_of: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LAYERS):
            layer_of[f"{prefix}.weight" if prefix else "weight"] = module
    found: dict[int, Weight] = {}
    unmatched = set(patterns or ())
    for name, tensor in model.named_parameters(remove_duplicate=False):
        wanted = name in layer_of if patterns is None else _wanted(name, patterns, unmatched)
        if wanted and id(tensor) not in found and (tensor.requires_grad or frozen):
            found[id(tensor)] = _place(name, tensor, layer_of.get(name))
    positive = {p for p in unmatched if not p.startswith("!")}
    if positive:
        names = [n for n, _ in model.named_parameters()]
        shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        raise UserError(f"select: no parameter matches {sorted(positive)[0]!r}. The model has {shown or 'none'}.")
    if not found:
        raise UserError("no parameters to work on: the model has no trainable linear or convolution weights.")
    return list(found.values())


def _wanted(name: str, patterns: list[str], unmatched: set[str]) -> bool:
    wanted = False
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
