"""Targets: the value of a rule that leaves a network as small, or as accurate, as a recipe says."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import deephoyer as dh
from deephoyer import targets
from deephoyer.counting import count
from deephoyer.lab import models, recipe
from deephoyer.lab.cli import app
from deephoyer.lab.data import DATASETS
from deephoyer.lab.report import publish
from deephoyer.lab.report.measure import measure
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.train.progress import Silent
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run
from deephoyer.masks import scored
from deephoyer.rules import Absolute, Effective, StdRatio
from test_compiling import noise

X = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def uneven(name="resnet-20"):
    """A network whose coupled channels are of many sizes."""
    torch.manual_seed(0)
    model = models.make(name)
    coupled = dh.Coupled(model, X)
    with torch.no_grad():
        for unit in coupled.units():
            scale = torch.rand(unit.count) ** 3 + 0.01
            for tensor, factor in zip(unit.tensors, unit.spread(scale.log()), strict=True):
                tensor.mul_(factor.exp())
    return model, coupled


@pytest.mark.parametrize(
    ("rule", "share"),
    [
        (StdRatio, 0.7),
        (StdRatio, 0.4),
        (StdRatio, 0.15),
        (Absolute, 0.4),
        (Effective, 0.15),
        *(pytest.param(Absolute, share, marks=pytest.mark.slow) for share in (0.7, 0.15)),
        *(pytest.param(Effective, share, marks=pytest.mark.slow) for share in (0.7, 0.4)),
    ],
)
def test_the_macs_that_compaction_leaves_are_the_target_and_one_group_more_would_be_over_it(rule, share):
    model, coupled = uneven()
    dense = count(model, X)[1].macs_executed
    found = targets.value_for(targets.macs(model, X, share, coupled), model, rule, coupled)
    values = rule.candidates(scored(model, coupled)[1]).tolist()
    one_less = values[values.index(found.value) - 1]

    def left(value):
        other, groups = uneven()
        dh.prune(other, rule(value), groups)
        return count(dh.compact(other, X), X)[1].macs_executed / dense

    assert left(found.value) == found.number <= share < left(one_less)
    assert found.number > share - 0.05


def test_a_search_leaves_the_network_as_it_was():
    model, coupled = uneven()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets.value_for(targets.macs(model, X, 0.5, coupled), model, StdRatio, coupled)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_macs_the_papers_way_and_executed_are_the_same_after_coupled_pruning():
    model, coupled = uneven()
    found = targets.value_for(targets.macs(model, X, 0.4, coupled), model, StdRatio, coupled)
    dh.prune(model, StdRatio(found.value), coupled)
    assert count(model, X)[1].macs_paper == count(dh.compact(model, X), X)[1].macs_executed


def test_with_joints_what_is_dead_in_one_layer_alone_is_counted_as_gone():
    model, _ = uneven()
    groups = ["filters", "channels"]
    found = targets.value_for(targets.macs(model, X, 0.5, joints="gather"), model, StdRatio, groups)
    dh.prune(model, StdRatio(found.value), groups)
    (_, total), dense = count(model, X), count(models.make("resnet-20"), X)[1].macs_executed
    executed = {joints: count(dh.compact(model, X, joints=joints), X)[1].macs_executed for joints in ("none", "gather")}
    assert executed["gather"] / dense == found.number <= 0.5
    assert executed["gather"] <= total.macs_paper and executed["gather"] < executed["none"]


def test_a_run_with_joints_is_counted_stored_measured_and_compacted_with_them(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS._makers, "compiling-noise", noise)
    untrained = ["pretrain={epochs: 0}", "regularize={epochs: 0, strength: 0}", "finetune={epochs: 0}"]
    pruned = ["prune={rule: std-ratio, groups: filters+channels, target: {macs: 0.5}}", "joints=gather"]
    made = recipe.read("demo", ["model=resnet-20", "data=compiling-noise", "device=cpu", *untrained, *pruned])
    run = Run(made, tmp_path / "run").execute()
    found = finish(run)["compact"]["total"]["macs_executed"]
    dense = count(models.make("resnet-20"), X)[1].macs_executed
    assert found <= 0.5 * dense < count(dh.compact(run.model, X), X)[1].macs_executed
    assert measure(run.model, made).compact.macs == found
    done = CliRunner().invoke(app, ["compact", str(run.folder.path), "--out", str(tmp_path / "again.safetensors")])
    assert done.exit_code == 0, done.output
    again, first = (p.stat().st_size for p in (tmp_path / "again.safetensors", run.folder / "compact.safetensors"))
    assert again == first


def test_single_weights_can_be_aimed_at_to_one():
    model = models.make("lenet-5")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    goal = targets.density(model, 0.01)
    found = targets.value_for(goal, model, StdRatio)
    masks = dh.prune(model, StdRatio(found.value))
    assert sum(c.left for c in masks.counts().values()) == 4305 and found.number == 0.01


def test_the_last_value_that_keeps_the_accuracy_is_taken():
    model = torch.nn.Linear(100, 1)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 101.0))
    share = lambda: 0.5 + 0.5 * float((model.weight != 0).float().mean())  # noqa: E731
    found = targets.value_for(targets.accuracy(share, 0.9), model, Absolute)
    assert found.value == 20.5 and found.number == pytest.approx(0.9)


def stairs():
    """Two layers with sixteen rows each, of magnitudes 1 to 16 and 101 to 116; the first has a fifth of the weights."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16))
    with torch.no_grad():
        for layer, start in zip(model, (1, 101), strict=True):
            layer.weight.copy_(torch.arange(start, start + 16)[:, None].expand_as(layer.weight))
    return model


