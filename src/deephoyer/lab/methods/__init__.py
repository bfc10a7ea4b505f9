"""The methods that DeepHoyer is compared with, by name; each is a file with its paper on top.

What is a penalty or a score alone is not here: `regularize.penalty` and `prune.score` have those.
"""

from __future__ import annotations

from deephoyer.lab.methods.admm import ADMM
from deephoyer.lab.methods.bayesian_compression import GroupHorseshoe, GroupNormalJeffreys
from deephoyer.lab.methods.fpgm import FPGM
from deephoyer.lab.methods.gradual import GradualMagnitude
from deephoyer.lab.methods.iterative import IterativeMagnitude
from deephoyer.lab.methods.l0 import HardConcrete
from deephoyer.lab.methods.l1_filters import L1Filters
from deephoyer.lab.methods.method import Method, Stage
from deephoyer.lab.methods.random_pruning import RandomPruning
from deephoyer.lab.methods.rigl import RigL
from deephoyer.lab.methods.slimming import NetworkSlimming
from deephoyer.lab.methods.snip import SnipBeforeTraining
from deephoyer.lab.methods.soft_filters import SoftFilterPruning
from deephoyer.lab.methods.surgery import NetworkSurgery
from deephoyer.lab.methods.variational_dropout import SparseVariationalDropout
from deephoyer.registry import Registry

METHODS: Registry[Method] = Registry("method", "methods")
METHODS.add("iterative-magnitude", IterativeMagnitude)
METHODS.add("gradual-magnitude", GradualMagnitude)
METHODS.add("snip", SnipBeforeTraining)
METHODS.add("rigl", RigL)
METHODS.add("admm", ADMM)
METHODS.add("surgery", NetworkSurgery)
METHODS.add("l0", HardConcrete)
METHODS.add("sparse-vd", SparseVariationalDropout)
METHODS.add("bc-gnj", GroupNormalJeffreys)
METHODS.add("bc-ghs", GroupHorseshoe)
METHODS.add("slimming", NetworkSlimming)
METHODS.add("soft-filters", SoftFilterPruning)
METHODS.add("fpgm", FPGM)
METHODS.add("l1-filters", L1Filters)
METHODS.add("random", RandomPruning)

__all__ = ["METHODS", "Method", "Stage"]
