"""The commands, as a person meets them: what they print, and how they end."""

import json
import shutil

import pytest

from deephoyer.lab import cli

QUICK = [
    "data={name: mnist, limit: 600}",
    "device=cpu",
    "pretrain.epochs=1",
    "regularize.epochs=1",
    "finetune.epochs=1",
]


def test_list_shows_the_recipes_by_folder_and_every_kind_with_a_line_each(command):
    status, out, _ = command("list")
    assert status == 0
    for word in ("paper/lenet-300-100", "small/resnet-56-gather", "98.56 %, 2,536 weights", "not yet run", "MNIST"):
        assert word in out
    kinds = {
        "models": "deephoyer[timm]",  # brackets are text, not markup
        "data": "mnist",
        "penalties": "hoyer-square",
        "groups": "coupled",
        "rules": "density",
    }
    for kind, word in kinds.items():
        assert word in command("list", kind)[1]


def test_a_recipe_key_with_dashes_is_told_how_it_is_written(command):
    status, _, said = command("run", "demo", "--seed", "1")
    assert status == 2 and "keys of a recipe are written without dashes: seed=…" in said
    assert "without dashes" not in command("run", "demo", "--sead", "1")[2]


def test_networks_that_are_not_there_are_told_with_the_commands_that_make_them(command):
    status, _, said = command("run", "small/lenet-5", "device=cpu")
    made = [line.strip() for line in said.splitlines()[1:]]
    assert status == 2 and "neither in ./results nor in ./runs" in said
    assert made == [f"deephoyer run parts/lenet-5-teacher epoch_selection=test-best seed={seed}" for seed in range(4)]
    status, _, said = command("run", "small/resnet-56-gather-finetuned-twice", "device=cpu")
    made = [line.strip() for line in said.splitlines()[1:]]
    assert made == ["deephoyer run small/resnet-56-gather", "deephoyer run parts/resnet-110-dense"]


def test_an_old_name_is_answered_with_the_new_words(command):
    status, _, said = command("run", "lenet-5-hs")
    assert status == 2 and "deephoyer run paper/lenet-5 data=mnist" in said


def test_run_makes_a_folder_that_show_reads_again(command, tmp_path, timed):
    with timed():
        status, out, _ = command("run", "demo", *QUICK, "--out", "mine")
    assert status == 0 and "fc1" in out and "finetuned" in out
    record = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert record["protocol"] == "held-out" and record["accuracy"].keys() >= {"dense", "pruned", "finetuned"}
    status, again, _ = command("show", "mine")
    assert status == 0 and again.strip() in out


def test_a_summary_that_is_not_ours_is_told_in_a_line(command, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")
    status, _, said = command("show", "other")
    assert status == 2 and "not written by this version of deephoyer" in said


def test_the_same_command_on_a_finished_run_shows_it_again(command, tmp_path):
    command("run", "demo", *QUICK)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    status, out, _ = command("run", "demo", *QUICK)
    assert status == 0 and "finetuned" in out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == before


def test_a_finished_run_whose_checkpoints_were_deleted_is_not_trained_again(command, tmp_path):
    command("run", "demo", *QUICK)
    (folder,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(folder / "checkpoints")
    metrics = (folder / "metrics.jsonl").read_bytes()
    status, out, _ = command("run", "demo", *QUICK)
    assert status == 0 and "finetuned" in out
    assert (folder / "metrics.jsonl").read_bytes() == metrics and not (folder / "checkpoints").exists()
    for other, told in (("seed=5", "belongs to another recipe"), ("finetune.lr=0.5", "would be overwritten")):
        status, _, err = command("run", "demo", *QUICK, other, "--out", str(folder))
        assert status == 2 and told in err and (folder / "metrics.jsonl").read_bytes() == metrics


def test_cp_gives_a_recipe_that_runs(command, tmp_path):
    assert command("cp", "demo", "mine.yaml")[0] == 0
    assert command("run", "mine.yaml", *QUICK)[0] == 0
    assert (tmp_path / "runs").is_dir()
    status, _, err = command("cp", "demo", "mine.yaml")
    assert status == 2 and "--force" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "nope"], "is not a recipe"),
        (["run", "demo", "regularize.penalty=hoyer_sq"], "Did you mean 'hoyer-square'?"),
        (["run", "missing.yaml"], "can't be read"),
        (["run", "demo", "device=cuda:7"], "does not exist"),
        (["evaluate", "nowhere", "--device", "gpu"], "'gpu' is not a device: it is auto, cpu, cuda"),
        (["list", "penaltys"], "Did you mean 'penalties'?"),
        (["show", "nowhere"], "folder of a finished run"),
        (["cp", "demo", "no/such/folder.yaml"], "can't be written"),
        (["run", "demo", "--out", "/proc/nothing"], "can't be created"),
    ],
)
def test_a_mistake_is_one_or_two_lines_and_status_2(command, words, told):
    status, _, err = command(*words)
    assert status == 2 and told in err
    assert err.startswith("deephoyer: ") and len(err.splitlines()) <= 2 and "Traceback" not in err


def test_a_recipe_that_is_not_text_is_told(command, tmp_path):
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe\x00")
    status, _, err = command("run", "odd.yaml")
    assert status == 2 and "odd.yaml" in err


def test_version_is_printed(command):
    assert command("--version")[1].strip() == cli.__version__
