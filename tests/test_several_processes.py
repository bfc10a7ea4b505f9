"""Several processes that train one network, on the CPU: what one alone would do, whoever dies on the way."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

import image_folders
from deephoyer.lab import models, recipe
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.train.loop import TrainingLoop
from deephoyer.lab.train.run import Run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folders.make(tmp_path_factory.mktemp("photos"), val=7)


@pytest.fixture
def job(tmp_path, photos):
    return image_folders.recipe_file(tmp_path, photos)


def alone(job, folder, *changes):
    return Run(recipe.read(str(job), ["data.workers=0", *changes]), folder).execute()


def together(job, folder, *changes, count=2):
    """`deephoyer run` in so many processes, as torchrun would start them; what each said on standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, image_folders.__file__, "run", str(job), "--out", str(folder), "data.workers=0", *changes]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(
            words,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    return [rank.returncode for rank in ranks], [out for out, _ in said], [err for _, err in said]


def final(folder):
    tensors, state, _ = checkpoint.newest(folder / "checkpoints")
    return {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}, state


def close(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_two_processes_end_with_the_weights_and_the_counts_of_one(tmp_path, job):
    status, said, _ = together(job, tmp_path / "two", "accumulate=2")
    assert status == [0, 0] and "finetune: 2 epochs" in said[0] and not said[1]
    one = alone(job, tmp_path / "one")
    weights, state = final(tmp_path / "two")
    close(weights, one.model.state_dict())
    assert state["accuracy"] == one.state.accuracy
    for ours, theirs in zip(one.folder.metrics(), _metrics(tmp_path / "two"), strict=True):
        assert ours["held_out"] == theirs["held_out"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_a_network_with_batch_norm_has_the_same_counts_in_two_processes(tmp_path, job):
    torch.manual_seed(3)
    network = models.make("resnet-20", classes=4)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.2, 0.2)
    safetensors.torch.save_file(network.state_dict(), tmp_path / "start.safetensors")
    changes = [f"start={tmp_path / 'start.safetensors'}", "model={name: resnet-20, classes: 4}"]
    changes += ["pretrain=null", "regularize=null", "finetune=null", "prune.value=0.7"]
    status, _, _ = together(job, tmp_path / "two", *changes)
    one = alone(job, tmp_path / "one", *changes)
    weights, state = final(tmp_path / "two")
    assert status == [0, 0] and state["accuracy"] == one.state.accuracy
    assert all(torch.equal(weights[name], t) for name, t in one.model.state_dict().items())


def test_a_mistake_is_told_once(tmp_path, job):
    status, _, said = together(job, tmp_path / "run", "batch_size=9")
    assert status == [2, 2] and "9 images can't be divided equally among 2 processes" in said[0]
    assert said[0].count("deephoyer:") == 1 and "deephoyer:" not in said[1] and "Traceback" not in "".join(said)


def test_a_killed_rank_ends_all_and_the_run_goes_on_with_one_process_and_then_with_two(tmp_path, job):
    place, pids = tmp_path / "run", tmp_path / "pids"
    pids.mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [image_folders.__file__, "run", str(job), "--out", str(place), "data.workers=1", "pretrain.epochs=6"]
    group = subprocess.Popen(
        words,
        env={**os.environ, "TEST_PAUSE": "0.05", "TEST_PIDS": str(pids)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(checkpoint.numbers(place / "checkpoints")) < 2:
        assert group.poll() is None, group.communicate()
        time.sleep(0.02)
    os.kill(int((pids / "1").read_text()), signal.SIGKILL)
    _, said = group.communicate(timeout=120)
    assert group.returncode != 0
    assert "of this run" in said and f"resume from the last checkpoint in {place}" in said
    stage = checkpoint.newest(place / "checkpoints")[1]["stage"]
    assert stage == "pretrain"

    changes = ["pretrain.epochs=6", "finetune.epochs=1"]
    stop_in_regularize(Run(recipe.read(str(job), changes), place))
    assert checkpoint.newest(place / "checkpoints")[1]["stage"] == "regularize"
    status, _, said = together(job, place, *changes)
    assert status == [0, 0], said
    whole = alone(job, tmp_path / "whole", *changes)
    weights, state = final(place)
    close(weights, whole.model.state_dict())
    assert state["accuracy"] == whole.state.accuracy


def stop_in_regularize(run):
    class Stop(Exception):
        pass

    plain = TrainingLoop.epoch

    def stopping(loop, epoch):
        if loop.state.stage == "regularize":
            raise Stop
        return plain(loop, epoch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(TrainingLoop, "epoch", stopping)
        run.execute()


def _metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
