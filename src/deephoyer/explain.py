"""What hangs together in a network, what can go, what cannot and why; with an evaluation, what each part is worth.

Nothing is removed here: for sensitivity, channels are zeroed for the time of an evaluation and put back.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, shown
from deephoyer.groups import SliceUnit
from deephoyer.inference import Examples
from deephoyer.structure import Coupled
from deephoyer.text_table import text_table

SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class CoupledSet:
    """Channels that can only go together, or the reason why they stay; `scores` is by share removed."""

    name: str
    layers: tuple[str, ...]
    channels: int
    parameters: int
    reason: str | None = None
    scores: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """All coupled sets of a network; prints as a table."""

    sets: list[CoupledSet]
    parameters: int
    removable: int
    """Parameters that lie in channels which can go; one that lies in two sets, as most weights do, counts once."""
    score: float | None = None

    def rows(self) -> list[list[str]]:
        """Name, layers, why it stays, channels, parameters, a score for each share."""
        shares = self.shares()
        return [
            [
                one.name,
                _short(one.layers),
                one.reason or "",
                f"{one.channels:,}",
                f"{one.parameters:,}" if one.reason is None else "",
                *(f"{one.scores[share]:.4g}" if share in one.scores else "" for share in shares),
            ]
            for one in self.sets
        ]

    def head(self) -> list[str]:
        measured = [f"{share:.0%} gone" for share in self.shares()]
        return ["set", "layers", "why they stay", "channels", "parameters", *measured]

    def shares(self) -> list[float]:
        return sorted({share for one in self.sets for share in one.scores})

    def __str__(self) -> str:
        lines = [text_table("coupled channels", self.head(), self.rows(), words=3)]
        if self.score is not None:
            lines.append(f"score with everything there: {self.score:.4g}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(f"<th>{html.escape(title)}</th>" for title in self.head())
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self.rows())
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def explain(
    model: nn.Module,
    example_inputs: Examples,
    evaluate: Callable[[nn.Module], float] | None = None,
    *,
    shares: Sequence[float] = SHARES,
    groups: Coupled | None = None,
) -> Explanation:
    """Which channels of `model` are coupled, which can be removed, which cannot and why.

    With `evaluate` (a function of the model: its accuracy, or its loss) fractions of each removable set are zeroed in
    turn, channels of least magnitude first, in all layers they run through, and the model is evaluated; it is then
    restored.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [(one.name, one.channels, one.reason) for one in explain(net, torch.zeros(1, 4)).sets if one.reason is None]
    [('0', 3, None)]
    """
    for share in shares:
        if not 0 < share < 1:
            raise UserError(f"explain: {share!r} is not a share; shares lie between 0 and 1, like 0.5.")
    graph = groups if groups is not None else Coupled(model, example_inputs)
    units = {unit.name: unit for unit in _units(graph)}
    base = None if evaluate is None else _score(evaluate, model)
    made = []
    for number, one in enumerate(graph.sets, 1):
        unit = units.get(one.name) if one.reason is None else None
        scores = {}
        if evaluate is not None and unit is not None:
            for share in shares:
                _tell(number, len(graph.sets), one.name, share)
                scores[share] = _without(model, unit, share, evaluate)
        size = 0 if unit is None else int(unit.sizes().sum().item())
        made.append(CoupledSet(one.name, tuple(one.layers), len(one.channels), size, one.reason, scores))
    if evaluate is not None and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return Explanation(made, sum(p.numel() for p in model.parameters()), _covered(list(units.values())), base)


def _units(graph: Coupled) -> list[SliceUnit]:
    try:
        return [unit for unit in graph.units() if isinstance(unit, SliceUnit)]
    except UserError:  # nothing can go; the sets say why
        return []


def _covered(units: Sequence[SliceUnit]) -> int:
    """How many elements of parameters lie in a group of any of the units."""
    inside: dict[int, Tensor] = {}
    for unit in units:
        for tensor, here in zip(unit.tensors, unit.spread(torch.ones(unit.count)), strict=True):
            laid = (here > 0).expand_as(tensor)
            inside[id(tensor)] = inside[id(tensor)] | laid if id(tensor) in inside else laid
    return sum(int(laid.sum()) for laid in inside.values())


def _without(model: nn.Module, unit: SliceUnit, share: float, evaluate: Callable[[nn.Module], float]) -> float:
    """The score while the least channels of the unit are zero."""
    gone = round(share * unit.count)
    keep = torch.ones(unit.count, dtype=torch.bool)
    keep[unit.magnitudes().detach().cpu().argsort()[:gone]] = False
    before: list[Tensor] = [tensor.detach().clone() for tensor in unit.tensors]
    try:
        with torch.no_grad():
            for tensor, left in zip(unit.tensors, unit.spread((~keep).to(torch.float32)), strict=True):
                tensor.masked_fill_(left.expand_as(tensor) > 0, 0.0)
        return _score(evaluate, model)
    finally:
        with torch.no_grad():
            for tensor, was in zip(unit.tensors, before, strict=True):
                tensor.copy_(was)


def _score(evaluate: Callable[[nn.Module], float], model: nn.Module) -> float:
    score = evaluate(model)
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"explain: evaluate(model) must return a number, not {shown(score)}.") from None


def _tell(number: int, count: int, name: str, share: float) -> None:
    """Where it is, on a terminal: an evaluation may take a while."""
    if sys.stderr.isatty():
        print(f"\r\033[K{number} of {count}: {name} without {share:.0%}", end="", file=sys.stderr, flush=True)


def _short(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
