"""Norms by the root of the mean square (RMSNorm), of whichever class, and what they must be told when channels go.

Such a norm divides by √(Σx²/n + ε). A channel that is zero adds nothing to the sum, so without it the norm is the
same but for n, which the weight and ε make up for: with m of n channels left, ε grows by n/m and the weight by √(n/m).
So do norms of each channel's response by their mean (ConvNeXt V2's), whose weight grows by n/m.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.structure.narrowed import set_size


@dataclass(frozen=True)
class RmsNorm:
    """How a module does it: where its ε is, what is added to its weight (Gemma's has 1 + w), how that grows, and where.

    A weight is multiplied by (n/m) to the `power`; the channels lie along `dim`.
    """

    epsilon: str
    offset: float = 0.0
    power: float = 0.5
    dim: int = -1


def rms_norm(module: nn.Module) -> RmsNorm | None:
    """What sort of RMSNorm a module is, by what it does to random numbers; None for everything else."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    weight = own.get("weight")
    if weight is None or weight.dim() != 1 or set(own) - {"weight", "bias"} or module._modules:
        return None
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase):
        return None
    named = [n for n, v in vars(module).items() if "eps" in n and isinstance(v, float) and v > 0]
    if not named or not weight.is_floating_point():
        return None
    try:
        return (_response if "bias" in own else _tried)(module, named[0], len(weight))
    except Exception:
        return None


def _tried(module: nn.Module, name: str, size: int) -> RmsNorm | None:
    twin: Any = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    like = twin.weight
    w, x = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    x = x.expand(2, size) * torch.tensor([[1.0], [1e-3]])
    setattr(twin, name, 1e-3)
    with torch.no_grad():
        twin.weight = nn.Parameter(w.to(like), requires_grad=False)
        y = twin(x.to(like)).double().cpu()
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    for offset in (0.0, 1.0):
        wanted = scaled * (w + offset)
        if y.shape == wanted.shape and bool(((y - wanted).abs() <= 3e-2 * (wanted.abs() + 1e-3)).all()):
            return RmsNorm(name, offset)
    return None


def _response(module: nn.Module, name: str, size: int) -> RmsNorm | None:
    """x + b + w·x·r / (mean of r over the channels + ε), where r is a channel's length over all places."""
    twin: Any = copy.deepcopy(module)
    setattr(twin, name, 1e-3)
    generator = torch.Generator().manual_seed(0)
    w, b = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        like = twin.weight
        twin.weight, twin.bias = (nn.Parameter(t.to(like), requires_grad=False) for t in (w, b))
    for dim in (-1, 1):
        x = torch.randn(2, 3, 4, size, generator=generator, dtype=torch.float64)
        r = x.norm(dim=(1, 2), keepdim=True)
        wanted = (x + b + w * x * r / (r.mean(-1, keepdim=True) + 1e-3)).movedim(-1, dim)
        try:
            with torch.no_grad():
                y = twin(x.movedim(-1, dim).to(like)).double().cpu()
        except Exception:
            continue
        if y.shape == wanted.shape and bool(((y - wanted).abs() <= 3e-2 * (wanted.abs() + 1e-3)).all()):
            return RmsNorm(name, power=1.0, dim=dim)
    return None


def absorb(module: nn.Module, norm: RmsNorm, before: int, after: int) -> None:
    """Makes the norm of `after` channels what it was when there were others, all zero."""
    if before == after:
        return
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        grown = (weight.double() + norm.offset) * (before / after) ** norm.power - norm.offset
        weight.copy_(grown)
    set_size(module, norm.epsilon, getattr(module, norm.epsilon) * before / after)
