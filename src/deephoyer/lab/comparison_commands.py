"""The command `deephoyer compare`: runs a comparison, shows its results, and writes its file, figures and page.

Which runs a comparison takes is in `comparison.py`, its results file in `report/comparison_results.py`, the page in
`report/methods_page.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from deephoyer.lab.search_commands import Jobs, Mps, exit_when_interrupted, live_table, out, say

if TYPE_CHECKING:
    from deephoyer.lab.comparison import Comparison, Job

DOCS = Path("docs")


def compare(
    name: Annotated[str, typer.Argument(help="a comparison's name, or your own YAML file; `all` only writes the page")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="for every run")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="run only this method; may be repeated")] = None,
    jobs: Jobs = 0,
    mps: Mps = True,
    minutes: Annotated[float | None, typer.Option(min=0, help="start no run after this time")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="only print the number of runs and epochs")] = False,
    seconds_an_epoch: Annotated[
        float, typer.Option(min=0, help="time per epoch ÷ parallel runs; --plan then estimates the total")
    ] = 0.0,
    seconds_a_run: Annotated[
        float, typer.Option(min=0, help="time per run besides its epochs ÷ parallel runs; for --plan")
    ] = 0.0,
    write: Annotated[
        bool, typer.Option("--write", help="save the results in results/methods and write docs/methods.md")
    ] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="--write, and a record of each row's first fresh seed at the middle size")
    ] = False,
) -> None:
    """Compares methods by one protocol: same start, epochs, number of settings, sizes. Run it again to resume."""
    from deephoyer.lab import sweep as sweeps
    from deephoyer.lab.comparison import Comparison
    from deephoyer.lab.report import comparison_results

    if name == "all":
        _write_page()
        return
    comparison = Comparison(name, overrides or [], only or [], minutes)
    stored = comparison_results.read(comparison.name, comparison.protocol)
    if write or publish:
        comparison_results.refuse_another(comparison)  # before anything runs
    if stored is not None and (count := comparison.recall(stored.content)):
        out.print(f"{count:,} results are in {comparison_results.RESULTS} already and are not run again.")
    unpublished = _unpublished(comparison) if publish else []
    comparison.run_again(unpublished)  # for a record the network is needed, too
    runs, done = comparison.cost()
    left = sum(epochs for folder, epochs in runs.items() if folder not in done)
    hours = (left * seconds_an_epoch + (len(runs) - len(done)) * seconds_a_run) / 3600
    out.print(
        f"{len(done):,} of {len(runs):,} runs are finished (final seeds included; grids may still be extended). "
        f"{left:,} epochs are left{f': {hours:.2f} hours' if hours else ''}."
    )
    if not plan:
        with exit_when_interrupted(), live_table() as live:
            parallel = jobs or sweeps.default_jobs()
            show = None if live is None else lambda busy: live.update(sweeps.progress_table(busy))
            devices = [comparison.device] * parallel
            words = [comparison.protocol.base, *comparison.overrides]
            sweeps.run_queue(words, comparison, parallel, devices, show=show, mps=mps, say=say, timed=False)
    if done or stored is not None or not plan:
        out.print(_table(comparison))
        for line in _without_setting(comparison):
            out.print(line, markup=False)
    if publish:
        _publish(comparison)
    if write or publish:
        whole = Comparison(name, overrides or []) if only else comparison  # keeps the results of the other methods
        if stored is not None and only:
            whole.recall(stored.content)
            whole.run_again(unpublished)
        out.print(f"wrote {comparison_results.write(whole)}")
        _draw(comparison.name)
        _write_page(comparison.source)


def _unpublished(comparison: Comparison) -> list[Job]:
    """The runs to be published that have no record yet."""
    from deephoyer.lab.report.record import RESULTS, read_all

    published = {(record.digest, record.seed) for record in read_all(RESULTS)}
    return [job for job in comparison.jobs_to_publish() if (comparison.recipe(job).digest(), job.seed) not in published]


def _publish(comparison: Comparison) -> None:
    from deephoyer.lab.report.comparison_results import TAG
    from deephoyer.lab.report.publish import publish

    for job in _unpublished(comparison):
        if comparison.outcome(job) is not None:
            record = publish(comparison.result_folder(job), row=job.method, tags=[TAG])
            out.print(f"published {record.path}")


def _table(comparison: Comparison) -> Table:
    """The results so far: a row for each method and size."""
    from deephoyer.lab.comparison import Job

    table = Table(title=comparison.protocol.about, title_justify="left")
    for title in ("method", "size", "chosen", "seeds", "test accuracy", "left"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for method in comparison.methods:
        for size in comparison.protocol.sizes:
            value = comparison.chosen(method, size)
            seeds = comparison.protocol.fresh_seeds
            outcomes = [comparison.outcome(Job(method, value, s, size)) for s in seeds] if value is not None else []
            runs = [run for run in outcomes if run is not None]
            accuracy = f"{100 * sum(run.accuracy for run in runs) / len(runs):.2f} %" if runs else ""
            left = f"{100 * sum(run.share for run in runs) / len(runs):.3g} %" if runs else ""
            chosen = "" if value is None else f"{value:g}"
            table.add_row(method, f"{100 * size:g} %", chosen, str(len(runs)), accuracy, left)
    return table


def _without_setting(comparison: Comparison) -> list[str]:
    """Why methods have no setting at a size, a line for each."""
    from deephoyer.lab.comparison import Job

    lines = []
    for method, entry in comparison.methods.items():
        for size in filter(comparison.protocol.chooses_at, comparison.protocol.sizes):
            if comparison.chosen(method, size) is None:
                first = Job(method, entry.values[0], 0, size)
                why = comparison.failure(first) if comparison.outcome(first) is None else None
                lines += [f"{method}, {100 * size:g} %: {why}"] if why else []
    return lines


def _draw(name: str) -> None:
    """The figures of a comparison that comes with the package."""
    from deephoyer.lab import comparison_protocol
    from deephoyer.lab.report import comparison_results
    from deephoyer.lab.report.figures.methods import every_seed, losses_near_best
    from deephoyer.lab.report.figures.style import save

    if name not in comparison_protocol.names():
        return
    protocol = comparison_protocol.read(name)
    results = comparison_results.read(name, protocol)
    if results is None:
        return
    percent = {
        size: {method: [100 * a for a in seeds.values()] for method, seeds in results.accuracies(size).items()}
        for size in protocol.sizes
    }
    if any(accuracies for methods in percent.values() for accuracies in methods.values()):
        save(every_seed(protocol.about, percent), DOCS / "figures", f"methods-{name}")
    losses = {method: lost for method in protocol.methods if (lost := results.losses_near_best(method))}
    if losses:
        title = f"{protocol.about}, {100 * protocol.middle:g} %"
        save(losses_near_best(title, losses), DOCS / "figures", f"strengths-{name}")


def _write_page(source: str | None = None) -> None:
    """The page of all comparisons of the package; or that of the user's own, by its file."""
    from deephoyer.files import folder_at, write_atomically
    from deephoyer.lab.comparison_protocol import names
    from deephoyer.lab.report import methods_page

    if source is None or Path(source).stem in names():
        path, text = DOCS / "methods.md", methods_page.page(figures=DOCS / "figures")
    else:
        path, text = DOCS / f"methods-{Path(source).stem}.md", methods_page.page_of_own(source)
    folder_at(DOCS)
    write_atomically(path, text.encode())
    out.print(f"wrote {path}")
