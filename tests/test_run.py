"""Runs: real training of a small network on a few real images, cut off, resumed, damaged, refused."""

import copy
import dataclasses
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import deephoyer as dh
from deephoyer.lab import data, recipe
from deephoyer.lab.fork_server import ForkServer
from deephoyer.lab.open_network import open_network
from deephoyer.lab.processes import IMPORTS
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train.loop import TrainingLoop
from deephoyer.lab.train.result import finish, tables
from deephoyer.lab.train.resume import StageTensors
from deephoyer.lab.train.run import Run

SMALL = [
    "data={name: mnist, limit: 1200}",
    "device=cpu",
    "pretrain.epochs=3",
    "regularize.epochs=4",
    "regularize.strength=1e-3",
    "finetune.epochs=3",
]


def small(*changes):
    return recipe.read("demo", [*SMALL, *changes])


@pytest.fixture(autouse=True, scope="module")
def saves_every_epoch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deephoyer.lab.train.resume.SAVE_SECONDS", 0.0)
        patch.setattr("deephoyer.lab.train.resume.SAVE_SHARE", float("inf"))
        yield


@pytest.fixture(scope="module")
def whole(saves_every_epoch, tmp_path_factory):
    """A small run that went to its end; tests look at it and leave it as it is."""
    return Run(small(), tmp_path_factory.mktemp("runs") / "whole").execute()


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of its folder, to damage and to go on with."""
    return Path(shutil.copytree(whole.folder.path, tmp_path / "copied"))


def weights(run):
    return {name: t.clone() for name, t in run.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_idle_weights_stay_in_a_result_whose_predictions_would_change_without_them(copied, monkeypatch):
    def emptied(model, *_, **__):
        other = copy.deepcopy(model)
        torch.nn.init.zeros_(other.fc3.weight)
        return other

    monkeypatch.setattr("deephoyer.lab.train.result.tidy", emptied)
    run = Run(small(), copied).execute()
    assert "differs on" in finish(run)["not_tidied"]
    assert dh.load(copied / "finetuned.safetensors", model=run.fresh_model()).fc3.weight.any()


def test_the_test_images_are_evaluated_once_for_each_network_that_differs(copied, monkeypatch):
    evaluated = []

    def predictions(run, model):
        evaluated.append(model)
        return torch.zeros(5)

    monkeypatch.setattr(Run, "predictions", predictions)
    monkeypatch.setattr("deephoyer.lab.train.result.tidy", lambda model, *_, **__: copy.deepcopy(model))
    run = Run(small(), copied).execute()
    finish(run)
    assert len(evaluated) == 2 and evaluated[0] is run.model  # and the compacted one


def test_a_run_loses_most_weights_and_little_accuracy(tmp_path):
    run = Run(small("data={name: mnist, limit: 6000}", "prune={rule: density, value: 0.1}"), tmp_path).execute()
    assert run.finished() and run.masks.density == pytest.approx(0.1, abs=1e-3)
    accuracy = run.state.accuracy
    assert accuracy["dense"] > 0.85 and accuracy["finetuned"] > accuracy["dense"] - 0.05
    for name, mask in run.masks.items():
        assert not run.model.state_dict()[name][~mask].any()
    stages = [line["stage"] for line in run.folder.metrics()]
    assert stages == ["pretrain"] * 3 + ["regularize"] * 4 + ["finetune"] * 3


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    first, again, other = (
        weights(Run(small(f"seed={seed}", "regularize.epochs=1"), tmp_path / name).execute())
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert same(first, again) and not same(first, other)


class Stop(Exception):
    pass


def cut_after(run, stage, epochs):
    """Runs it as far as that, and no further."""
    plain = TrainingLoop.epoch

    def stopping(loop, epoch):
        if loop.state.stage == stage and epoch == epochs:
            raise Stop
        return plain(loop, epoch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(TrainingLoop, "epoch", stopping)
        run.execute()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("stage", ["pretrain", "regularize", "finetune"])
def test_a_run_stopped_after_any_epoch_resumes_bit_for_bit(tmp_path, stage, optimizer):
    made = small(f"{stage}.optimizer={optimizer}", "regularize.warmup={kind: cosine, epochs: 2}", "shift=1")
    whole = weights(Run(made, tmp_path / "whole").execute())

    cut_after(Run(made, tmp_path / "cut"), stage, 2)
    resumed = Run(made, tmp_path / "cut").execute()
    assert same(weights(resumed), whole)
    assert len(resumed.folder.metrics()) == 10


def test_a_run_may_go_on_on_another_device(tmp_path):
    cut_after(Run(small(), tmp_path), "regularize", 1)
    assert Run(small("device=auto"), tmp_path).execute().finished()


def test_a_checkpoint_of_another_version_of_this_program_is_told_in_a_line(copied):
    tensors, state, _ = checkpoint.newest(copied / "checkpoints")
    checkpoint.save(copied / "checkpoints", tensors, state | {"mood": "good"})
    with pytest.raises(dh.UserError, match=r"another version of deephoyer.*'mood'"):
        Run(small(), copied).execute()


DRIVER = """
import signal, sys, deephoyer.lab.train.resume as resume
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to Ctrl-C
resume.SAVE_SECONDS = 0.0
resume.SAVE_SHARE = float("inf")
from deephoyer.lab.cli import main
sys.argv = ["deephoyer", "run", "demo", "--out", sys.argv[1], *sys.argv[2:]]
main()
"""


@pytest.fixture
def forked(tmp_path):
    """Starts a run in a process of its own that needn't import torch first: six of them would mostly do that."""
    server = ForkServer(dict(os.environ), IMPORTS)
    assert server.ready()

    def start(folder, *changes):
        with open(tmp_path / "log.txt", "ab") as log:
            return server.start(["-c", DRIVER, str(folder), *SMALL, *changes], log)

    yield start
    server.close()


