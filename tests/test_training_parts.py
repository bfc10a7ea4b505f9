"""The parts of the loop: batches, rates, sweeps."""

import os
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deephoyer.lab import data
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.stages import Training
from deephoyer.lab.train import batches, gpu_sharing
from deephoyer.lab.train.augment import looked_up
from deephoyer.lab.train.optim import make_optimizer, rate_at, rates_in, set_rate


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
    expected, labels = batches.images(pictures, draw, reach)
    assert torch.equal(looked_up(pictures, draw.numbers, draw.shift, draw.flip, reach), expected) and torch.equal(
        labels, draw[0]
    )


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
    program = tmp_path / "bin" / gpu_sharing.CONTROL
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
    with nullcontext() if end is None else pytest.raises(end), gpu_sharing.mps(said.append, 4) as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder) and environment[gpu_sharing.PART] == "50"
        if end is not None:
            raise end
    assert control() == [["start", folder], ["quit", folder]]
    assert not os.path.exists(folder) and said == []


def test_an_mps_that_runs_already_is_left_alone(control, tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "control").touch()
    with gpu_sharing.mps(print, 8) as environment:
        assert environment == {gpu_sharing.PART: "25"}
    assert [call[0] for call in control()] == ["get_server_list"]


def test_mps_is_found_beside_the_driver_where_the_path_has_it_not(tmp_path, monkeypatch):
    program = tmp_path / gpu_sharing.CONTROL
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(gpu_sharing, "BESIDE_THE_DRIVER", str(tmp_path))
    assert gpu_sharing._control() == str(program)


def test_two_fill_the_gpu_and_a_users_own_part_stays(monkeypatch):
    assert [gpu_sharing.part(n)[gpu_sharing.PART] for n in (1, 2, 3, 16)] == ["100", "100", "67", "13"]
    monkeypatch.setenv(gpu_sharing.PART, "30")
    assert gpu_sharing.part(4) == {}


def test_an_mps_that_does_not_start_is_done_without(control, monkeypatch):
    monkeypatch.setenv("REFUSES", "1")
    said = []
    with gpu_sharing.mps(said.append, 4) as environment:
        assert environment == {}
    assert len(said) == 1 and "exit status 1" in said[0]
    assert [call[0] for call in control()] == ["start"]


def test_without_the_program_or_a_gpu_to_share_nothing_is_started(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with gpu_sharing.mps(pytest.fail, 4) as environment:
        assert environment == {}


def test_a_gpu_is_as_crowded_as_runs_at_once_are_on_it(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert gpu_sharing.runs_per_gpu(["cpu", "cpu"], 2) == 0
    assert gpu_sharing.runs_per_gpu(["auto", "cuda:0", "cuda"], 2) == 2
    assert gpu_sharing.runs_per_gpu(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 4) == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_sharing.runs_per_gpu(["auto", "auto"], 2) == 0
