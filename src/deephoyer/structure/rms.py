"""Norms by the root of the mean square (RMSNorm), of whichever class, and what they must be told when channels go.

Such a norm divides by √(Σx²/n + ε). A channel that is zero adds nothing to the sum, so without it the norm is the
same but for n, which the weight and ε make up for: with m of n channels left, ε grows by n/m and the weight by √(n/m).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.structure.sizes import set_size


@dataclass(frozen=True)
class RmsNorm:
    """How a module does it: where its ε is, and what is added to its weight (Gemma's has 1 + w)."""

    epsilon: str
    offset: float


def rms_norm(module: nn.Module) -> RmsNorm | None:
    """What sort of RMSNorm a module is, by what it does to random numbers; None for everything else."""
    own = dict(module._parameters)
    weight = own.pop("weight", None)
    if weight is None or weight.dim() != 1 or any(p is not None for p in own.values()) or module._modules:
        return None
    named = [n for n, v in vars(module).items() if "eps" in n and isinstance(v, float) and v > 0]
    if not named or not weight.is_floating_point():
        return None
    try:
        return _tried(module, named[0], len(weight))
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


def absorb(module: nn.Module, norm: RmsNorm, before: int, after: int) -> None:
    """Makes the norm of `after` channels what it was when there were others, all zero."""
    if before == after:
        return
    weight = module.weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        grown = (weight.double() + norm.offset) * (before / after) ** 0.5 - norm.offset
        weight.copy_(grown)
    set_size(module, norm.epsilon, getattr(module, norm.epsilon) * before / after)