def test_a_run_killed_at_random_moments_ends_with_the_same_weights_bit_for_bit(tmp_path, forked):
    longer = ["pretrain.epochs=12", "regularize.epochs=16", "finetune.epochs=10"]
    assert forked(tmp_path / "whole", *longer).wait() == 0
    moments, kills = random.Random(0), 0
    for _ in range(4):
        victim = forked(tmp_path / "killed", *longer)
        deadline = time.monotonic() + 60
        while not (tmp_path / "killed" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        began = checkpoint.numbers(tmp_path / "killed" / "checkpoints")
        while checkpoint.numbers(tmp_path / "killed" / "checkpoints") == began and victim.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.4))
        victim.send_signal(signal.SIGKILL)
        kills += victim.wait() == -signal.SIGKILL
    assert kills >= 2, "the run was too short to be killed"
    assert forked(tmp_path / "killed", *longer).wait() == 0
    a, b = (dh_weights(tmp_path / name) for name in ("whole", "killed"))
    assert same(a, b)
    lines = [(tmp_path / n / "metrics.jsonl").read_text().splitlines() for n in ("whole", "killed")]
    strip = [[{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in text] for text in lines]
    assert strip[0] == strip[1]


def dh_weights(folder: Path):
    tensors, _, _ = checkpoint.newest(folder / "checkpoints")
    return {k: v for k, v in tensors.items() if k.startswith(("model.", "masks."))}


def test_ctrl_c_leaves_a_run_that_goes_on_and_exit_status_130(tmp_path):
    words = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), *SMALL, "pretrain.epochs=4000"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not checkpoint.numbers(tmp_path / "run" / "checkpoints"):
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "resume from the last checkpoint" in said and "Traceback" not in said
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") is not None


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    made = small("regularize.optimizer=sgd", "regularize.lr=1e30")
    with pytest.raises(dh.UserError, match="regularize: the loss is"):
        Run(made, tmp_path).execute()
    assert "the loss is" in json.loads((tmp_path / "failed.json").read_text())
    tensors, state, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert state["stage"] == "regularize" and all(t.isfinite().all() for t in tensors.values())


def test_a_model_that_can_not_read_the_data_is_told_in_a_line(tmp_path, monkeypatch):
    digits = data.load("mnist", limit=20)
    photographs = dataclasses.replace(digits, train_x=digits.train_x.repeat(1, 3, 1, 1))
    monkeypatch.setattr("deephoyer.lab.data.on_device", lambda choice, device: photographs)
    with pytest.raises(dh.UserError, match="lenet-300-100 can't read images of 3×28×28"):
        Run(small(), tmp_path).execute()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(whole, copied):
    newest = copied / "checkpoints" / f"{checkpoint.numbers(copied / 'checkpoints')[-1]:06d}.safetensors"
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    assert same(weights(Run(small(), copied).execute()), weights(whole))


def test_a_folder_with_no_whole_checkpoint_says_so(copied):
    for path in (copied / "checkpoints").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(dh.UserError, match="No intact checkpoint is left"):
        Run(small(), copied).execute()


