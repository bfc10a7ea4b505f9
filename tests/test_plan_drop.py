"""A plan that is told scores: an allowed drop wins over the size, and the best epoch is handed back."""

from __future__ import annotations

import copy

import pytest
import torch

from deephoyer.pace import Stages
from deephoyer.plan import Plan
from deephoyer.targets import Target
from small_training import X, adam, batches, macs_share, network, train


def scored_run(scores, **settings):
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.25, drop=0.02), len(scores), **settings)
    for epoch, score in enumerate(scores):
        train(model, optimizer, epoch, count=1)
        plan.epoch(score)
    return plan, plan.finish(), model


def test_where_size_and_drop_conflict_the_drop_wins_and_the_plan_says_how_far_it_came():
    """Pruned once it keeps its score, pruned twice it does not."""
    plan, small, model = scored_run([0.9, 0.9, 0.9, 0.89, 0.7, 0.7, 0.8, 0.85], stages=Stages(0.25, 0.25), rounds=2)
    assert plan.report.score == 0.89 and plan.report.epoch == 4
    assert all(torch.equal(model.get_parameter(name) != 0, mask) for name, mask in plan.masks.items())
    assert macs_share(small, model) == pytest.approx(0.5, rel=0.03)
    assert "was asked for: cutting further lost more than the drop of 0.02" in plan.report.notes[0]
    assert "asked for: 0.25 of the MACs, losing at most 0.02" in str(plan.report)


LOST = "cutting further lost more than the drop of 0.02 that is allowed"


UNKNOWN = "it was pruned further, but no score was given after that"


UNASKED = "no score was given when the next prune was due"


@pytest.mark.parametrize(
    ("regularize", "scores", "why"),
    [
        (0.25, [0.9, 0.9], "finished after 2 of 8, before the next prune was due"),
        (0.25, [0.9, 0.9, 0.9, 0.7], LOST),
        (0.25, [0.9, 0.9, 0.9, None, None], UNKNOWN),
        (0.25, [0.9, 0.9, 0.9, 0.89], UNKNOWN),
        (0.25, [0.9, 0.9, 0.9, 0.89, 0.7], LOST),
        (0.5, [0.9, 0.9, 0.9, 0.9, 0.89, None, None], UNASKED),
        (0.5, [0.9, 0.9, 0.9, 0.9, 0.89, 0.7], "the score was too low when the next prune was due"),
    ],
)
def test_a_report_says_of_a_drop_only_what_scores_have_shown(regularize, scores, why):
    model = network()
    optimizer = adam(model)
    settings = {"stages": Stages(0.25, regularize), "rounds": 2, "pull": 0}  # prunes after 3 and 4 steps, or 4 and 6
    plan = Plan(model, X, optimizer, Target(macs=0.25, drop=0.02), steps=8, **settings)
    for step, score in enumerate(scores):
        train(model, optimizer, step, count=1)
        plan.step(score)
    plan.finish()
    (note,) = plan.report.notes
    assert note.endswith(f"0.25 was asked for: {why}."), note


def test_a_score_from_before_the_last_prune_is_not_that_of_the_pruned_network():
    model = network()
    plan = Plan(model, X, adam(model), Target(macs=0.5), 4, pull=0)
    plan.epoch(0.9)
    plan.finish()
    assert plan.report.score is None and "none was given for these weights; 0.9000 before" in str(plan.report)
    plan = Plan(model, X, adam(model), Target(macs=0.5, drop=0.1), steps=2, rounds=1, pull=0, baseline=0.9)
    plan.step()
    plan.step()
    plan.finish()
    assert plan.report.notes == ["no score was given after the last prune: what it lost is not known."]


def test_a_prune_waits_until_the_score_is_back():
    scores = [0.9] * 11 + [0.8] + [0.89] * 28  # two epochs of forty are time enough to recover
    plan, small, model = scored_run(scores, stages=Stages(0.25, 0.05), rounds=2)
    shares = [line["share"] for line in plan.history]
    assert shares[10] == 1 and shares[11] == shares[12] == pytest.approx(0.5, rel=0.03)
    assert shares[13] < 0.3, "it was due after the twelfth epoch"
    assert macs_share(small, model) == pytest.approx(0.25, rel=0.05) and plan.report.score == 0.89


