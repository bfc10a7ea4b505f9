"""The trials of a search with two goals: each a point, those that no other beats in both as a front."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from deephoyer.lab.report.figures.style import BLUE, GREY, styled


@styled
def trials(goals: Sequence[str], points: Sequence[tuple[Sequence[float], bool]]) -> Figure:
    """The second goal to the right, the first upwards: sizes from left to right, accuracy above them."""
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.subplots()
    others = [values for values, best in points if not best]
    front = sorted((values for values, best in points if best), key=lambda values: values[1])
    axes.scatter([v[1] for v in others], [v[0] for v in others], s=18, color=GREY, label="other trials")
    axes.plot([v[1] for v in front], [v[0] for v in front], "o-", color=BLUE, markersize=6, label="the front")
    axes.set(xlabel=goals[1], ylabel=goals[0])
    axes.legend()
    return figure
