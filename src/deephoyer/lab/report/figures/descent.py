"""Hoyer-Square's descent path on twenty normal numbers, with the trimming threshold (the paper's second figure)."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from deephoyer.lab.report.figures.style import BLUE, GREY, INK, RED, styled
from deephoyer.penalties import HoyerSquare, trimming_threshold

COUNT, STEPS, RATE, SEED = 20, 1300, 0.01, 4


@styled
def descent() -> Figure:
    """Numbers below the threshold in magnitude go to zero; those above it grow until they are below it, too."""
    path = walk(torch.randn(COUNT, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64))
    threshold = torch.stack([trimming_threshold(w) for w in path])
    figure = Figure(figsize=(7.6, 4.8))
    axes = figure.subplots()
    alive = path[-1] != 0
    for i, line in enumerate(path.T):
        axes.plot(line, color=BLUE if alive[i] else GREY, linewidth=1.8 if alive[i] else 1.1)
    for sign in (1, -1):
        axes.plot(sign * threshold, color=RED, linestyle=(0, (5, 2)), linewidth=1.8)
    axes.plot([], [], color=RED, linestyle=(0, (5, 2)), linewidth=1.8, label=r"± trimming threshold $\sum w^2/\sum|w|$")
    axes.plot([], [], color=BLUE, linewidth=1.8, label="elements that are left")
    axes.plot([], [], color=GREY, linewidth=1.1, label="elements that became zero")
    axes.set(xlabel="step of gradient descent", ylabel="value of the element", xlim=(0, STEPS))
    axes.set_title("Hoyer-Square on 20 normal numbers")
    axes.axhline(0, color=INK, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def walk(w: Tensor) -> Tensor:
    """Every step of plain gradient descent on Hoyer-Square; an element that reaches zero stays there."""
    path = [w]
    for _ in range(STEPS):
        step = w - RATE * HoyerSquare().slope(w.abs()) * w.sign()
        # Past zero the gradient turns round: without this, elements would rattle about it for ever.
        w = torch.where(step.sign() * w.sign() < 0, 0.0, step)
        path.append(w)
    return torch.stack(path)