def test_a_folder_made_by_another_recipe_is_refused(copied):
    with pytest.raises(dh.UserError, match=r"belongs to another recipe \(regularize.strength was 0.001, now 0.002\)"):
        Run(small("regularize.strength=2e-3"), copied).execute()


def test_a_stage_that_has_not_begun_may_still_be_changed(tmp_path):
    with pytest.raises(dh.UserError, match="would leave nothing of"):
        Run(small("prune.value=1e6"), tmp_path).execute()
    assert "would leave nothing of" in json.loads((tmp_path / "failed.json").read_text()), "for who counts on it"
    assert Run(small("prune.value=0.1"), tmp_path).execute().finished()
    assert not (tmp_path / "failed.json").exists()


def test_a_second_process_is_kept_out_of_the_folder(tmp_path):
    run = Run(small(), tmp_path)
    run.folder.open()
    with pytest.raises(dh.UserError, match="another process"):
        Run(small(), tmp_path).execute()
    run.folder.close()


def test_held_out_images_are_never_trained_on_and_test_images_never_selected_by(tmp_path, whole):
    assert len(whole.held_out) == 120 and not set(whole.held_out.tolist()) & set(whole.pool.tolist())
    assert all("held_out" in line and "test" not in line for line in whole.folder.metrics())
    best = Run(small("epoch_selection=test-best"), tmp_path / "best").execute()
    assert len(best.pool) == 1200
    tuned = [line["test"] for line in best.folder.metrics() if line["stage"] == "finetune"]
    assert best.state.accuracy["finetuned"] == max(tuned)


def test_the_last_epoch_is_kept_where_it_is_asked_for_even_if_another_was_better(tmp_path):
    words = ("pretrain.epochs=10", "pretrain.lr=0.02", "pretrain.schedule=constant")  # accuracy goes up and down
    run = Run(small("epoch_selection=last", *words), tmp_path).execute()
    dense = [line["test"] for line in run.folder.metrics() if line["stage"] == "pretrain"]
    assert len(run.pool) == 1200 and run.state.selected == {"pretrain": 10, "finetune": 3}
    assert run.state.accuracy["dense"] == dense[-1] < max(dense)


def test_a_run_may_start_from_a_file_instead_of_pretraining(tmp_path, whole):
    source = whole.folder / "dense.safetensors"
    second = Run(small("pretrain=null", f"start={source}"), tmp_path / "second").execute()
    assert same(weights(second), weights(whole))
    assert second.state.accuracy["start"] == whole.state.accuracy["dense"] and "dense" not in second.state.accuracy
    (tmp_path / "cut.safetensors").write_bytes(source.read_bytes()[:5000])
    with pytest.raises(dh.UserError, match=r"start: .*can't be read"):
        Run(small("pretrain=null", f"start={tmp_path / 'cut.safetensors'}"), tmp_path / "third").execute()


