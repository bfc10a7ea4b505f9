"""What others reported, as they printed it: the rows of the four MNIST tables of the DeepHoyer paper, and later ones.

Yang, Wen, Li, "DeepHoyer: Learning Sparser Neural Network with Differentiable Scale-Invariant Sparsity
Measures", ICLR 2020, tables 1, 2, 4 and 5. Nothing here was measured by us. Which epoch a row was
selected by is said where its source says it.
"""

from __future__ import annotations

from dataclasses import dataclass

NOT_SAID = "not reported"


@dataclass(frozen=True)
class Reported:
    """A row: sizes are nonzero weights or MACs in print, `layers` one of them a layer, `accuracy` in percent."""

    method: str
    source: str
    accuracy: str
    size: str
    left: str
    layers: tuple[str, ...] = ()
    structure: str = ""

    @property
    def number(self) -> float:
        """The size as a number.

        >>> Reported("", "", "98.4", "21.8k", "8 %").number
        21800.0
        """
        return float(self.size.rstrip("k")) * (1000 if self.size.endswith("k") else 1)


PAPER = "DeepHoyer"
TRANSFORMED = "Ma et al. 2019, re-implemented by DeepHoyer"
HAN, ADMM, SNIP = "Han et al. 2015", "Zhang et al. 2018", "Lee et al. 2019"
BAYESIAN, L0, TRIMMED = "Louizos et al. 2017", "Louizos et al. 2018", "Yun et al. 2019"

LENET_300_100_ELEMENTS = (
    Reported("dense", PAPER, "98.4", "266.2k", "100 %", ("235.2k", "30k", "1k")),
    Reported("magnitude pruning", HAN, "98.4", "21.8k", "8 %", ("18.8k", "2.7k", "260")),
    Reported("SNIP", SNIP, "98.4", "13.3k", "5.0 %"),
    Reported("ADMM", ADMM, "98.4", "11.6k", "4.37 %", ("9.4k", "2.1k", "120")),
    Reported("transformed l1", TRANSFORMED, "98.4", "6.4k", "2.40 %", ("5.0k", "1.2k", "209")),
    Reported("Hoyer", PAPER, "98.4", "6.0k", "2.27 %", ("5.3k", "672", "82")),
    Reported("Hoyer-Square", PAPER, "98.4", "4.6k", "1.74 %", ("3.7k", "768", "159")),
)

LENET_5_ELEMENTS = (
    Reported("dense", PAPER, "99.2", "430.5k", "100 %", ("500", "25k", "400k", "5k")),
    Reported("magnitude pruning", HAN, "99.2", "36k", "8 %", ("330", "3k", "32k", "950")),
    Reported("SNIP", SNIP, "99.2", "8.6k", "2.0 %"),
    Reported("ADMM", ADMM, "99.2", "6.1k", "1.4 %", ("100", "2k", "3.6k", "350")),
    Reported("transformed l1", TRANSFORMED, "99.2", "5.4k", "1.3 %", ("100", "690", "4.4k", "203")),
    Reported("Hoyer", PAPER, "99.2", "4.0k", "0.9 %", ("53", "613", "3.2k", "136")),
    Reported("Hoyer-Square", PAPER, "99.2", "3.5k", "0.8 %", ("67", "848", "2.4k", "234")),
    # arXiv:1903.09769: 246 times fewer, "(almost) zero accuracy loss"; the number of weights follows from the ratio.
    Reported("progressive ADMM", "Ye et al. 2019", "almost no loss", "1.75k", "0.41 %"),
)

LENET_300_100_STRUCTURE = (
    Reported("dense", PAPER, "98.4", "266.2k", "100 %", structure="784-300-100"),
    Reported("sparse VD", "Molchanov et al. 2017", "98.2", "67.3k", "25.28 %", structure="512-114-72"),
    Reported("BC-GNJ", BAYESIAN, "98.2", "28.6k", "10.76 %", structure="278-98-13"),
    Reported("BC-GHS", BAYESIAN, "98.2", "28.1k", "10.55 %", structure="311-86-14"),
    Reported("l0, hard concrete", L0, "98.2", "26.6k", "10.01 %", structure="266-88-33"),
    Reported("trimmed l1, Bayes", TRIMMED, "98.3", "20.5k", "7.70 %", structure="245-75-25"),
    Reported("Group-HS", PAPER, "98.2", "16.5k", "6.19 %", structure="353-45-11"),
)

LENET_5_STRUCTURE = (
    Reported("dense", PAPER, "99.2", "2293k", "100 %", structure="20-50-800-500"),
    Reported("sparse VD", "Molchanov et al. 2017", "99.0", "660.2k", "28.79 %", structure="14-19-242-131"),
    Reported("l0, hard concrete", L0, "99.0", "390.7k", "17.04 %", structure="9-18-26-25"),
    Reported("trimmed l1, Bayes", TRIMMED, "99.0", "334.0k", "14.57 %", structure="8-17-53-19"),
    Reported("BC-GNJ", BAYESIAN, "99.0", "282.9k", "12.34 %", structure="8-13-88-13"),
    Reported("SBP", "Neklyudov et al. 2017", "99.1", "212.8k", "9.28 %", structure="3-18-284-283"),
    Reported("group lasso", "Wen et al. 2016", "99.0", "201.8k", "8.80 %", structure="3-12-192-500"),
    Reported("Group-HS", PAPER, "99.0", "169.9k", "7.41 %", structure="5-12-139-13"),
    Reported("BC-GHS", BAYESIAN, "99.0", "153.4k", "6.69 %", structure="5-10-76-16"),
)
