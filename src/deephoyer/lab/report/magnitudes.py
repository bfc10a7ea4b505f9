"""Histograms of group magnitudes before pruning, layer by layer, kept and pruned groups apart, as numbers.

They are drawn in `plots.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def histograms_of(before: Mapping[str, Tensor], after: Mapping[str, Tensor], bins: int) -> list[dict[str, Any]]:
    """One entry per layer and kind of group: edges (log₁₀ of the magnitude), kept and pruned groups in each bin.

    `before` are the weights that were pruned, `after` the final ones: what is zero there was pruned.

    >>> elements, *_ = histograms_of({"w": torch.tensor([[1.0, 0.001]])}, {"w": torch.tensor([[1.0, 0.0]])}, bins=2)
    >>> elements["kind"], elements["stayed"], elements["went"], elements["threshold"]
    ('elements', [0, 1], [1, 0], -1.5)
    """
    histograms = []
    for name, weight in before.items():
        final = after.get(name)
        if final is None or weight.dim() < 2 or final.shape != weight.shape:
            continue
        for kind, (magnitude, kept) in _kinds(weight, final != 0).items():
            histograms.append({"name": name, "kind": kind, **_histogram(magnitude, kept, bins)})
    return histograms


def _kinds(weight: Tensor, alive: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Magnitudes, and which were kept: of single weights, filters (first dimension) and channels (second)."""
    kinds = {"elements": (weight.abs().flatten(), alive.flatten())}
    for dim, kind in enumerate(("filters", "channels")):
        rows, kept = (t.movedim(dim, 0).flatten(1) for t in (weight, alive))
        kinds[kind] = rows.norm(dim=1), kept.any(1)
    return kinds


def _histogram(magnitude: Tensor, kept: Tensor, bins: int) -> dict[str, Any]:
    """On a logarithmic scale; exact zeros are counted separately."""
    zero = magnitude == 0
    logs, alive = magnitude[~zero].double().log10(), kept[~zero]
    if not len(logs):
        return {"edges": [], "stayed": [], "went": [], "zeros": int(zero.sum()), "threshold": None}
    high = logs.max().item()
    low = max(logs.min().item(), high - 12)  # rounding noise far below all others would take up the axis
    edges = torch.linspace(low, high if high > low else low + 1e-3, bins + 1, dtype=torch.float64)
    counts = [torch.histogram(logs[part].clamp(min=low), edges).hist.int().tolist() for part in (alive, ~alive)]
    return {
        "edges": [round(edge, 4) for edge in edges.tolist()],
        "stayed": counts[0],
        "went": counts[1],
        "zeros": int(zero.sum()),
        "threshold": _threshold(logs, alive),
    }


def _threshold(logs: Tensor, alive: Tensor) -> float | None:
    """The threshold below which everything was pruned and above which everything was kept; None if there is none."""
    if not alive.any() or alive.all():
        return None
    highest, lowest = logs[~alive].max().item(), logs[alive].min().item()
    return round((highest + lowest) / 2, 4) if highest < lowest else None