def test_a_prune_that_cost_too_much_is_taken_back_and_half_as_much_is_pruned():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.25, drop=0.02), 8, stages=Stages(0.25, 0.25), rounds=2, pull=0)
    for epoch, score in enumerate([0.9, 0.9, 0.9, 0.89]):
        train(model, optimizer, epoch, count=1)
        before = {name: p.clone() for name, p in model.named_parameters()}
        plan.epoch(score)
    assert plan.metrics()["share"] == pytest.approx(0.25, rel=0.03)
    train(model, optimizer, 4, count=1)
    plan.epoch(0.5)
    assert plan.metrics()["share"] == pytest.approx(0.5 * 0.5**0.5, rel=0.03)
    for name, p in model.named_parameters():
        mask = plan.masks.get(name, torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(p, before[name] * mask), "the weights of the fourth epoch, without those pruned"
    train(model, optimizer, 5, count=1)
    assert plan.masks.undone(model) == []
    assert plan.finish()[0].out_channels >= 8 and plan.report.epoch == 4


def test_rounds_that_became_too_small_to_matter_end_in_finetuning_of_the_last_good_network():
    scores = [0.88, 0.89, 0.9, *[0.5] * 17]  # whatever is pruned costs too much
    plan, small, model = scored_run(scores, stages=Stages(0.1, 0.1), rounds=1)
    shares = [line["share"] for line in plan.history[4:]]  # pruned after the fourth epoch
    assert shares == sorted(shares) and shares[-1] == 1 and plan.history[-1]["stage"] == "finetune"
    assert plan.report.epoch == 3 and plan.report.reached == 1
    assert all(tensor.shape == model.state_dict()[name].shape for name, tensor in small.state_dict().items())


def accuracy(model):
    with torch.no_grad():
        right = sum(int((model.eval()(x).argmax(1) == y).sum()) for x, y in batches(100))
    return right / 96


def to_a_drop(until, state=None, start=0, total=16):
    """A loop with its own checkpoint."""
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(drop=0.05), total)
    if state is not None:
        for part, saved in zip((model, optimizer, plan), state, strict=True):
            part.load_state_dict(saved)
    for epoch in range(start, until):
        train(model, optimizer, epoch)
        plan.epoch(accuracy(model))
    return [copy.deepcopy(part.state_dict()) for part in (model, optimizer, plan)], plan, model


def test_a_drop_alone_asks_for_as_few_macs_as_it_allows():
    _, plan, model = to_a_drop(16)
    small = plan.finish()
    assert macs_share(small, model) < 0.3 and accuracy(small) >= plan.report.base - 0.05
    assert plan.report.score == accuracy(small)
    assert str(plan.report).startswith("asked for: as few MACs as possible, losing at most 0.05")
    assert plan.report.notes[0] in (
        f"{LOST.replace('0.02', '0.05')}.",
        "the epochs were over before it was pruned further.",
    )
    assert plan.report.to_json()["target"] == {"macs": 0.0, "drop": 0.05}


def test_a_plan_killed_after_a_prune_was_taken_back_ends_bit_for_bit_the_same():
    _, whole, _ = to_a_drop(16)
    shares = [line["share"] for line in whole.history]
    back = next(i for i in range(1, 16) if shares[i] > shares[i - 1])
    expected = whole.finish().state_dict()
    for cut in (back - 1, back, back + 1):
        state, _, _ = to_a_drop(cut)
        _, resumed, _ = to_a_drop(16, state, cut)
        found = resumed.finish().state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found), cut
        assert resumed.report.to_json() == whole.report.to_json()


def test_the_epoch_that_is_kept_is_the_best_after_the_last_prune():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.3), 6, stages=Stages(0, 0.5), rounds=1)
    kept = {}
    for epoch, score in enumerate([0.99, 0.99, 0.99, 0.5, 0.8, 0.7]):
        train(model, optimizer, epoch)
        kept[epoch] = copy.deepcopy(model.state_dict())
        plan.epoch(score)
    plan.finish()
    assert plan.report.epoch == 5 and all(torch.equal(t, kept[4][n]) for n, t in model.state_dict().items())


def test_a_score_that_is_no_number_is_the_worst_of_all():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.5, drop=0.05), 8, stages=Stages(0.2, 0.3), rounds=2)
    for epoch, score in enumerate([float("nan"), 0.8, 0.8, 0.8, float("nan"), 0.78, 0.79, 0.78]):
        train(model, optimizer, epoch, count=1)
        plan.epoch(torch.tensor(score))
    plan.finish()
    assert plan.report.base == pytest.approx(0.8) and plan.report.score == pytest.approx(0.79)
    assert plan.report.epoch == 7 and plan.report.reached == pytest.approx(0.5, rel=0.03)


def test_a_drop_is_measured_from_the_best_score_also_of_a_pruned_network_that_was_still_learning():
    scores = [0.6, 0.6, 0.6, 0.8, 0.77, 0.8, 0.79, 0.79]  # the third prune costs 0.03, after one that gained 0.2
    plan, _, _ = scored_run(scores, stages=Stages(0.25, 0.25), rounds=4)
    assert plan.report.base == 0.8 and plan.report.score >= 0.78
    shares = [line["share"] for line in plan.history]
    assert shares[5] > shares[4] < shares[3], "taken back"
    assert "0.8000 is what the drop is measured from" in str(plan.report)
    given, _, _ = scored_run(scores, stages=Stages(0.25, 0.25), rounds=4, baseline=0.6)
    assert given.report.base == 0.6 and given.report.reached < plan.report.reached


def test_without_a_score_to_measure_a_drop_from_nothing_is_pruned():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.3, drop=0.0), steps=12)
    for step in range(12):
        train(model, optimizer, step, count=1)
        if step == 1:
            with pytest.warns(UserWarning, match="the first prune waits for a score"):
                plan.step()
        else:
            plan.step(0.9 if step == 6 else 0.5 if step == 7 else None)
        assert (plan.masks is None) == (step < 6)
    plan.finish()
    assert plan.report.base == 0.9 and plan.report.reached == 1.0, "what was cut lost more than is allowed"
    assert "the weights of step 7" in str(plan.report)
