"""The rules: which weights and groups they let go, exactly."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.masks import scored
from deephoyer.rules import RULES


@st.composite
def nets(draw, ties=True):
    """Two linear layers; with ties there are few distinct weights, zeros among them."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    width = draw(st.integers(1, 9))
    model = nn.Sequential(nn.Linear(draw(st.integers(1, 9)), width), nn.Linear(width, draw(st.integers(1, 9))))
    if ties and draw(st.booleans()):
        for layer in model:
            layer.weight.data = torch.randint(-2, 3, layer.weight.shape).float()
    return model


def left(masks):
    return {name: count.left for name, count in masks.counts().items()}


@given(nets(), st.floats(0, 3) | st.sampled_from([0.0, 1.0, 2.0]))
def test_absolute_keeps_what_is_at_least_the_value_and_not_zero(model, value):
    before = copy.deepcopy(model)
    masks = dh.prune(model, dh.Absolute(value), allow_empty=True)
    for old, new, name in zip(before, model, masks, strict=True):
        stays = (old.weight.abs() >= torch.tensor(value)) & (old.weight != 0)
        assert masks[name].equal(stays)
        assert new.weight.equal(old.weight * stays)


@given(nets(), st.floats(0, 3))
def test_std_ratio_is_relative_to_each_layers_spread(model, value):
    before = copy.deepcopy(model)
    masks = dh.prune(model, dh.StdRatio(value), allow_empty=True)
    for old, name in zip(before, masks, strict=True):
        w = old.weight.detach()
        threshold = value * (w - w.mean()).square().mean().sqrt()
        clear = (w.abs() - threshold).abs() > 1e-5
        assert masks[name][clear].equal(((w.abs() >= threshold) & (w != 0))[clear])


def share(value, count):
    """Halves are kept, and one at least, unless nothing is asked for."""
    return max(1, math.floor(value * count + 0.5)) if value else 0


@given(nets(), st.floats(0, 1))
def test_density_keeps_exactly_the_largest_share_of_each_layer(model, value):
    before = copy.deepcopy(model)
    masks = dh.prune(model, dh.Density(value), allow_empty=True)
    for old, name in zip(before, masks, strict=True):
        w = old.weight.abs()
        assert masks[name].sum() == min(share(value, w.numel()), w.count_nonzero())
        if masks[name].any() and not masks[name].all():
            assert w[masks[name]].min() >= w[~masks[name]].max()


def effective_count(w):
    return w.abs().double().sum() ** 2 / w.double().square().sum()


@given(nets(ties=False), st.floats(0, 2))
def test_effective_keeps_a_multiple_of_each_layers_effective_count_and_at_least_one(model, value):
    before = copy.deepcopy(model)
    masks = dh.prune(model, dh.Effective(value))
    for old, name in zip(before, masks, strict=True):
        w = old.weight.detach().abs()
        wanted = value * effective_count(w).item()
        assert abs(masks[name].sum() - min(max(wanted, 1), w.numel())) <= 0.5 + 1e-6
        if not masks[name].all():
            assert w[masks[name]].min() >= w[~masks[name]].max()


@given(nets(ties=False), st.floats(0.05, 1), st.floats(1e-6, 1e6), st.sampled_from(["elements", "filters", "channels"]))
def test_effective_is_blind_to_the_scale_of_each_layer(model, value, scale, groups):
    scaled = copy.deepcopy(model)
    scaled[1].weight.data.mul_(scale)
    _, scores = scored(model, groups)
    clear = all(abs((value * s.effective + 0.5) % 1 - 0.5) < 0.499 for s in scores)  # or rounding decides
    ours, theirs = dh.prune(model, dh.Effective(value), groups), dh.prune(scaled, dh.Effective(value), groups)
    assert not clear or left(ours) == left(theirs)


@given(nets(), st.lists(st.floats(0, 4), min_size=2, max_size=2))
def test_a_larger_multiple_of_the_effective_count_keeps_all_that_a_smaller_one_does(model, values):
    few, many = (dh.prune(copy.deepcopy(model), dh.Effective(v), allow_empty=True) for v in sorted(values))
    assert all((few[name] <= many[name]).all() for name in few)


def test_effective_keeps_two_over_pi_of_a_gaussian_and_all_of_what_is_equal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(30, 20))
    nn.init.normal_(model[0].weight, std=1e-3)
    nn.init.constant_(model[1].weight, 7.0)
    masks = dh.prune(model, dh.Effective(0.5))
    assert_close(left(masks)["0.weight"] / 60_000, 0.5 * 2 / math.pi, rtol=0.02, atol=0)
    assert left(masks)["1.weight"] == 300
    assert dh.prune(nn.Linear(300, 200), dh.Effective(9.0)).density == 1


