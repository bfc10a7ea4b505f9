"""The commands publish, verify, table and figure: arguments in, text out. `cli.py` adds them to the program.

The work is done in other modules, which are imported when a command needs them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deephoyer.errors import UserError, unknown

if TYPE_CHECKING:
    from deephoyer.lab.report.record import Record

RESULTS, FIGURES = Path("results"), ("contours", "descent", "histograms", "front", "cifar")
ResultsFolder = Annotated[Path, typer.Option("--results", help="the folder of records")]


def _place(words: list[str]) -> tuple[list[Path], dict[str, Any]]:
    """Paths, and the settings of the data on this machine (data.path=…)."""
    from deephoyer.lab import recipe as recipes
    from deephoyer.lab.choices import OF_THIS_MACHINE

    settings = [word for word in words if re.match(r"data\.\w+=", word)]
    place = recipes.choices(settings).get("data", {})
    for key in place:
        if key not in OF_THIS_MACHINE:
            raise UserError(f"data.{key}: it would be another run; only data.path and data.workers can be given here.")
    return [Path(word) for word in words if word not in settings], place


def publish(
    words: Annotated[list[str], typer.Argument(metavar="RUN... [data.path=…]", help="folders of finished runs")],
    row: Annotated[str | None, typer.Option("--as", help="the title of its row in the tables")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="its purpose: best, ablation, front, …")] = None,
    note: Annotated[list[str] | None, typer.Option("--note", help="a sentence to store in the record")] = None,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="whether to keep the network's file")] = True,
    results: ResultsFolder = RESULTS,
) -> None:
    """Writes a record and the weights of each finished run into results/: small enough to commit."""
    from deephoyer.lab.report.publish import publish as write

    runs, place = _place(words)
    for run in runs:
        record = write(run, results, row=row, tags=tag or (), notes=note or (), keep_weights=weights, place=place)
        measured, in_float32 = record.measured, record.weights.right_in_float32
        stored = "" if in_float32 is None else f" as stored in float16 ({in_float32 / measured.images:.2%} in float32)"
        nonzeros = f"{measured.total.nonzeros:,} nonzeros"
        typer.echo(f"{record.path}: {measured.accuracy:.2%}{stored}, {nonzeros}; {record.command}")


def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECORD...] [data.path=…]",
            help="records or folders of records (default: results), and where their data are on this machine",
        ),
    ] = None,
) -> None:
    """Loads published networks, evaluates them on the real test set, counts again, and compares with their records."""
    from deephoyer.lab.report.verify import verify as outcomes

    verdicts = []
    paths, place = _place(words or [])
    for outcome in outcomes(paths or [RESULTS], place):
        verdicts.append(outcome.verdict)
        typer.echo(str(outcome))
        for difference in outcome.differences:
            typer.echo(f"       {difference}")
    failed, without = verdicts.count("FAILED"), verdicts.count("weights not kept")
    verified = f"{verdicts.count('ok')} of {len(verdicts) - without} records verified"
    typer.echo(f"{verified}: equal counts, accuracy within 2 of 10,000 images, of the networks as they are stored")
    if without:
        typer.echo(f"{without} more without weights: their numbers are consistent, nothing was measured")
    if failed:
        raise typer.Exit(1)


def table(
    name: Annotated[str | None, typer.Argument(help="lenet-300-100-elements, …; default: all")] = None,
    write: Annotated[bool, typer.Option("--write", help="write docs/results.md and results/index.csv")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV; without a name, the index of all records")] = False,
    results: ResultsFolder = RESULTS,
    docs: Annotated[Path, typer.Option("--docs", help="the folder of results.md")] = Path("docs"),
) -> None:
    """Prints a table of reported and measured results, or writes the page of all tables and the index of records."""
    from deephoyer.files import write_atomically
    from deephoyer.lab.report.alexnet_layers import NAME, alexnet_layers
    from deephoyer.lab.report.index import INDEX, index
    from deephoyer.lab.report.paper_tables import paper_table
    from deephoyer.lab.report.results_page import page, section

    records = _records(results)
    if name is not None:
        if write:
            raise UserError("--write is for the whole page; leave out the table's name.")
        if name == NAME:
            by_layer = alexnet_layers(records)
            typer.echo(by_layer.csv() if as_csv else by_layer.markdown() + "\n", nl=False)
            return
        chosen = paper_table(name)
        typer.echo(chosen.table(records).csv() if as_csv else section(chosen, records), nl=False)
    elif write:
        write_atomically(docs / "results.md", page(records, docs / "figures").encode())
        write_atomically(results / INDEX, index(records, results).csv().encode())
        typer.echo(f"wrote {docs / 'results.md'} and {results / INDEX} from {len(records)} records")
    else:
        typer.echo(index(records, results).csv() if as_csv else page(records, docs / "figures"), nl=False)


def figure(
    name: Annotated[str, typer.Argument(help=", ".join(FIGURES))],
    run: Annotated[Path | None, typer.Argument(help="the folder of a finished run, for histograms")] = None,
    results: ResultsFolder = RESULTS,
    folder: Annotated[Path, typer.Option("--out", help="the folder of the figure")] = Path("docs/figures"),
) -> None:
    """Draws a figure as SVG and PNG, reproducibly."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    if (name == "histograms") != (run is not None):
        raise UserError("histograms needs the folder of a finished run, and is the only figure that takes one.")
    from deephoyer.lab.report import figures

    if name == "histograms" and run is not None:
        drawn = {f"histograms-{figures.model_of(run)}": figures.histograms(run)}
    elif name == "cifar":
        drawn = {"cifar": figures.cifar_front(_records(results))}
    elif name == "front":
        records = _records(results)
        drawn = {"front": figures.mnist_front(records)}
        if any(record.protocol == "held-out" for record in records):
            drawn["front-held-out"] = figures.mnist_front(records, "held-out")
    else:
        drawn = {name: figures.contours() if name == "contours" else figures.descent()}
    for title, drawing in drawn.items():
        for path in figures.save(drawing, folder, title):
            typer.echo(f"wrote {path}")


def _records(results: Path) -> list[Record]:
    """All records; the default folder need not exist, another one must."""
    from deephoyer.lab.report.record import read_all

    if results != RESULTS and not results.is_dir():
        raise UserError(f"{results}: no such folder.")
    return read_all(results)
