"""l1 and Hoyer of two numbers: where they are small, and which way descent goes (the paper's first figure)."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deephoyer.lab.report.figures.style import GREY, styled
from deephoyer.penalties import L1, Hoyer, Penalty

REACH = 2.0


@styled
def contours() -> Figure:
    """Contours on the left, directions of negative gradients on the right; l1 above Hoyer."""
    figure = Figure(figsize=(7.6, 7.2))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for line, (name, penalty) in zip(panels, (("l1", L1()), ("Hoyer", Hoyer())), strict=True):
        _heights(line[0], penalty)
        _arrows(line[1], penalty)
        line[0].set_title(f"{name}: value (darker is lower)")
        line[1].set_title(f"{name}: direction of descent (darker is steeper)")
        line[0].set_ylabel("$w_2$")
    for axes in panels.flat:
        axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), aspect="equal", xticks=range(-2, 3), yticks=range(-2, 3))
    for axes in panels[1]:
        axes.set_xlabel("$w_1$")
    return figure


def _heights(axes: Axes, penalty: Penalty) -> None:
    # A grid of rays: Hoyer is constant along each, and a square grid would show steps where rays meet.
    radius = torch.cat([torch.tensor([1e-3]), torch.linspace(0.1, 3, 30)]).double()[:, None]
    angle = torch.linspace(0, 2 * torch.pi, 361, dtype=torch.float64)
    x, y = radius * angle.cos(), radius * angle.sin()
    height = torch.stack([penalty.value(pair) for pair in torch.stack([x, y], 2).abs().view(-1, 2)]).view_as(x)
    top = penalty.value(torch.full((2,), REACH, dtype=torch.float64))
    levels = torch.linspace(float(height.min()), float(top) * 1.0001, 15)
    axes.contourf(x, y, height.clamp(max=top), levels=levels, cmap="cividis")
    axes.contour(x[1:], y[1:], height[1:], levels=levels[1:-1], colors="white", linewidths=0.4, alpha=0.5)


def _arrows(axes: Axes, penalty: Penalty) -> None:
    line = torch.linspace(-REACH, REACH, 16, dtype=torch.float64)[1:-1]
    pairs = torch.cartesian_prod(line, line)
    down = torch.stack([-penalty.slope(pair.abs()) * pair.sign() for pair in pairs])
    steepness = down.norm(dim=1)
    moving = steepness > 1e-9  # on its diagonals Hoyer is level
    tip = down / steepness.clamp(min=1e-9)[:, None]
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.quiver(
        *pairs[moving].T.numpy(), *tip[moving].T.numpy(), steepness[moving].clamp(max=1.4).numpy(),
        cmap="viridis_r", clim=(-0.3, 1.4), angles="xy", scale_units="xy", scale=4.6, width=0.008, pivot="mid",
    )  # fmt: skip
    axes.plot(*pairs[~moving].T.numpy(), ".", color=GREY, markersize=3)
