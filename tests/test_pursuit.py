"""A strength that is corrected after every epoch, and a run that ends at the density it was asked for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deephoyer as dh
from deephoyer.errors import UserError
from deephoyer.strength import Cosine
from deephoyer.train import recipe
from deephoyer.train.pursuit import MOST, correction
from deephoyer.train.run import Run
from deephoyer.train.stack import Stack
from test_run import cut_after, same, weights

SHORT = [
    "data={name: mnist, limit: 1200}",
    "device=cpu",
    "pretrain.epochs=2",
    "regularize.epochs=10",
    "regularize.optimizer=sgd",
    "regularize.lr=0.1",
    "regularize.schedule=cosine",
    "regularize.density=0.2",
    "finetune.epochs=1",
]
densities = st.floats(0.01, 0.99)


@given(densities, densities, densities, st.integers(1, 9))
def test_a_correction_is_bounded_and_goes_the_right_way(before, now, aim, done):
    factor = correction(before, now, aim, [0.1] * 10, done)
    assert 1 / MOST <= factor <= MOST
    if now <= aim:
        assert factor == 1 / MOST
    assert factor <= correction(before, min(0.999, now * 1.1), aim, [0.1] * 10, done)  # slower: no weaker


@given(densities, st.floats(0.1, 0.9), st.integers(2, 7))
def test_a_density_that_falls_as_planned_needs_no_correction(start, share, done):
    rates = [0.1] * 10
    planned = [start * share ** (sum(rates[:i]) / sum(rates[:8])) for i in range(9)]
    assert math.isclose(correction(planned[done - 1], planned[done], planned[8], rates, done), 1.0, rel_tol=1e-6)


def test_at_rest_a_strength_is_only_let_go():
    rates = [0.1] * 10
    assert correction(0.9, 0.9, 0.1, rates, 8) == 1.0
    assert correction(0.2, 0.09, 0.1, rates, 9) == 1 / MOST


@pytest.mark.parametrize("guess", [1e-5, 1e-4, 1e-2])
def test_a_guess_far_off_ends_near_the_density_asked_for(tmp_path, guess):
    run = Run(recipe.read("demo", [*SHORT, f"regularize.strength={guess}"]), tmp_path).execute()
    lines = [line for line in run.folder.metrics() if line["stage"] == "regularize"]
    assert lines[0]["strength"] == guess and len({line["strength"] for line in lines}) > 3
    assert 0.1 < lines[-1]["effective_density"] < 0.3


def test_a_corrected_run_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr("deephoyer.train.run.SAVE_SECONDS", 0.0)
    made = recipe.read("demo", [*SHORT, "regularize.strength=1e-4", "rounds=2", "regularize.epochs=4"])
    whole = weights(Run(made, tmp_path / "whole").execute())
    cut_after(Run(made, tmp_path / "cut"), "regularize", 2)
    assert same(weights(Run(made, tmp_path / "cut").execute()), whole)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("regularize.warmup={epochs: 2}", "not both"),
        ("regularize.strength=0", "can't be corrected"),
        ("regularize.density=1", "less than 1"),
    ],
)
def test_what_can_not_be_corrected_is_refused(change, told):
    with pytest.raises(UserError, match=told):
        recipe.read("demo", [*SHORT, "regularize.strength=1e-4", change])


def test_corrected_runs_are_not_stacked(tmp_path):
    with pytest.raises(UserError, match=r"regularize\.density"):
        Stack([Run(recipe.read("demo", SHORT), tmp_path)])


@pytest.mark.parametrize("strength", [2e-3, Cosine(2e-3, steps=4, start=1e-3), lambda step: 1e-3 * (step + 1)])
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
    with pytest.raises(UserError, match="strengthen"):
        harder.strengthen(-1.0)
