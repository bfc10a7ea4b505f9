"""What a finished run comes to: accuracies, counts, the smaller network; a record, and tables to print.

The record is `summary.json` in the run's folder. Training is over when this is called.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from deephoyer.summary import Summary, summary
from deephoyer.train import environment
from deephoyer.train.run import Run

FORMAT = "deephoyer-result-1"


def finish(run: Run) -> dict[str, Any]:
    """Measures the final network, writes the record, and gives it; a run measured before is read again."""
    if (run.folder / "summary.json").exists():
        return run.folder.read_json("summary.json")
    example = run.data.floats(run.data.test_x[:1])
    record = {
        "format": FORMAT,
        "recipe": run.recipe.model_dump(mode="json"),
        "environment": environment.describe(run.device),
        "protocol": run.recipe.select,
        "selected": run.state.selected,
        "accuracy": run.state.accuracy,
        "seconds": {stage: round(s, 1) for stage, s in run.state.seconds.items()},
        "sparse": summary(run.model, example, latency=False).to_json(),
    }
    run.folder.write_json("summary.json", record)
    return record


PROTOCOLS = {
    "held-out": "the epoch best on held-out training images",
    "test-best": "the epoch best on the test images (the paper's protocol)",
}


def tables(record: dict[str, Any]) -> list[Table]:
    """The record as a person reads it."""
    sparse = Summary.from_json(record["sparse"])
    return [sparse.table(), _accuracies(record)]


def _accuracies(record: dict[str, Any]) -> Table:
    table = Table(title=f"test accuracy; selected: {PROTOCOLS[record['protocol']]}", title_justify="left")
    for stage in record["accuracy"]:
        table.add_column(stage, justify="right")
    table.add_column("lost", justify="right")
    accuracy = record["accuracy"]
    lost = 100 * (accuracy["dense"] - accuracy["finetuned"])
    table.add_row(*(f"{100 * a:.2f} %" for a in accuracy.values()), f"{lost:.2f} points")
    return table
