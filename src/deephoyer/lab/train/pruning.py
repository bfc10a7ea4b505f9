"""The prune stage of a run: with the rule's value from the recipe, or with the value that meets a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deephoyer import targets
from deephoyer.cutting import Cutter, agreed
from deephoyer.errors import UserError
from deephoyer.groups import Grouping
from deephoyer.lab.stages import Prune, PruneTarget
from deephoyer.lab.train import batches
from deephoyer.lab.train.batches import Epoch
from deephoyer.lab.train.objective import logits
from deephoyer.masks import Masks, prune
from deephoyer.rules import Rule
from deephoyer.scores import SCORES, Magnitude, Score
from deephoyer.structure import Coupled

if TYPE_CHECKING:
    from deephoyer.lab.train.run import Run


def pruned(run: Run, done: float | None = None, score: Score | None = None) -> Masks:
    """Prunes the run's network in place; refuses a result whose outputs no longer depend on the input.

    `done` is the share of the way to the target, by default the share of rounds; `score` replaces the recipe's.
    """
    settings, method = run.recipe.prune, run.recipe.method
    if settings is None:
        raise UserError(f"method {method}: prunes while it trains; the recipe needs a prune stage that says how.")
    if done is None:
        done = (run.state.round + 1) / run.recipe.rounds  # each round takes the same share of what the last one left
    elif done < 1 and settings.target is None:
        raise UserError(f"method {method}: prunes in steps towards a target; give prune.target instead of a value.")
    groups = run.groups(settings.groups)
    scoring = _Scoring(run, score or _score(run, settings))
    if settings.target is not None and settings.target.latency is not None:
        return _prune_to_latency(run, settings, settings.target, groups, done, scoring)
    if settings.target is None:
        rule = settings.make()
    else:
        rule = _rule_for_target(run, settings, settings.target, groups, done, scoring)
    masks = prune(
        run.model, rule, groups, settings.parameters, settings.allow_empty, settings.multiple, **scoring.arguments()
    )
    if not _depends_on_image(run):
        raise UserError(
            "prune: the outputs no longer depend on the image. Prune less, or regularize more gently; "
            "the network before pruning is in the folder's newest checkpoint."
        )
    return masks


def warning_of_loss(before: float | None, after: float) -> str | None:
    """A warning if pruning lost more than half of the accuracy."""
    if before is None or after >= before / 2:
        return None
    return (
        f"prune: accuracy fell from {before:.1%} to {after:.1%}; finetuning may not bring that back. Prune less at "
        "once (`rounds`, or a second run that starts from the first), or regularize more."
    )


@dataclass(frozen=True)
class _Scoring:
    """The score of groups, and the batches it may use: those of one epoch, the same at every call."""

    run: Run
    score: Score

    def arguments(self) -> dict[str, Any]:
        recipe = self.run.recipe
        seed = batches.seed_of(recipe.seed, "score")
        torch.manual_seed(seed)  # for dropout
        self.run.model.train()
        return {
            "score": self.score,
            "batches": self._batches(seed),
            "loss": lambda model, batch: F.cross_entropy(logits(model, batch[0], recipe), batch[1]),
        }

    def _batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch with this seed; all of them in every process."""
        run, recipe = self.run, self.run.recipe
        drawn = batches.of_epoch(run.data, run.pool, recipe, seed)
        if isinstance(drawn, Epoch):
            drawn = drawn.to(run.device)
        for step in drawn.steps(range(len(drawn))):
            yield batches.images(run.data, step, recipe.shift)


def _score(run: Run, settings: Prune) -> Score:
    if settings.score is not None:
        return SCORES.make(settings.score)
    own = run.method.score(run.method_stage("prune")) if run.recipe.method else None
    return own or Magnitude()


def _prune_to_latency(
    run: Run, settings: Prune, target: PruneTarget, groups: list[Grouping], done: float, scoring: _Scoring
) -> Masks:
    """Prunes to a share of the network's latency, measured here by the first process."""
    assert target.latency is not None
    arguments = scoring.arguments()
    cutter = Cutter(
        run.model,
        run.data.example(),
        targets.Target(
            latency=target.latency,
            batch=target.batch or 1,
            mode=target.mode or "eager",
            dtype=getattr(torch, target.dtype) if target.dtype else None,
        ),
        groups,
        multiple=settings.multiple if settings.multiple > 1 else None,
        score=scoring.score,
        batches=None if isinstance(scoring.score, Magnitude) else list(arguments["batches"]),
        loss=arguments["loss"],
    )
    cut = agreed(cutter.aim(target.latency**done))
    run.progress.note(
        f"prune: the network takes {cut.share:.2f} of its original time, target {target.latency**done:.2f}"
    )
    masks = cutter.apply(cut)
    if done == 1 and (why := cutter.why_not(cut.share)) is not None:
        run.progress.note(f"prune: {why}")
    return masks


def _rule_for_target(
    run: Run, settings: Prune, target: PruneTarget, groups: list[Grouping], done: float, scoring: _Scoring
) -> Rule:
    """The rule with the value that meets the target; accuracy is measured on the images that select epochs."""
    example = run.data.example()
    if target.macs is not None:
        coupled = next((group for group in groups if isinstance(group, Coupled)), None)
        goal = targets.macs(run.model, example, target.macs**done, coupled, run.recipe.joints)
    elif target.density is not None:
        goal = targets.density(run.model, target.density**done)
    elif target.live is not None:
        goal = targets.live(run.model, example, target.live**done)
    else:
        least = run.accuracy(run.selection_images) - target.drop if target.drop is not None else target.accuracy
        assert least is not None
        goal = targets.accuracy(lambda: run.accuracy(run.selection_images), least)
    solution = targets.value_for(
        goal,
        run.model,
        settings.rule_of_target(),
        groups,
        settings.parameters,
        settings.allow_empty,
        settings.multiple,
        **scoring.arguments(),
    )
    run.state.prune_value = solution.value
    run.progress.note(f"prune: {settings.rule} {solution.value:.4g} gives {goal.name} {solution.number:.4g}")
    return settings.rule_of_target()(solution.value)


@torch.inference_mode()
def _depends_on_image(run: Run) -> bool:
    run.model.eval()
    outputs = run.model(run.data.first(run.selection_images, 100))
    return len(outputs) < 2 or not torch.allclose(outputs, outputs[:1].expand_as(outputs), rtol=1e-6, atol=0)
