# ruff: noqa: I001  (the names of a module stand together)
"""deephoyer: make neural networks sparse, small and fast while they train.

Public names are loaded when they are first touched: importing the package costs nothing, and a command that
needs no torch does not wait for it. A new public name is written down twice: for type checkers, and in `_PUBLIC`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deephoyer.errors import UserError as UserError
    from deephoyer.explain import explain as explain
    from deephoyer.export import export as export, load as load, save as save
    from deephoyer.groups import (
        Channels as Channels,
        Elements as Elements,
        Filters as Filters,
        Grouping as Grouping,
        IndexGroups as IndexGroups,
    )
    from deephoyer.masks import Masks as Masks, prune as prune
    from deephoyer.penalties import (
        L1 as L1,
        MCP as MCP,
        SCAD as SCAD,
        Hoyer as Hoyer,
        HoyerSquare as HoyerSquare,
        Penalty as Penalty,
        TransformedL1 as TransformedL1,
        TrimmedL1 as TrimmedL1,
        hoyer as hoyer,
        hoyer_measure as hoyer_measure,
        hoyer_square as hoyer_square,
        trimming_threshold as trimming_threshold,
    )
    from deephoyer.plan import Plan as Plan
    from deephoyer.pretrained import from_pretrained as from_pretrained
    from deephoyer.regularizer import Regularizer as Regularizer
    from deephoyer.rules import Absolute as Absolute, Density as Density, Effective as Effective
    from deephoyer.rules import PerLayer as PerLayer, StdRatio as StdRatio
    from deephoyer.scores import (
        GeometricMedian as GeometricMedian,
        Magnitude as Magnitude,
        NormScale as NormScale,
        Random as Random,
        Score as Score,
        Snip as Snip,
        Taylor as Taylor,
    )
    from deephoyer.shrink import shrink as shrink
    from deephoyer.structure import Coupled as Coupled, Heads as Heads, Neurons as Neurons, compact as compact
    from deephoyer.summary import summary as summary
    from deephoyer.targets import Target as Target

__version__ = "0.1.0"

_PUBLIC = {
    "errors": "UserError",
    "explain": "explain",
    "export": "export load save",
    "groups": "Channels Elements Filters Grouping IndexGroups",
    "masks": "Masks prune",
    "penalties": "L1 MCP SCAD Hoyer HoyerSquare Penalty TransformedL1 TrimmedL1 "
    "hoyer hoyer_measure hoyer_square trimming_threshold",
    "plan": "Plan",
    "pretrained": "from_pretrained",
    "regularizer": "Regularizer",
    "rules": "Absolute Density Effective PerLayer StdRatio",
    "scores": "GeometricMedian Magnitude NormScale Random Score Snip Taylor",
    "shrink": "shrink",
    "structure": "Coupled Heads Neurons compact",
    "summary": "summary",
    "targets": "Target",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deephoyer' has no attribute {name!r}")
    found = getattr(import_module(f"deephoyer.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`summary` and `export` are functions and live in modules of that name: importing those doesn't hide them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
