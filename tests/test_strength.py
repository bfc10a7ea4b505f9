"""Strengths: numbers, one for each kind of group, schedules; and their way through a saved state."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.strength import Constant, Cosine, Linear, Listed, multiplied, settled

sizes = st.floats(0, 1e6)
BAD = [-1.0, -1e-30, math.nan, math.inf, -math.inf, True, "1e-4", None, [1e-4], 1j]


@given(sizes, sizes, st.integers(1, 1000), st.sampled_from([Linear, Cosine]))
def test_a_warm_up_goes_from_start_to_value_and_stays(value, start, steps, kind):
    schedule = kind(value, steps=steps, start=start)
    path = [schedule(s) for s in range(steps + 3)]
    low, high = min(start, value), max(start, value)
    assert path[0] == start
    assert path[steps:] == [value] * 3
    assert all(low * (1 - 1e-9) <= x <= high * (1 + 1e-9) + 1e-300 for x in path)
    rising = sorted(path, reverse=start > value)
    assert path == pytest.approx(rising, rel=1e-9, abs=1e-300)


def test_a_linear_warm_up_is_half_done_half_way_and_a_cosine_too_but_later():
    assert Linear(1.0, steps=10)(5) == 0.5
    assert Cosine(1.0, steps=10)(5) == pytest.approx(0.5)
    assert Cosine(1.0, steps=10)(2) < Linear(1.0, steps=10)(2)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_strength_is_refused(bad):
    model = nn.Linear(3, 2)
    for make in (
        lambda: dh.Regularizer(model, strength=bad),
        lambda: dh.Regularizer(model, groups="filters+channels", strength={"filters": 1.0, "channels": bad}),
        lambda: dh.Regularizer(model, strength=lambda step: bad),
        lambda: Constant(bad),
        lambda: Linear(bad, steps=3),
        lambda: Cosine(1.0, steps=3, start=bad),
    ):
        with pytest.raises(dh.UserError, match="strength"):
            make()


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", None, True])
def test_a_warm_up_over_no_steps_is_refused(steps):
    for kind in (Linear, Cosine):
        with pytest.raises(dh.UserError, match="steps"):
            kind(1.0, steps=steps)


def test_a_strength_for_a_kind_that_is_not_there_or_none_for_one_that_is():
    model = nn.Linear(3, 2)
    with pytest.raises(dh.UserError, match="Did you mean 'filters'"):
        dh.Regularizer(model, groups="filters", strength={"filter": 1.0})
    with pytest.raises(dh.UserError, match="'channels' has none"):
        dh.Regularizer(model, groups="filters+channels", strength={"filters": 1.0})


@given(sizes, sizes)
def test_each_kind_of_group_has_its_own_strength(a, b):
    model = nn.Linear(4, 3).double()
    both = dh.Regularizer(model, "l1", "filters+channels", strength={"channels": b, "filters": a})
    w = model.weight
    assert_close(both.loss(), a * w.norm(dim=1).sum() + b * w.norm(dim=0).sum())
    assert both.strength_now() == {"filters": a, "channels": b}


def test_a_strength_of_zero_changes_nothing():
    model = nn.Linear(4, 3)
    reg = dh.Regularizer(model, strength=0)
    reg.add_grad_()
    assert reg.loss() == 0
    assert model.weight.grad.eq(0).all()


def test_a_callable_of_the_step_is_asked_at_every_step():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    reg = dh.Regularizer(model, "l1", strength=lambda step: step / 8)
    seen = []
    for _ in range(4):
        model.zero_grad()
        reg.add_grad_()
        seen.append(model.weight.grad.item())
    assert seen == [0, 0.125, 0.25, 0.375]
    reg.add_grad_(advance=False)
    assert reg.strength_now() == {"elements": 0.5}


def test_a_callable_that_turns_bad_on_the_way_is_refused_then():
    reg = dh.Regularizer(nn.Linear(2, 2), strength=lambda step: 1.0 - step)
    reg.add_grad_()
    with pytest.raises(dh.UserError, match=r"strength of elements is -1\.0"):
        reg.add_grad_()


def make(strength, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, dh.Regularizer(model, groups="filters+channels", strength=strength).attach(optimizer)


def go(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6).double()).square().sum().backward()
        optimizer.step()


SCHEDULES = {
    "constant": 0.1,
    "linear": Linear(0.1, steps=7),
    "cosine": Cosine(0.1, steps=7, start=0.02),
    "mixed": {"filters": Linear(0.3, steps=6), "channels": 0.01},
    "own": lambda step: 0.1 / (1 + step),
}


@pytest.mark.parametrize("strength", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_run_taken_up_in_the_middle_of_a_schedule_ends_the_same(strength):
    whole, optimizer, _ = make(strength)
    go(whole, optimizer, 10)

    model, optimizer, reg = make(strength)
    go(model, optimizer, 4)
    state = json.loads(json.dumps(reg.state_dict()))
    # A strength of one's own is not in the state; the others are, whatever the new regularizer was given.
    fresh, optimizer, reg = make(strength if callable(strength) else 99.0, seed=1)
    fresh.load_state_dict(model.state_dict())
    reg.load_state_dict(state)
    go(fresh, optimizer, 6)
    assert fresh.weight.equal(whole.weight)
    assert reg.steps == 10


def test_a_state_of_other_groups_or_of_no_known_schedule_is_refused_and_changes_nothing():
    _, _, reg = make(0.5)
    elements = dh.Regularizer(nn.Linear(2, 2)).state_dict()
    with pytest.raises(dh.UserError, match="this state is for groups"):
        reg.load_state_dict(elements)
    odd = {"steps": 3, "strength": {"filters": {"kind": "constant", "value": 1.0}, "channels": {"kind": "linaer"}}}
    with pytest.raises(dh.UserError, match="Did you mean 'linear'"):
        reg.load_state_dict(odd)
    assert reg.steps == 0
    assert reg.strength_now() == {"filters": 0.5, "channels": 0.5}


def test_every_schedule_can_be_multiplied():
    assert multiplied(Constant(0.5), 3) == Constant(1.5)
    assert multiplied(Linear(1.0, steps=4, start=0.5), 3) == Linear(3.0, steps=4, start=1.5)
    assert multiplied(Listed((1.0, 2.0), steps=3), 3) == Listed((3.0, 6.0), steps=3)
    with pytest.raises(dh.UserError, match="a function of your own"):
        multiplied(lambda step: 1.0, 3)


def test_a_list_of_strengths_is_settled_at_its_last_value():
    listed = Listed((1.0, 2.0, 4.0), steps=3)
    assert [listed(step) for step in range(10)] == [1.0] * 3 + [2.0] * 3 + [4.0] * 4
    assert [settled(listed, step) for step in range(10)] == [False] * 6 + [True] * 4
    assert settled(Constant(1.0), 0) and not settled(lambda step: 1.0, 10**6)
