"""How figures look, and how they are saved: the same bytes from the same numbers, as SVG and PNG.

Colours are Okabe and Ito's, which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
from matplotlib.figure import Figure

from deephoyer.files import folder_at, write_atomically

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, YELLOW, INK, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#1a1a1a", "#767676"
CYCLE = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine has it
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    # Element names in an SVG are random otherwise.
    "svg.hashsalt": "deephoyer",
}

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draws with our settings, whatever the user's own are."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS, "backend": "Agg"}):
            return draw(*args, **kwargs)

    return drawn


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes `name.svg` and `name.png`, without dates, and gives their paths."""
    folder_at(folder)
    nothing = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    paths = []
    for ending, metadata in nothing.items():
        content = io.BytesIO()
        with matplotlib.rc_context(SETTINGS):
            figure.savefig(content, format=ending, metadata=metadata)
        paths.append(folder / f"{name}.{ending}")
        write_atomically(paths[-1], content.getvalue())
    return paths
