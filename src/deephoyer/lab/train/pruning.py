"""A run's prune stage: by the recipe's rule, or by the value of it that meets a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deephoyer import targets
from deephoyer.errors import UserError
from deephoyer.groups import Grouping
from deephoyer.lab.schema import Prune, Target
from deephoyer.masks import Masks, prune
from deephoyer.rules import Rule

if TYPE_CHECKING:
    from deephoyer.lab.train.run import Run


def pruned(run: Run) -> Masks:
    """Prunes the run's network in place; one that is cut through is refused, for it would keep any target."""
    settings = run.recipe.prune
    assert settings is not None
    groups = run.groups(settings.groups)
    rule = settings.make() if settings.target is None else _aimed(run, settings, settings.target, groups)
    masks = prune(run.model, rule, groups, settings.parameters, settings.allow_empty, settings.multiple)
    if not _tells_images_apart(run):
        raise UserError(
            "prune: nothing of an image reaches the outputs any more. Ask for less, or regularize more gently; "
            "the network as it was before is in the folder's newest checkpoint."
        )
    return masks


def warning_of_loss(before: float | None, after: float) -> str | None:
    """What to say, by the accuracies before and after it, of a cut that took more than half of what there was."""
    if before is None or after >= before / 2:
        return None
    return (
        f"prune: accuracy fell from {before:.1%} to {after:.1%}; finetuning may not bring that back. Prune less at "
        "once (`rounds`, or a second run that starts from the first), or regularize more."
    )


def _aimed(run: Run, settings: Prune, target: Target, groups: list[Grouping]) -> Rule:
    """The rule with the value that meets the target; images that this run may select by decide on accuracy."""
    example = run.data.example()
    done = (run.state.round + 1) / run.recipe.rounds  # each round takes the same share of what the last one left
    if target.macs is not None:
        goal = targets.macs(run.model, example, target.macs**done, joints=run.recipe.joints)
    elif target.density is not None:
        goal = targets.density(run.model, target.density**done)
    else:
        least = run.accuracy(run.watched) - target.drop if target.drop is not None else target.accuracy
        assert least is not None
        goal = targets.accuracy(lambda: run.accuracy(run.watched), least)
    found = targets.value_for(
        goal, run.model, settings.threshold(), groups, settings.parameters, settings.allow_empty, settings.multiple
    )
    run.state.prune_value = found.value
    run.progress.note(f"prune: {settings.rule} {found.value:.4g}, where {goal.name} is {found.number:.4g}")
    return settings.threshold()(found.value)


@torch.inference_mode()
def _tells_images_apart(run: Run) -> bool:
    run.model.eval()
    found = run.model(run.data.first(run.watched, 100))
    return len(found) < 2 or not torch.allclose(found, found[:1].expand_as(found), rtol=1e-6, atol=0)
