"""The commands `report` (an HTML page about runs) and `explain` (the coupled channels of a network)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deephoyer.errors import UserError


def report(
    runs: Annotated[list[Path] | None, typer.Argument(help="a run's folder; several are compared")] = None,
    target: Annotated[Path | None, typer.Option("--out", help="the file to write")] = None,
    results: Annotated[bool, typer.Option("--results", help="all published runs in ./results instead")] = False,
) -> None:
    """Writes one HTML file about a run, a comparison of several runs, or all published runs."""
    from deephoyer.lab.report import run_page

    if target is not None and target.is_dir():
        raise UserError(f"{target} is a folder; name a file to write, like {target / 'report.html'}.")
    if bool(runs) == results:
        raise UserError("report: give the folder of a run, several of them, or --results.")
    if results or runs is None:
        from deephoyer.lab.report.record import read_all

        folder = Path("results")
        typer.echo(f"wrote {run_page.write_results(read_all(folder), folder, target or Path('results.html'))}")
        return
    if len(runs) > 1:
        typer.echo(f"wrote {run_page.write_comparison(runs, target or Path('comparison.html'))}")
        return
    path, facts = run_page.write(runs[0], target)
    for line in facts.missing:
        typer.echo(f"missing: {line}", err=True)
    typer.echo(f"wrote {path}")


def explain(
    source: Annotated[str, typer.Argument(help="the folder of a run, a stored network, or a model's name")],
    model: Annotated[str | None, typer.Option("--model", help="the model, for a file of plain weights")] = None,
) -> None:
    """Shows which channels of a network are coupled, which can be removed, and which cannot and why."""
    import torch

    from deephoyer.explain import explain as explanation_of
    from deephoyer.lab import models
    from deephoyer.lab.open_network import chosen_model, open_network

    if Path(source).exists():
        network, example = open_network(Path(source), chosen_model(model))
    else:
        network, example = models.make(source), torch.zeros(2, *models.input_shape(source))
    explanation = explanation_of(network, example)
    typer.echo(str(explanation))
    removable = f"{explanation.removable:,} of {explanation.parameters:,} parameters"
    typer.echo(f"{removable} belong to channels that can be removed")
