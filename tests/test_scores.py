"""Scores: what groups are worth, on every grouping and with every rule, against sums written out."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import deephoyer as dh
from deephoyer import targets
from deephoyer.masks import scored
from deephoyer.scores import SCORES, sums, vectors

X = torch.randn(12, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.arange(12) % 3
BATCHES = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]


def net(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.weight.copy_(torch.rand(norm.num_features) + 0.1)
    return model


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def groupings(model):
    """One of each kind, with the parameters it goes with."""
    indices = dh.IndexGroups({"0.weight": [[0, 1, 2], [2, 3], [9]]})
    return {
        "elements": ("elements", None),
        "filters": ("filters", None),
        "channels": ("channels", None),
        "coupled": (dh.Coupled(model, X), None),
        "index": (indices, None),
    }


KINDS = ("elements", "filters", "channels", "coupled", "index")


def units_of(model, kind):
    groups, parameters = groupings(model)[kind]
    return scored(model, groups, parameters)[0]


def by_hand(unit, values, reduce):
    """A number for each group, from the elements that a one-hot spread shows to be its members."""
    count = len(unit.sizes())
    found = []
    for group in range(count):
        laid = unit.spread(torch.eye(count)[group])
        members = [v[(s > 0).expand(v.shape)] for s, v in zip(laid, values, strict=True)]
        found.append(reduce(torch.cat(members)))
    return torch.stack(found)


def gradients(model, batch):
    copied = copy.deepcopy(model)
    loss(copied, batch).backward()
    return {name: p.grad for name, p in copied.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_sums_add_up_the_members_of_each_group(kind):
    for unit in units_of(net(), kind):
        values = [t.detach() ** 3 for t in unit.tensors]
        assert_close(sums(unit, values), by_hand(unit, values, torch.sum))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_hold_the_members_of_each_group(kind):
    for unit in units_of(net(), kind):
        rows = vectors(unit).detach()
        assert_close(rows.square().sum(1).sqrt(), unit.magnitudes().detach())
        assert_close(rows.sum(1), by_hand(unit, [t.detach() for t in unit.tensors], torch.sum))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [1, 2])
def test_a_magnitude_is_the_mean_of_a_groups_weights(kind, norm):
    model = net()
    units, scores = scored(model, *groupings(model)[kind], score=dh.Magnitude(norm))
    for unit, s in zip(units, scores, strict=True):
        weights = [t.detach() for t in unit.tensors]
        assert_close(s.score.detach(), by_hand(unit, weights, lambda w: w.abs().pow(norm).mean() ** (1 / norm)))
        assert s.std == pytest.approx(torch.cat([w.flatten() for w in weights]).std(correction=0).item())


@pytest.mark.parametrize("kind", KINDS)
def test_snip_is_the_sum_of_gradients_times_weights_on_the_first_batch(kind):
    model = net()
    found = gradients(model, BATCHES[0])
    units, scores = scored(model, *groupings(model)[kind], score="snip", batches=BATCHES, loss=loss)
    for unit, s in zip(units, scores, strict=True):
        values = [(found[n] * t).abs().detach() for n, t in zip(unit.names, unit.tensors, strict=True)]
        assert_close(s.score, by_hand(unit, values, torch.sum))


@pytest.mark.parametrize("kind", KINDS)
def test_taylor_is_the_mean_square_of_what_the_loss_would_change_by(kind):
    model = net()
    units, scores = scored(model, *groupings(model)[kind], score=dh.Taylor(batches=2), batches=BATCHES, loss=loss)
    for i, (unit, s) in enumerate(zip(units, scores, strict=True)):
        each = []
        for batch in BATCHES[:2]:
            found = gradients(model, batch)
            values = [(found[n] * t).detach() for n, t in zip(unit.names, unit.tensors, strict=True)]
            each.append(by_hand(unit, values, torch.sum).square())
        assert_close(s.score, (each[0] + each[1]) / 2, msg=f"unit {i}")


@pytest.mark.parametrize("kind", ["filters", "channels", "coupled"])
def test_the_geometric_median_scores_by_the_mean_distance_to_the_other_groups(kind):
    model = net()
    units, scores = scored(model, *groupings(model)[kind], score="geometric-median")
    for unit, s in zip(units, scores, strict=True):
        rows = vectors(unit).detach()
        far = torch.stack([(rows - row).norm(dim=1).sum() for row in rows]) / (len(rows) - 1) / rows.shape[1] ** 0.5
        assert_close(s.score.detach(), far)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=30))
def test_distances_between_single_weights_are_those_of_all_pairs(numbers):
    weight = torch.tensor([numbers], dtype=torch.float64)
    model = nn.Linear(len(numbers), 1, bias=False).double()
    model.weight.data.copy_(weight)
    score = scored(model, "elements", score="geometric-median")[1][0].score.detach()
    far = (weight[0, :, None] - weight[0]).abs().sum(1) / (len(numbers) - 1)
    alive = weight[0] != 0
    assert_close(score[alive], far[alive])
    assert not score[~alive].any()


def test_of_filters_in_a_cluster_the_geometric_median_gives_up_one_and_keeps_the_outlier():
    model = nn.Linear(2, 4, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 1.0], [1.1, 1.0], [1.0, 1.1], [-0.2, -0.2]]))
    masks = dh.prune(model, dh.Density(0.75), groups="filters", score="geometric-median")
    assert masks["weight"][:, 0].tolist() == [False, True, True, True]


def test_norm_scale_is_the_norms_own_for_coupled_channels_and_the_following_norms_for_filters():
    model = net()
    coupled = scored(model, dh.Coupled(model, X), score="norm-scale")[1]
    assert_close(coupled[0].score, model[1].weight.detach())
    filters = scored(model, "filters", ["0.weight", "3.weight"], score="norm-scale", batches=BATCHES, loss=loss)[1]
    assert_close(filters[1].score, model[4].weight.detach())
    elements = scored(model, "elements", "0.weight", score="norm-scale", batches=BATCHES, loss=loss)[1]
    assert_close(elements[0].score.view(6, -1), model[1].weight.detach().view(6, 1).expand(6, 18))


def test_a_layer_that_no_norm_follows_has_no_norm_scale():
    with pytest.raises(dh.UserError, match=r"norm-scale: no norm reads the output of 7.weight"):
        dh.prune(net(), dh.Density(0.5), groups="filters", score="norm-scale", batches=BATCHES, loss=loss)


def test_random_scores_follow_from_the_seed_and_from_nothing_else():
    kept = [dh.prune(net(n), dh.Density(0.3), score=dh.Random(seed)) for n, seed in ((0, 1), (5, 1), (0, 2))]
    same = [all(torch.equal(kept[0][name], other[name]) for name in kept[0]) for other in kept]
    assert same == [True, True, False]


@pytest.mark.parametrize("score", list(SCORES))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule",
    [
        dh.Density(0.5),
        dh.Density(0.5, "global"),
        dh.StdRatio(0.3),
        dh.Absolute(1e-9),
        dh.PerLayer({"*": dh.Density(1)}),
    ],
)
def test_every_score_goes_with_every_grouping_and_every_rule(score, kind, rule):
    model = net()
    groups, parameters = groupings(model)[kind]
    if score == "norm-scale" and kind != "coupled":
        parameters = ["0.weight", "3.weight"]
    masks = dh.prune(model, rule, groups, parameters, True, score=score, batches=BATCHES, loss=loss)
    assert 0 < masks.density <= 1
    for name, p in model.named_parameters():
        assert name not in masks or not p[~masks[name]].any()


@pytest.mark.parametrize("score", list(SCORES))
def test_what_is_zero_is_worth_nothing_by_any_score(score):
    model = net()
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
            tensor[2] = 0
        model[3].weight[:, 2] = 0
    unit = scored(model, dh.Coupled(model, X), score=score, batches=BATCHES, loss=loss)[1][0]
    assert unit.score[2] == 0 and unit.score[0] > 0


def test_gradients_leave_the_model_as_it_was():
    model = net().train()
    loss(model, BATCHES[2]).backward()
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    scored(model, "elements", score="taylor", batches=BATCHES, loss=loss)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_a_score_that_needs_batches_says_so():
    with pytest.raises(dh.UserError, match=r"score taylor: needs batches .* Pass batches= and loss= to prune"):
        dh.prune(net(), dh.Density(0.5), score="taylor")
    with pytest.raises(dh.UserError, match="Pass loss= to prune"):
        dh.prune(net(), dh.Density(0.5), score="snip", batches=BATCHES)
    with pytest.raises(dh.UserError, match="asks for 4 batches, but only 3 were given"):
        dh.prune(net(), dh.Density(0.5), score=dh.Taylor(4), batches=BATCHES, loss=loss)
    with pytest.raises(dh.UserError, match="one number with a gradient"):
        dh.prune(net(), dh.Density(0.5), score="snip", batches=BATCHES, loss=lambda m, b: m(b[0]))


def test_an_unknown_score_is_told_with_the_nearest():
    with pytest.raises(dh.UserError, match=r"'tailor' is not a score. Did you mean 'taylor'"):
        dh.prune(net(), dh.Density(0.5), score="tailor")
    with pytest.raises(dh.UserError, match="neither a score nor the name of one"):
        dh.prune(net(), dh.Density(0.5), score=dh.Density(0.5))
    with pytest.raises(dh.UserError, match="norm is 3"):
        dh.Magnitude(3)


def test_a_target_is_met_by_any_score_and_gradients_are_asked_for_once():
    model, asked = net(), []

    def counted(model, batch):
        asked.append(batch)
        return loss(model, batch)

    found = targets.value_for(
        targets.density(model, 0.25), model, dh.Absolute, score="snip", batches=iter(BATCHES), loss=counted
    )
    assert 0.2 < found.number <= 0.25 and len(asked) == 1
