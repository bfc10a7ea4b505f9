"""What others reported, as they printed it: the rows of the DeepHoyer paper's tables, and of work published since.

Yang, Wen, Li, "DeepHoyer: Learning Sparser Neural Network with Differentiable Scale-Invariant Sparsity
Measures", ICLR 2020: tables 1 to 5 and those of its appendix, whose own rows count filters and channels that are zero
in a layer as gone. Nothing here was measured by us. Which epoch a row was selected by is said where its source says it.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPER = "DeepHoyer"


@dataclass(frozen=True)
class Reported:
    """A row, in print: `accuracy` in percent, `size` in nonzero weights or MACs, or how many times `fewer` MACs.

    `layers` has the nonzeros of each layer or, of a structural row, the widths; `base` is the accuracy of the dense
    network it started from.
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
        """The accuracy as a number; of a range the lower end, none where only a gain was printed.

        >>> Reported("", "", "93.8–94.0").percent
        93.8
        """
        first = self.accuracy.partition("–")[0]
        return float(first) if first[:1].isdigit() else None


def _points(*rows: tuple[str, str, str, str, float]) -> tuple[Reported, ...]:
    return tuple(
        Reported(method, source, accuracy, fewer=fewer, base=base) for method, source, base, accuracy, fewer in rows
    )


TRANSFORMED = "Ma et al. 2019, re-implemented by DeepHoyer"
HAN, ADMM, SNIP = "Han et al. 2015", "Zhang et al. 2018", "Lee et al. 2019"
BAYESIAN, L0, TRIMMED = "Louizos et al. 2017", "Louizos et al. 2018", "Yun et al. 2019"

LENET_300_100_ELEMENTS = (
    Reported("dense", PAPER, "98.4", "266.2k", "100 %", "235.2k-30k-1k"),
    Reported("magnitude pruning", HAN, "98.4", "21.8k", "8 %", "18.8k-2.7k-260"),
    Reported("SNIP", SNIP, "98.4", "13.3k", "5.0 %"),
    Reported("ADMM", ADMM, "98.4", "11.6k", "4.37 %", "9.4k-2.1k-120"),
    Reported("transformed l1", TRANSFORMED, "98.4", "6.4k", "2.40 %", "5.0k-1.2k-209"),
    Reported("Hoyer", PAPER, "98.4", "6.0k", "2.27 %", "5.3k-672-82"),
    Reported("Hoyer-Square", PAPER, "98.4", "4.6k", "1.74 %", "3.7k-768-159"),
)

LENET_5_ELEMENTS = (
    Reported("dense", PAPER, "99.2", "430.5k", "100 %", "500-25k-400k-5k"),
    Reported("magnitude pruning", HAN, "99.2", "36k", "8 %", "330-3k-32k-950"),
    Reported("SNIP", SNIP, "99.2", "8.6k", "2.0 %"),
    Reported("ADMM", ADMM, "99.2", "6.1k", "1.4 %", "100-2k-3.6k-350"),
    Reported("transformed l1", TRANSFORMED, "99.2", "5.4k", "1.3 %", "100-690-4.4k-203"),
    Reported("Hoyer", PAPER, "99.2", "4.0k", "0.9 %", "53-613-3.2k-136"),
    Reported("Hoyer-Square", PAPER, "99.2", "3.5k", "0.8 %", "67-848-2.4k-234"),
    # arXiv:1903.09769: 246 times fewer, "(almost) zero accuracy loss"; the number of weights follows from the ratio.
    Reported("progressive ADMM", "Ye et al. 2019", "almost no loss", "1.75k", "0.41 %"),
)

LENET_300_100_STRUCTURE = (
    Reported("dense", PAPER, "98.4", "266.2k", "100 %", layers="784-300-100"),
    Reported("sparse VD", "Molchanov et al. 2017", "98.2", "67.3k", "25.28 %", layers="512-114-72"),
    Reported("BC-GNJ", BAYESIAN, "98.2", "28.6k", "10.76 %", layers="278-98-13"),
    Reported("BC-GHS", BAYESIAN, "98.2", "28.1k", "10.55 %", layers="311-86-14"),
    Reported("l0, hard concrete", L0, "98.2", "26.6k", "10.01 %", layers="266-88-33"),
    Reported("trimmed l1, Bayes", TRIMMED, "98.3", "20.5k", "7.70 %", layers="245-75-25"),
    Reported("Group-HS", PAPER, "98.2", "16.5k", "6.19 %", layers="353-45-11"),
)