@given(nets(), st.floats(0, 1))
def test_global_density_keeps_exactly_the_largest_share_of_the_network(model, value):
    w = torch.cat([layer.weight.abs().flatten() for layer in model])
    masks = dh.prune(model, dh.Density(value, scope="global"), allow_empty=True)
    stays = torch.cat([m.flatten() for m in masks.values()])
    assert stays.sum() == min(share(value, w.numel()), w.count_nonzero())
    if stays.any() and not stays.all():
        assert w[stays].min() >= w[~stays].max()


@given(nets(ties=False), st.floats(0, 1), st.sampled_from(["filters", "channels"]))
def test_groups_go_whole_by_the_root_mean_square_of_their_weights(model, value, groups):
    dim = 1 if groups == "filters" else 0
    scores = [layer.weight.detach().square().mean(dim).sqrt() for layer in model]
    masks = dh.prune(model, dh.Density(value), groups=groups, allow_empty=True)
    for score, mask in zip(scores, masks.values(), strict=True):
        kept = mask.any(dim)
        assert mask.all(dim).equal(kept)
        assert kept.sum() == share(value, len(score))
        if kept.any() and not kept.all():
            assert score[kept].min() >= score[~kept].max()


def test_a_layer_that_is_zero_already_is_not_said_to_be_under_a_threshold():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[0].weight)
    with pytest.raises(dh.UserError, match=r"0\.weight: all of it is zero already\. Allow it"):
        dh.prune(model, dh.Effective(1.0))


def test_one_threshold_means_the_same_for_a_weight_a_filter_and_a_channel():
    model = nn.Conv2d(3, 4, 3)
    nn.init.constant_(model.weight, 0.1)
    for groups in ("elements", "filters", "channels", "filters+channels"):
        assert dh.prune(model, dh.Absolute(0.0999), groups=groups).density == 1
        with pytest.raises(dh.UserError, match="would leave nothing"):
            dh.prune(model, dh.Absolute(0.1001), groups=groups)


def test_the_only_channel_of_gray_images_stays_where_its_filters_can_be_pruned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3))
    whole = model[0].weight.clone()
    with pytest.raises(dh.UserError, match=r"would leave nothing of 0\.weight"):
        dh.prune(model, dh.StdRatio(1.02), groups="channels", parameters="0.weight")
    masks = dh.prune(model, dh.StdRatio(1.02), groups="filters+channels")
    kept = masks["0.weight"].flatten(1).any(1)
    assert 0 < kept.sum() < 8 and model[0].weight[kept].equal(whole[kept])
    with pytest.raises(dh.UserError, match=r"would leave nothing of 0\.weight"):
        dh.prune(model, dh.Absolute(1e3), groups="filters+channels")


@given(nets(), st.floats(0, 1))
def test_pruning_again_by_the_same_rule_changes_nothing(model, value):
    for rule in (dh.Absolute(value), dh.Density(value), dh.Density(value, "global")):
        once = dh.prune(model, rule, allow_empty=True)
        again = dh.prune(model, rule, allow_empty=True)
        assert all(once[name].equal(again[name]) for name in once)


def test_overlapping_lists_keep_a_weight_only_if_all_its_groups_stay():
    model = nn.Linear(5, 1)
    model.weight.data[:] = torch.tensor([3.0, 1.0, 0.1, 0.1, 0.1])
    lists = dh.IndexGroups({"weight": [[0, 1], [1, 2, 3]]})
    masks = dh.prune(model, dh.Absolute(1.0), groups=lists)
    assert masks["weight"].tolist() == [[True, False, False, False, True]]


def test_per_layer_takes_the_first_pattern_that_matches():
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Linear(4, 4), nn.Linear(4, 4))
    rule = dh.PerLayer({"1.*": dh.Density(0.25), "[12].*": {"rule": "density", "value": 0.5}, "*": dh.Absolute(0)})
    assert left(dh.prune(model, rule)) == {"0.weight": 12, "1.weight": 4, "2.weight": 8}


def test_a_global_density_in_per_layer_ranges_over_its_own_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.data.mul_(100)
    model[1].weight.data.mul_(10)
    rule = dh.PerLayer({"0*": dh.Density(1.0), "*": dh.Density(0.5, scope="global")})
    masks = dh.prune(model, rule)
    assert left(masks)["0.weight"] == 16
    assert left(masks)["1.weight"] + left(masks)["2.weight"] == 16
    assert left(masks)["1.weight"] > left(masks)["2.weight"]


