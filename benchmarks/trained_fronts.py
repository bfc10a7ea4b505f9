"""The table and the figure of trained transformers, score against executed MACs, from a folder's JSON files.

Of each penalty they show one strength per size: the best mean over seeds on data that was held out for this; without
such data, by the score at the last step itself, which is optimistic for all penalties alike.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

Run = dict[str, Any]
Results = dict[str, list[Run]]
"""The numbers of every seed, by network."""


@dataclass(frozen=True)
class Shown:
    """How a task and its score are shown."""

    name: str
    title: str
    score: str
    unit: str
    best: Callable[..., Any]
    text: Callable[[float], str]

    @property
    def rising(self) -> bool:
        return self.best is max


@dataclass(frozen=True)
class Row:
    """A method at one size with the strength that was chosen, or the dense network."""

    name: str
    method: str
    kept: str
    strength: str
    tried: int
    runs: list[Run]

    def mean(self, key: str) -> float:
        """Over the seeds that have it: not every one is timed."""
        return statistics.fmean(r[key] for r in self.runs if key in r)


def read(folder: Path) -> Results:
    """The results of finished networks: those whose costs are known."""
    results: Results = {}
    for file in sorted(folder.glob("seed-*.json")):
        for name, numbers in json.loads(file.read_text()).items():
            if "macs" in numbers:
                results.setdefault(name.rpartition("-")[0], []).append(numbers)
    return results


def rows(results: Results, shown: Shown) -> list[Row]:
    """The dense networks, then sizes from large to small, the best method first. If not all strengths of a penalty have
    all seeds, the best of those with the most seeds is chosen."""
    tries: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for name, runs in results.items():
        parts = re.fullmatch(r"(.+?)-([\d.]+(?:e-\d+)?)-([\d.]+)", name)
        method, strength, kept = parts.groups() if parts else (name, "0", "1")
        tries.setdefault((method, kept), {})[strength] = runs
    chosen = []
    for (method, kept), strengths in tries.items():
        most = max(map(len, strengths.values()))
        whole = {strength: runs for strength, runs in strengths.items() if len(runs) == most}
        best = shown.best(whole, key=lambda strength: statistics.fmean(map(_choosing, whole[strength])))
        name = method if kept == "1" else f"{method}-{best}-{kept}"
        chosen.append(Row(name, method, kept, "" if best == "0" else best, len(whole), whole[best]))
    sign = -1 if shown.rising else 1
    return sorted(chosen, key=lambda row: (-float(row.kept), row.method != "dense", sign * row.mean("last")))


def _choosing(run: Run) -> float:
    return run["held_out"] if "held_out" in run else run["last"]


def table(results: Results, shown: Shown) -> str:
    """Means over seeds ± their standard deviation, in Markdown."""
    if not results:
        return "No network is finished yet."
    shown_rows = rows(results, shown)
    dense_macs = max(row.mean("macs") for row in shown_rows)
    timed = any("times_dense" in run for row in shown_rows for run in row.runs)
    titles = ["network", "kept", "strength", "seeds", f"{shown.score}, last step", "best", "MACs", "parameters"]
    titles += [f"{shown.unit}/s", "× dense"] if timed else []
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * 3}{'--:|' * (len(titles) - 3)}"]
    for row in shown_rows:
        strength = f"{row.strength} of {row.tried}" if row.strength else ""
        cells = [row.method, "" if row.kept == "1" else row.kept, strength, str(len(row.runs))]
        cells += [_spread(row, key, shown) for key in ("last", "best")]
        cells += [f"{row.mean('macs') / dense_macs:.2f}", f"{row.mean('parameters') / 1e6:.2f}M"]
        if any("times_dense" in run for run in row.runs):
            cells += [f"{row.mean(f'{shown.unit}_per_second'):,.0f}", f"{row.mean('times_dense'):.2f}"]
        elif timed:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(row: Row, key: str, shown: Shown) -> str:
    values = [run[key] for run in row.runs]
    return shown.text(statistics.fmean(values)) + (
        f" ± {shown.text(statistics.stdev(values))}" if len(values) > 1 else ""
    )


def put(results: Results, shown: Shown, page: Path) -> list[Path]:
    """Writes the table and the figure between the page's marks; returns the paths of all files that were written."""
    files = save(results, shown, page.parent / "figures") if results else []
    measuring.put(page, shown.name, block(results, shown))
    return [page, *files]


def block(results: Results, shown: Shown) -> str:
    """The text between a page's marks."""
    figure = f"\n![{shown.title}: {shown.score} against executed MACs](figures/{shown.name}.svg)\n" if results else ""
    return f"{table(results, shown)}\n{figure}"


def save(results: Results, shown: Shown, folder: Path) -> list[Path]:
    """Draws the score against executed MACs and, if measured, against speed; one point per seed. Returns the paths."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from deephoyer.lab.report.figures import style

    shown_rows = rows(results, shown)
    dense_macs = max(row.mean("macs") for row in shown_rows)
    colours = dict(zip(("group-hs", "group-lasso", "magnitude", "random"), style.CYCLE, strict=False))
    panels: dict[str, Callable[[Run], float | None]] = {
        "executed MACs, share of the dense network's": lambda run: run["macs"] / dense_macs,
        f"{shown.unit} a second, times the dense network's": lambda run: run.get("times_dense"),
    }
    if not any("times_dense" in run for row in shown_rows for run in row.runs):
        panels.popitem()

    def draw(axes: Axes, size_of: Callable[[Run], float | None]) -> None:
        for (method, colour), marker in zip(colours.items(), style.MARKERS, strict=False):
            method_rows = [row for row in shown_rows if row.method == method]
            sizes = [[(x, run["last"]) for run in row.runs if (x := size_of(run))] for row in method_rows]
            sizes = sorted(filter(None, sizes))
            if sizes:
                points = [point for seeds in sizes for point in seeds]
                axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5, alpha=0.8, label=method)
                means = [tuple(map(statistics.fmean, zip(*seeds, strict=True))) for seeds in sizes]
                axes.plot(*zip(*means, strict=True), color=colour, linewidth=1)
        low, high = axes.get_ylim()
        for row in shown_rows:
            if row.method in colours:
                continue
            value, line = row.mean("last"), "-" if row.method == "dense" else "--"
            if max(low - value, value - high) > high - low:  # would squeeze everything else together
                axes.plot([], [], " ", label=f"{row.method}: {shown.text(value)}, outside")
            else:
                axes.axhline(value, color=style.GREY, linestyle=line, linewidth=1, label=row.method)

    @style.styled
    def drawn() -> Figure:
        figure = Figure(figsize=(1.2 + 5.2 * len(panels), 4.2))
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, size_of) in zip(all_axes, panels.items(), strict=True):
            draw(axes, size_of)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: shown.text(y)))
            axes.set(xlabel=title, ylabel=f"{shown.score} at the last step")
        figure.suptitle(shown.title, fontsize=12)
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure

    return style.save(drawn(), folder, shown.name)
