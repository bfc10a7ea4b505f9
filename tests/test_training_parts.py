"""The parts of the loop: batches, rates, teachers, sweeps."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import deephoyer as dh
from deephoyer import data, models
from deephoyer.train import answers, batches, checkpoint, recipe, sharing, sweep
from deephoyer.train.distill import Teachers, teachers_of
from deephoyer.train.places import looked_up
from deephoyer.train.rates import make_optimizer, rate_at, rates_in, set_rate
from deephoyer.train.schema import Training


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 3), st.integers(0, 99))
def test_an_epoch_shows_each_image_at_most_once_and_only_of_its_pool(count, batch, shift, seed):
    pool = torch.arange(100)[:count] * 2
    drawn = batches.draw(pool, batch, shift, True, seed)
    seen = drawn.index.flatten().tolist()
    assert len(set(seen)) == len(seen) and set(seen) <= set(pool.tolist())
    assert len(pool) - len(seen) < min(batch, count)
    if shift:
        assert drawn.shift.abs().max() <= shift


@given(st.integers(-2, 2), st.integers(-2, 2))
def test_a_shift_moves_the_image_and_lets_zeros_in(rows, columns):
    x = torch.rand(1, 2, 5, 6)
    expected = torch.zeros_like(x)
    for i in range(5):
        for j in range(6):
            if 0 <= i - rows < 5 and 0 <= j - columns < 6:
                expected[..., i, j] = x[..., i - rows, j - columns]
    assert torch.equal(batches.moved(x, torch.tensor([[rows, columns]]), 2), expected)


@pytest.mark.parametrize("reach", [0, 1, 3])
@pytest.mark.parametrize("flips", [False, True])
def test_images_looked_up_are_the_images_moved(reach, flips):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 3, 6, 5), dtype=torch.uint8, generator=g)
    y = torch.arange(40)
    pictures = data.Dataset("pictures", x, y, x, y, 40, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).in_floats()
    draw = batches.draw(torch.arange(40), 30, reach, flips, seed=2).step(0)
    expected, labels = batches.images(pictures, *draw, reach)
    assert torch.equal(looked_up(pictures, *draw, reach), expected) and torch.equal(labels, draw[0])


def test_rates_are_pure_functions_of_the_step():
    step = Training(epochs=10, lr=1.0, schedule="step", milestones=(3, 6))
    assert [round(rate_at(step, s, 10), 6) for s in (0, 29, 30, 59, 60, 99)] == [1, 1, 0.1, 0.1, 0.01, 0.01]
    cosine = Training(epochs=10, lr=1.0, schedule="cosine")
    assert rate_at(cosine, 0, 10) == 1 and rate_at(cosine, 50, 10) == pytest.approx(0.5)
    assert 0 < rate_at(cosine, 99, 10) < 0.001


@pytest.mark.parametrize("schedule", [{}, {"schedule": "cosine"}, {"schedule": "step", "milestones": (1, 4)}], ids=str)
def test_a_rate_that_warms_up_rises_evenly_to_its_schedule_and_follows_it_then(schedule):
    def rates(warmup):
        stage = Training(epochs=6, lr=0.1, lr_warmup=warmup, **schedule)
        return [rate for epoch in range(6) for rate in rates_in(stage, epoch, steps=5)]

    plain, warm = rates(0), rates(2)
    assert [w / p for w, p in zip(warm[:10], plain[:10], strict=True)] == pytest.approx([n / 10 for n in range(1, 11)])
    assert warm[9:] == plain[9:] and plain[0] == 0.1


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_every_optimizer_of_a_recipe_trains(name):
    model = torch.nn.Linear(2, 1)
    optimizer = make_optimizer(Training(epochs=1, optimizer=name, lr=0.1), model.parameters())
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True)])
def test_an_optimizer_goes_on_from_a_file_captured_or_not_and_in_any_memory_format(tmp_path, name, kinds):
    """For captured steps it holds its rate and step count as tensors; a machine without a GPU has a plain one."""
    settings = Training(epochs=1, optimizer=name, lr=0.1, weight_decay=1e-2)
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))

    def trained(kinds, steps):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        for captured in kinds:
            optimizer = make_optimizer(settings, model.parameters(), captured)
            if checkpoint.numbers(tmp_path):
                checkpoint.refill(optimizer, *checkpoint.read(tmp_path / "000001.safetensors"))
            for _ in range(steps):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                set_rate(optimizer, 0.05)
                optimizer.step()
            if len(kinds) > 1:
                checkpoint.save(tmp_path, *checkpoint.flatten(optimizer.state_dict()))
        return model.weight

    whole = trained([False], 6)
    torch.testing.assert_close(trained(kinds, 3), whole)


@pytest.mark.parametrize("passes", [20, 0])
def test_teachers_in_a_table_and_teachers_asked_in_the_step_say_the_same(passes):
    torch.manual_seed(0)
    digits = data.load("mnist", limit=40).in_floats()
    nets = [models.make("lenet-300-100") for _ in range(2)]
    teachers = Teachers(nets, digits, reach=1, flips=True, temperature=2.0, weight=0.6, most_passes=passes)
    assert (teachers.table is None) == (passes == 0)
    drawn = batches.draw(torch.arange(40), 16, 1, True, seed=3)
    index, shift, flip = drawn.step(0)
    x, y = batches.images(digits, index, shift, flip, 1)
    logits = torch.randn(16, 10)
    with torch.no_grad():
        soft = torch.stack([F.softmax(net(x) / 2.0, 1) for net in nets]).mean(0)
    far = (soft * (soft.log() - F.log_softmax(logits / 2.0, 1))).sum(1).mean() * 4
    expected = 0.4 * F.cross_entropy(logits, y) + 0.6 * far
    torch.testing.assert_close(teachers.losses(logits, y, x, index, shift, flip).mean(), expected)


def test_teachers_whose_answers_are_kept_say_the_same_and_are_asked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    torch.manual_seed(0)
    digits = data.load("mnist", limit=30)
    nets = [models.make("lenet-300-100"), models.make("lenet-5")]
    drawn = batches.draw(torch.arange(30), 16, 2, True, seed=3).step(0)
    x, y = batches.images(digits, *drawn, 2)
    logits, notes, asked = torch.randn(16, 10), [], []
    for net in nets:
        net.register_forward_hook(lambda net, x, y: asked.append(net))

    def losses(temperature=2.0, **how):
        asked.clear()
        teachers = Teachers(nets, digits, 2, True, temperature, 1.0, say=notes.append, **how)
        times = len(asked)
        return teachers.losses(logits, y, x, *drawn), times

    plain, first, again = losses(most_passes=0)[0], losses(keep=True), losses(keep=True)
    torch.testing.assert_close(first[0], plain, rtol=0, atol=2e-3)  # kept as float16
    assert first[1] == 2 * 50 and again[1] == 0 and torch.equal(first[0], again[0])
    assert "teacher: 50 of 50 positions" in notes
    assert losses(temperature=3.0, keep=True)[1] == 2 * 50  # what was kept is no answer to this
    with torch.no_grad():
        nets[1].conv1.weight[0] += 1
    assert losses(keep=True)[1] == 50  # one teacher has changed
    for file in (tmp_path / "teachers").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    notes.clear()
    assert losses(keep=True)[1] == 2 * 50 and any("damaged" in note for note in notes)


def test_of_several_that_want_the_same_answers_one_asks_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    asked = []

    def slowly():
        for position in range(3):
            asked.append(position)
            time.sleep(0.05)
            yield torch.full((2, 10), position / 4)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: answers.kept("same", 3, slowly(), print), range(4)))
    assert asked == [0, 1, 2]
    assert all(torch.equal(table, found[0]) for table in found) and found[0][2, 0, 0] == 0.5


def test_teachers_of_two_kinds_teach_the_mean_of_what_both_say(tmp_path):
    torch.manual_seed(0)
    kinds, digits = ["lenet-300-100", "lenet-5"], data.load("mnist", limit=20).in_floats()
    nets = [models.make(kind) for kind in kinds]
    for kind, net in zip(kinds, nets, strict=True):
        safetensors.torch.save_file(net.state_dict(), tmp_path / kind)
    files = [str(tmp_path / kind) for kind in kinds]
    made = recipe.read("demo", [f"distill={{model: {kinds}, checkpoints: {files}, temperature: 2, weight: 1}}"])
    logits, (x, y) = torch.randn(20, 10), (digits.floats(digits.train_x), digits.train_y)
    found = teachers_of(made, digits, torch.device("cpu"), print).losses(logits, y, x, torch.arange(20), None, None)
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
        "deephoyer.train.compiling.BACKEND", lambda graph, inputs: blocks.append(graph) or graph.forward
    )
    torch.manual_seed(0)
    few, teacher, x = data.load("mnist", limit=4), models.make("resnet-20").eval(), torch.randn(4, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        said = F.softmax(teacher(x).float() / 4.0, 1)
    asked = Teachers([teacher], few, 4, True, 4.0, 1.0, half=True, compiled=compiled)
    logits, labels = torch.randn(4, 10), torch.zeros(4, dtype=torch.long)
    far = F.kl_div(F.log_softmax(logits / 4.0, 1), said, reduction="none").sum(1) * 16
    found = asked.losses(logits, labels, x, torch.arange(4), None, None)
    torch.testing.assert_close(found, far)
    assert bool(blocks) == compiled
    assert teacher.conv1.weight.dtype is torch.bfloat16 and teacher.bn1.weight.dtype is torch.float32


QUICK = [
    "data={name: mnist, limit: 300}",
    "device=cpu",
    "regularize.epochs=1",
    "finetune.epochs=1",
    "pretrain.epochs=1",
]


def test_a_sweep_runs_every_member_and_one_that_fails_leaves_the_others_alone(tmp_path):
    team = sweep.members("demo", QUICK, ["prune.value=0.1,1e9"], tmp_path)
    sweep.run_all("demo", QUICK, team, 2, None)
    good, bad = team
    assert good.status == 0 and good.result()["accuracy"]["finetuned"] > 0
    assert bad.status == 2 and "would leave nothing of" in bad.line()
    assert sweep.result_table(team).row_count == 2
    before = (good.folder / "summary.json").stat().st_mtime_ns
    again = sweep.members("demo", QUICK, ["prune.value=0.1"], tmp_path)
    sweep.run_all("demo", QUICK, again, 1, None)
    assert (good.folder / "summary.json").stat().st_mtime_ns == before
    assert json.loads((good.folder / "summary.json").read_text()) == again[0].result()


def test_a_stacked_sweep_goes_on_past_a_network_that_cannot_be_stacked_and_is_not_done_twice(tmp_path):
    said: list[str] = []
    team = sweep.members("demo", QUICK, ["model=resnet-20,lenet-300-100"], tmp_path)
    sweep.run_stacked("demo", QUICK, team, said.append)
    bad, good = team
    assert bad.status == 1 and "BatchNorm2d" in bad.line() and any("BatchNorm2d" in text for text in said)
    assert good.status == 0 and good.result()["accuracy"]["finetuned"] > 0
    before = (good.folder / "summary.json").stat().st_mtime_ns
    again = sweep.members("demo", QUICK, ["model=lenet-300-100"], tmp_path)
    sweep.run_stacked("demo", QUICK, again, said.append)
    assert again[0].status == 0 and (good.folder / "summary.json").stat().st_mtime_ns == before


PATIENT = """
import pathlib, signal, sys, time
mine = pathlib.Path(sys.argv[-1])
def told(*_):
    (mine / "told").touch()
    end = time.monotonic() + 10
    while len(list(mine.parent.glob("*/told"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    sys.exit(time.monotonic() >= end)
signal.signal(signal.SIGINT, told)
(mine / "ready").touch()
time.sleep(60)
"""


def test_ctrl_c_is_told_to_all_members_before_any_is_waited_for(tmp_path):
    class Show:
        def update(self, table):
            if len(list(tmp_path.glob("*/ready"))) == 2:
                raise KeyboardInterrupt

    team = [sweep.Member([], tmp_path / name) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        sweep._conduct([sys.executable, "-c", PATIENT], dict(os.environ), team, 2, Show())
    assert [m.process.returncode for m in team] == [0, 0]


STRUCK = """
import pathlib, sys, time
mine = pathlib.Path(sys.argv[-1])
tries = len(list(mine.glob("try*")))
(mine / f"try{tries}").touch()
(mine / "here").touch()
company = len(list(mine.parent.glob("*/here"))) > 1
time.sleep(0.5)
(mine / "here").unlink()
if mine.name == "killed":
    sys.exit(3)
if mine.name == "broken" or company or not tries:
    sys.exit("torch.AcceleratorError: CUDA error: unspecified launch failure")
"""


def test_members_that_another_struck_down_go_on_alone_once_all_have_left_the_gpu(tmp_path):
    team = [sweep.Member([], tmp_path / name) for name in ("killed", "struck", "broken", "struck too")]
    sweep._conduct([sys.executable, "-c", STRUCK], dict(os.environ), team, 4, None)
    assert [m.status for m in team] == [3, 0, 1, 0]
    assert [len(list(m.folder.glob("try*"))) for m in team] == [1, 2, 2, 2]
    assert "launch failure" in team[1].folder.joinpath("log.txt").read_text(), "the first failure can still be read"


@pytest.mark.parametrize("axis", ["seed", "seed=", "=1", "seed=1,1", "seed=one", "sed=1"])
def test_a_grid_that_makes_no_sense_is_refused_before_anything_runs(tmp_path, axis):
    with pytest.raises(dh.UserError):
        sweep.members("demo", QUICK, [axis], tmp_path)
    assert not list(tmp_path.iterdir())


CONTROL = """#!/bin/sh
# What NVIDIA's program does as seen from outside: -d stays behind, and then takes commands through its folder.
if [ "$1" = -d ]; then
  echo "start $CUDA_MPS_PIPE_DIRECTORY" >> "$CALLS"
  [ "$REFUSES" ] && exit 1
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
else
  [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
  read command
  echo "$command $CUDA_MPS_PIPE_DIRECTORY" >> "$CALLS"
  [ "$command" = quit ] && rm "$CUDA_MPS_PIPE_DIRECTORY/control"
fi
exit 0
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A program named like NVIDIA's on the path; gives the calls it got."""
    program = tmp_path / "bin" / sharing.CONTROL
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "nothing"))
    return lambda: [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_a_private_mps_lasts_as_long_as_the_sweep_however_that_ends(control, end):
    said = []
    with nullcontext() if end is None else pytest.raises(end), sharing.mps(said.append, 4) as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder) and environment[sharing.PART] == "50"
        if end is not None:
            raise end
    assert control() == [["start", folder], ["quit", folder]]
    assert not os.path.exists(folder) and said == []


def test_an_mps_that_runs_already_is_left_alone(control, tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "control").touch()
    with sharing.mps(print, 8) as environment:
        assert environment == {sharing.PART: "25"}
    assert [call[0] for call in control()] == ["get_server_list"]


def test_two_fill_the_gpu_and_a_users_own_part_stays(monkeypatch):
    assert [sharing.part(n)[sharing.PART] for n in (1, 2, 3, 16)] == ["100", "100", "67", "13"]
    monkeypatch.setenv(sharing.PART, "30")
    assert sharing.part(4) == {}


def test_an_mps_that_does_not_start_is_done_without(control, monkeypatch):
    monkeypatch.setenv("REFUSES", "1")
    said = []
    with sharing.mps(said.append, 4) as environment:
        assert environment == {}
    assert len(said) == 1 and "exit status 1" in said[0]
    assert [call[0] for call in control()] == ["start"]


def test_without_the_program_or_a_gpu_to_share_nothing_is_started(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with sharing.mps(pytest.fail, 4) as environment:
        assert environment == {}


def test_a_gpu_is_as_crowded_as_runs_at_once_are_on_it(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert sharing.crowd(["cpu", "cpu"], 2) == 0
    assert sharing.crowd(["auto", "cuda:0", "cuda"], 2) == 2
    assert sharing.crowd(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 4) == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sharing.crowd(["auto", "auto"], 2) == 0