@pytest.mark.parametrize(("share", "allow_empty", "value"), [(0.9, False, 5.5), (0.9, True, 5.5), (0.8, True, 13.5)])
def test_a_search_in_multiples_takes_the_first_value_that_rounds_to_the_target_and_changes_nothing(
    share, allow_empty, value
):
    """Eleven rows of sixteen are rounded to eight, and three to none."""
    model = stairs()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    goal = targets.density(model, share)
    found = targets.value_for(goal, model, Absolute, "filters", allow_empty=allow_empty, multiple=8)
    assert found.value == value and found.number == pytest.approx(share) and found.number <= share
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_a_search_in_multiples_does_not_empty_a_layer_and_tells_how_far_it_came():
    model = stairs()
    goal = targets.density(model, 0.8)
    with pytest.raises(dh.UserError, match=r"it is 0\.9 at absolute 12\.5, where no layer may be emptied"):
        targets.value_for(goal, model, Absolute, "filters", multiple=8)
    out_of_reach = targets.density(model, 0.1)
    with pytest.raises(dh.UserError, match=r"it is 0\.8 at absolute 15\.5, where next to nothing is left to prune"):
        targets.value_for(out_of_reach, model, Absolute, "filters", "0.weight", allow_empty=True, multiple=8)


@given(st.integers(0, 10**6), st.floats(0.02, 1))
def test_one_weight_more_than_an_effective_value_leaves_would_be_over_the_density(seed, share):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    net[1].weight.data.pow_(3).mul_(1e-3)
    found = targets.value_for(targets.density(net, max(share, 2 / 98)), net, Effective)
    masks = dh.prune(net, Effective(found.value))
    assert masks.density == found.number <= max(share, 2 / 98) < found.number + 1.5 / 98


def test_a_target_beyond_reach_says_how_far_it_came():
    model, coupled = uneven()
    with pytest.raises(dh.UserError, match=r"can't be 1e-06: it is 0\.\d+ at std-ratio .* no layer may be emptied"):
        targets.value_for(targets.macs(model, X, 1e-6, coupled), model, StdRatio, coupled)
    with pytest.raises(dh.UserError, match=r"it is 0\.5 at absolute 0, where nothing is pruned yet"):
        targets.value_for(targets.accuracy(lambda: 0.5, 0.9), model, Absolute, coupled)


def test_a_layer_that_is_zero_already_is_told():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(net[1].weight)
    with pytest.raises(dh.UserError, match="all zero before"):
        targets.value_for(targets.density(net, 0.2), net, StdRatio)


def test_a_deep_network_is_measured_a_few_times_for_its_thousands_of_groups():
    model, coupled = uneven("resnet-110")
    goal = targets.macs(model, X, 0.4, coupled)
    tries = []

    def counted():
        tries.append(goal.measure())
        return tries[-1]

    found = targets.value_for(dataclasses.replace(goal, measure=counted), model, StdRatio, coupled)
    assert found.number <= 0.4 and len(tries) <= 4 and len(StdRatio.candidates(scored(model, coupled)[1])) > 2000


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 30), st.data())
def test_an_estimate_however_wrong_changes_no_outcome_and_a_right_one_is_asked_twice(sizes, bound, drawn):
    sizes = sorted(sizes, reverse=True)
    guesses = drawn.draw(st.lists(st.integers(0, 30), min_size=len(sizes), max_size=len(sizes)))
    first = next((i for i, size in enumerate(sizes) if size <= bound), len(sizes))

    def place(estimated):
        at, asked = [0], []
        goal = targets.Goal("size", lambda: asked.append(at[0]) or sizes[at[0]], bound)
        goal = dataclasses.replace(goal, estimate=(lambda: estimated[at[0]]) if estimated else None)
        tries = targets._Tries(goal, nn.Linear(1, 1), lambda value: at.__setitem__(0, value))
        return tries.first_kept(range(len(sizes))), asked

    assert place(None)[0] == place(guesses)[0] == first
    assert place(sizes)[0] == first and len(place(sizes)[1]) <= 2


