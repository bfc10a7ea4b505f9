"""What others reported, as they printed it: the rows of the DeepHoyer paper's tables, and of work published since.

Yang, Wen, Li, "DeepHoyer: Learning Sparser Neural Network with Differentiable Scale-Invariant Sparsity Measures", ICLR
2020: tables 1 to 5 and those of its appendix, whose own rows count filters and channels that are zero in a layer as
gone. The rows are in `literature.csv`; `measured` alone is ours, of networks that their authors made public
(`benchmarks/public_networks.py`). Which epoch a row was selected by is said where its source says it. Progressive ADMM
(arXiv:1903.09769) prints 246 times fewer weights on LeNet-5 with "(almost) zero accuracy loss"; their number follows
from that ratio. Of AlexNet `accuracy` is how much the top-5 error grew, in points.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAPER = "DeepHoyer"


@dataclass(frozen=True)
class Reported:
    """A row, in print: `accuracy` in percent, `size` in nonzero weights or MACs, or how many times `fewer` MACs.

    `layers` has the nonzeros of each layer or, of a structural row, the widths; `base` is the accuracy of the dense
    network it started from; `measured` is what their public network, or several, came to when we showed it the images.
    """

    method: str
    source: str
    accuracy: str
    size: str = ""
    left: str = ""
    layers: str = ""
    fewer: float | None = None
    base: str = ""
    top5: str = ""
    measured: str = ""

    @property
    def number(self) -> float | None:
        """The size as a number.

        >>> Reported("", "", "98.4", "21.8k").number
        21800.0
        """
        units = {"k": 1e3, "M": 1e6}
        return float(self.size.rstrip("kM")) * units.get(self.size[-1], 1) if self.size else None

    @property
    def percent(self) -> float | None:
        """The accuracy as a number: as printed, or else as measured; of a range the lower end, of a mere gain none.

        >>> Reported("", "", "93.8–94.0").percent
        93.8
        """
        first = (self.accuracy or self.measured).partition("–")[0]
        return float(first) if first[:1].isdigit() else None


@cache
def reported(table: str) -> tuple[Reported, ...]:
    """The rows of one of `paper_tables.TABLES`.

    >>> reported("lenet-5-elements")[0].size
    '430.5k'
    """
    with open(Path(__file__).with_suffix(".csv"), encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("table") == table]
    return tuple(Reported(**{**row, "fewer": float(row["fewer"]) if row["fewer"] else None}) for row in rows)  # type: ignore[arg-type]
