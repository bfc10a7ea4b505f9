"""The penalties as functions of magnitudes, against their formulas written out once more here."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.penalties import PENALTIES


def scad(r, lam=0.1, a=3.7):
    small, middle, large = r[r <= lam], r[(r > lam) & (r <= a * lam)], r[r > a * lam]
    bend = (2 * a * lam * middle - middle**2 - lam**2) / (2 * (a - 1) * lam)
    return small.sum() + bend.sum() + len(large) * lam * (a + 1) / 2


def mcp(r, lam=0.1, gamma=3.0):
    bent, large = r[r <= gamma * lam], r[r > gamma * lam]
    return (bent - bent**2 / (2 * gamma * lam)).sum() + len(large) * gamma * lam / 2


def trimmed_l1(r, keep=0.05):
    return r.sort().values[: len(r) - int(len(r) * keep)].sum()


FORMULAS = {
    "l1": lambda r: r.sum(),
    "hoyer": lambda r: r.sum() / (r**2).sum().sqrt(),
    "hoyer-square": lambda r: r.sum() ** 2 / (r**2).sum(),
    "transformed-l1": lambda r: (2 * r / (1 + r)).sum(),
    "scad": scad,
    "mcp": mcp,
    "trimmed-l1": trimmed_l1,
}
BLIND_TO_SCALE = ("hoyer", "hoyer-square")


@st.composite
def magnitudes(draw, least=1, dtype=torch.float64):
    """Magnitudes from 1e-6 to 1e6, some of them 0, at least one not."""
    n = draw(st.integers(least, 60))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    r = torch.rand(n, generator=random, dtype=torch.float64) * 10.0 ** draw(st.floats(-6, 6))
    r[torch.rand(n, generator=random) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = 0
    assume(r.any())
    return r.to(dtype)


def weights(least=1):
    """Magnitudes with signs."""
    return magnitudes(least).map(lambda r: torch.where(torch.arange(len(r)) % 3 == 0, -r, r))


def slack(name, r):
    """Some slopes are a difference of two terms; rounding is relative to the size of those."""
    if name in BLIND_TO_SCALE:
        return 1e-9 * (2 * r.sum() / (r**2).sum()).item()
    return 1e-12 if name in ("scad", "mcp") else 0.0


def test_every_penalty_has_a_formula_here():
    assert set(FORMULAS) == set(PENALTIES)


@pytest.mark.parametrize("name", FORMULAS)
@given(magnitudes())
def test_value_and_slope_are_those_of_the_formula(name, r):
    penalty = PENALTIES.make(name)
    x = r.clone().requires_grad_()
    value = FORMULAS[name](x)
    (slope,) = torch.autograd.grad(value, x)
    assert_close(penalty.value(r), value.detach(), rtol=1e-9, atol=0)
    alive = r > 0  # what is 0 stays there, so its slope does not count; trimmed-l1 may free any of them
    assert_close(penalty.slope(r)[alive], slope[alive], rtol=1e-9, atol=slack(name, r))


@pytest.mark.parametrize("name", FORMULAS)
@given(magnitudes())
def test_values_can_be_differentiated_by_autograd_too(name, r):
    penalty = PENALTIES.make(name)
    x = r.clone().requires_grad_()
    (slope,) = torch.autograd.grad(penalty.value(x), x)
    alive = r > 0
    assert_close(slope[alive], penalty.slope(r)[alive], rtol=1e-9, atol=slack(name, r))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("n", [1, 2, 50])
def test_zeros_have_value_zero_and_gradient_zero(name, n):
    penalty = PENALTIES.make(name)
    r = torch.zeros(n, requires_grad=True)
    value = penalty.value(r.abs())
    value.backward()
    assert value == 0
    assert r.grad.eq(0).all()
    assert penalty.coefficient(r.detach()).eq(0).all()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_magnitude_is_too_small_for_a_finite_gradient(name, dtype):
    penalty = PENALTIES.make(name)
    powers = torch.arange(-320, 1, 4).double()
    small = (10.0**powers).to(dtype)
    for r in [small, *small.split(1), torch.cat([small, torch.ones(1, dtype=dtype)])]:
        gradient = penalty.coefficient(r) * r
        assert gradient.isfinite().all(), r
        assert penalty.value(r).isfinite()


@given(magnitudes(), st.floats(-6, 6))
def test_the_hoyer_family_ignores_scale(r, power):
    s = 10.0**power
    for f in (dh.hoyer, dh.hoyer_square, dh.hoyer_measure):
        assert_close(f(s * r), f(r), rtol=1e-9, atol=1e-12)


@given(weights())
def test_bounds_of_the_hoyer_family(w):
    n, exact = len(w), 1 + 1e-12
    assert 1 / exact <= dh.hoyer_square(w) <= n * exact
    assert 1 / exact <= dh.hoyer(w) <= math.sqrt(n) * exact
    assert 0 <= dh.hoyer_measure(w) <= 1


@given(st.integers(2, 300), st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_the_measure_stays_in_its_bounds_at_both_ends(n, size, dtype):
    alone = torch.zeros(n, dtype=dtype)
    alone[n // 2] = -size
    assert 1 - 1e-6 <= dh.hoyer_measure(alone) <= 1
    assert 0 <= dh.hoyer_measure(torch.full((n,), size, dtype=dtype)) <= 1e-3


@given(st.integers(1, 100), st.integers(1, 100), st.floats(1e-6, 1e6))
def test_hoyer_square_counts_equal_weights(alive, dead, size):
    w = torch.cat([torch.full((alive,), size), torch.zeros(dead)]).double()
    assert_close(dh.hoyer_square(w), torch.tensor(float(alive)).double())


@given(weights())
def test_descent_on_hoyer_square_moves_weights_to_or_from_zero_as_the_threshold_says(w):
    threshold = dh.trimming_threshold(w)
    x = w.clone().requires_grad_()
    dh.hoyer_square(x).backward()
    step = 1e-4 * w[w != 0].abs().min() / (x.grad.abs().max() + 1e-300)
    moved = (w - step * x.grad).abs()
    clear = (w.abs() / threshold - 1).abs() > 1e-9
    below, above = (w != 0) & clear & (w.abs() < threshold), clear & (w.abs() > threshold)
    assert (x.grad * w)[below].gt(0).all() and (x.grad * w)[above].lt(0).all()
    assert (moved <= w.abs())[below].all() and (moved >= w.abs())[above].all()
    assert x.grad[w == 0].eq(0).all()


@given(weights())
def test_the_trimming_threshold_lies_between_mean_and_maximum(w):
    threshold = dh.trimming_threshold(w)
    assert w.abs().mean() * (1 - 1e-12) <= threshold <= w.abs().max() * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    w = torch.full((70_000,), 3.0, dtype=dtype)  # more than the largest float16, and far beyond bfloat16's digits
    assert dh.hoyer_square(w).dtype == torch.float32
    assert_close(dh.hoyer_square(w), torch.tensor(70_000.0))
    assert_close(dh.trimming_threshold(w), torch.tensor(3.0))


@given(st.integers(1, 200), st.integers(0, 99))
def test_trimmed_l1_frees_the_share_that_was_asked_for(n, percent):
    r = torch.arange(1.0, n + 1)
    free = n * percent // 100
    assert dh.TrimmedL1(percent / 100).slope(r).sum() == n - free
    assert dh.TrimmedL1(percent / 100).value(r) == r[: n - free].sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: dh.TransformedL1(a=x),
        lambda x: dh.SCAD(lam=x),
        lambda x: dh.SCAD(a=x),
        lambda x: dh.MCP(lam=x),
        lambda x: dh.MCP(gamma=x),
    ],
)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_settings_that_make_no_penalty_are_refused(make, value):
    with pytest.raises(dh.UserError):
        make(value)


@pytest.mark.parametrize("keep", [-0.1, 1.0, 2, math.nan, "0.1", None, True])
def test_a_share_outside_zero_to_one_is_refused(keep):
    with pytest.raises(dh.UserError, match="keep"):
        dh.TrimmedL1(keep)


def test_a_slip_in_a_penalty_name_is_answered_with_the_right_one():
    with pytest.raises(dh.UserError, match="Did you mean 'hoyer-square'"):
        PENALTIES.make("hoyer_sq")
    with pytest.raises(dh.UserError, match="its settings: a"):
        PENALTIES.make("transformed-l1", b=1)


@pytest.mark.parametrize("name", PENALTIES)
def test_what_a_penalty_declares_for_fast_paths_is_true_of_its_slope(name):
    """Separable: the slope does not change with other magnitudes. Scale-free: the value stays when all grow alike."""
    penalty = PENALTIES.make(name) if name != "trimmed-l1" else dh.TrimmedL1(keep=0.5)
    r = torch.tensor([0.05, 0.2, 0.5, 1.5], dtype=torch.float64)
    alone = torch.cat([penalty.slope(x[None]) for x in r])
    assert penalty.separable == torch.allclose(penalty.slope(r), alone)
    assert penalty.scale_free == torch.allclose(penalty.value(3 * r), penalty.value(r))


def test_weights_whose_squares_have_lost_their_digits_count_as_zero():
    assert dh.hoyer_square(torch.full((4,), 1e-17)) == 0
    assert_close(dh.hoyer_square(torch.full((4,), 1e-14)), torch.tensor(4.0))
