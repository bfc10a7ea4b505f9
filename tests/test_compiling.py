"""Blocks compiled for training steps: which ones, that they train the same, and that nothing else sees them."""

import copy
import shutil

import pytest
import torch
from torch import nn

import deephoyer as dh
from deephoyer.lab import models, recipe
from deephoyer.lab.data import DATASETS, Dataset
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.train.compiling import Compiled, repeated
from deephoyer.lab.train.run import Run


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(self.linear(x)).relu()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaves = nn.Sequential(Leaf(), Leaf())

    def forward(self, x):
        return self.leaves(x)


def test_the_outermost_repeated_modules_are_found():
    tree = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Branch(), Branch()), Branch(), nn.ReLU())
    assert repeated(tree) == [tree[1][0], tree[1][1], tree[2]]
    assert repeated(nn.Sequential(Branch(), nn.Linear(6, 6))) == []  # a leaf twice is not often
    pair = nn.Sequential(Branch(), Branch())
    assert repeated(pair) == [*pair[0].leaves, *pair[1].leaves]


def test_a_network_is_as_it_was_outside_of_a_compiled_step(monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.compiling.BACKEND", "eager")
    model = nn.Sequential(Leaf(), Leaf(), Leaf())
    names = list(model.state_dict())
    compiled = Compiled(repeated(model))
    with compiled.on():
        assert "forward" in vars(model[0]) and list(model.state_dict()) == names
    with pytest.raises(ZeroDivisionError), compiled.on():
        _ = 1 / 0
    assert not any("forward" in vars(module) for module in model.modules())
    copy.deepcopy(model)(torch.ones(2, 6))


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU takes a C++ compiler")
def test_likes_are_compiled_once_and_give_the_same_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(*(Leaf() for _ in range(4))).double()
    twin, x = copy.deepcopy(model), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch._dynamo.utils.counters.clear()
    with Compiled(repeated(model)).on():
        model(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def noise(limit: int = 64) -> Dataset:
    """random images in CIFAR-10's shape"""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (limit, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (limit,), generator=g)
    return Dataset("compiling-noise", x, y, x[:16], y[:16], 10)


SMALL = [
    "model=resnet-20",
    "data=compiling-noise",
    "device=cpu",
    "batch_size=16",
    "pretrain={epochs: 2, optimizer: sgd, lr: 1e-3}",
    "regularize={epochs: 1, optimizer: sgd, lr: 1e-3, strength: 1e-4, groups: coupled}",
    "prune={rule: density, value: 0.5}",
    "finetune={epochs: 1, optimizer: sgd, lr: 1e-3}",
]


def test_a_run_with_compiled_blocks_is_the_run_without(tmp_path, monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.compiling.BACKEND", "aot_eager")
    monkeypatch.setitem(DATASETS._makers, "compiling-noise", noise)
    teacher = tmp_path / "teacher.safetensors"
    checkpoint.write_tensors(teacher, models.make("resnet-20").state_dict())
    words = [f"distill={{teachers: [{{file: {teacher}, model: resnet-20}}]}}", "pretrain.epochs=1"]
    plain, compiled = (
        Run(recipe.read("demo", [*SMALL, *words, f"compile={choice}"]), tmp_path / choice).execute()
        for choice in ("off", "blocks")
    )
    assert all(not compiled.model.state_dict()[name][~mask].any() for name, mask in compiled.masks.items())
    ours, theirs = compiled.model.state_dict(), plain.model.state_dict()
    assert list(ours) == list(theirs) == list(models.make("resnet-20").state_dict())
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5)
    losses = [[line["loss"] for line in run.folder.metrics()] for run in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert Run(compiled.recipe, tmp_path / "blocks").execute().finished()


@pytest.mark.cuda
@pytest.mark.parametrize(("precision", "slack"), [("float32", 1e-2), ("bfloat16", 5e-2)])
def test_compiled_blocks_are_captured_and_train_as_plain_ones(tmp_path, monkeypatch, precision, slack):
    monkeypatch.setitem(DATASETS._makers, "compiling-noise", lambda: noise(256))
    fast = ["device=cuda", f"precision={precision}", "channels_last=true", "shift=2", "flip=true"]
    losses = []
    for choice in (["capture=off"], ["compile=blocks"]):
        run = Run(recipe.read("demo", [*SMALL, *fast, *choice]), tmp_path / choice[0]).execute()
        losses.append([line["loss"] for line in run.folder.metrics()])
    assert losses[1] == pytest.approx(losses[0], rel=slack)


def test_compile_takes_off_and_blocks_only():
    assert recipe.read("demo").compile == "off" and recipe.read("demo", ["compile=off", "capture=off"]).capture == "off"
    with pytest.raises(dh.UserError, match="compile"):
        recipe.read("demo", ["compile=all"])
