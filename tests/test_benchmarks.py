"""The benchmarks: what they show and write, never how long anything takes."""

import io
import json
import random
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

import allowed_drop
import cifar_fronts
import epochs
import imports
import input_pipeline
import latency_targets
import pack_runs
import plan
import printed_results
import public_networks
import regularizer
import run_list
import tiny_imagenet
import training_step
from deephoyer.errors import UserError
from deephoyer.lab import models, recipe
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train.run import Run
from run_list import Job


def output_of(module, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *words])
    module.main()
    return capsys.readouterr().out


def test_the_regularizer_is_shown_as_ratios_and_a_record_is_written(monkeypatch, capsys, tmp_path):
    file = tmp_path / "made" / "it.json"
    words = ("--device", "cpu", "--networks", "lenet-300-100", "--brief", "--check", "--out", str(file))
    out = output_of(regularizer, monkeypatch, capsys, *words)
    for word in ("lenet-300-100", "elements", "filters+channels", "÷ floor", "autograd loop ÷ ours", "results repeat"):
        assert word in out
    record = json.loads(file.read_text())
    assert [case["groups"] for case in record["cases"]] == ["elements", "filters+channels"]
    for case in record["cases"]:
        assert all(case["ms"][side] > 0 for side in ("floor", "autograd, asks host", "autograd", "plain", "foreach"))
        assert all(found["repeats"] and found["relative error"] < 1e-3 for found in case["checks"].values())
    assert record["ratios"]["lenet-300-100 elements: ours / floor"] > 0
    assert record["machine"]["threads"] >= 1 and record["copy GB/s"] > 0


def test_without_torch_pruning_its_side_is_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setattr(regularizer, "has_torch_pruning", lambda: False)
    options = regularizer.Options(networks=("lenet-300-100",), groups=("filters+channels",), budget=0.0)
    (record,) = regularizer.measured(options)
    assert "not installed" in record["notes"][0] and "torch-pruning" not in record["cases"][0]["ms"]
    titles, row = regularizer.rows(record)
    assert row[titles.index("torch-pruning ÷ ours")] == "–"


def test_a_network_that_a_benchmark_has_not_is_named(monkeypatch, capsys):
    with pytest.raises(UserError, match="is not a network of this benchmark"):
        output_of(regularizer, monkeypatch, capsys, "--device", "cpu", "--networks", "lenet", "--brief")
    with pytest.raises(UserError, match="Did you mean 'lenet-5'"):
        output_of(epochs, monkeypatch, capsys, "--device", "cpu", "--cases", "lenet-6")


def test_a_plan_told_a_drop_alone_stands_beside_a_training_for_each_size():
    dense = {"way": "dense", "trainings": 0, "macs": 1.0, "held_out": 0.97, "test": 0.98}
    one = {"way": "a plan, told the drop alone", "trainings": 1, "macs": 0.1, "held_out": 0.965, "test": 0.97}
    lines = [dense, dense, one, one | {"macs": 0.2}, {"way": "magnitude", "trainings": 6}]
    assert allowed_drop.table({"lines": lines}).splitlines()[2:] == [
        "| dense |  | 1.000 | 97.00 | 98.00 |",
        "| a plan, told the drop alone | 1 | 0.150 ± 0.071 | 96.50 | 97.00 |",
        "| magnitude | 6 | – | – | – |",
    ]


def test_a_step_is_compared_with_the_bare_one(monkeypatch, capsys):
    out = output_of(training_step, monkeypatch, capsys, "--brief")
    assert all(f"step, {kind}" in out for kind in ("bare", "add_grad_", "autograd loop"))


def test_epochs_by_batch_blocks_and_teacher_stand_in_one_table():
    cases = [{"batch": 128, "blocks": "off", "teacher": False, "alone": 2.2}]
    cases.append({"batch": 256, "blocks": "blocks", "teacher": True, "alone": 2.0, "at once, each": 0.75})
    assert epochs.matrix_rows(cases, 4)[1:] == [
        ["128", "eager", "none", "2.200 s", ""],
        ["256", "compiled", "asked", "2.000 s", "0.750 s"],
    ]
    assert len(epochs.noise(50).train_y) == 50 and len(epochs.noise(50).test_y) == 10


