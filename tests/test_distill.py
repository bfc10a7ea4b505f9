"""Teachers: asked in the step, in a table, or once for all runs; and what is kept of their answers."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from deephoyer.errors import UserError
from deephoyer.lab import bounded_yaml, data, models, recipe
from deephoyer.lab.train import batches, teacher_cache
from deephoyer.lab.train.distill import Teachers, teachers_of
from deephoyer.lab.train.objective import Objective


@pytest.mark.parametrize("passes", [20, 0])
def test_teachers_in_a_table_and_teachers_asked_in_the_step_say_the_same(passes):
    torch.manual_seed(0)
    digits = data.load("mnist", limit=40).in_floats()
    nets = [models.make("lenet-300-100") for _ in range(2)]
    teachers = Teachers(nets, digits, reach=1, flips=True, temperature=2.0, weight=0.6, most_passes=passes)
    assert (teachers.table is None) == (passes == 0)
    drawn = batches.draw(torch.arange(40), 16, 1, True, seed=3)
    step = drawn.step(0)
    x, y = batches.images(digits, step, 1)
    logits = torch.randn(16, 10)
    with torch.no_grad():
        soft = torch.stack([F.softmax(net(x) / 2.0, 1) for net in nets]).mean(0)
    far = (soft * (soft.log() - F.log_softmax(logits / 2.0, 1))).sum(1).mean() * 4
    expected = 0.4 * F.cross_entropy(logits, y) + 0.6 * far
    torch.testing.assert_close(teachers.losses(logits, y, x, step).mean(), expected)


@pytest.mark.parametrize("half", [False, True])
def test_teachers_whose_answers_are_kept_say_the_same_and_are_asked_once(half, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    torch.manual_seed(0)
    digits = data.load("mnist", limit=30)
    nets = [models.make("lenet-300-100"), models.make("lenet-5")]
    drawn = batches.draw(torch.arange(30), 16, 1, True, seed=3).step(0)
    x, y = batches.images(digits, drawn, 1)
    logits, notes, asked = torch.randn(16, 10), [], []
    for net in nets:
        net.register_forward_hook(lambda net, x, y: asked.append(net))

    def losses(temperature=2.0, **how):
        how["say"] = notes.append
        asked.clear()
        teachers = Teachers([copy.deepcopy(net) for net in nets], digits, 1, True, temperature, 1.0, half, **how)
        times = len(asked)
        return teachers.losses(logits, y, x, drawn), times

    plain, first, again = losses(most_passes=0)[0], losses(keep=True), losses(keep=True)
    torch.testing.assert_close(first[0], plain, rtol=0, atol=3e-2 if half else 2e-3)  # kept as float16
    assert first[1] == 2 * 18 and again[1] == 0 and torch.equal(first[0], again[0])
    assert "predictions of the teacher: 18 of 18 positions" in notes
    assert losses(temperature=3.0, keep=True)[1] == 2 * 18  # what was kept is no answer to this
    with torch.no_grad():
        nets[1].conv1.weight[0] += 1
    assert losses(keep=True)[1] == 18  # one teacher has changed
    for file in (tmp_path / "teachers").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    notes.clear()
    assert losses(keep=True)[1] == 2 * 18 and any("damaged" in note for note in notes)


def test_of_several_that_want_the_same_answers_one_asks_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    asked = []

    def slowly():
        for position in range(3):
            asked.append(position)
            time.sleep(0.05)
            yield torch.full((2, 10), position / 4)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: teacher_cache.load_or_compute("same", 3, slowly(), print), range(4)))
    assert asked == [0, 1, 2]
    assert all(torch.equal(table, found[0]) for table in found) and found[0][2, 0, 0] == 0.5


def test_answers_that_can_not_be_written_are_used_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))

    def full(*_):
        raise UserError("the disk is full.")

    monkeypatch.setattr(teacher_cache, "write_atomically", full)
    notes = []
    assert torch.equal(
        teacher_cache.load_or_compute("a", 1, iter([torch.ones(2, 3)]), notes.append), torch.ones(1, 2, 3).half()
    )
    assert notes[-1] == "the disk is full. The predictions are not cached."


def test_answers_that_have_no_place_are_used_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path / "file"))
    notes = []
    assert torch.equal(
        teacher_cache.load_or_compute("a", 1, iter([torch.ones(2, 3)]), notes.append), torch.ones(1, 2, 3).half()
    )
    assert "can't be made" in notes[0] and "The predictions are not cached." in notes[0]


def test_answers_that_are_there_are_read_where_nothing_can_be_locked(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    (tmp_path / "teachers" / "a.lock").mkdir(parents=True)
    for again in range(2):
        asked = iter([torch.full((2, 3), 0.5)] if not again else ())
        assert torch.equal(teacher_cache.load_or_compute("a", 1, asked, print), torch.full((1, 2, 3), 0.5).half())


def test_teachers_of_two_kinds_teach_the_mean_of_what_both_say(tmp_path):
    torch.manual_seed(0)
    kinds, digits = ["lenet-300-100", "lenet-5"], data.load("mnist", limit=20).in_floats()
    nets = [models.make(kind) for kind in kinds]
    for kind, net in zip(kinds, nets, strict=True):
        safetensors.torch.save_file(net.state_dict(), tmp_path / kind)
    files = [str(tmp_path / kind) for kind in kinds]
    teachers = [{"file": file, "model": kind} for file, kind in zip(files, kinds, strict=True)]
    made = recipe.read("demo", [f"distill={{teachers: {teachers}, temperature: 2, weight: 1}}"])
    logits, (x, y) = torch.randn(20, 10), (digits.floats(digits.train_x), digits.train_y)
    everything = batches.Draw(torch.arange(20), None, None)
    found = teachers_of(made, digits, torch.device("cpu"), print).losses(logits, y, x, everything)
    with torch.no_grad():
        soft = (F.softmax(nets[0](x) / 2, 1) + F.softmax(nets[1](x) / 2, 1)) / 2
    torch.testing.assert_close(found, 4 * (soft * (soft.log() - F.log_softmax(logits / 2, 1))).sum(1))


def test_teachers_of_photographs_are_asked_in_the_step():
    few = data.load("mnist", limit=4)
    assert Teachers([models.make("lenet-300-100")], few, 4, True, 4.0, 0.7).table is None
    assert Teachers([models.make("lenet-300-100")], few, 1, True, 4.0, 0.7).table is not None


@pytest.mark.parametrize("compiled", [False, True])
def test_teachers_made_ready_say_what_they_said_in_half_precision(compiled, monkeypatch):
    blocks = []
    monkeypatch.setattr(
        "deephoyer.lab.train.compiling.BACKEND", lambda graph, inputs: blocks.append(graph) or graph.forward
    )
    torch.manual_seed(0)
    few, teacher, x = data.load("mnist", limit=4), models.make("resnet-20").eval(), torch.randn(4, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        said = F.softmax(teacher(x).float() / 4.0, 1)
    asked = Teachers([teacher], few, 4, True, 4.0, 1.0, half=True, compiled=compiled)
    logits, labels = torch.randn(4, 10), torch.zeros(4, dtype=torch.long)
    far = F.kl_div(F.log_softmax(logits / 4.0, 1), said, reduction="none").sum(1) * 16
    found = asked.losses(logits, labels, x, batches.Draw(torch.arange(4), None, None))
    torch.testing.assert_close(found, far)
    assert bool(blocks) == compiled
    assert teacher.conv1.weight.dtype is torch.bfloat16 and teacher.bn1.weight.dtype is torch.float32


def test_features_are_what_the_last_linear_layer_is_given_and_their_distance_is_relative():
    torch.manual_seed(0)
    digits = data.load("mnist", limit=16).in_floats()
    net, teacher = models.make("lenet-300-100"), models.make("lenet-300-100")
    recipe_of = recipe.read("demo", ["distill={teachers: [a.safetensors], temperature: 2, weight: 0, features: 3}"])
    teachers = Teachers([teacher], digits, 0, False, 2.0, 0.0, features=3.0)
    step = batches.draw(torch.arange(16), 16, 0, False, seed=1).step(0)
    x, y = batches.images(digits, step, 0)

    def hidden(of):
        return of.fc2(of.fc1(x.flatten(1)).relu()).relu()

    a, b = hidden(net), hidden(teacher).detach()
    far = ((a - b).square().sum(1) / b.square().sum(1)).mean()
    expected = F.cross_entropy(net(x), y) + 3 * far
    found = Objective(net, digits, recipe_of, teachers)(step)
    torch.testing.assert_close(found, expected)
    own, theirs = (torch.autograd.grad(loss, list(net.parameters())) for loss in (found, expected))
    torch.testing.assert_close(own, theirs)
    assert not any(m._forward_pre_hooks for one in (net, teacher) for m in one.modules())


def test_features_of_another_width_and_of_several_teachers_are_refused():
    digits = data.load("mnist", limit=4).in_floats()
    teachers = Teachers([models.make("lenet-5")], digits, 0, False, 2.0, 0.5, features=1.0)
    with pytest.raises(UserError, match="the network has 100 features and its teacher 500"):
        Objective(models.make("lenet-300-100"), digits, recipe.read("demo"), teachers)
    with pytest.raises(UserError, match="not of 2"):
        recipe.read("demo", ["distill={teachers: [a.safetensors, b.safetensors], features: 1}"])
    with pytest.raises(UserError, match="can't be kept"):
        recipe.read("demo", ["distill={teachers: [a.safetensors], features: 1, keep: true}"])


class OfPatches(nn.Module):
    """Its last linear layer reads every patch, and their predictions are averaged."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(100, 10)

    def forward(self, x):
        return self.head(x.flatten(1)[:, :300].view(-1, 3, 100)).mean(1)


