"""Where the weights, the gradients and the strengths are right now, as a table on the device.

Gradients that are freed and allocated at every step move. A table is made from numbers the host
knows, copied without waiting, and kept under those numbers; it is never overwritten, since a captured
graph may go on reading it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

AT_HAND = 32
"""Tables that can be made in a capture: a graph of several steps makes one for each."""


@dataclass(frozen=True, eq=False)
class PointerTable:
    """Sections of one table; `staged` is the memory it is copied from, which a captured copy reads again."""

    sections: list[Tensor]
    staged: Tensor


@dataclass(eq=False)
class PointerTables:
    """The tables in use on a device."""

    device: torch.device
    kept: dict[Any, PointerTable] = field(default_factory=dict)
    captured: list[PointerTable] = field(default_factory=list)
    spare: dict[int, list[Tensor]] = field(default_factory=dict)

    def table(self, sections: tuple[tuple[int, ...], ...]) -> list[Tensor]:
        """The sections as int64 tensors on the device."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        found = self.kept.get(sections)
        if found is None:
            found = self._upload(sections, capturing)
            if not capturing:  # a table filled by a captured copy is empty until the graph is replayed
                self._keep(sections, found)
        if capturing:
            self.captured.append(found)
        return found.sections

    def _keep(self, sections: tuple[tuple[int, ...], ...], made: PointerTable) -> None:
        if len(self.kept) >= 16:
            self.kept.pop(next(iter(self.kept)))
        self.kept[sections] = made

    def _upload(self, sections: tuple[tuple[int, ...], ...], capturing: bool) -> PointerTable:
        padded = [[*s, *([0] * (-len(s) % 2))] for s in sections]  # sections start at 16 bytes
        numbers = torch.tensor([n for s in padded for n in s], dtype=torch.int64)
        staged = self._staging(len(numbers), capturing)
        staged.copy_(numbers)
        whole = staged.to(self.device, non_blocking=True, copy=True)
        parts = whole.split([len(s) for s in padded])
        return PointerTable(list(parts), staged)

    def _staging(self, length: int, capturing: bool) -> Tensor:
        """Pinned memory. Some is kept at hand, for allocating it while a graph is captured may not be allowed."""
        if self.device.type != "cuda":
            return torch.empty(length, dtype=torch.int64)
        spare = self.spare.setdefault(length, [])
        if not capturing and len(spare) < AT_HAND:
            spare.extend(torch.empty(AT_HAND, length, dtype=torch.int64, pin_memory=True).unbind())
        return spare.pop() if capturing and spare else torch.empty(length, dtype=torch.int64, pin_memory=True)