@pytest.mark.slow
def test_a_sweep_is_timed_against_one_run():
    small = ["data={name: mnist, limit: 300}"]
    record = epochs.together(2, "cpu", 2, case="lenet-300-100", changes=small)
    assert record["networks"] == 2 and record["notes"] == []
    both, each = record["at once: seconds an epoch"], record["at once: seconds an epoch and network"]
    assert each == both / 2 and record["one: wall clock"] > 0
    assert "2 at once" in epochs.together_rows(record)[2]


@pytest.mark.slow
def test_times_as_targets_are_shown_beside_plain_mac_targets(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    out = output_of(
        latency_targets, monkeypatch, capsys, "--device", "cpu", "--brief", "--out", str(tmp_path / "it.json")
    )
    (line,) = json.loads((tmp_path / "it.json").read_text())["lines"]
    assert line["network"] == "resnet-20" and 0 < line["kept"] <= 1 and 0 < line["macs_kept"] <= 1 and "by MACs" in out


@pytest.mark.slow
def test_a_plan_is_compared_with_magnitude_pruning_to_the_same_macs(monkeypatch, capsys, tmp_path):
    file, ways = tmp_path / "it.json", ("dense", "magnitude, once", "plan, group lasso")
    words = ("--device", "cpu", "--brief", "--jobs", "2", "--ways", *ways, "--out", str(file))
    out = output_of(plan, monkeypatch, capsys, *words)
    macs = {line["way"]: line["macs"] for line in json.loads(file.read_text())["lines"]}
    assert list(macs) == list(ways) and macs["dense"] == 1 and "± " in out
    assert macs["plan, group lasso"] == pytest.approx(0.5, rel=0.02)
    assert macs["magnitude, once"] == pytest.approx(0.5, rel=0.02)


def test_a_way_that_the_comparison_with_a_plan_has_not_is_refused_with_the_titles_of_all(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        output_of(plan, monkeypatch, capsys, "--device", "cpu", "--brief", "--ways", "dense", "plan")
    (*_, line) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "'plan' is not a way of this benchmark" in line
    assert all(repr(title) in line for title, _ in plan.ways(4))


def test_a_network_that_learned_noise_is_not_pruned():
    assert epochs.recipe("resnet-56", "cpu", 2).stages() == ("pretrain", "regularize")


def test_importing_is_compared_with_torch(monkeypatch, capsys):
    out = output_of(imports, monkeypatch, capsys, "--brief")
    assert "all public names, after that" in out and "deephoyer list" in out


def test_reading_images_is_compared_with_training_on_them(monkeypatch, capsys, tmp_path):
    words = ("--device", "cpu", "--brief", "--model", "resnet-20", "--workers", "1", "--out", str(tmp_path / "it.json"))
    monkeypatch.setattr(input_pipeline, "STEPS", 2)  # an epoch is over long before the time is
    out = output_of(input_pipeline, monkeypatch, capsys, *words)
    assert "training on what is read reaches" in out and "1 workers" in out
    record = json.loads((tmp_path / "it.json").read_text())
    assert set(record["rates"]) == {"one core", "reading alone", "training alone", "training on what is read"}
    assert all(rate > 0 for rate in record["rates"].values())


def test_runs_on_tiny_imagenet_start_from_earlier_ones_and_nothing_is_trained_twice():
    plan = tiny_imagenet.Plan(0.5, (), (0, 1))
    for jobs in (list(plan.resnet()), list(plan.alexnet())):
        recipes = [job.command.read() for job in jobs]
        identities = [(made.digest(), made.seed) for made in recipes]
        assert len(set(identities)) == len(jobs)
        for i, later in enumerate(recipes[1:], 1):
            start = recipe.Command.parse(later.start).read()
            assert (start.digest(), start.seed) in identities[:i]
    as_shipped = list(tiny_imagenet.Plan(1, (), (0,)).resnet())
    assert as_shipped[0].command.read().digest() == recipe.read("parts/resnet-50-tiny-dense").digest()


def test_what_would_not_end_in_time_is_not_begun_and_told(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    out = output_of(tiny_imagenet, monkeypatch, capsys, "--seconds", "0", "--out", "table.json")
    assert out.count("not yet: ") > 20 and "not yet: alexnet, dense, start, seed 0: would take" in out
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == [] and not (tmp_path / "runs").exists()


class Opened:
    """Its pickle runs a function when it is loaded as pickles usually are."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_anothers_network_is_read_from_its_pickle_without_running_any_of_it(tmp_path):
    torch.manual_seed(0)
    theirs = models.make("resnet-20", shortcut="conv").eval()
    theirs.fc, theirs.layer2[0].downsample = theirs.linear, theirs.layer2[0].shortcut
    narrow, sign = 5, tmp_path / "was-run"
    block = theirs.layer1[1]
    block.conv1, block.conv2 = nn.Conv2d(16, narrow, 3, 1, 1, bias=False), nn.Conv2d(narrow, 16, 3, 1, 1, bias=False)
    block.bn1 = nn.BatchNorm2d(narrow)
    theirs.eval()
    theirs.note = Opened(sign)
    torch.save(theirs, tmp_path / "theirs.pth")
    state = public_networks.state_of(tmp_path / "theirs.pth")
    assert not sign.exists()
    ours = public_networks.network(state)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images)) and ours.layer1[1].conv1.out_channels == narrow
    torch.save(theirs.state_dict(), tmp_path / "state.pth")
    assert public_networks.state_of(tmp_path / "state.pth").keys() == state.keys()


def test_a_file_that_holds_no_network_is_refused(tmp_path):
    (tmp_path / "text.pth").write_text("no archive")
    torch.save({"a": 1}, tmp_path / "number.pth")
    with pytest.raises(UserError, match="is not a file that torch"):
        public_networks.state_of(tmp_path / "text.pth")
    with pytest.raises(UserError, match="no network was found in it"):
        public_networks.state_of(tmp_path / "number.pth")


# A list of runs


SMALL = (
    "data={name: mnist, limit: 1000}",
    "device=cpu",
    "pretrain.epochs=2",
    "regularize.epochs=1",
    "finetune.epochs=1",
)


def listed():
    """A run, the dense network that it starts from, one that starts from the first, and the first once more."""
    dense = Job("lenet", "dense", "", "demo", (*SMALL, "regularize=null", "prune=null", "finetune=null", "seed=0"))
    first = Job("lenet", "cut", "", "demo", (*SMALL, "pretrain=null", dense.start(), "seed=0"))
    later = Job("lenet", "cut", "again", "demo", (*SMALL, "pretrain=null", first.start(), "seed=0"))
    return [first, dense, later, Job("lenet", "the same", "", "demo", first.overrides)]


def test_a_run_is_given_when_what_it_starts_from_is_done_and_not_if_that_failed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first, dense, later, _ = listed()
    queue = run_list.InOrder(listed(), float("inf"), run_list.Publisher(None))
    run = queue.next()
    assert run.folder == dense.folder and queue.next() is None and queue.open()
    dense.folder.mkdir(parents=True)
    (dense.folder / "summary.json").write_text("{}")
    run.status = 0
    queue.ended(run)
    run = queue.next()
    assert run.folder == first.folder and [job.folder for job in queue.jobs].count(first.folder) == 1
    run.status = 2
    queue.ended(run)
    assert queue.next() is None and not queue.open()
    assert [line.split(": ")[1] for line in queue.left()] == ["failed", f"waits for {first.title}; 2 of 2 epochs left"]
    assert later.recipe.epochs == 2


def packed(jobs, folder):
    return "\n".join(pack_runs.pack_jobs(jobs, folder / "home", run_list.Publisher(None)))


@pytest.mark.slow
def test_a_run_stopped_when_time_is_up_goes_on_elsewhere_and_ends_with_the_same_bits(monkeypatch, tmp_path):
    def until_a_checkpoint_is_there(self, busy):
        if any(self.jobs[0].folder.glob("checkpoints/*")):
            raise run_list.TimeIsUp

    here, there, apart = (tmp_path / name for name in ("here", "there", "apart"))
    for folder in (here, there, apart):
        folder.mkdir()
    monkeypatch.chdir(here)
    jobs = [Job("lenet", "cut", "", "demo", (*SMALL, "seed=1"))]
    silent = {"say": lambda text: None}
    with monkeypatch.context() as m:
        m.setattr(run_list.InOrder, "tick", until_a_checkpoint_is_there)
        left = run_list.in_parallel(jobs, 600, 2, run_list.Publisher(None), **silent)
    assert len(left) == 1 and "not to its end" in left[0] and "packed into" in packed(jobs, tmp_path)
    monkeypatch.chdir(there)
    parts = b"".join(path.read_bytes() for path in sorted((tmp_path / "home").glob("runs-*")))
    with tarfile.open(fileobj=io.BytesIO(parts)) as archive:
        archive.extractall(filter="data")
    assert run_list.in_parallel(jobs, 600, 2, run_list.Publisher(None), **silent) == []
    lines = [(folder / jobs[0].folder / "metrics.jsonl").read_text().splitlines() for folder in (here, there)]
    assert lines[0][:2] == lines[1][:2] and len(lines[1]) == 4  # their times, too: not trained again
    ended, state, _ = checkpoint.newest(RunFolder(jobs[0].folder).checkpoints)
    alone = Run(jobs[0].recipe, apart).execute().model.state_dict()
    assert state["stage"] == "done" and all(torch.equal(ended[f"model.{name}"], t) for name, t in alone.items())


def test_what_is_packed_keeps_within_its_size_and_names_what_found_no_room(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    jobs = listed()[:2]
    for job in jobs:
        folder = RunFolder(job.folder)
        folder.checkpoints.mkdir(parents=True)
        folder.write_command(job.command, job.recipe)
        folder.add_metrics({"stage": "pretrain"})
        (folder.checkpoints / "000001.safetensors").write_bytes(random.Random(0).randbytes(5000))
    folders = [job.folder for job in jobs]
    assert pack_runs.pack(folders, tmp_path / "home", 12_000) == [str(jobs[1].folder)]
    assert sum(path.stat().st_size for path in (tmp_path / "home").iterdir()) < 12_000
    assert jobs[1].epochs_left() == 1 and jobs[1].recipe.epochs == 2


@pytest.mark.parametrize("item", printed_results.ITEMS)
def test_the_runs_of_a_printed_result_are_those_that_its_table_looks_for(item):
    results, jobs = printed_results.results(item), list(printed_results.jobs(item, (0, 3)))
    wanted = [(recipe.Command.parse(result.words).read().digest(), seed) for result in results for seed in (0, 3)]
    assert [job.identity for job in jobs] == wanted
    assert [job.keep_weights for job in jobs] == [True, False] * len(results)
    if item == "appendix":
        assert {job.row for job in jobs} == {"transformed l1", "Hoyer", "Hoyer-Square", "Group-HS"}


def test_every_run_of_the_cifar_fronts_starts_from_one_that_comes_before_it():
    plan = cifar_fronts.Plan(("resnet-56", "resnet-110"), (0, 1))
    for name, item in cifar_fronts.ITEMS.items():
        jobs = list(item(plan))
        known = set()
        for job in jobs:
            start = recipe.Command.parse(job.recipe.start).read() if job.recipe.start else None
            assert start is None or (start.digest(), start.seed) in known, (name, job.title)
            assert name == "held-out" or job.recipe.epoch_selection != "held-out"
            known.add(job.identity)
    jobs = list(plan.ablation())
    epochs = {job.words: job.recipe.epochs for job in jobs}
    compared = [job for job in jobs if job.is_row and job.aim]
    assert len(compared) == 16 and {epochs[job.words] + epochs[job.recipe.start] for job in compared} == {162, 324}
