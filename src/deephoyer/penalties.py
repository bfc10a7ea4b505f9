"""The penalties: functions of group magnitudes r ≥ 0 that are small when few magnitudes carry the weight.

Each has a value and a slope ∂value/∂r, in closed form. Nothing here knows of modules, groups or
training; strengths are multiplied in elsewhere. Formulas: DeepHoyer (Yang, Wen, Li; ICLR 2020),
with the piece-wise penalties it is compared to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deephoyer.errors import positive, share
from deephoyer.registry import Registry


def wide(x: Tensor) -> Tensor:
    """Half-precision tensors as float32, so that sums over many weights stay exact enough."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0, with gradient 0 there too: an all-zero tensor is never NaN.

    A sum of squares that small (below 1e-31 in float32) has lost its digits: its weights are as good as zero.
    """
    info = torch.finfo(b.dtype)
    zero = b < info.tiny / info.eps
    return torch.where(zero, torch.zeros_like(b), a / torch.where(zero, torch.ones_like(b), b))


class Penalty:
    """A function of the magnitudes alone. A new one needs `value` and `slope`, and a line in `PENALTIES`.

    Its declarations enable fast paths; without them everything still works, term by term.
    """

    separable = False
    """The slope at a magnitude depends on that magnitude alone, so that blocks of weights can be done one by one."""

    scale_free = False
    """The value stays when all magnitudes grow alike, and `line` gives the slope."""

    device_slope: str | None = None
    """The name of its slope in `kernels/triton_slopes.py`. A subclass does not inherit it: its slope may differ."""

    def value(self, r: Tensor) -> Tensor:
        raise NotImplementedError

    def slope(self, r: Tensor) -> Tensor:
        raise NotImplementedError

    def line(self, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        """Of a scale-free penalty: A and B of its slope A − B·r, from Σr and Σr²."""
        raise NotImplementedError

    def coefficient(self, r: Tensor) -> Tensor:
        """slope / r, what a group's weights are multiplied by in the gradient: 0 where r is 0, never infinite."""
        alive = r > 0
        c = self.slope(r) / torch.where(alive, r, torch.ones_like(r))
        most = torch.finfo(r.dtype).max ** 0.5  # a weight so small that this binds is far below rounding
        return torch.where(alive, c.clamp(-most, most), torch.zeros_like(r))

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in vars(self).items())
        return f"{type(self).__name__}({settings})"


class L1(Penalty):
    """Σr: shrinks every magnitude at the same speed; on filters or channels it is the group lasso."""

    separable = True
    device_slope = "l1"

    def value(self, r: Tensor) -> Tensor:
        return r.sum()

    def slope(self, r: Tensor) -> Tensor:
        return torch.ones_like(r)


class ScaleFree(Penalty):
    """The Hoyer family: made of S₁ = Σr and S₂ = Σr² only, so its slope is a line A − B·r in r."""

    scale_free = True

    def slope(self, r: Tensor) -> Tensor:
        a, b = self.line(r.sum(), r.square().sum())
        return a - b * r


