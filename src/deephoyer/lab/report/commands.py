"""The commands of this room: publish, verify, table, figure. `cli.py` hooks them in.

They read words, call the rooms, and print; heavy modules are imported when a command needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deephoyer.errors import UserError, unknown

if TYPE_CHECKING:
    from deephoyer.lab.report.record import Record

RESULTS, FIGURES = Path("results"), ("contours", "descent", "histograms", "front", "cifar")
ResultsFolder = Annotated[Path, typer.Option("--results", help="the folder of records")]


def publish(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    row: Annotated[str | None, typer.Option("--as", help="the title of its row in the tables")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="what it is for: ablation, front, …")] = None,
    base: Annotated[str | None, typer.Option("--recipe", help="the recipe it varies; the nearest by default")] = None,
    name: Annotated[str | None, typer.Option("--name", help="the record's name, for a single run")] = None,
    results: ResultsFolder = RESULTS,
) -> None:
    """Writes a record and the weights of each finished run into results/: small enough to commit."""
    from deephoyer.lab.report.publish import name_of
    from deephoyer.lab.report.publish import publish as write

    if name is not None and len(runs) > 1:
        raise UserError(f"--name is for a single run; {len(runs)} are given.")
    for run in runs:
        place = results / (name or name_of(run, base))
        record = write(run, place, row=row, tags=tag or (), base=base)
        measured = record.measured
        typer.echo(f"{place}: {measured.accuracy:.2%}, {measured.total.nonzeros:,} nonzeros; {record.command}")


def verify(
    paths: Annotated[list[Path] | None, typer.Argument(help="records, or folders of them; results by default")] = None,
) -> None:
    """Loads published networks, evaluates them on the real test set, counts again, and compares with their records."""
    from deephoyer.lab.report.verify import verify as outcomes

    failed = count = 0
    for outcome in outcomes(paths or [RESULTS]):
        count += 1
        failed += bool(outcome.differences)
        typer.echo(str(outcome))
        for difference in outcome.differences:
            typer.echo(f"       {difference}")
    typer.echo(f"{count - failed} of {count} records verified: counts alike, accuracy within 2 images of 10,000")
    if failed:
        raise typer.Exit(1)


def table(
    name: Annotated[str | None, typer.Argument(help="lenet-300-100-elements, …; all where none is named")] = None,
    write: Annotated[bool, typer.Option("--write", help="writes results.md into the docs")] = False,
    results: ResultsFolder = RESULTS,
    docs: Annotated[Path, typer.Option("--docs", help="the folder of results.md")] = Path("docs"),
) -> None:
    """Prints a table of reported and measured results as Markdown, or writes the page of all of them."""
    from deephoyer.files import write_atomically
    from deephoyer.lab.report.page import page
    from deephoyer.lab.report.tables import table as made

    records = _records(results)
    if name is not None:
        if write:
            raise UserError("--write is for the whole page; leave out the table's name.")
        typer.echo(made(name, records), nl=False)
        return
    text = page(records, docs / "figures")
    if write:
        write_atomically(docs / "results.md", text.encode())
        typer.echo(f"wrote {docs / 'results.md'} from {len(records)} records")
    else:
        typer.echo(text, nl=False)


def figure(
    name: Annotated[str, typer.Argument(help=", ".join(FIGURES))],
    run: Annotated[Path | None, typer.Argument(help="the folder of a finished run, for histograms")] = None,
    results: ResultsFolder = RESULTS,
    folder: Annotated[Path, typer.Option("--out", help="where the figure goes")] = Path("docs/figures"),
) -> None:
    """Draws a figure as SVG and PNG: the same numbers, the same bytes."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    if (name == "histograms") != (run is not None):
        raise UserError("histograms needs the folder of a finished run, and is the only figure that takes one.")
    from deephoyer.lab.report import figures

    if name == "histograms" and run is not None:
        drawn = {f"histograms-{figures.model_of(run)}": figures.histograms(run)}
    elif name == "cifar":
        drawn = {"cifar": figures.cifar(_records(results))}
    elif name == "front":
        records = _records(results)
        drawn = {"front": figures.front(records)}
        if any(record.protocol == "held-out" for record in records):
            drawn["front-held-out"] = figures.front(records, "held-out")
    else:
        drawn = {name: figures.contours() if name == "contours" else figures.descent()}
    for title, made in drawn.items():
        for path in figures.save(made, folder, title):
            typer.echo(f"wrote {path}")


def _records(results: Path) -> list[Record]:
    """A checkout without results has no records; a folder that was asked for by name must be there."""
    from deephoyer.lab.report.record import read_all

    if results != RESULTS and not results.is_dir():
        raise UserError(f"{results}: there is no such folder of records.")
    return read_all(results)
