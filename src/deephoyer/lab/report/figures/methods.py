"""Methods side by side: the test accuracy of every seed as a point, a panel for each size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from deephoyer.lab.report.figures.style import BLUE, INK, styled


@styled
def every_seed(title: str, sizes: Mapping[float, Mapping[str, Sequence[float]]]) -> Figure:
    """`sizes` has for each share asked for the accuracies of each method, in percent; the bar is their mean."""
    names = list(next(iter(sizes.values())))
    figure = Figure(figsize=(3.2 * len(sizes) + 1.4, 0.32 * len(names) + 1.4))
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, (size, rows) in zip(panels, sizes.items(), strict=True):
        for place, name in enumerate(reversed(names)):
            found = list(rows.get(name, ()))
            axes.scatter(found, [place] * len(found), s=12, color=BLUE, alpha=0.6)
            if found:
                axes.plot([sum(found) / len(found)] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=1.5)
        axes.set(xlabel="test accuracy, %", title=f"{100 * size:g} %", yticks=range(len(names)))
        axes.set_yticklabels(list(reversed(names)))
    figure.suptitle(title)
    return figure
