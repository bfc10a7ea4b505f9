"""Searches: axes, goals, trials that workers share, and what is left when some of them are killed."""

import json
import subprocess
import sys

import pytest

import deephoyer as dh
from deephoyer.lab import recipe as recipes
from deephoyer.lab.search import MEASURES, Axis, Search, goals
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run
from small_runs import QUICK, until


@pytest.mark.parametrize(
    "text", ["seed", "seed=", "=1", "seed=1", "a=1,1", "a=2..1", "a=0..1:log", "a=x..y", "a=1..", "a=..2"]
)
def test_an_axis_that_makes_no_sense_is_refused(text):
    with pytest.raises(dh.UserError, match="--vary"):
        Axis.read(text)


def test_an_axis_is_a_range_of_numbers_of_whole_numbers_or_a_list():
    assert Axis.read("a.b=0.1..0.5") == Axis("a.b", 0.1, 0.5)
    assert Axis.read("a=3..20") == Axis("a", 3, 20, whole=True)
    assert Axis.read("a=1e-5..1e-2:log") == Axis("a", 1e-5, 1e-2, log=True)
    assert Axis.read("a=x,y").values == ("x", "y")


@pytest.mark.parametrize("chosen", [([], []), (["speed"], []), (["accuracy"], ["accuracy"])])
def test_a_goal_must_be_a_measure_and_stand_once(chosen):
    with pytest.raises(dh.UserError):
        goals(*chosen)


def _search(folder, trials, vary="regularize.strength=1e-4..1e-2:log", silent_after=2.0):
    axes = [Axis.read(vary)]
    return Search("demo", QUICK, axes, goals(["accuracy"], ["nonzeros"]), trials, folder, silent_after=silent_after)


def test_a_study_of_another_search_is_refused(tmp_path):
    _search(tmp_path / "study", 1)
    with pytest.raises(dh.UserError, match="contains another search"):
        _search(tmp_path / "study", 1, "regularize.strength=1e-4..1e-1:log")


def test_a_slip_in_a_key_shows_before_anything_starts(tmp_path):
    with pytest.raises(dh.UserError, match="strenght"):
        _search(tmp_path / "study", 1, "regularize.strenght=1,2")
    assert not (tmp_path / "study").exists()


def test_a_trial_whose_worker_fell_silent_is_taken_up_once(tmp_path):
    dead = _search(tmp_path / "study", 1)
    member = dead.next()
    one, other = _search(tmp_path / "study", 1, silent_after=0.0), _search(tmp_path / "study", 1, silent_after=0.0)
    taken = one.next()
    assert taken.overrides == member.overrides and taken.folder == member.folder
    one.silent_after = other.silent_after = 1000.0
    assert other.next() is None and other.open(), "it waits for the trial that the first one has"


def test_a_worker_that_slept_goes_on_though_its_trial_was_taken_over(tmp_path):
    slept = _search(tmp_path / "study", 2)
    member = slept.next()
    taken = _search(tmp_path / "study", 2, silent_after=0.0).next()
    assert taken.folder == member.folder
    slept.tick([member])
    member.status = 2
    slept.ended(member)
    assert not slept.failures() and slept.next() is not None, "the trial is the other worker's now"


def test_fewer_trials_than_there_are_leave_those_that_were_stopped_for_later(tmp_path):
    study = _search(tmp_path / "study", 2)
    members = [study.next(), study.next()]
    for member in members:
        study.interrupted(member)
    fewer = _search(tmp_path / "study", 1)
    first = fewer.next()
    assert first.overrides == members[0].overrides and fewer.next() is None
    fewer._fail(first.about["trial"], "no such luck.")
    assert fewer.next() is None and not fewer.open()
    assert _search(tmp_path / "study", 2).next().overrides == members[1].overrides


def test_a_worker_with_the_process_number_of_an_earlier_one_draws_other_settings(tmp_path):
    first, second = (_search(tmp_path / "study", 2).next() for _ in range(2))
    assert first.overrides != second.overrides


def test_a_trial_stopped_with_its_worker_is_the_next_one_of_the_same_command(tmp_path):
    study = _search(tmp_path / "study", 2)
    member = study.next()
    study.interrupted(member)
    assert _search(tmp_path / "study", 2).next().overrides == member.overrides


def test_a_trial_that_failed_counts_and_says_why(tmp_path):
    study = _search(tmp_path / "study", 1)
    member = study.next()
    member.folder.mkdir(parents=True)
    (member.folder / "log.txt").write_text("deephoyer: no such luck.")
    member.status = 2
    study.ended(member)
    assert not study.open() and study.failures() == [(member.overrides, "deephoyer: no such luck.")]