def test_features_of_another_shape_are_refused_though_the_layers_are_of_one_width():
    digits = data.load("mnist", limit=4).in_floats()
    teachers = Teachers([OfPatches()], digits, 0, False, 2.0, 0.5, features=1.0)
    with pytest.raises(UserError, match="the network has 100 features and its teacher 3×100"):
        Objective(models.make("lenet-300-100"), digits, recipe.read("demo"), teachers)
    convolution = nn.Sequential(nn.Conv2d(1, 10, 28), nn.Flatten())
    with pytest.raises(UserError, match="the teacher calls no linear layer"):
        Teachers([convolution], digits, 0, False, 2.0, 0.5, features=1.0)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("{name: lenet-300-100, classes: 9}", "has 9 outputs, but the data has 10 classes"),
        ("resnet-20", "can't read images of 1×28×28"),
    ],
)
def test_a_teacher_of_other_images_or_classes_is_told_in_a_line(tmp_path, model, told):
    file = tmp_path / "teacher.safetensors"
    safetensors.torch.save_file(models.of(bounded_yaml.load(model)).state_dict(), file)
    settings = recipe.read("demo", [f"distill={{teachers: [{{file: {file}, model: {model}}}]}}"])
    with pytest.raises(UserError, match=told):
        teachers_of(settings, data.load("mnist", limit=20), torch.device("cpu"), print)
