"""`docs/results.md`: the paper's tables on one page, generated from the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deephoyer.lab.report.paper_tables import TABLES, PaperTable, comparison
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.series import Series

MNIST = {
    "nonzeros": "Nonzero weights without biases; *by layer*: means.",
    "MACs": "Multiply-accumulates without zero filters and channels of each layer (the paper's counting); *widths* of "
    "the best seed.",
}
CIFAR = (
    "The paper's counting leaves out filters and channels that are zero in a layer, whether or not they can be "
    "removed; *executed* MACs are those after compaction (others: as they report). *Measured by us*: the authors' "
    "public networks. *Best test epoch* is given for rows of the last epoch. *Its start*: the accuracy before the run. "
    "*The paper's front there* interpolates its four points, constant past the last; in brackets our difference. "
    "*Faster*: the dense network's time ÷ the compacted one's (GPU: only the latter channels last). *Per layer* runs "
    "compact with `joints: gather`; all but the dense ones had teachers."
)
NOT_RUN = "Not run by us yet: the numbers of the paper and of the methods it compares with."
NO_SETTINGS = " Not run by us yet with the paper's exact settings."
SEARCH = (
    "`deephoyer run compare/lenet-5 regularize.penalty=l1 …`: the same epochs, number of strengths tried on held-out "
    "images, and target size; no shifts, no teachers ([how](lessons.md)). *Left*: nonzeros, or MACs by the paper's "
    "counting."
)
FIGURES = {
    "front": "Accuracy against size on MNIST, test-best",
    "front-held-out": "The same, held-out",
    "cifar": "Accuracy against MACs on CIFAR-10",
    "histograms-lenet-300-100": "Nonzero weights of LeNet-300-100 at three stages",
    "histograms-lenet-5": "Nonzero weights of LeNet-5 at three stages",
    "contours": "Contours of l1 and Hoyer in two dimensions",
    "descent": "Hoyer-Square on twenty normal random numbers",
}


def page(records: Sequence[Record], figures: Path) -> str:
    """The text of the page, with the existing figures at its end."""
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
    """A table with its title and an explanation."""
    rendered = table.table(records)
    ours = [row for row in rendered.rows if isinstance(row, Series)]
    if table.floor is None:
        about = f"The dense network has {table.dense:,} MACs. " + (CIFAR if table.name == "resnet-56" else "As above.")
    else:
        about = MNIST[table.counts]
    about = NOT_RUN if not ours else about + ("" if any("paper-settings" in s.tags for s in ours) else NO_SETTINGS)
    return f"## {table.title}\n\n{about}\n\n{rendered.markdown()}\n"
