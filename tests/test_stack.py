"""Stacked runs: the same trainings as one by one, faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deephoyer import models
from deephoyer.errors import UserError
from deephoyer.train import recipe as recipes
from deephoyer.train.run import Run
from deephoyer.train.stack import Stack
from deephoyer.train.stacked import stacked

SMALL = [
    "data={name: mnist, limit: 600}", "device=cpu", "pretrain.epochs=2", "regularize.epochs=3", "finetune.epochs=2",
    "batch_size=50", "shift=1", "select=held-out",
]  # fmt: skip


def run(name: str, folder: Path, *more: str) -> Run:
    return Run(recipes.read(name, [*SMALL, *more]), folder)


@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5"])
def test_a_stacked_network_is_the_networks_side_by_side(name):
    nets = [models.make(name).double() for _ in range(3)]
    x = torch.rand(12, 1, 28, 28, dtype=torch.float64)
    expected = torch.cat([net(part) for net, part in zip(nets, x.split(4), strict=True)])
    expected.square().sum().backward()
    grads = [{n: p.grad.clone() for n, p in net.named_parameters()} for net in nets]
    twin = stacked(nets)
    found = twin(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    for n, p in twin.named_parameters():
        for i in range(3):
            torch.testing.assert_close(p.grad[i], grads[i][n])
            assert nets[i].get_parameter(n).data_ptr() == p[i].data_ptr()


def test_padding_and_strides_are_the_convolutions_own():
    nets = [nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)).double() for _ in range(2)]
    x = torch.rand(4, 3, 7, 8, dtype=torch.float64)
    expected = torch.cat([net(part) for net, part in zip(nets, x.split(2), strict=True)])
    torch.testing.assert_close(stacked(nets)(x), expected)


@pytest.mark.parametrize("other", [{"padding_mode": "circular"}, {"dilation": 2}])
def test_a_convolution_that_is_not_plain_is_not_stacked(other):
    with pytest.raises(UserError, match="only plain convolutions"):
        stacked([nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, **other)) for _ in range(2)])


def test_a_network_with_batch_norm_is_not_stacked():
    with pytest.raises(UserError, match="BatchNorm2d"):
        stacked([nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)) for _ in range(2)])


@pytest.mark.parametrize("name", ["lenet-300-100-hs-decay", "lenet-300-100-group-hs-decay"])
def test_members_of_a_stack_end_as_they_would_alone(tmp_path, name):
    differ = [
        ["seed=0", "regularize.strength=1e-3"],
        ["seed=1", "regularize.strength=2e-3"],
        ["seed=1", "prune.value=0.01"],
    ]
    alone = [run(name, tmp_path / f"alone{i}", *d).execute() for i, d in enumerate(differ)]
    stack = Stack([run(name, tmp_path / f"stacked{i}", *d) for i, d in enumerate(differ)]).execute()
    assert not stack.failed
    for one, member in zip(alone, stack.runs, strict=True):
        assert member.finished() and member.state.selected == one.state.selected
        assert member.masks.density == pytest.approx(one.masks.density, rel=0.02)
        for (n, p), q in zip(one.model.named_parameters(), member.model.parameters(), strict=True):
            agree = torch.isclose(p, q, rtol=1e-2, atol=1e-3).float().mean()
            assert agree > 0.95, n
        for stage in ("dense", "finetuned"):
            assert member.state.accuracy[stage] == pytest.approx(one.state.accuracy[stage], abs=0.01)
        assert [line["epoch"] for line in member.folder.metrics()] == [line["epoch"] for line in one.folder.metrics()]


def test_members_are_watched_on_images_as_they_are_trained_on(tmp_path):
    changes = ["data={name: mnist, limit: 600, normalize: true}", "finetune.epochs=0", "regularize.epochs=0"]
    alone = run("lenet-300-100-hs", tmp_path / "alone", *changes).execute()
    member = Stack([run("lenet-300-100-hs", tmp_path / "stacked", *changes)]).execute().runs[0]
    one, other = ([line["held_out"] for line in r.folder.metrics()] for r in (alone, member))
    assert other == pytest.approx(one, abs=0.02) and member.state.selected == alone.state.selected


def test_a_team_that_failed_whole_is_not_trained_on(tmp_path):
    stack = Stack([run("lenet-300-100-hs", tmp_path / name, "pretrain.lr=1e30") for name in "ab"]).execute()
    assert len(stack.failed) == 2 and not stack.runs[0].folder.metrics()
    assert all("loss is" in str(why) for why in stack.failed.values())


def test_a_member_that_fails_leaves_the_others_alone(tmp_path):
    stack = Stack([run("lenet-300-100-hs", tmp_path / "a"), run("lenet-300-100-hs", tmp_path / "b", "prune.value=99")])
    stack.execute()
    assert [r.folder.path.name for r in stack.failed] == ["b"] and stack.runs[0].finished()
    assert "would leave nothing" in str(stack.failed[stack.runs[1]])


def test_members_share_one_copy_of_the_data(tmp_path):
    nothing = ["pretrain.epochs=0", "regularize.epochs=0", "finetune.epochs=0"]
    names = [("a", "seed=0"), ("b", "seed=1"), ("c", "data={name: mnist, limit: 500}")]
    first, second, other = (run("lenet-300-100-hs", tmp_path / n, change, *nothing).execute() for n, change in names)
    assert first.data is second.data and other.data is not first.data and len(other.data.train_x) == 500


def test_recipes_that_differ_in_more_are_not_stacked(tmp_path):
    with pytest.raises(UserError, match="differ"):
        Stack([run("lenet-300-100-hs", tmp_path / "a"), run("lenet-300-100-hs", tmp_path / "b", "regularize.lr=0.1")])


def test_a_member_cut_off_in_a_stack_goes_on_alone(tmp_path, monkeypatch):
    from deephoyer.train import stack as module

    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    whole = Stack([run("lenet-300-100-hs", tmp_path / f"whole{i}", f"seed={i}") for i in range(2)]).execute()

    class Cut(Exception):
        pass

    cut = Stack([run("lenet-300-100-hs", tmp_path / f"cut{i}", f"seed={i}") for i in range(2)])
    original = module.Lockstep._save

    def save_and_stop(self) -> None:
        original(self)
        if self.stage == "regularize":
            raise Cut

    monkeypatch.setattr(module.Lockstep, "_save", save_and_stop)
    with pytest.raises(Cut):
        cut.execute()
    monkeypatch.setattr(module.Lockstep, "_save", original)
    before = cut.runs[1].state.seconds["regularize"]
    assert before > 0
    first = run("lenet-300-100-hs", tmp_path / "cut0", "seed=0").execute()
    second = Stack([run("lenet-300-100-hs", tmp_path / "cut1", "seed=1")]).execute().runs[0]
    assert second.state.seconds["regularize"] > before
    for member, expected in ((first, whole.runs[0]), (second, whole.runs[1])):
        for p, q in zip(member.model.parameters(), expected.model.parameters(), strict=True):
            assert torch.isclose(p, q, rtol=1e-2, atol=1e-3).float().mean() > 0.98


def test_rounds_repeat_regularizing_and_pruning(tmp_path):
    once = run("lenet-300-100-hs", tmp_path / "once", "regularize.strength=1e-3").execute()
    twice = run("lenet-300-100-hs", tmp_path / "twice", "regularize.strength=1e-3", "rounds=2").execute()
    stages = [(line["stage"], line.get("round", 1), line["epoch"]) for line in twice.folder.metrics()]
    assert stages[2:8] == [("regularize", r, e) for r in (1, 2) for e in (1, 2, 3)]
    assert twice.masks.density < once.masks.density
    for name, mask in twice.masks.items():
        assert not twice.model.get_parameter(name)[~mask].any()


def test_a_target_is_reached_in_equal_steps_over_the_rounds(tmp_path):
    aimed = run(
        "lenet-300-100-hs", tmp_path, "rounds=2", "prune={rule: std-ratio, target: {density: 0.04}, select: '*'}"
    )
    seen = []
    prune = aimed.prune

    def noted() -> None:
        prune()
        seen.append(aimed.masks.density)

    aimed.prune = noted
    aimed.execute()
    assert seen == pytest.approx([0.2, 0.04], rel=0.05)
