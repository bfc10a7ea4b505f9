"""A strength that is corrected after every epoch, and a run that ends at the density it was asked for."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deephoyer as dh
from deephoyer.errors import UserError
from deephoyer.lab import recipe
from deephoyer.lab.train.loop import TrainingLoop
from deephoyer.lab.train.progress import Silent
from deephoyer.lab.train.run import Run
from deephoyer.lab.train.strength_control import MAX_FACTOR, correction
from deephoyer.strength import Cosine, Listed
from test_run import same, weights

SHORT = [
    "data={name: mnist, limit: 1200}",
    "device=cpu",
    "pretrain.epochs=2",
    "regularize.epochs=10",
    "regularize.optimizer=sgd",
    "regularize.lr=0.1",
    "regularize.schedule=cosine",
    "regularize.effective_density=0.2",
    "finetune.epochs=1",
]


class Notes(Silent):
    """Keeps what a run tells."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


densities = st.floats(0.01, 0.99)


@given(densities, densities, densities, st.integers(1, 9))
def test_a_correction_is_bounded_and_goes_the_right_way(before, now, aim, done):
    factor = correction(before, now, aim, [0.1] * 10, done)
    assert 1 / MAX_FACTOR <= factor <= MAX_FACTOR
    assert factor <= correction(before, min(0.999, now * 1.1), aim, [0.1] * 10, done)  # slower: no weaker


@given(densities, st.floats(0.1, 0.9), st.integers(2, 7))
def test_a_density_that_falls_as_planned_needs_no_correction(start, share, done):
    rates = [0.1] * 10
    planned = [start * share ** (i / 9) for i in range(10)]
    assert math.isclose(correction(planned[done - 1], planned[done], planned[9], rates, done), 1.0, rel_tol=1e-6)


def test_at_rest_a_strength_is_only_let_go():
    rates = [0.1] * 10
    assert correction(0.9, 0.9, 0.1, rates, 9) == 1.0
    assert correction(0.2, 0.09, 0.1, rates, 9) == 1 / MAX_FACTOR


def test_a_density_that_stays_at_its_aim_leaves_the_strength_nearly_alone():
    assert 0.9 < correction(0.2001, 0.2001, 0.2, [0.1] * 20, 5) < 1.1
    assert 0.9 < correction(0.19999, 0.19999, 0.2, [0.1] * 20, 5) < 1.1
    assert correction(0.2, 0.0, 0.1, [0.1] * 20, 5) == 1 / MAX_FACTOR


@pytest.mark.parametrize("guess", [1e-5, 1e-4, 1e-2])
def test_a_guess_far_off_ends_near_the_density_asked_for(tmp_path, guess):
    told = Notes()
    run = Run(recipe.read("demo", [*SHORT, f"regularize.strength={guess}"]), tmp_path, told).execute()
    lines = [line for line in run.folder.metrics() if line["stage"] == "regularize"]
    assert lines[0]["strength"] == guess and len({line["strength"] for line in lines}) > 3
    assert 0.13 < lines[-1]["effective_density"] < 0.27
    assert f"effective density {lines[-1]['effective_density']:.3g}, target 0.2" in " ".join(told.notes)


def test_a_corrected_run_goes_on_where_it_was_cut_off_in_its_second_round(tmp_path, monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.resume.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("deephoyer.lab.train.resume.SAVE_SHARE", float("inf"))
    made = recipe.read("demo", [*SHORT, "regularize.strength=1e-4", "rounds=2", "regularize.epochs=4"])
    whole = weights(Run(made, tmp_path / "whole").execute())
    save, seen = TrainingLoop.save, []

    def cutting(loop):
        save(loop)
        seen.append(loop.state.round)
        if seen.count(1) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "save", cutting)
        Run(made, tmp_path / "cut").execute()
    again = Run(made, tmp_path / "cut").execute()
    assert same(weights(again), whole) and len(again.folder.metrics()) == 11


def test_the_strengths_that_were_found_can_be_given_as_a_list(tmp_path):
    found = Run(recipe.read("demo", [*SHORT, "regularize.strength=1e-4"]), tmp_path / "found").execute()
    strengths = [line["strength"] for line in found.folder.metrics() if line["stage"] == "regularize"]
    listed = ["regularize.effective_density=null", f"regularize.strength={strengths}"]
    given = Run(recipe.read("demo", [*SHORT, *listed]), tmp_path / "given").execute()
    assert same(weights(given), weights(found))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("regularize.warmup={epochs: 2}", "not both"),
        ("regularize.strength=0", "needs a positive initial strength"),
        ("regularize.effective_density=1", "less than 1"),
        ("regularize.strength=[1e-4, 1e-4]", "2 values for 10 epochs; give one for each"),
        (f"regularize.strength={[1e-4] * 10}", "not both"),
    ],
)
def test_what_can_not_be_corrected_is_refused(change, told):
    with pytest.raises(UserError, match=told):
        recipe.read("demo", [*SHORT, "regularize.strength=1e-4", change])


def test_a_density_that_is_met_from_the_start_is_refused(tmp_path):
    with pytest.raises(UserError, match="at the start"):
        Run(
            recipe.read("demo", [*SHORT, "regularize.strength=1e-4", "regularize.effective_density=0.95"]), tmp_path
        ).execute()


@pytest.mark.parametrize("strength", [2e-3, Cosine(2e-3, steps=4, start=1e-3), Listed((1e-3, 2e-3), steps=3)])
def test_strengthen_multiplies_the_gradient_now_and_later(strength):
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    plain, harder = (dh.Regularizer(model, strength=strength) for _ in range(2))
    harder.strengthen(3.0)
    for _ in range(6):
        gradients = []
        for regularizer in (plain, harder):
            model.weight.grad = torch.zeros_like(model.weight)
            regularizer.add_grad_()
            gradients.append(model.weight.grad)
        torch.testing.assert_close(gradients[1], 3 * gradients[0])
    again = dh.Regularizer(model, strength=1e-3)
    again.load_state_dict(json.loads(json.dumps(harder.state_dict())))
    assert again.strength_now() == harder.strength_now()
    with pytest.raises(UserError, match="strengthen"):
        harder.strengthen(-1.0)
    with pytest.raises(UserError, match="function of your own"):
        dh.Regularizer(model, strength=lambda step: 1e-3).strengthen(2.0)


def test_a_fall_is_expected_in_proportion_to_the_learning_rate():
    """At half the rate of the epoch before, half of its fall; of the rates 2.5 are left, one of them in this epoch."""
    fell = math.exp(0.8)
    assert math.isclose(correction(0.4 * fell, 0.4, 0.4 / math.e, [2.0, 1.0, 1.0, 1.0], 1), 1.0, rel_tol=1e-6)


def test_an_epoch_is_never_asked_for_more_than_what_is_left():
    assert math.isclose(correction(0.8, 0.4, 0.2, [1.0] * 9 + [0.5], 8), 1.0, rel_tol=1e-6)


def test_after_a_single_epoch_nothing_is_corrected():
    assert correction(0.8, 0.4, 0.1, [0.1], 1) == 1.0