def test_a_trial_that_is_interrupted_again_and_again_is_not_lost_but_one_whose_workers_die_is_given_up(tmp_path):
    study = _search(tmp_path / "study", 1)
    for _ in range(6):
        study.interrupted(study.next())
    assert study.failures() == [] and study.open()
    for _ in range(4):
        study._requeue(study.next().about["trial"])
    assert not study.open() and [why for _, why in study.failures()] == ["its worker died"]


def test_a_trial_whose_network_was_not_compacted_fails_by_itself_and_says_why(tmp_path):
    axes = [Axis.read("regularize.strength=1e-4..1e-2:log")]
    study = Search("demo", QUICK, axes, goals([], ["macs"]), 2, tmp_path / "study")
    member = study.next()
    member.folder.mkdir(parents=True)
    (member.folder / "summary.json").write_text(json.dumps({"not_compacted": "its outputs differ."}))
    member.status = 0
    study.ended(member)
    assert study.failures() == [(member.overrides, "its network was not compacted: its outputs differ.")]
    assert study.next() is not None


@pytest.mark.parametrize("metrics", [None, "", '{"stage": "finetune", "epoch": 1}', '{"stage"'])
def test_a_trial_whose_metrics_are_lost_fails_by_itself_and_says_why(tmp_path, metrics):
    study = _search(tmp_path / "study", 2)
    member = study.next()
    member.folder.mkdir(parents=True)
    (member.folder / "summary.json").write_text(json.dumps({"selected": {"finetune": 7}}))
    if metrics is not None:
        (member.folder / "metrics.jsonl").write_text(metrics)
    member.status = 0
    study.ended(member)
    [(_, why)] = study.failures()
    assert "metrics.jsonl" in why and study.next() is not None


@pytest.mark.parametrize("left", [b'{"op_code":8,"worker', bytes(40)], ids=["half a line", "zeros"])
def test_a_study_goes_on_though_its_last_line_was_not_written_to_its_end(tmp_path, left):
    study = _search(tmp_path / "study", 2)
    member = study.next()
    study.interrupted(member)
    with open(tmp_path / "study" / "study.journal", "ab") as journal:
        journal.write(left)
    assert _search(tmp_path / "study", 2).next().overrides == member.overrides
    assert _search(tmp_path / "study", 2).next().overrides != member.overrides


def test_a_damaged_line_within_a_study_is_named_and_the_lines_before_it_are_a_study(tmp_path):
    study = _search(tmp_path / "study", 3)
    first = study.next()
    journal = tmp_path / "study" / "study.journal"
    before = journal.read_bytes().splitlines(keepends=True)
    study.next()
    whole = journal.read_bytes().splitlines(keepends=True)
    for damaged in (b"\0" * 40 + b"\n", b'{"op_code": 5, "wor\n', b"[\n"):
        journal.write_bytes(b"".join([*before, damaged, *whole[len(before) + 1 :]]))
        with pytest.raises(dh.UserError, match=rf"line {len(before) + 1} of {len(whole)} is damaged.*-n {len(before)}"):
            _search(tmp_path / "study", 3)
    journal.write_bytes(b"".join(before))
    again = _search(tmp_path / "study", 3, silent_after=0.0)
    assert again.next().overrides == first.overrides


def test_a_study_whose_folder_was_renamed_goes_on(tmp_path):
    member = _search(tmp_path / "study", 1).next()
    (tmp_path / "study").rename(tmp_path / "moved")
    moved = _search(tmp_path / "moved", 1, silent_after=0.0)
    assert moved.next().overrides == member.overrides


def test_the_accuracy_of_a_network_that_is_not_finetuned_is_that_after_it_was_pruned(tmp_path):
    density = "prune={rule: density, value: 0.001}"
    changes = [*QUICK[:2], "pretrain.epochs=1", "regularize=null", "finetune=null", density]
    run = Run(recipes.read("demo", changes), tmp_path).execute()
    assert MEASURES["accuracy"](tmp_path, finish(run)) == run.accuracy(run.selection_images)


def test_two_workers_share_a_study_and_one_that_is_killed_loses_no_trial(tmp_path):
    words = [sys.executable, "-m", "deephoyer", "search", "demo", *QUICK]
    words += ["--vary", "regularize.strength=1e-4..1e-2:log", "--trials", "3"]
    words += ["--maximize", "accuracy", "--minimize", "nonzeros", "--jobs", "1"]
    words += ["--silent-after", "4", "--out", str(tmp_path / "study")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(words, **quiet)
    until(lambda: list((tmp_path / "study").glob("*/metrics.jsonl")), 120)
    second = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first.kill()
    first.wait()
    output = second.communicate(timeout=300)[0]
    assert second.returncode == 0, output
    study = _search(tmp_path / "study", 3)
    finished = [row[0] for row in study.rows()]
    assert len(finished) == 3 and len({tuple(chosen) for chosen in finished}) == 3 and not study.failures()
    assert (tmp_path / "study" / "front.svg").exists() and "●" in output
