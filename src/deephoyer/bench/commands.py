"""The command `bench`: measures on this machine, prints a table of ratios, writes a record. `cli.py` hooks it in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deephoyer.errors import UserError, unknown

WHAT = ("regularizer", "step", "epochs")
DEVICES = ("auto", "cpu", "cuda")


def bench(
    what: Annotated[str, typer.Argument(help="regularizer, step (of training; CPU) or epochs")] = "regularizer",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where it is")] = "auto",
    models: Annotated[str | None, typer.Option(help="comma-separated; by default what suits the device")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="for each measurement of the regularizer")] = 0.25,
    epochs: Annotated[int | None, typer.Option(min=2, help="a stage; the first is not counted")] = None,
    together: Annotated[int, typer.Option(min=0, help="with epochs: so many ResNet-56 at once against one")] = 0,
    check: Annotated[bool, typer.Option("--check", help="compare with float64 autograd, look for waits")] = False,
    target: Annotated[Path | None, typer.Option("--out", help="a JSON file for the record")] = None,
) -> None:
    """Measures what the penalty costs here, side by side with the usual ways of writing it."""
    from deephoyer.bench.tables import show, write
    from deephoyer.lab.runs.environment import pick_device

    if what not in WHAT:
        raise unknown("benchmark", what, WHAT)
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if what == "step" and device == "cuda":
        raise UserError("bench step: measures on the CPU; leave out --device.")
    place = pick_device(device).type
    chosen = tuple(models.split(",")) if models else ()
    if what == "regularizer":
        from deephoyer.bench import regularizer

        record: dict[str, Any] = {}
        for record in regularizer.measured(regularizer.Options(place, chosen, budget=seconds, check=check)):
            write(target, record)
        show(regularizer.rows(record), regularizer.notes(record))
    elif what == "step":
        from deephoyer.bench import step

        if chosen not in ((), ("lenet-300-100",)):
            raise UserError("bench step: measures lenet-300-100 alone; leave out --models.")
        record = step.measured(epochs=3 if epochs is None else epochs)
        write(target, record)
        show(step.rows(record))
    else:
        record = _epochs(place, chosen, epochs, together, target)
    for failed, why in record.get("errors", {}).items():
        typer.echo(f"{failed}: {why}", err=True)


def _epochs(
    place: str, chosen: tuple[str, ...], count: int | None, at_once: int, target: Path | None
) -> dict[str, Any]:
    from deephoyer.bench import epochs, together
    from deephoyer.bench.clock import machine
    from deephoyer.bench.tables import show, write

    if at_once and place != "cuda":
        raise UserError("bench epochs --together: needs a GPU for the runs to share.")
    record: dict[str, Any] = {"machine": machine(place)}
    for case in chosen or ([] if at_once else epochs.usual(place)):
        if case not in epochs.CASES:
            raise unknown("network of this benchmark", case, epochs.CASES)
        record[case] = epochs.times(case, place, count or epochs.EPOCHS[case])
        write(target, record)
    if len(record) > 1:
        show(epochs.rows(record))
    if at_once:
        record["together"] = found = together.together(at_once, place, count or epochs.EPOCHS["resnet-56"])
        show(together.rows(found), found["notes"])
    write(target, record)
    return record
