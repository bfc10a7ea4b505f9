"""The position of a run: everything in a checkpoint besides tensors. `train/run.py` and `train/loop.py` change it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deephoyer.errors import UserError, shown
from deephoyer.lab.schema import TITLES

LARGEST = 10**12


@dataclass
class State:
    """Plain numbers and words, as JSON has them."""

    stage: str = ""
    """The stage that comes next; "" before the first, "done" after the last."""
    epoch: int = 0
    round: int = 0
    best: float = -1.0
    best_epoch: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)
    selected: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    prune_value: float | None = None
    metrics_size: int = 0
    regularizer: dict[str, Any] | None = None
    density_at_start: float | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    """Steps done of an epoch that is not over; their losses, and the density it began with, go with it."""
    loss: float = 0.0
    density_before: float | None = None
    top5: dict[str, float] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    selection_accuracy: float | None = None
    """Of the final network on the images that select epochs, if the last stage has no epochs that say it."""

    @classmethod
    def read(cls, content: Any) -> State:
        """Of a checkpoint, each value checked; what an older version did not write has its default."""
        if not isinstance(content, Mapping):
            raise UserError(f"the checkpoint's state is {shown(content)}, not keys with values.")
        strange = [key for key in content if key not in {f.name for f in fields(cls)}]
        if strange:
            raise UserError(f"the checkpoint is of another version of deephoyer: it has {shown(strange[0])} in it.")
        try:
            state = TypeAdapter(cls).validate_json(json.dumps(content), strict=True)
        except ValidationError as why:
            first = why.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"the checkpoint's {place} is {shown(first['input'])}: {first['msg'].lower()}.") from None
        for name in ("epoch", "round", "best_epoch", "metrics_size", "step"):
            if not 0 <= getattr(state, name) < LARGEST:
                raise UserError(f"the checkpoint's {name} is {shown(getattr(state, name))}, which is out of range.")
        for name in ("accuracy", "top5", "selected", "seconds"):  # a checkpoint has its keys in the alphabet's order
            setattr(state, name, _by_stage(getattr(state, name)))
        return state


def _by_stage(values: dict[str, Any]) -> dict[str, Any]:
    """In the order of the stages, which the keys name; the last is what a run ends with.

    >>> _by_stage({"dense": 0.98, "finetuned": 0.97, "pruned": 0.5})
    {'dense': 0.98, 'pruned': 0.5, 'finetuned': 0.97}
    """
    known = [*TITLES, *TITLES.values()]
    return {key: values[key] for key in sorted(values, key=lambda k: known.index(k) if k in known else len(known))}
