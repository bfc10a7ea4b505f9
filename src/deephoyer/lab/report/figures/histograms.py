"""Histograms of a run's nonzero weights: one row per layer, one column per stage (as in the paper's appendix)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.lab import models
from deephoyer.lab.choices import named
from deephoyer.lab.report.figures.style import BLUE, styled
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.schema import TITLES, Recipe
from deephoyer.weights import LAYERS

STAGES = {"dense": "dense", "regularized": "regularized", "finetuned": "pruned and finetuned"}
"""Files of a run's folder and what their column is called; a stage that was not run has none."""


@styled
def histograms(run: str | Path) -> Figure:
    """Nonzero weights only, with their number in the corner. Counts are logarithmic, as most weights are tiny."""
    folder = RunFolder(run)
    files = [f"{TITLES[stage]}.safetensors" for stage in _recipe(folder).stages()]
    stages = {title: _weights(folder, f) for s, title in STAGES.items() if (f := f"{s}.safetensors") in files}
    layers = list(next(iter(stages.values())))
    figure = Figure(figsize=(9, 2.1 * len(layers) + 0.6))
    panels = figure.subplots(len(layers), len(stages), squeeze=False)
    for line, layer in zip(panels, layers, strict=True):
        for axes, title in zip(line, stages, strict=True):
            _panel(axes, stages[title][layer])
        line[0].set_ylabel(f"{layer.upper()}\nnumber of weights")
    for axes, title in zip(panels[0], stages, strict=True):
        axes.set_title(title)
    for axes in panels[-1]:
        axes.set_xlabel("value of the weight")
    return figure


def model_of(run: str | Path) -> str:
    """The name of a run's network."""
    return named(_recipe(RunFolder(run)).model)[0]


def _recipe(folder: RunFolder) -> Recipe:
    recipe = folder.recipe()
    if recipe is None:
        raise UserError(f"{folder.path} has no recipe.yaml: is it the folder of a finished run?")
    return recipe


def _weights(folder: RunFolder, file: str) -> dict[str, Tensor]:
    """Each layer's weights after a stage."""
    model: nn.Module = models.of(_recipe(folder).model)
    checkpoint.fill(model, folder / file, str(folder.path))
    return {name: m.weight.detach().flatten() for name, m in model.named_modules() if isinstance(m, LAYERS)}


def _panel(axes: Axes, weights: Tensor) -> None:
    nonzero = weights[weights != 0].numpy()
    reach = float(np.abs(nonzero).max(initial=1e-6)) * 1.02
    axes.hist(nonzero, bins=61, range=(-reach, reach), color=BLUE, histtype="stepfilled")
    mark = float(f"{0.7 * reach:.0e}")
    axes.set_xticks([-mark, 0, mark])
    axes.set_yscale("log")
    # Room above the bars for the count.
    bottom, top = 0.6, max(axes.get_ylim()[1], 10)
    axes.set_ylim(bottom, top * (top / bottom) ** 0.25)
    count = f"{len(nonzero):,} of {weights.numel():,}"
    axes.text(0.98, 0.97, count, transform=axes.transAxes, ha="right", va="top", fontsize=8.5)
