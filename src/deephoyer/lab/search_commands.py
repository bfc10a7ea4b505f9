"""The commands sweep and search. `cli.py` adds them to the program; the work is done in `sweep.py` and `search.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

# A pipe has no width; tables are then as wide as they need to be.
out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)

RecipeName = Annotated[str, typer.Argument(help="a recipe's name, or a YAML file of your own")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="for every run")]
Jobs = Annotated[int, typer.Option("--jobs", min=0, help="parallel runs; 0: automatic")]
Mps = Annotated[bool, typer.Option("--mps/--no-mps", help="share a GPU with NVIDIA's MPS if available")]


def sweep(
    recipe: RecipeName,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="key=value,value,…; repeat for a product of grids")
    ] = None,
    jobs: Jobs = 0,
    mps: Mps = True,
    folder: Annotated[Path, typer.Option("--out", help="the folder for all run folders")] = Path("runs"),
) -> None:
    """Runs a recipe for every combination of a grid, several runs in parallel. Run it again to resume."""
    from deephoyer.lab import sweep as sweeps

    changes = overrides or []
    runs = sweeps.grid_runs(recipe, changes, grid or [], folder)
    with exit_when_interrupted(), live_table() as live:
        sweeps.run_all(recipe, changes, runs, jobs or sweeps.default_jobs(), live, mps=mps, say=say)
    out.print(sweeps.result_table(runs))
    failed = [run for run in runs if run.status != 0]
    if failed:
        say(f"{len(failed)} of {len(runs)} runs failed; the first: {failed[0].folder / 'log.txt'}")
        raise typer.Exit(1)


def search(
    recipe: RecipeName,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None, typer.Option("--vary", help="key=low..high, key=low..high:log or key=value,value,…")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="number of settings to try, over all workers")] = 20,
    maximize: Annotated[list[str] | None, typer.Option("--maximize", help="accuracy")] = None,
    minimize: Annotated[
        list[str] | None, typer.Option("--minimize", help="nonzeros, macs, parameters or seconds")
    ] = None,
    jobs: Jobs = 0,
    mps: Mps = True,
    folder: Annotated[
        Path | None, typer.Option("--out", help="the study's folder; several machines can share it on a shared disk")
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="URL of an Optuna storage, instead of a file in the study's folder")
    ] = None,
    seed: Annotated[int, typer.Option("--search-seed", min=0, help="seed of the sampler")] = 0,
    silent_after: Annotated[
        float,
        typer.Option(
            "--silent-after", min=1, help="seconds of silence after which a worker's trial is resumed by another"
        ),
    ] = 120.0,
) -> None:
    """Searches for good settings with Optuna. Run the same command again to resume, or to join as another worker."""
    from deephoyer.lab import search as searches
    from deephoyer.lab import sweep as sweeps
    from deephoyer.lab.recipe import folder_name

    changes = overrides or []
    axes = [searches.Axis.read(text) for text in vary or []]
    aims = searches.goals(maximize or [], minimize or [])
    study_folder = folder or Path("runs") / f"search-{folder_name(recipe, changes)}"
    study = searches.Search(recipe, changes, axes, aims, trials, study_folder, storage, seed, silent_after)
    out.print(f"study {study_folder}: {study.done()} of {trials} trials finished")
    with exit_when_interrupted(), live_table() as live:
        parallel = jobs or sweeps.default_jobs()
        devices = [study.device()] * parallel
        show = None if live is None else lambda busy: live.update(sweeps.progress_table(busy))
        sweeps.run_queue([recipe, *changes], study, parallel, devices, show=show, mps=mps, say=say)
    _show(study, study_folder)


def _show(study: Any, folder: Path) -> None:
    """Prints the Pareto front, then the other trials; draws a figure if there are two objectives."""
    table = Table(title=f"{study.done()} trials; ● Pareto-optimal", title_justify="left")
    table.add_column("")
    for aim in study.aims:
        table.add_column(str(aim), justify="right")
    table.add_column("settings")
    rows = study.rows()
    for chosen, values, best in sorted(rows, key=lambda row: not row[2]):
        table.add_row("●" if best else "", *(f"{value:,.6g}" for value in values), " ".join(chosen))
    out.print(table)
    for chosen, why in study.failures():
        say(f"failed: {' '.join(chosen)}: {why}")
    if len(study.aims) == 2 and rows:
        from deephoyer.lab.report.figures.style import save
        from deephoyer.lab.report.figures.trials import trials

        figure = trials([str(aim) for aim in study.aims], [(values, best) for _, values, best in rows])
        out.print(f"figure: {save(figure, folder, 'front')[0]}")


@contextmanager
def live_table() -> Iterator[Any]:
    """A table that is kept up to date; None where there is no terminal."""
    if not out.is_terminal:
        yield None
        return
    from rich.live import Live

    with Live(console=out, refresh_per_second=4) as live:
        yield live


@contextmanager
def exit_when_interrupted() -> Iterator[None]:
    """Ctrl-C says how to resume, and exits with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted. Run the same command again to resume from the last checkpoints.")
        raise typer.Exit(130) from None


def say(text: str) -> None:
    errors.print(f"deephoyer: {text}", markup=False)
