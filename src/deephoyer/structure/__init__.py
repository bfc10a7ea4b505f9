"""Which channels are coupled, taking them out or zeroing what is idle, and proving that nothing changed.

Knows nothing of training.
"""

from __future__ import annotations

from deephoyer.structure.compact import CompactReport, compact, compact_report
from deephoyer.structure.coupled import Coupled, Heads, Neurons
from deephoyer.structure.equality import Differs
from deephoyer.structure.follow import CannotFollow
from deephoyer.structure.shape import BadShape, check_joints, describe, reshape_
from deephoyer.structure.tidy import tidy

__all__ = [
    "BadShape",
    "CannotFollow",
    "CompactReport",
    "Coupled",
    "Differs",
    "Heads",
    "Neurons",
    "check_joints",
    "compact",
    "compact_report",
    "describe",
    "reshape_",
    "tidy",
]
