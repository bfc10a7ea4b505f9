"""Every method and score through `deephoyer run`: tiny, on the CPU, cut off and taken up again bit for bit."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deephoyer as dh
from deephoyer.lab import models, recipe
from deephoyer.lab.methods import METHODS
from deephoyer.lab.schema import TITLES
from deephoyer.lab.train.evaluate import Correct
from deephoyer.lab.train.loop import TrainingLoop
from deephoyer.lab.train.run import METHOD_FILE, Run
from deephoyer.lab.train.step import CapturedStep
from deephoyer.scores import SCORES
from test_run import cut_after, same, weights

TINY = [
    "data={name: mnist, limit: 400}",
    "model=normed",
    "device=cpu",
    "pretrain.epochs=1",
    "regularize={epochs: 3, strength: 0}",
    "prune={rule: absolute, target: {density: 0.4}}",
    "finetune.epochs=1",
]
OVERRIDES = {
    "iterative-magnitude": ["method={name: iterative-magnitude, steps: 3}"],
    "gradual-magnitude": ["method={name: gradual-magnitude, every: 2, until: 0.8}"],
    "rigl": ["method={name: rigl, every: 2}"],
    "admm": ["method={name: admm, every: 1}"],
    "surgery": ["method={name: surgery, c: 0.5, gamma: 0.1}"],
    "l0": ["method={name: l0, strength: 1.0}"],
    "sparse-vd": ["method={name: sparse-vd, warmup: 1}"],
    "bc-gnj": ["method={name: bc-gnj, warmup: 1}", "prune.groups=channels"],
    "bc-ghs": ["method={name: bc-ghs, warmup: 1}", "prune.groups=channels"],
    "slimming": ["method=slimming", "prune.groups=coupled"],
    "soft-filters": ["method={name: soft-filters, keep: 0.5}", "prune.groups=filters"],
    "fpgm": ["method={name: fpgm, keep: 0.5}", "prune.groups=filters"],
    "l1-filters": ["method=l1-filters", "prune.groups=filters"],
}


@pytest.fixture(autouse=True)
def saves_every_epoch(monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.resume.SAVE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def a_network_with_a_norm(monkeypatch):
    def normed(dropout=0.0):
        middle = [nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(dropout)]
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), *middle, nn.Linear(20, 10))

    monkeypatch.setitem(models.MODELS._makers, "normed", normed)


def tiny(name, *more):
    return recipe.read("demo", [*TINY, *OVERRIDES.get(name, [f"method={name}"]), *more])


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_is_one_override_and_a_run_with_it_resumes_bit_for_bit(tmp_path, name):
    first = name in ("snip", "rigl")  # which prune before the network is trained
    stage, more = ("pretrain", ["pretrain.epochs=4"]) if first else ("regularize", [])
    whole = Run(tiny(name, *more), tmp_path / "whole").execute()
    cut_after(Run(tiny(name, *more), tmp_path / "cut"), stage, 2)
    again = Run(tiny(name, *more), tmp_path / "cut").execute()
    assert same(weights(again), weights(whole))
    assert 0.1 < whole.masks.density <= 0.41 and all(p.isfinite().all() for p in whole.model.parameters())
    assert whole.state.accuracy["finetuned"] > 0.15


def test_no_epoch_is_selected_whose_network_had_other_weights_than_the_stage_ends_with(tmp_path, monkeypatch):
    falling = iter(range(100, 0, -1))  # the first epoch would be the best one
    monkeypatch.setattr("deephoyer.lab.train.loop.Correct.read", lambda counts, data: Correct(next(falling), None, 100))
    run = Run(tiny("rigl", "pretrain.epochs=4", "regularize=null"), tmp_path).execute()
    assert run.state.selected["pretrain"] == 4, "weights move until the fourth epoch"


def test_a_run_with_a_method_from_the_command_line(command):
    code, said, _ = command("run", "demo", *TINY, *OVERRIDES["admm"])
    assert code == 0 and "finetuned" in said
    assert command("list", "methods")[1].count("et al.") >= 12
    code, _, error = command("run", "demo", "method=adm")
    assert code == 2 and "'adm' is not a method. Did you mean 'admm'?" in error
    code, _, error = command("run", "demo", "method={name: admm, roh: 1}")
    assert code == 2 and "roh" in error


@pytest.mark.parametrize("name", list(SCORES))
def test_every_score_is_a_word_in_a_recipe(tmp_path, name):
    changes = ["regularize=null", f"prune.score={name}"]
    if name == "norm-scale":
        changes += ["prune.groups=coupled"]
    run = Run(recipe.read("demo", [*TINY, *changes]), tmp_path).execute()
    assert 0.1 < run.masks.density <= 0.41


def test_scores_take_settings_and_slips_are_told(command):
    assert recipe.read("demo", ["prune.score={name: taylor, batches: 8}"]).prune.score["batches"] == 8
    code, _, error = command("run", "demo", "prune.score=tailor")
    assert code == 2 and "prune.score" in error and "Did you mean 'taylor'?" in error


def test_gradients_for_a_score_are_those_of_the_recipes_own_batches_and_the_same_each_time(tmp_path):
    changes = ["regularize=null", "prune.score={name: taylor, batches: 2}", "model={name: normed, dropout: 0.5}"]
    first, again = (Run(recipe.read("demo", [*TINY, *changes]), tmp_path / name).execute() for name in "ab")
    assert same(weights(first), weights(again))


def test_a_target_counts_what_is_left_when_idle_weights_are_gone(tmp_path, monkeypatch):
    from deephoyer.lab.train.result import finish

    changes = ["regularize=null", "prune.target={live: 0.05}", "prune.score=random", "finetune.epochs=0"]
    monkeypatch.chdir(tmp_path)
    run = Run(recipe.read("demo", [*TINY, *changes]), tmp_path / "run").execute()
    total = finish(run)["sparse"]["total"]
    assert total["nonzeros"] / total["weights"] == pytest.approx(0.05, rel=0.01)
    assert run.masks.density > 0.05


def test_a_network_trained_by_a_method_serves_runs_that_start_from_it(command, tmp_path):
    dense = [*TINY[:4], "regularize=null", "prune=null", "finetune=null"]
    assert command("run", "demo", *dense)[0] == 0
    start = "demo " + " ".join(f"'{word}'" for word in dense)
    trained = [*TINY[:3], "pretrain=null", "prune=null", "finetune=null", f"start={json.dumps(start)}"]
    trained += ["regularize={epochs: 2, strength: 0}", "method={name: sparse-vd, warmup: 1}"]
    assert command("run", "demo", *trained)[0] == 0
    start = "demo " + " ".join(json.dumps(word) for word in trained)
    for share in (0.2, 0.05):
        sized = [*TINY[:3], "pretrain=null", "regularize=null", f"start={json.dumps(start)}", "method=sparse-vd"]
        sized += [f"prune={{rule: absolute, target: {{density: {share}}}}}", "finetune.epochs=1"]
        code, _, error = command("run", "demo", *sized)
        assert code == 0, error
    lone = [*TINY[:3], "pretrain=null", "regularize=null", "method=sparse-vd", "prune={rule: absolute, value: 0.05}"]
    code, _, error = command("run", "demo", *lone)
    assert code == 2 and "Start from a run of this method" in error


def test_a_method_that_cuts_in_steps_needs_a_target(tmp_path):
    made = tiny("iterative-magnitude", "prune={rule: density, value: 0.1}")
    with pytest.raises(dh.UserError, match="prunes in steps towards a target"):
        Run(made, tmp_path).execute()


def test_a_method_may_work_beside_a_penalty(tmp_path):
    run = Run(tiny("admm", "regularize={epochs: 2, strength: 1e-3}"), tmp_path).execute()
    assert "penalty" in run.folder.metrics()[1]
    plain = Run(tiny("admm", "regularize={epochs: 2, strength: 0}"), tmp_path / "plain").execute()
    assert "penalty" not in plain.folder.metrics()[1]
    assert not torch.equal(run.model.state_dict()["1.weight"], plain.model.state_dict()["1.weight"])


def test_the_score_and_the_method_that_contributing_shows_work_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(SCORES, "_makers", dict(SCORES._makers))
    monkeypatch.setattr(METHODS, "_makers", dict(METHODS._makers))
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = [
        code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "SCORES.add" in code or "METHODS.add" in code
    ]
    assert len(shown) == 3 and all(len(code.splitlines()) < 40 for code in shown)
    for code in shown:
        exec(code, {})
    made = recipe.read("demo", [*TINY, "method=rewinding", "prune.score=fisher"])
    run = Run(made, tmp_path).execute()
    assert 0.1 < run.masks.density <= 0.4  # pixels that are always 0 are worth nothing


# Captured steps


@pytest.fixture
def captures(monkeypatch):
    """How many graphs have been captured."""
    count, plainly = [], CapturedStep._capture

    def counted(self, tables, unroll):
        count.append(unroll)
        return plainly(self, tables, unroll)

    monkeypatch.setattr(CapturedStep, "_capture", counted)
    return count


@pytest.fixture
def the_same_noise(monkeypatch):
    """In place of random numbers those that stand in a row, whoever asks for them."""

    def row(low, high):
        return lambda like: torch.linspace(low, high, like.numel(), dtype=like.dtype, device=like.device).view_as(like)

    monkeypatch.setattr(torch, "randn_like", row(-1.5, 1.5))
    monkeypatch.setattr(torch, "rand_like", row(0.05, 0.95))


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(METHODS))
def test_captured_and_plain_steps_of_a_method_agree(tmp_path, name, captures, the_same_noise):
    on_gpu = ["device=cuda", "data={name: mnist, limit: 2000}", "finetune.epochs=0"]
    stage = "regularize" if "regularize" in METHODS[name].stages else "pretrain"
    plain = Run(tiny(name, *on_gpu, "capture=off"), tmp_path / "plain").execute()
    assert not captures
    captured = Run(tiny(name, *on_gpu), tmp_path / "captured").execute()
    assert captures
    for file in (f"{TITLES[stage]}.safetensors", *([METHOD_FILE] if plain.method.state() else [])):
        expected, found = (load_file(run.folder / file) for run in (plain, captured))
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            apart = (found[key].double() - tensor.double()).abs().mean()
            assert apart <= 2e-4 * max(1, tensor.double().abs().mean()), key  # a tenth of one step of Adam


@pytest.mark.cuda
def test_masks_that_change_between_epochs_are_held_by_captured_steps(tmp_path, captures, monkeypatch):
    on_gpu = ["device=cuda", "data={name: mnist, limit: 2000}", "regularize={epochs: 6, strength: 0}"]
    held = []
    run = Run(tiny("iterative-magnitude", *on_gpu), tmp_path)
    plainly = TrainingLoop.epoch

    def watched(loop, epoch):
        line = plainly(loop, epoch)
        if run.state.stage == "regularize" and run.masks is not None:
            held.append(run.masks.density)
            assert all(not run.model.state_dict()[name][~mask].any() for name, mask in run.masks.items())
        return line

    monkeypatch.setattr(TrainingLoop, "epoch", watched)
    run.execute()
    assert len(set(held)) == 2 and held == sorted(held, reverse=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["l0", "sparse-vd", "bc-gnj", "bc-ghs"])
def test_every_replay_of_a_captured_step_draws_its_own_noise(tmp_path, name, captures, monkeypatch):
    """Nothing is learned, so that the losses of an epoch differ by its noise alone."""
    still = "regularize={epochs: 5, strength: 0, lr: 1e-12, schedule: constant}"
    changes = ["device=cuda", "data={name: mnist, limit: 2000}", still, "prune=null", "finetune=null"]
    run = Run(recipe.read("demo", [*TINY[:4], OVERRIDES[name][0], *changes]), tmp_path)
    seed_of, draw, drawn = TrainingLoop.seed_of, TrainingLoop.draw, []

    def repeating(loop, epoch):
        return seed_of(loop, [0, 1, 1, 2, 3][epoch] if run.state.stage == "regularize" else epoch)

    def always_the_first(loop, epoch):
        drawn.append(draw(loop, epoch))
        return drawn[run.state.stage == "regularize"]

    monkeypatch.setattr(TrainingLoop, "seed_of", repeating)
    monkeypatch.setattr(TrainingLoop, "draw", always_the_first)
    run.execute()
    loss = [line["loss"] for line in run.folder.metrics() if line["stage"] == "regularize"]
    assert loss[1] == pytest.approx(loss[2], rel=1e-5), "the same seed"
    assert len({round(one, 7) for one in loss[2:]}) == 3, "others"
    assert loss[3:] == pytest.approx(loss[1:3], rel=0.1)
    assert captures