LENET_5_STRUCTURE = (
    Reported("dense", PAPER, "99.2", "2293k", "100 %", layers="20-50-800-500"),
    Reported("sparse VD", "Molchanov et al. 2017", "99.0", "660.2k", "28.79 %", layers="14-19-242-131"),
    Reported("l0, hard concrete", L0, "99.0", "390.7k", "17.04 %", layers="9-18-26-25"),
    Reported("trimmed l1, Bayes", TRIMMED, "99.0", "334.0k", "14.57 %", layers="8-17-53-19"),
    Reported("BC-GNJ", BAYESIAN, "99.0", "282.9k", "12.34 %", layers="8-13-88-13"),
    Reported("SBP", "Neklyudov et al. 2017", "99.1", "212.8k", "9.28 %", layers="3-18-284-283"),
    Reported("group lasso", "Wen et al. 2016", "99.0", "201.8k", "8.80 %", layers="3-12-192-500"),
    Reported("Group-HS", PAPER, "99.0", "169.9k", "7.41 %", layers="5-12-139-13"),
    Reported("BC-GHS", BAYESIAN, "99.0", "153.4k", "6.69 %", layers="5-10-76-16"),
)

LI, NISP, SFP = "Li et al. 2017", "Yu et al. 2018", "He et al. 2018"
SINCE = "work published since"
C_SGD, FCF, CHIP = "Ding et al. 2019", "Li et al. 2019", "Sui et al. 2021"

RESNET_56 = _points(
    ("Pruning-A", LI, "93.04", "93.10", 1.12),
    ("Pruning-B", LI, "93.04", "93.06", 1.38),
    ("channel pruning", "He et al. 2017", "92.8", "91.8", 2.00),
    ("NISP-56", NISP, "", "−0.03 from its base", 1.77),
    ("SFP", SFP, "93.59", "93.78", 1.70),
    ("AMC", "He et al. 2018 (AMC)", "92.8", "91.9", 2.00),
    ("C-SGD-5/8", C_SGD, "93.39", "93.62", 2.55),
    ("CNN-FCF-A", FCF, "93.14", "93.38", 1.75),
    ("CNN-FCF-B", FCF, "93.14", "91.92", 3.44),
    ("Group-HS 2e-4", PAPER, "93.14", "93.58", 2.38),
    ("Group-HS 2.5e-4", PAPER, "93.14", "93.45", 3.07),
    ("Group-HS 3e-4", PAPER, "93.14", "92.90", 3.52),
    ("Group-HS 5e-4", PAPER, "93.14", "92.23", 5.63),
    ("ResRep", "Ding et al. 2021", "", "93.71", 2.12),
    ("SRR-GR", "Wang et al. 2021", "", "93.75", 2.16),
    ("DepGraph", "Fang et al. 2023", "93.53", "93.77", 2.13),
    ("DepGraph", "Fang et al. 2023", "93.53", "93.64", 2.57),
    ("LRF", "Joo et al. 2021", "", "93.19", 3.8),
    ("PPSM", SINCE, "", "93.22", 4.1),
    ("CHIP", CHIP, "93.26", "94.16", 1.90),
    ("CHIP", CHIP, "93.26", "92.43", 3.61),
    ("OCSPruner", SINCE, "", "93.8–94.0", 2.0),
)

