"""How a plan goes to its target: after which epochs it prunes, and how far each time.

Without a drop in a few rounds, each of which removes the same fraction of what the one before left. Where a drop is
allowed, rounds are as many as it takes to keep most of the network each time, and one that costs too much is taken
back: the next round then removes about half as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deephoyer.errors import UserError, not_negative, positive_whole
from deephoyer.targets import Target

ROUNDS = 3
KEPT_A_ROUND = 0.75
"""What a round keeps of the cost that is left, at the least, where a drop is allowed."""
LONGEST = 0.6
"""The share of all epochs that many rounds are spread over, at the most."""
FINEST = 0.97
"""A round that would keep more than this is not worth the epochs that it takes to see what it costs."""
PATIENCE = 0.05
"""The share of all epochs that a pruned network has to come back to the score it may not fall under."""


@dataclass(frozen=True)
class Stages:
    """The shares of all epochs: dense, then with the regularizer, which ends with pruning; finetuning has the rest."""

    dense: float = 0.1
    regularize: float = 0.2

    def __post_init__(self) -> None:
        for name in ("dense", "regularize"):
            not_negative(getattr(self, name), f"stages: {name}")
        if self.dense + self.regularize > 1:
            raise UserError(f"stages: {self.dense} + {self.regularize} is more than all of the epochs.")


class Pace:
    """Where a plan is on its way, and what comes next; lengths are in its epochs or steps.

    >>> pace = Pace(Target(macs=0.25), total=20, rounds=2)
    >>> pace.moments, pace.after(1), pace.after(2)
    ([4, 6], 0.5, 0.25)
    """

    def __init__(self, target: Target, total: int, stages: Stages | None = None, rounds: int | None = None):
        self.goal, self.total, self.careful = target.share, total, target.drop is not None
        if rounds is None:
            needed = math.ceil(math.log(self.goal) / math.log(KEPT_A_ROUND)) if self.careful else 0
            rounds = max(ROUNDS, min(needed, round(LONGEST * total)))
        self.rounds = positive_whole(rounds, "plan: rounds")
        self.stages = stages or (Stages(regularize=min(LONGEST, max(0.2, 0.05 * rounds))) if self.careful else Stages())
        self.level = 0  # how many rounds the network has behind it
        self.share = 1.0  # what the last of them aimed at
        self.pruned_at = 0
        self.keeps = self._planned = self.goal ** (1 / self.rounds)  # of the cost that is left, in a round

    @property
    def moments(self) -> list[int]:
        """The epoch (or step) after which each round prunes, if the drop allows it."""
        begin = round(self.stages.dense * self.total)
        last = max(round((self.stages.dense + self.stages.regularize) * self.total), begin + self.rounds)
        last = min(last, max(1, self.total - 1))  # an epoch at least is left to finetune
        begin = min(begin, last - 1)
        return [begin + max(1, round((last - begin) * (i + 1) / self.rounds)) for i in range(self.rounds)]

    @property
    def next_moment(self) -> int:
        """When the next round is due; those beyond the planned number follow as soon as the score allows."""
        return self.moments[min(self.level, self.rounds - 1)]

    @property
    def patience(self) -> int:
        return max(1, round(PATIENCE * self.total))

    @property
    def over(self) -> bool:
        """Whether nothing more is to be pruned."""
        return self.share <= self.goal or self.keeps > max(FINEST, self._planned)

    def due(self, done: int) -> int:
        """How many rounds are due after so many epochs; with a drop one at a time, as each is looked at."""
        if self.over:
            return 0
        if self.careful:
            return int(done >= self.next_moment and self.total - done >= self.patience)
        return max(0, sum(done >= moment for moment in self.moments) - self.level)

    def after(self, rounds: int = 1) -> float:
        """What so many more rounds aim at."""
        share = self.share * self.keeps**rounds
        return self.goal if share < self.goal * (1 + 1e-6) else share

    def pruned(self, rounds: int, done: int) -> None:
        """So many rounds were made."""
        self.share, self.level, self.pruned_at = self.after(rounds), self.level + rounds, done

    def back_to(self, level: int, share: float) -> None:
        """The network is again as it was then."""
        self.level, self.share = level, share

    def smaller_rounds(self) -> None:
        """From now on a round removes about half as much."""
        self.keeps = math.sqrt(self.keeps)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "share": self.share, "keeps": self.keeps, "pruned_at": self.pruned_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level, self.pruned_at = int(state["level"]), int(state["pruned_at"])
        self.share, self.keeps = float(state["share"]), float(state["keeps"])