TINY = [
    "data={name: mnist, limit: 1000}",
    "device=cpu",
    "pretrain.epochs=2",
    "regularize.epochs=1",
    "finetune.epochs=1",
    "prune.value=null",
]


def run(folder, *changes):
    command = recipe.Command("demo", (*TINY, *changes))
    job = Run(command.read(), folder, command=command).execute()
    return job, finish(job)


def test_a_run_with_a_target_meets_it_and_its_record_has_the_value(tmp_path):
    job, summary = run(tmp_path / "run", "prune.target={density: 0.2}")
    assert 0.1999 < job.masks.density <= 0.2
    assert 0.18 < summary["sparse"]["total"]["nonzeros"] / 266_200 <= 0.2, "idle weights are gone besides"
    assert summary["prune_value"] == job.state.prune_value > 0
    made = publish.publish(tmp_path / "run", tmp_path / "results")
    assert made.prune_value == job.state.prune_value and "prune.target" in made.command


UNTRAINED = ["pretrain={epochs: 0}", "regularize={epochs: 0, strength: 0}", "finetune={epochs: 0}"]


def test_a_run_prunes_in_the_multiples_of_its_recipe(tmp_path):
    pruned = "prune={groups: filters, multiple: 60, target: {density: 0.9}}"
    job = Run(recipe.read("demo", [*TINY, *UNTRAINED, pruned]), tmp_path).execute()
    left = [int(mask.any(1).sum()) for mask in job.masks.values()]
    assert left[0] % 60 == left[1] % 60 == 0 and sum(left) < 410, "the last layer has fewer than that"


def test_a_run_that_is_cut_through_is_told_so_before_it_is_finetuned(tmp_path):
    """Of the second layer's 100 rows the first to go takes all, where that is allowed; a target would be kept."""
    pruned = "prune={groups: filters, multiple: 100, allow_empty: true, target: {density: 0.2}}"
    with pytest.raises(dh.UserError, match="the outputs no longer depend on the image"):
        Run(recipe.read("demo", [*TINY, *UNTRAINED, pruned]), tmp_path).execute()
    assert checkpoint.newest(tmp_path / "checkpoints")[1]["stage"] == "prune"


def test_a_run_that_loses_most_of_its_accuracy_is_warned_and_one_that_does_not_is_not(tmp_path):
    class Notes(Silent):
        def note(self, text):
            notes.append(text)

    for density, fell in ((0.002, True), (0.5, False)):
        notes = []
        change = f"prune={{rule: density, value: {density}}}"
        job = Run(recipe.read("demo", [*TINY, change]), tmp_path / str(density), Notes()).execute()
        before, after = (f"{job.state.accuracy[stage]:.1%}" for stage in ("regularized", "pruned"))
        told = [note for note in notes if note.startswith(f"prune: accuracy fell from {before} to {after};")]
        assert len(told) == fell


def test_a_rule_without_a_value_is_refused():
    with pytest.raises(dh.UserError, match="no value to be found"):
        targets.value_for(targets.density(nn.Linear(2, 2), 0.5), nn.Linear(2, 2), dh.Density)


@pytest.mark.parametrize("select", ["held-out", "test-best"])
def test_a_run_may_lose_no_more_accuracy_than_it_is_allowed(tmp_path, select):
    job, summary = run(tmp_path, "prune.target={drop: 0.02}", f"epoch_selection={select}")
    assert job.masks.density < 0.9
    if select == "test-best":
        assert summary["accuracy"]["pruned"] >= summary["accuracy"]["regularized"] - 0.02


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("prune={rule: std-ratio, value: 0.1, target: {macs: 0.4}}", "not both"),
        ("prune={rule: density, target: {macs: 0.4}}", "rule that a target can use"),
        ("prune={target: {macs: 0.4, drop: 0.1}}", "one of macs"),
        ("prune={target: {}}", "one of macs"),
        ("prune={rule: {name: std-ratio, scope: global}, target: {macs: 0.4}}", "needs a rule without settings"),
        ("prune={target: {macs: 1.4}}", "less than or equal to 1"),
        ("prune={target: {mac: 0.4}}", "macs"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(change, told):
    with pytest.raises(dh.UserError, match=told):
        recipe.read("demo", [change])
