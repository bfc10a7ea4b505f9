"""deephoyer: make neural networks sparse, small and fast while they train."""

from deephoyer.errors import UserError
from deephoyer.export import export, load, save
from deephoyer.groups import Channels, Elements, Filters, Grouping, IndexGroups
from deephoyer.masks import Masks, prune
from deephoyer.penalties import (
    L1,
    MCP,
    SCAD,
    Hoyer,
    HoyerSquare,
    Penalty,
    TransformedL1,
    TrimmedL1,
    hoyer,
    hoyer_measure,
    hoyer_square,
    trimming_threshold,
)
from deephoyer.regularizer import Regularizer
from deephoyer.rules import Absolute, Density, PerLayer, StdRatio
from deephoyer.scores import GeometricMedian, Magnitude, NormScale, Random, Score, Snip, Taylor
from deephoyer.structure import Coupled, compact
from deephoyer.summary import summary

__version__ = "0.1.0"

__all__ = [
    "Absolute",
    "Channels",
    "Coupled",
    "Density",
    "Elements",
    "Filters",
    "GeometricMedian",
    "Grouping",
    "Hoyer",
    "HoyerSquare",
    "IndexGroups",
    "L1",
    "MCP",
    "Magnitude",
    "Masks",
    "NormScale",
    "Penalty",
    "PerLayer",
    "Random",
    "Regularizer",
    "SCAD",
    "Score",
    "Snip",
    "StdRatio",
    "Taylor",
    "TransformedL1",
    "TrimmedL1",
    "UserError",
    "compact",
    "export",
    "hoyer",
    "hoyer_measure",
    "hoyer_square",
    "load",
    "prune",
    "save",
    "summary",
    "trimming_threshold",
]