RESNET_110 = _points(
    ("Pruning-A", LI, "93.53", "93.51", 1.19),
    ("Pruning-B", LI, "93.53", "93.30", 1.62),
    ("NISP-110", NISP, "", "−0.18 from its base", 1.78),
    ("SFP", SFP, "93.68", "93.86", 1.69),
    ("C-SGD-5/8", C_SGD, "94.38", "94.41", 2.56),
    ("CNN-FCF-A", FCF, "93.58", "93.67", 1.76),
    ("CNN-FCF-B", FCF, "93.58", "92.96", 3.42),
    ("Group-HS 7e-5", PAPER, "93.62", "94.06", 2.30),
    ("Group-HS 1e-4", PAPER, "93.62", "93.80", 3.09),
    ("Group-HS 1.5e-4", PAPER, "93.62", "93.54", 4.38),
    ("Group-HS 2e-4", PAPER, "93.62", "92.97", 5.84),
    ("CHIP", CHIP, "93.50", "94.50", 1.80),
    ("CHIP", CHIP, "93.50", "94.44", 2.09),
    ("CHIP", CHIP, "93.50", "93.23", 3.53),
    ("LRF", "Joo et al. 2021", "", "94.34", 2.67),
    ("PPSM", SINCE, "", "93.83", 3.2),
)

GUO, DAI = "Guo et al. 2016", "Dai et al. 2017"

ALEXNET = (
    Reported("dense", PAPER, "+0.0", "60.9M", "100 %"),
    Reported("magnitude pruning", HAN, "−0.1", "6.7M", "11.0 %"),
    Reported("dynamic network surgery", GUO, "+0.2", "3.45M", "5.67 %"),
    Reported("NeST", DAI, "−0.1", "3.1M", "5.09 % (6.40 % in print)"),
    Reported("transformed l1", TRANSFORMED, "+0.0", "3.05M", "5.01 %"),
    Reported("ADMM", ADMM, "+0.0", "2.9M", "4.76 %"),
    Reported("Hoyer", PAPER, "+0.0", "3.62M", "5.94 %"),
    Reported("Hoyer-Square", PAPER, "+0.0", "2.85M", "4.69 %"),
)
"""`accuracy` is how much the top-5 error grew, in points."""

THINET, SINGH, LUO, LIN = "Luo et al. 2017", "Singh et al. 2018", "Luo et al. 2018", "Lin et al. 2018"

RESNET_50 = tuple(
    Reported(method, source, top1, fewer=fewer, top5=top5)
    for method, source, top1, top5, fewer in (
        ("dense", PAPER, "76.15", "92.87", 1.00),
        ("channel pruning", "He et al. 2017", "", "90.80", 2.00),
        ("ThiNet-70", THINET, "72.04", "90.67", 1.58),
        ("ThiNet-50", THINET, "71.01", "90.02", 2.26),
        ("ThiNet-30", THINET, "68.42", "88.30", 3.51),
        ("SSS", "Huang et al. 2018", "74.18", "91.91", 1.45),
        ("SFP", SFP, "74.61", "92.06", 1.72),
        ("CFP", SINGH, "73.4", "91.4", 1.98),
        ("Autopruner", LUO, "74.76", "92.15", 2.05),
        ("GDP", LIN, "71.89", "90.71", 2.05),
        ("DCP", "Zhuang et al. 2018", "74.95", "92.32", 2.26),
        ("SSR-L2", "Lin et al. 2019", "71.47", "90.19", 2.26),
        ("C-SGD-70", C_SGD, "75.27", "92.46", 1.58),
        ("C-SGD-50", C_SGD, "74.93", "92.27", 1.86),
        ("C-SGD-30", C_SGD, "74.54", "92.09", 2.26),
        ("CNN-FCF-A", FCF, "76.50", "93.13", 1.41),
        ("CNN-FCF-B", FCF, "75.68", "92.68", 1.85),
        ("CNN-FCF-C", FCF, "74.55", "92.18", 2.33),
        ("CNN-FCF-D", FCF, "73.54", "91.50", 2.96),
        ("Group-HS 1e-5", PAPER, "76.43", "93.07", 1.89),
        ("Group-HS 2e-5", PAPER, "75.20", "92.52", 3.09),
        ("Group-HS 3e-5", PAPER, "73.19", "91.36", 4.68),
        ("Group-HS 4e-5", PAPER, "71.08", "90.21", 5.48),
    )
)
