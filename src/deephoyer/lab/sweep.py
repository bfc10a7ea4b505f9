"""Runs for every combination of a grid of overrides, several in parallel, with a table at the end.

The processes are in `processes.py`; settings that depend on earlier results are in `search.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.live import Live
from rich.table import Table

from deephoyer.errors import UserError
from deephoyer.lab import recipe as recipes
from deephoyer.lab.choices import named
from deephoyer.lab.cores import THREADS, threads_asked_for, usable_cores
from deephoyer.lab.processes import DEEPHOYER, IMPORTS, UNTIMED, ChildRun, ListQueue, Queue, run_children


def grid_runs(recipe: str, overrides: Sequence[str], grid: Iterable[str], folder: Path) -> list[ChildRun]:
    """Every combination of the grid's values, each checked before anything starts.

    >>> [run.title for run in grid_runs("demo", [], ["seed=0,1"], Path("runs"))]
    ['seed=0', 'seed=1']
    """
    axes = []
    for axis in grid:
        key, equals, values = axis.partition("=")
        if not equals or not key or not values:
            raise UserError(f"--grid {axis!r}: write key=value,value,… like regularize.strength=1e-4,2e-4.")
        axes.append([f"{key}={value}" for value in recipes.values_in(values)])
    runs = []
    for chosen in itertools.product(*axes):
        all_overrides = [*overrides, *chosen]
        recipes.read(recipe, all_overrides)
        runs.append(ChildRun(list(chosen), folder / recipes.folder_name(recipe, all_overrides)))
    if len({run.folder for run in runs}) < len(runs):
        raise UserError("--grid: a value is given twice.")
    return runs


def run_all(
    recipe: str,
    overrides: Sequence[str],
    runs: Sequence[ChildRun],
    jobs: int,
    live: Live | None,
    *,
    mps: bool = True,
    say: Callable[[str], None] = print,
    program: Sequence[str] = DEEPHOYER,
) -> None:
    """Executes runs, `jobs` at a time. Without `mps`, runs on one GPU take turns."""
    devices = [recipes.read(recipe, [*overrides, *run.overrides]).device for run in runs]
    show = None if live is None else lambda _: live.update(progress_table(runs))
    run_queue([recipe, *overrides], ListQueue(runs), jobs, devices, show=show, mps=mps, say=say, program=program)


def run_queue(
    words: Sequence[str],
    queue: Queue,
    jobs: int,
    devices: list[str],
    *,
    show: Callable[[Sequence[ChildRun]], None] | None = None,
    mps: bool = True,
    say: Callable[[str], None] = print,
    program: Sequence[str] = DEEPHOYER,
    timed: bool = True,
) -> None:
    """Executes a queue of runs that share a recipe and overrides (`words`); several on one GPU share it.

    Unless `timed`, runs do not measure the speed of the final network, and reuse processes, which saves the second that
    initializing a GPU takes.
    """
    from deephoyer.lab.train import gpu_sharing

    with ExitStack() as shared:
        environment = dict(os.environ) | ({} if timed else {UNTIMED: "1"})
        sharing = gpu_sharing.runs_per_gpu(devices, jobs)
        if sharing > 1:
            environment |= gpu_sharing.one_thread()
            environment |= shared.enter_context(gpu_sharing.mps(say, sharing)) if mps else {}
        elif jobs > 1 and not threads_asked_for():
            environment[THREADS] = str(max(1, usable_cores() // jobs))
        run_children([*program, "run", *words], environment, queue, jobs, show, say, _imports(words), not timed)


def _imports(words: Sequence[str]) -> tuple[str, ...]:
    """What the fork server loads once for all runs: modules, and images that take two seconds to unpack."""
    if not words:
        return IMPORTS
    data, _ = named(recipes.read(words[0], words[1:]).data)
    return (*IMPORTS, *(["deephoyer.lab.data.mnist:mnist"] if data == "mnist" else []))


def default_jobs() -> int:
    """The number of parallel runs: several on a GPU, which small networks leave mostly idle; one on CPUs."""
    import torch

    return max(1, min(16, usable_cores() // 2)) if torch.cuda.is_available() else 1


def progress_table(runs: Sequence[ChildRun]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for run in runs:
        table.add_row(run.title, run.line())
    return table


def result_table(runs: Sequence[ChildRun]) -> Table:
    """Sizes and accuracies, one row per run."""
    table = Table(title="sweep", title_justify="left")
    for title in (
        "",
        "nonzeros",
        "density",
        "layer widths",
        "MACs, paper's counting",
        "accuracy before",
        "accuracy after",
    ):
        table.add_column(title, justify="left" if not title else "right")
    for run in runs:
        record = run.result()
        if record is None:
            table.add_row(run.title, run.line(), "", "", "", "", "")
            continue
        total, accuracy = record["sparse"]["total"], record["accuracy"]
        table.add_row(
            run.title,
            f"{total['nonzeros']:,}",
            f"{total['nonzeros'] / total['weights']:.2%}",
            record["sparse"]["layer_widths"] or "",
            f"{total['macs_paper']:,}",
            f"{next(iter(accuracy.values())):.2%}",
            f"{next(reversed(accuracy.values())):.2%}",
        )
    return table