class Hoyer(ScaleFree):
    """Σr / √Σr²: between 1 and √n, scale-invariant."""

    device_slope = "hoyer"

    def value(self, r: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(r)
        return _ratio(r.sum() * norm, norm.square())

    def line(self, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        a = _ratio(s2.sqrt(), s2)
        return a, _ratio(s1 * a, s2)


class HoyerSquare(ScaleFree):
    """(Σr)² / Σr²: between 1 and n, scale-invariant, small if few magnitudes are large."""

    device_slope = "hoyer-square"

    def value(self, r: Tensor) -> Tensor:
        s1, s2 = r.sum(), r.square().sum()
        return s1 * _ratio(s1, s2)

    def line(self, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        a = _ratio(2 * s1, s2)
        return a, a * _ratio(s1, s2)


class TransformedL1(Penalty):
    """Σ (a+1)r / (a+r): between l1 (large a) and a count of nonzeros (small a)."""

    separable = True
    device_slope = "transformed-l1"

    def __init__(self, a: float = 1.0):
        self.a = positive(a, "transformed-l1: a")

    def value(self, r: Tensor) -> Tensor:
        return ((self.a + 1) * r / (self.a + r)).sum()

    def slope(self, r: Tensor) -> Tensor:
        return self.a * (self.a + 1) / (self.a + r).square()


class SCAD(Penalty):
    """l1 up to λ, flat beyond aλ, a parabola between (Fan & Li 2001); divided by λ, so the slope at 0 is 1."""

    separable = True
    device_slope = "scad"

    def __init__(self, lam: float = 0.1, a: float = 3.7):
        self.lam = positive(lam, "scad: lam")
        self.a = positive(a, "scad: a", above=1.0)

    def value(self, r: Tensor) -> Tensor:
        lam, a = self.lam, self.a
        bend = (2 * a * lam * r - r.square() - lam**2) / (2 * (a - 1) * lam)
        flat = torch.full_like(r, lam * (a + 1) / 2)
        return torch.where(r <= lam, r, torch.where(r <= a * lam, bend, flat)).sum()

    def slope(self, r: Tensor) -> Tensor:
        return ((self.a * self.lam - r) / ((self.a - 1) * self.lam)).clamp(0, 1)


class MCP(Penalty):
    """A slope of 1 at 0 that falls to 0 at γλ and stays there (Zhang 2010); divided by λ."""

    separable = True
    device_slope = "mcp"

    def __init__(self, lam: float = 0.1, gamma: float = 3.0):
        self.lam = positive(lam, "mcp: lam")
        self.gamma = positive(gamma, "mcp: gamma")

    def value(self, r: Tensor) -> Tensor:
        end = self.gamma * self.lam
        near = r.clamp(max=end)
        return (near - near.square() / (2 * end)).sum()

    def slope(self, r: Tensor) -> Tensor:
        return (1 - r / (self.gamma * self.lam)).clamp(min=0)


class TrimmedL1(Penalty):
    """Σr over all but the largest fraction `keep`, which is not penalized (Yun et al. 2019)."""

    def __init__(self, keep: float = 0.05):
        self.keep = share(keep, "trimmed-l1: keep")

    def _free(self, r: Tensor) -> Tensor:
        return r.topk(math.floor(self.keep * r.numel() + 1e-6)).indices  # 0.29 × 100 is 28.999…

    def value(self, r: Tensor) -> Tensor:
        r = r.flatten()
        return r.sum() - r[self._free(r)].sum()

    def slope(self, r: Tensor) -> Tensor:
        flat = torch.ones_like(r).flatten()
        return flat.index_fill(0, self._free(r.flatten()), 0).view_as(r)


PENALTIES: Registry[Penalty] = Registry("penalty", "penalties")
PENALTIES.add("l1", L1)
PENALTIES.add("hoyer", Hoyer)
PENALTIES.add("hoyer-square", HoyerSquare)
PENALTIES.add("transformed-l1", TransformedL1)
PENALTIES.add("scad", SCAD)
PENALTIES.add("mcp", MCP)
PENALTIES.add("trimmed-l1", TrimmedL1)


def hoyer(x: Tensor) -> Tensor:
    """Σ|x| / √Σx², between 1 and √n; 0 for an all-zero tensor.

    >>> hoyer(torch.tensor([3.0, -4.0]))
    tensor(1.4000)
    """
    return Hoyer().value(wide(x).abs())


def hoyer_square(x: Tensor) -> Tensor:
    """(Σ|x|)² / Σx², between 1 and n: the effective number of nonzero elements.

    >>> hoyer_square(torch.tensor([0.0, 5.0, -5.0, 0.0]))
    tensor(2.)
    """
    return HoyerSquare().value(wide(x).abs())


def hoyer_measure(x: Tensor) -> Tensor:
    """Hoyer's sparsity in [0, 1]: 0 if all elements have equal magnitude, 1 if only one is nonzero.

    An all-zero tensor has no direction; its measure is 1, and so is that of a single element.

    >>> hoyer_measure(torch.tensor([0.0, 4.0, 0.0, 0.0]))
    tensor(1.)
    """
    root = math.sqrt(x.numel())
    if x.numel() < 2:
        return torch.ones((), dtype=wide(x).dtype, device=x.device)
    spread = hoyer(x)
    measure = ((root - spread) / (root - 1)).clamp(0, 1)  # rounding steps over the ends
    return torch.where(spread == 0, torch.ones_like(spread), measure)


def trimming_threshold(x: Tensor) -> Tensor:
    """Σx² / Σ|x|: under Hoyer-Square, elements below it shrink and elements above it grow.

    >>> trimming_threshold(torch.tensor([1.0, -3.0]))
    tensor(2.5000)
    """
    r = wide(x).abs()
    return _ratio(r.square().sum(), r.sum())
