"""The slopes p'(r) of the penalties as device code, chosen when a kernel is compiled.

The same formulas as in `penalties.py`, which explains them.
"""

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM108  (a branch on a type is decided when a kernel is compiled)
from __future__ import annotations

import triton
import triton.language as tl

from deephoyer.penalties import Penalty

SLOPES = ("l1", "hoyer", "hoyer-square", "transformed-l1", "scad", "mcp")
"""What a penalty's `device_slope` may be; the numbers in `slope` below are places in this list."""


def kind_of(penalty: Penalty) -> tuple[int, float, float] | None:
    """The number of a penalty's slope and its first two settings; None if it has no device code."""
    name = vars(type(penalty)).get("device_slope")
    if name is None:
        return None
    settings = [float(v) for v in vars(penalty).values()]
    first, second, *_ = [*settings, 0.0, 0.0]
    return SLOPES.index(name), first, second


@triton.jit
def ratio(a, b):
    """a / b, and 0 where b is too small a sum of squares to have digits left."""
    if b.dtype == tl.float64:
        zero = b < 1.0020841800044864e-292
    else:
        zero = b < 9.860761315262648e-32
    return tl.where(zero, 0.0, a / tl.where(zero, 1.0, b))


@triton.jit
def bounded(c):
    """A coefficient p'(r) / r, kept finite."""
    if c.dtype == tl.float64:
        most = 1.3407807929942596e154
    else:
        most = 1.8446743e19
    return tl.minimum(tl.maximum(c, -most), most)


@triton.jit
def slope(r, s1, s2, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):
    """p'(r); s1 and s2 are Σr and Σr², which only the Hoyer family looks at."""
    if KIND == 0:  # l1
        out = r * 0 + 1
    elif KIND == 1:  # hoyer
        a = ratio(tl.sqrt(s2), s2)
        out = a - ratio(s1 * a, s2) * r
    elif KIND == 2:  # hoyer-square
        a = ratio(2 * s1, s2)
        out = a - a * ratio(s1, s2) * r
    elif KIND == 3:  # transformed l1, a = P0
        out = P0 * (P0 + 1) / ((P0 + r) * (P0 + r))
    elif KIND == 4:  # scad, λ = P0, a = P1
        out = tl.minimum(tl.maximum((P1 * P0 - r) / ((P1 - 1) * P0), 0.0), 1.0)
    else:  # mcp, λ = P0, γ = P1
        out = tl.maximum(1 - r / (P1 * P0), 0.0)
    return out
