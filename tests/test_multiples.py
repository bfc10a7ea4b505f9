"""Pruning in multiples: how many groups stay, which of them, and the widths of the network that is left."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deephoyer as dh
from deephoyer.masks import Empties
from test_targets import X, uneven


def kept(score, value, multiple):
    """Which of single weights with these magnitudes stay."""
    model = nn.Linear(len(score), 1)
    model.weight.data[0] = score
    return dh.prune(model, dh.Absolute(value), allow_empty=True, multiple=multiple)["weight"][0]


def sizes():
    """Magnitudes: of few kinds, zero among them, or of many."""
    few = st.lists(st.integers(0, 4).map(float), min_size=1, max_size=40)
    return (few | st.lists(st.floats(0.125, 4, width=32), min_size=1, max_size=40)).map(torch.tensor)


@given(sizes(), st.floats(0, 5), st.integers(1, 17))
def test_the_largest_stay_and_they_are_the_nearest_multiple_or_all_there_are(score, value, multiple):
    judged, stays = kept(score, value, 1), kept(score, value, multiple)
    if len(score) < multiple:
        assert stays.equal(judged)
        return
    count, alive = int(stays.sum()), int((score > 0).sum())
    assert count % multiple == 0 or count == alive
    assert abs(count - int(judged.sum())) <= multiple / 2
    assert stays.equal(judged) or not judged.all()
    assert not stays[score == 0].any()
    if stays.any() and not stays.all():
        assert score[stays].min() >= score[~stays].max()


@given(sizes(), st.floats(0, 5), st.floats(0, 5), st.integers(1, 17))
def test_with_a_multiple_a_larger_value_keeps_a_part_of_what_a_smaller_one_keeps(score, one, other, multiple):
    more, fewer = (kept(score, value, multiple) for value in sorted((one, other)))
    assert not (fewer & ~more).any()


def test_among_hundreds_of_equals_a_larger_value_keeps_a_part_too():
    ordered = torch.tensor([3.0, 2.0, 1.0]).repeat_interleave(torch.tensor([5, 12, 983]))
    for seed in range(20):
        score = ordered[torch.randperm(1000, generator=torch.Generator().manual_seed(seed))]
        more, fewer = kept(score, 2, 8), kept(score, 3, 8)
        assert (int(more.sum()), int(fewer.sum())) == (16, 8) and not (fewer & ~more).any()


def rows(large, of=16):
    """A layer whose first rows are large and the others small."""
    model = nn.Linear(3, of)
    model.weight.data[:] = (torch.arange(of) < large).add(0.1)[:, None]
    return model


def test_a_layer_under_half_a_multiple_goes_whole_only_where_that_is_allowed():
    rule = dh.Absolute(1.0)
    assert dh.prune(rows(4), rule, "filters", multiple=8)["weight"].all(1).tolist() == [True] * 8 + [False] * 8
    model = rows(3)
    before = model.weight.clone()
    with pytest.raises(Empties, match="nothing of weight: fewer than half of 8 groups reach its threshold 1"):
        dh.prune(model, rule, "filters", multiple=8)
    assert model.weight.equal(before)
    assert dh.prune(model, rule, "filters", allow_empty=True, multiple=8).density == 0
    assert not model.weight.any()


@pytest.mark.parametrize("large", [2, 3])
def test_a_layer_with_fewer_groups_than_the_multiple_is_left_to_the_rule(large):
    assert dh.prune(rows(large, of=3), dh.Absolute(1.0), "filters", multiple=16)["weight"].all(1).sum() == large


def test_two_kinds_of_groups_would_cut_into_each_others_multiples_and_are_refused():
    model = rows(4)
    before = model.weight.clone()
    with pytest.raises(dh.UserError, match="one kind of group, not filters and channels"):
        dh.prune(model, dh.Absolute(1.0), "filters+channels", multiple=8)
    assert model.weight.equal(before)


def test_a_coupled_network_has_widths_in_multiples_and_the_outputs_it_had():
    def small(multiple):
        model, coupled = uneven()
        dh.prune(model, dh.StdRatio(0.5), coupled, multiple=multiple)
        return model.eval(), dh.compact(model, X, groups=coupled)

    def widths(net):
        return {m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)} | {net.linear.in_features}

    masked, compacted = small(8)
    assert widths(compacted) != widths(masked) and all(width % 8 == 0 for width in widths(compacted))
    assert any(width % 8 for width in widths(small(1)[1]))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(compacted(x), masked(x))


@pytest.mark.parametrize("multiple", [0, -8, 8.0, "8", None, True])
def test_a_multiple_that_is_no_count_is_refused(multiple):
    with pytest.raises(dh.UserError, match=f"multiple is {multiple!r}; it must be a whole number, 1 or more"):
        dh.prune(rows(4), dh.Absolute(1.0), "filters", multiple=multiple)
