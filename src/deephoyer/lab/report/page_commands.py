"""The command `report`: a page to look at, for one run or several. `cli.py` hooks it in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deephoyer.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(help="the folder of a run; several are compared")],
    target: Annotated[Path | None, typer.Option("--out", help="the file to write")] = None,
) -> None:
    """Writes a page about a run, or one that compares several: one HTML file, readable offline."""
    from deephoyer.lab.report import run_page

    if target is not None and target.is_dir():
        raise UserError(f"{target} is a folder; name a file to write, like {target / 'report.html'}.")
    if len(runs) > 1:
        typer.echo(f"wrote {run_page.write_comparison(runs, target or Path('comparison.html'))}")
        return
    path, facts = run_page.write(runs[0], target)
    for line in facts.missing:
        typer.echo(f"missing: {line}", err=True)
    typer.echo(f"wrote {path}")
