"""What others reported for ResNet-56 and ResNet-110 on CIFAR-10: the rows of the paper's appendix, and later ones.

Tables of "DeepHoyer" (Yang, Wen, Li 2020), whose own rows count filters and channels that are zero in a
layer as gone; and work published since, in which channels are physically removed. Nothing here was
measured by us.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPER = "DeepHoyer"


@dataclass(frozen=True)
class Point:
    """A row: accuracies in percent as printed, how many times fewer MACs, and whether the source is the paper's own."""

    method: str
    source: str
    base: str
    accuracy: str
    fewer: float

    @property
    def papers_counting(self) -> bool:
        return self.source == PAPER

    @property
    def number(self) -> float | None:
        """The accuracy as a number; of a range the lower end, none where only a gain was printed.

        >>> Point("", "", "", "93.8–94.0", 2.0).number
        93.8
        """
        return float(self.accuracy.partition("–")[0]) if self.accuracy[0].isdigit() else None


LI, NISP, SFP = "Li et al. 2017", "Yu et al. 2018", "He et al. 2018"
SINCE = "work published since"
C_SGD, FCF = "Ding et al. 2019", "Li et al. 2019"

RESNET_56 = (
    Point("Pruning-A", LI, "93.04", "93.10", 1.12),
    Point("Pruning-B", LI, "93.04", "93.06", 1.38),
    Point("channel pruning", "He et al. 2017", "92.8", "91.8", 2.00),
    Point("NISP-56", NISP, "", "−0.03 from its base", 1.77),
    Point("SFP", SFP, "93.59", "93.78", 1.70),
    Point("AMC", "He et al. 2018 (AMC)", "92.8", "91.9", 2.00),
    Point("C-SGD-5/8", C_SGD, "93.39", "93.62", 2.55),
    Point("CNN-FCF-A", FCF, "93.14", "93.38", 1.75),
    Point("CNN-FCF-B", FCF, "93.14", "91.92", 3.44),
    Point("Group-HS 2e-4", PAPER, "93.14", "93.58", 2.38),
    Point("Group-HS 2.5e-4", PAPER, "93.14", "93.45", 3.07),
    Point("Group-HS 3e-4", PAPER, "93.14", "92.90", 3.52),
    Point("Group-HS 5e-4", PAPER, "93.14", "92.23", 5.63),
    Point("ResRep", "Ding et al. 2021", "", "93.71", 2.12),
    Point("SRR-GR", "Wang et al. 2021", "", "93.75", 2.16),
    Point("DepGraph", "Fang et al. 2023", "93.53", "93.77", 2.13),
    Point("DepGraph", "Fang et al. 2023", "93.53", "93.64", 2.57),
    Point("LRF", "Joo et al. 2021", "", "93.19", 3.8),
    Point("PPSM", SINCE, "", "93.22", 4.1),
    Point("OCSPruner", SINCE, "", "93.8–94.0", 2.0),
)

RESNET_110 = (
    Point("Pruning-A", LI, "93.53", "93.51", 1.19),
    Point("Pruning-B", LI, "93.53", "93.30", 1.62),
    Point("NISP-110", NISP, "", "−0.18 from its base", 1.78),
    Point("SFP", SFP, "93.68", "93.86", 1.69),
    Point("C-SGD-5/8", C_SGD, "94.38", "94.41", 2.56),
    Point("CNN-FCF-A", FCF, "93.58", "93.67", 1.76),
    Point("CNN-FCF-B", FCF, "93.58", "92.96", 3.42),
    Point("Group-HS 7e-5", PAPER, "93.62", "94.06", 2.30),
    Point("Group-HS 1e-4", PAPER, "93.62", "93.80", 3.09),
    Point("Group-HS 1.5e-4", PAPER, "93.62", "93.54", 4.38),
    Point("Group-HS 2e-4", PAPER, "93.62", "92.97", 5.84),
    Point("LRF", "Joo et al. 2021", "", "94.34", 2.67),
    Point("PPSM", SINCE, "", "93.83", 3.2),
)
