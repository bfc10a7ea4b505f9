"""`docs/results.md`: the paper's tables on one page, made from the records and never by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deephoyer.lab.report.paper_tables import TABLES, PaperTable, comparison
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.series import Series

MNIST = {
    "nonzeros": "Nonzero weights, biases not counted; *by layer* are means.",
    "MACs": "Multiply-accumulates, zero filters and channels of each layer discounted (the paper's counting); *widths* "
    "are the best seed's.",
}
CIFAR = (
    "The paper's counting discounts filters and channels that are zero in a layer, whether or not they can be taken "
    "out; *executed* are those of the network that is left after compaction (of others: as they report it). *Measured "
    "by us* are networks that their authors made public, counted and shown the test images by us. *Best test epoch* "
    "stands beside rows of the last epoch, as the runs saw it. *Its start* is the accuracy a run began with. "
    "*The paper's front there* is straight between its four points and flat past the last; in brackets how far we are "
    "above it. *Faster* is the dense network's time over the compacted one's, at that "
    "batch. *Per layer* runs compact with `joints: gather`; all but the dense ones had teachers."
)
NOT_RUN = "Not run by us yet: the paper's numbers and those it compares with."
NO_SETTINGS = " No run of ours has the paper's very settings yet."
SEARCH = (
    "`deephoyer run compare/lenet-5 regularize.penalty=l1 …`: the same epochs, the same number of strengths tried on "
    "held-out images, the same size asked for, no shifts and no teachers ([how](lessons.md)). *Left* are nonzeros, or "
    "MACs by the paper's counting."
)
FIGURES = {
    "front": "Accuracy against size on MNIST, selected on the test images (test-best)",
    "front-held-out": "The same, selected on held-out images",
    "cifar": "Accuracy against MACs on CIFAR-10",
    "histograms-lenet-300-100": "Nonzero weights of LeNet-300-100 at three stages",
    "histograms-lenet-5": "Nonzero weights of LeNet-5 at three stages",
    "contours": "l1 and Hoyer in two dimensions",
    "descent": "Hoyer-Square on twenty normal numbers",
}


def page(records: Sequence[Record], figures: Path) -> str:
    """The text of the page; figures that are there are shown at its end."""
    count = "One published run" if len(records) == 1 else f"{len(records)} published runs"
    kept = sum(record.weights.file is not None for record in records)
    head = (Path(__file__).parent / "templates" / "results.md").read_text(encoding="utf-8")
    parts = [head.format(count=count, kept=kept)]
    parts += [section(table, records) for table in TABLES.values()]
    search = comparison(records)
    if search.rows:
        parts.append(f"## {search.title}\n\n{SEARCH}\n\n{search.markdown()}\n")
    shown = [f"![{about}](figures/{name}.svg)" for name, about in FIGURES.items() if (figures / f"{name}.svg").exists()]
    if shown:
        parts.append("## Figures\n\n" + "\n\n".join(shown) + "\n")
    return "\n".join(parts)


def section(table: PaperTable, records: Sequence[Record]) -> str:
    """A table with its title and what its words mean."""
    made = table.table(records)
    own = [row for row in made.rows if isinstance(row, Series)]
    if table.floor is None:
        about = f"The dense network has {table.dense:,} MACs. " + (CIFAR if table.name == "resnet-56" else "As above.")
    else:
        about = MNIST[table.counts]
    about = NOT_RUN if not own else about + ("" if any("paper-settings" in s.tags for s in own) else NO_SETTINGS)
    return f"## {table.title}\n\n{about}\n\n{made.markdown()}\n"
