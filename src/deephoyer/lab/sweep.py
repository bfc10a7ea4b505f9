"""A grid of overrides: every combination is a run, several at once, a table at the end. The runs' processes are in
`processes.py`; choosing settings by what came out before is `search.py`."""

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
from deephoyer.lab.processes import DEEPHOYER, IMPORTS, UNTIMED, ListedMembers, Member, Queue, conduct


def members(recipe: str, overrides: Sequence[str], grid: Iterable[str], folder: Path) -> list[Member]:
    """Every combination of the grid's values, each checked before anything starts.

    >>> [m.title for m in members("demo", [], ["seed=0,1"], Path("runs"))]
    ['seed=0', 'seed=1']
    """
    axes = []
    for axis in grid:
        key, equals, values = axis.partition("=")
        if not equals or not key or not values:
            raise UserError(f"--grid {axis!r}: write key=value,value,… like regularize.strength=1e-4,2e-4.")
        axes.append([f"{key}={value}" for value in values.split(",")])
    made = []
    for chosen in itertools.product(*axes):
        every = [*overrides, *chosen]
        recipes.read(recipe, every)
        made.append(Member(list(chosen), folder / recipes.folder_name(recipe, every)))
    if len({m.folder for m in made}) < len(made):
        raise UserError("--grid: a value is given twice.")
    return made


def run_all(
    recipe: str,
    overrides: Sequence[str],
    team: Sequence[Member],
    jobs: int,
    live: Live | None,
    *,
    mps: bool = True,
    say: Callable[[str], None] = print,
    program: Sequence[str] = DEEPHOYER,
) -> None:
    """Runs the members, `jobs` at a time. Without `mps`, members on one GPU take turns."""
    devices = [recipes.read(recipe, [*overrides, *m.overrides]).device for m in team]
    show = None if live is None else lambda _: live.update(progress_table(team))
    run_queue([recipe, *overrides], ListedMembers(team), jobs, devices, show=show, mps=mps, say=say, program=program)


def run_queue(
    words: Sequence[str],
    queue: Queue,
    jobs: int,
    devices: list[str],
    *,
    show: Callable[[Sequence[Member]], None] | None = None,
    mps: bool = True,
    say: Callable[[str], None] = print,
    program: Sequence[str] = DEEPHOYER,
    timed: bool = True,
) -> None:
    """Conducts a queue of runs that all begin with these words; several on one GPU share it. Unless they are to be
    `timed`, runs leave out the seconds in which the final network's speed is measured, and follow each other in
    processes that go on, which spares each the second in which a GPU is begun with."""
    from deephoyer.lab.runs.environment import usable_cores
    from deephoyer.lab.train import gpu_sharing

    with ExitStack() as shared:
        environment = dict(os.environ) | ({} if timed else {UNTIMED: "1"})
        crowd = gpu_sharing.crowd(devices, jobs)
        if crowd > 1:
            environment |= gpu_sharing.quiet_threads()
            environment |= shared.enter_context(gpu_sharing.mps(say, crowd)) if mps else {}
        elif jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
        conduct([*program, "run", *words], environment, queue, jobs, show, say, _imports(words), not timed)


def _imports(words: Sequence[str]) -> tuple[str, ...]:
    """What runs that begin with these words share: modules, and images that would take each two seconds to unpack."""
    if not words:
        return IMPORTS
    data, _ = named(recipes.read(words[0], words[1:]).data)
    return (*IMPORTS, *(["deephoyer.lab.data.mnist:mnist"] if data == "mnist" else []))


def default_jobs() -> int:
    """Small networks leave most of a GPU idle; on CPUs two trainings at once only get in each other's way."""
    import torch

    from deephoyer.lab.runs.environment import usable_cores

    return max(1, min(16, usable_cores() // 2)) if torch.cuda.is_available() else 1


def progress_table(team: Sequence[Member]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for member in team:
        table.add_row(member.title, member.line())
    return table


def result_table(team: Sequence[Member]) -> Table:
    """What came out, one row per member."""
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
    for member in team:
        record = member.result()
        if record is None:
            table.add_row(member.title, member.line(), "", "", "", "", "")
            continue
        total, accuracy = record["sparse"]["total"], record["accuracy"]
        table.add_row(
            member.title,
            f"{total['nonzeros']:,}",
            f"{total['nonzeros'] / total['weights']:.2%}",
            record["sparse"]["layer_widths"] or "",
            f"{total['macs_paper']:,}",
            f"{next(iter(accuracy.values())):.2%}",
            f"{next(reversed(accuracy.values())):.2%}",
        )
    return table