@pytest.mark.parametrize("choice", [0.1, None, {}, {"value": 0.1}, dh.Absolute])
def test_per_layer_refuses_what_is_no_rule(choice):
    with pytest.raises(dh.UserError, match="rule"):
        dh.PerLayer({"*": choice})


def test_per_layer_refuses_a_layer_that_no_pattern_matches():
    with pytest.raises(dh.UserError, match=r"no pattern matches '1\.weight'"):
        dh.prune(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), dh.PerLayer({"0.*": dh.Absolute(0)}))


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, "0.1", None])
def test_thresholds_that_are_none_are_refused(value):
    for rule in (dh.Absolute, dh.StdRatio, dh.Density, dh.Effective):
        with pytest.raises(dh.UserError, match="rule"):
            rule(value)


def test_densities_above_one_and_unknown_scopes_are_refused():
    with pytest.raises(dh.UserError, match="more than all"):
        dh.Density(1.01)
    with pytest.raises(dh.UserError, match="scope"):
        dh.Density(0.5, scope="net")
    with pytest.raises(dh.UserError, match="Did you mean 'std-ratio'"):
        RULES.make("std_ratio", value=1)


@pytest.mark.parametrize("rule", [0.1, "absolute", None, dh.Absolute])
def test_prune_refuses_what_is_no_rule(rule):
    with pytest.raises(dh.UserError, match="not a rule"):
        dh.prune(nn.Linear(2, 2), rule)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("groups", ["elements", "filters", dh.IndexGroups({"0.weight": [[0], [1]], "1.weight": [[0]]})])
def test_weights_that_are_not_finite_are_refused_by_name(bad, groups):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].weight.data[1, 1] = bad
    before = copy.deepcopy(model.state_dict())
    for rule in (dh.Absolute(1e-3), dh.StdRatio(0.1), dh.Density(0.5, "global")):
        with pytest.raises(dh.UserError, match=r"1\.weight holds weights that are not finite"):
            dh.prune(model, rule, groups=groups)
    for name, value in model.state_dict().items():
        assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rule", "groups", "threshold"),
    [
        (dh.Absolute(0.25), "elements", "0.25"),
        (dh.Absolute(0.25), "filters+channels", "0.25"),
        (dh.StdRatio(1e9), "elements", r"\d\.\d+e\+\d+"),
        (dh.Density(0.9, "global"), "elements", r"\d"),
        (dh.Density(0.0), "filters", "inf"),
        (dh.PerLayer({"1.*": dh.Absolute(0.25), "*": dh.Absolute(0)}), "elements", "0.25"),
    ],
)
def test_a_rule_that_would_empty_a_layer_names_it_and_its_threshold_and_changes_nothing(rule, groups, threshold):
    model = nn.Sequential(nn.Linear(40, 10), nn.Linear(10, 2))
    nn.init.uniform_(model[0].weight, 0.5, 1.0)
    nn.init.uniform_(model[1].weight, 0.01, 0.02)
    name = "0" if "Std" in repr(rule) or "Density(value=0.0" in repr(rule) else "1"
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(dh.UserError, match=rf"nothing of {name}\.weight.*threshold {threshold}"):
        dh.prune(model, rule, groups=groups)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    masks = dh.prune(model, rule, groups=groups, allow_empty=True)
    assert left(masks)[f"{name}.weight"] == 0
    assert model[int(name)].weight.eq(0).all()


def test_a_layer_emptied_by_two_kinds_of_groups_together_is_named_with_both_thresholds():
    model = nn.Linear(3, 2)
    model.weight.data[:] = torch.tensor([[0.9, 0.9, 0.9], [1.0, 0.0, 0.0]])
    before = model.weight.detach().clone()
    # The second row goes as a filter, the first as part of a list; neither kind would empty the layer alone.
    groups = ["filters", dh.IndexGroups({"weight": [[3], [0, 1, 2, 4, 5]]})]
    with pytest.raises(dh.UserError, match=r"nothing of weight.*0\.7 and 0\.7"):
        dh.prune(model, dh.Absolute(0.7), groups=groups)
    assert model.weight.equal(before)


def test_biases_may_vanish_whole():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    assert left(dh.prune(model, dh.Absolute(0), parameters="*")) == {"weight": 6, "bias": 0}


def test_frozen_layers_are_not_pruned():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(dh.prune(model, dh.Density(0.5))) == ["1.weight"]
