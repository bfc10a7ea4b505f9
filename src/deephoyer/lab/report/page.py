"""`docs/results.md`: all tables on one page, made from the records and never by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deephoyer.lab.report.record import Record
from deephoyer.lab.report.tables import NAMES, table

HEAD = """\
# Results on MNIST and CIFAR-10

<!-- Made by `deephoyer table --write` from the records under results/. Don't edit it: a test compares. -->

{count}. *Reported* numbers are as their authors printed them; *measured* ones are ours,
from the networks themselves: every record holds its recipe, its metrics and its weights, and

    deephoyer verify results

loads each, evaluates it on the real test images and counts again; two images of 10,000 may fall otherwise
on another machine, counts may not.

Two protocols, never mixed. *test-best* trains on all training images and reports the epoch that is best on
the test images, as the paper does; it flatters. *held-out* keeps a tenth of the training images away from
training and selects on those; test images decide nothing.
"""

FIGURES = {
    "front": "Accuracy against size, selected on the test images (test-best)",
    "front-held-out": "Accuracy against size, selected on held-out images",
    "cifar": "Accuracy against MACs on CIFAR-10",
    "histograms-lenet-300-100": "Nonzero weights of LeNet-300-100 at three stages",
    "histograms-lenet-5": "Nonzero weights of LeNet-5 at three stages",
    "contours": "l1 and Hoyer in two dimensions",
    "descent": "Hoyer-Square on twenty normal numbers",
}


def page(records: Sequence[Record], figures: Path) -> str:
    """The text of the page; figures that are there are shown at its end."""
    runs = len(records)
    parts = [HEAD.format(count="One published run" if runs == 1 else f"{runs} published runs")]
    parts += [table(name, records) for name in NAMES]
    there = [name for name in FIGURES if (figures / f"{name}.svg").exists()]
    if there:
        parts.append("## Figures\n\n" + "\n".join(f"![{FIGURES[name]}](figures/{name}.svg)\n" for name in there))
    return "\n".join(parts)
