"""Results that others printed, repeated with their own settings: the paper's on MNIST, and those of three methods.

Each has the command that repeats it; our numbers come from all records with the digest of that command's recipe. The
verdict says whether the result was reproduced, or by how much it was missed. Results that are only quoted are in
`literature.py`.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from deephoyer.lab.recipe import Command
from deephoyer.lab.report.record import Record

SCRIPTS = "data=mnist finetune.weight_decay=1e-4"
"""Where the authors' released scripts differ from the paper's appendix."""
HOYER = "regularize.penalty=hoyer regularize.strength={} prune.value={}"
TRANSFORMED = "regularize.penalty=transformed-l1 regularize.strength=2e-5 prune.value={}"


@dataclass(frozen=True)
class PrintedResult:
    """An accuracy in percent and a size, nonzero weights or MACs by the paper's counting; `words` repeat it."""

    title: str
    words: str
    accuracy: float
    size: float
    macs: bool = False

    def ours(self, records: Sequence[Record]) -> list[Record]:
        """Those of the records that repeat it."""
        digest = Command.parse(self.words).read().digest()
        return [record for record in records if record.digest == digest]

    @property
    def printed(self) -> str:
        return f"{self.size:,.0f} at {self.accuracy:g} %"

    @property
    def command(self) -> str:
        return shlex.join(shlex.split(self.words))


def _both(title: str, words: str, accuracy: float, size: float, macs: bool = False) -> list[PrintedResult]:
    return [
        PrintedResult(f"{title}, by the appendix", words, accuracy, size, macs),
        PrintedResult(f"{title}, by the scripts", f"{words} {SCRIPTS}", accuracy, size, macs),
    ]


PAPER = [
    *_both("LeNet-300-100, transformed l1", f"paper/lenet-300-100 {TRANSFORMED.format(0.3)}", 98.4, 6400),
    *_both("LeNet-300-100, Hoyer", f"paper/lenet-300-100 {HOYER.format(0.02, 0.05)}", 98.4, 6000),
    *_both("LeNet-300-100, Hoyer-Square", "paper/lenet-300-100", 98.4, 4600),
    *_both("LeNet-300-100, Group-HS", "paper/lenet-300-100-structure", 98.2, 16500, True),
    *_both("LeNet-5, transformed l1", f"paper/lenet-5 {TRANSFORMED.format(0.6)}", 99.2, 5400),
    *_both("LeNet-5, Hoyer", f"paper/lenet-5 {HOYER.format(0.01, 0.08)}", 99.2, 4000),
    *_both("LeNet-5, Hoyer-Square", "paper/lenet-5", 99.2, 3500),
    *_both("LeNet-5, Group-HS", "paper/lenet-5-structure", 99.0, 169_900, True),
]

_VD = (
    "pretrain=null finetune=null epoch_selection=last regularize.epochs=200 regularize.strength=0 "
    "'method={name: sparse-vd, warmup: 20}' 'prune={rule: absolute, value: 0.0498}'"
)
"""From random weights, 200 epochs of Adam from 1e-3 to 0, the divergence rising over the first 20; what has log α > 3
goes, and nothing is finetuned."""
_SNIP = (
    "'data={{name: mnist, normalize: true}}' method=snip regularize=null finetune=null "
    "'pretrain={{epochs: 250, optimizer: sgd, lr: 0.1, weight_decay: 5e-4, schedule: step, "
    "milestones: [46, 92, 138, 185, 231]}}' 'prune={{rule: absolute, target: {{density: {}}}}}'"
)
"""250 epochs of SGD with momentum from 0.1, a tenth of that after every 25,000 steps, of which an epoch has 540."""
_L0 = (
    "pretrain=null epoch_selection=last regularize.epochs=200 regularize.schedule=constant regularize.weight_decay=0 "
    "regularize.strength=0 'method={{name: l0, strength: 0.1, closed: 0.5}}' 'prune.target={{macs: {}}}'"
)
"""From random weights, 200 epochs of Adam at 1e-3 and λ = 0.1/N. The paper used a different λ for each layer; here
the network is pruned to the printed sizes, and finetuned."""

METHODS = [
    PrintedResult("sparse variational dropout, LeNet-300-100", f"compare/lenet-300-100 {_VD}", 98.08, 266_200 / 68),
    PrintedResult("sparse variational dropout, LeNet-5", f"compare/lenet-5 {_VD}", 99.25, 430_500 / 280),
    PrintedResult("SNIP, LeNet-300-100", f"compare/lenet-300-100 {_SNIP.format(0.05)}", 98.4, 13_300),
    PrintedResult("SNIP, LeNet-5", f"compare/lenet-5 {_SNIP.format(0.02)}", 99.2, 8_600),
    PrintedResult("l0, LeNet-300-100, MACs", f"compare/lenet-300-100-structure {_L0.format(0.1)}", 98.2, 26_600, True),
    PrintedResult("l0, LeNet-5, MACs", f"compare/lenet-5-structure {_L0.format(0.17)}", 99.0, 390_700, True),
]


TITLES = ["", "printed", "seeds", "ours", "verdict", "`deephoyer run`"]


def table(results: Sequence[PrintedResult], records: Sequence[Record]) -> list[list[str]]:
    """One row for each result that has records: its title, what was printed, ours, the verdict, and the command."""
    repeated = [(printed, printed.ours(records)) for printed in results]
    return [_row(printed, ours) for printed, ours in repeated if ours]


def _row(printed: PrintedResult, ours: Sequence[Record]) -> list[str]:
    accuracies = [100 * record.measured.accuracy for record in ours]
    totals = [record.measured.total for record in ours]
    accuracy = statistics.fmean(accuracies)
    size = statistics.fmean(total.macs_paper if printed.macs else total.nonzeros for total in totals)
    spread = f" ± {statistics.stdev(accuracies):.2f}" if len(ours) > 1 else ""
    mean = f"{size:,.0f} at {accuracy:.2f}{spread} %"
    return [
        printed.title,
        printed.printed,
        str(len(ours)),
        mean,
        verdict(printed, accuracy, size),
        f"`{printed.command}`",
    ]


def verdict(printed: PrintedResult, accuracy: float, size: float) -> str:
    """Reproduced, or by how much not: within half of the last printed digit of the accuracy, and 5 % of the size.

    >>> hoyer_square = PrintedResult("", "", accuracy=98.4, size=4600)
    >>> verdict(hoyer_square, 98.37, 4700), verdict(hoyer_square, 98.18, 6149)
    ('reproduced', '0.22 points less, 1.34 times as large')
    """
    misses = []
    if accuracy < printed.accuracy - 0.05:
        misses.append(f"{printed.accuracy - accuracy:.2f} points less")
    if size > 1.05 * printed.size:
        misses.append(f"{size / printed.size:.2f} times as large")
    return ", ".join(misses) or "reproduced"