def test_a_run_starts_from_the_run_that_its_words_make_or_says_how_to_make_that(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    words = " ".join(["demo", *(shlex.quote(change) for change in SMALL), "finetune=null prune=null regularize=null"])
    later = small("pretrain=null", f"start={json.dumps(words)}")
    with pytest.raises(dh.UserError, match=r"(?s)start: the network is neither .*train it with.*deephoyer run demo"):
        Run(later, "runs/later").execute()
    dense = recipe.Command.parse(words)
    first = Run(dense.read(), "runs/whatever", command=dense)
    first.execute()
    with pytest.raises(dh.UserError, match="is not finished"):
        Run(later, "runs/later").execute()
    finish(first)
    begun = Run(later, "runs/later").execute()
    assert begun.state.accuracy["start"] == first.state.accuracy["dense"]
    assert same(weights(begun), weights(whole))


def test_a_dense_training_is_a_run_that_can_be_shown_opened_and_found(tmp_path):
    run = Run(small("regularize=null", "prune=null", "finetune=null"), tmp_path)
    run.execute()
    record = finish(run)
    assert list(record["accuracy"]) == ["dense"] and list(record["files"]) == [
        "dense.safetensors",
        "compact.safetensors",
    ]
    assert record["sparse"]["total"]["nonzeros"] == 266_200 and run.recipe.result_file == "dense.safetensors"
    network, _ = open_network(tmp_path)
    assert same(dict(network.state_dict()), weights(run))
    said = [str(part) for part in tables(record, 100)]
    assert any("differs on 0 of 10,000 test images" in line for line in said)


def test_every_network_in_a_runs_folder_says_its_model_and_data(copied, command, whole):
    status, said, _ = command("evaluate", copied / "dense.safetensors")
    assert status == 0 and f"top-1 {whole.state.accuracy['dense']:.2%}".replace("%", " %") in said
    alone = copied.parent / "alone.safetensors"
    shutil.copy(copied / "dense.safetensors", alone)
    assert "does not say what data it is for" in command("evaluate", alone, "model=lenet-300-100")[2]
    assert "does not say which model it holds" in command("summary", alone)[2]


def test_a_run_and_the_dense_network_that_it_is_timed_beside_lie_in_one_memory_format(tmp_path):
    run = Run(recipe.read("paper/lenet-5", ["data={name: mnist, limit: 200}", "device=cpu"]), tmp_path)
    run.prepare()
    for network in (run.model, run.fresh_model()):
        weight = network.get_parameter("conv2.weight")
        assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_the_folder_keeps_the_words_and_an_older_one_is_refused(tmp_path):
    command = recipe.Command("demo", (*SMALL, "finetune=null"))
    Run(command.read(), tmp_path, command=command).execute()
    folder = RunFolder(tmp_path)
    assert folder.command() == command and folder.recipe() == command.read()
    (tmp_path / "command.json").unlink()
    with pytest.raises(dh.UserError, match=r"made by deephoyer 0\.1"):
        Run(command.read(), tmp_path, command=command).execute()


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs a place nobody can write to")
@pytest.mark.parametrize(
    "change", ["start=a.safetensors", "distill={teachers: [{file: a.safetensors, model: lenet-5}]}"]
)
def test_a_file_that_a_later_stage_needs_is_missed_before_the_first_one_trains(tmp_path, change):
    with pytest.raises(dh.UserError, match=r"(start|teachers): there is no file a\.safetensors"):
        Run(recipe.read("demo", [change]), tmp_path / "run").execute()
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("prune.parameters=fc9*", r"prune\.parameters: no parameter matches 'fc9\*'"),
        ("regularize.parameters=['!fc9*', 'x*']", r"regularize\.parameters: no parameter matches 'x\*'"),
        ("method=gradual-magnitude", r"method gradual-magnitude: .* Use prune\.target\.density"),
        ("method=admm", r"method admm: .* Set its keep, the share of groups to keep, or use prune\.target\.density"),
    ],
)
def test_a_slip_in_a_later_stage_is_told_before_the_first_one_trains(tmp_path, change, told):
    with pytest.raises(dh.UserError, match=told):
        Run(recipe.read("demo", [change, "data.limit=100"]), tmp_path / "run").execute()
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_a_run_that_has_begun_goes_on_without_the_file_it_began_with(tmp_path, whole):
    start = tmp_path / "start.safetensors"
    checkpoint.write_tensors(start, whole.model.state_dict())
    job = small("pretrain=null", f"start={start}", "regularize.strength=0", "finetune={epochs: 1}")
    stopped = Run(job, tmp_path / "run")
    stopped.folder.open()
    stopped.prepare()
    stopped.run_stage(StageTensors())
    stopped.folder.close()
    start.unlink()
    assert Run(job, tmp_path / "run").execute().finished()


def test_a_place_that_cannot_be_written_is_told_in_a_line():
    with pytest.raises(dh.UserError, match="can't be created"):
        Run(small(), "/proc/deephoyer-run").execute()


def test_a_full_disk_is_told_in_a_line_and_loses_nothing(tmp_path):
    """Files may not grow beyond a limit, as on a disk that is full."""
    limited = DRIVER.replace(
        "main()\n",
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n"
        "main()\n",
    )
    words = [sys.executable, "-c", limited, str(tmp_path / "run"), *SMALL]
    full = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert full.returncode == 2 and "can't be written" in full.stderr and "Traceback" not in full.stderr
    assert len(full.stderr.splitlines()) <= 2
    assert not list((tmp_path / "run").rglob("*.tmp"))
    finish(Run(small(), tmp_path / "run").execute())
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_is_refused_leaves_no_empty_folder_and_keeps_one_that_was_there(tmp_path):
    nowhere = recipe.read("demo", ["data={name: folder, path: /nowhere, size: 28}"])
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(dh.UserError, match="nowhere"):
            Run(nowhere, tmp_path / name).execute()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
