"""Methods compared: the test accuracy of every seed, one panel per size; and what a penalty's wrong strength costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from deephoyer.lab.report.figures.style import BLUE, CYCLE, GREY, INK, MARKERS, styled


@styled
def every_seed(title: str, sizes: Mapping[float, Mapping[str, Sequence[float]]]) -> Figure:
    """`sizes` has for each size the accuracies of each method, in percent; the bar is the mean. Sizes and methods
    without results are left out."""
    sizes = {size: rows for size, rows in sizes.items() if any(rows.values())}
    names = [name for name in next(iter(sizes.values())) if any(rows.get(name) for rows in sizes.values())]
    figure = Figure(figsize=(3.2 * len(sizes) + 1.4, 0.32 * len(names) + 1.4))
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, (size, rows) in zip(panels, sizes.items(), strict=True):
        for place, name in enumerate(reversed(names)):
            errors = [100 - accuracy for accuracy in rows.get(name, ())]
            axes.scatter(errors, [place] * len(errors), s=12, color=BLUE, alpha=0.6)
            if errors:
                axes.plot([sum(errors) / len(errors)] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=1.5)
        # Logarithmic, or random pruning would squeeze all others together; the best is to the right.
        axes.set(xscale="log", xlabel="test error, %", title=f"{100 * size:g} %", yticks=range(len(names)))
        axes.invert_xaxis()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticklabels(list(reversed(names)))
    figure.suptitle(title)
    return figure


@styled
def losses_near_best(title: str, penalties: Mapping[str, Mapping[float, Sequence[float]]]) -> Figure:
    """`penalties` has, for each factor of a penalty's best strength, the points of accuracy that its seeds lose."""
    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    for (name, lost), color, marker in zip(penalties.items(), itertools.cycle(CYCLE), itertools.cycle(MARKERS)):
        for factor, seeds in lost.items():
            axes.scatter([factor] * len(seeds), [-x for x in seeds], s=8, color=color, alpha=0.4)
        means = [-sum(seeds) / len(seeds) for seeds in lost.values()]
        axes.plot(list(lost), means, color=color, marker=marker, markersize=5, label=name)
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="strength, × the best", ylabel="held-out accuracy, points", title=title)
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["⅒", "⅕", "½", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.legend(loc="lower right")
    return figure
