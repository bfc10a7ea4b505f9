"""Methods: each formula against one written out here, in float64 where numbers are compared."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Gamma, InverseGamma, LogNormal, Normal, kl_divergence
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import deephoyer as dh
from deephoyer import targets
from deephoyer.lab.methods import METHODS, Stage
from deephoyer.lab.methods.admm import ADMM
from deephoyer.lab.methods.bayesian_compression import (
    GroupHorseshoe,
    GroupNormalJeffreys,
    gamma_divergence,
    inverse_gamma_divergence,
    normal_divergence,
)
from deephoyer.lab.methods.gradual import GradualMagnitude, density_at
from deephoyer.lab.methods.iterative import IterativeMagnitude, cuts_by
from deephoyer.lab.methods.l0 import GAMMA, ZETA, HardConcrete, chance, gate, settled
from deephoyer.lab.methods.rigl import RigL, densities, moved
from deephoyer.lab.methods.slimming import NetworkSlimming
from deephoyer.lab.methods.snip import SnipBeforeTraining
from deephoyer.lab.methods.surgery import NetworkSurgery, surgery
from deephoyer.lab.methods.variational_dropout import SparseVariationalDropout, divergence, log_alpha
from deephoyer.targets import value_for

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(16) % 3


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def stage_of(model, **settings):
    """A stage by itself, whose cuts keep a share of all weights."""
    held = []

    def cut(done, score):
        share = settings.get("keep", 0.25) ** done
        rule = dh.Density(share, "global")
        return dh.prune(model, rule, settings.get("groups", ["elements"]), score=score, batches=[(X, Y)], loss=loss)

    stage = Stage(
        **{
            "name": "regularize",
            "model": model,
            "groups": ["elements"],
            "epochs": 4,
            "steps": 3,
            "examples": 50,
            "keep": 0.25,
            "cut": cut,
            "hold": held.append,
            **settings,
        }
    )
    return stage, held


def train(method, model, stage, lr=0.05):
    """The loop as a run has it, on one batch."""
    method.begin(stage)
    optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=lr)
    for epoch in range(stage.epoch, stage.epochs):
        model.train()
        method.before_epoch(epoch)
        for _ in range(stage.steps):
            optimizer.zero_grad()
            total = cross_entropy(method(model, X), Y)
            extra = method.loss()
            (total if extra is None else total + extra).backward()
            method.after_backward()
            optimizer.step()
            method.after_step()
    method.end()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# Iterative magnitude pruning


def test_cuts_are_spread_evenly_and_the_last_one_is_left_to_the_prune_stage():
    model = net()
    stage, held = stage_of(model, epochs=6, keep=0.1)
    train(IterativeMagnitude(steps=3), model, stage, lr=1e-3)
    assert [m.density for m in held] == pytest.approx([0.1 ** (k / 3) for k in (1, 2)], abs=0.01)
    assert cuts_by(5, 6, 3) == 2


# SNIP


def test_snip_keeps_the_connections_on_which_the_untrained_networks_loss_hangs_most():
    model = net()
    loss(model, (X, Y)).backward()
    worth = torch.cat([(p.grad * p).abs().flatten() for n, p in model.named_parameters() if n.endswith("weight")])
    bar = worth.sort().values[-round(0.25 * len(worth))]
    stage, held = stage_of(model, name="pretrain")
    SnipBeforeTraining().begin(stage)
    assert torch.equal(torch.cat([m.flatten() for m in held[0].values()]), worth >= bar)


def test_snip_leaves_a_network_alone_that_is_pruned_already():
    model = net()
    stage, held = stage_of(model)
    stage.masks = dh.prune(model, dh.Density(0.5))
    SnipBeforeTraining().begin(stage)
    assert not held


# ADMM


def test_admm_pulls_towards_a_projection_and_its_gradient_is_that_of_the_augmented_term():
    model, rho = net(), 0.3
    method = ADMM(rho=rho, every=1, keep=0.2)
    stage, _ = stage_of(model)
    method.begin(stage)
    w = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()]).detach()
    kept = w.abs() >= w.abs().sort().values[-round(0.2 * len(w))]
    z, u = w * kept, torch.zeros_like(w)
    assert_close(torch.cat([t.flatten() for t in method.z.values()]), z)
    for epoch in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1).add_(0.01)
        w = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()]).detach()
        method.before_epoch(epoch)
        kept = (w + u).abs() >= (w + u).abs().sort().values[-round(0.2 * len(w))]
        z = (w + u) * kept
        u = u + w - z
        assert_close(torch.cat([t.flatten() for t in method.z.values()]), z)
        assert_close(torch.cat([t.flatten() for t in method.u.values()]), u)
        free = w.clone().requires_grad_()
        (rho / 2 * (free - z + u).square().sum()).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        method.after_backward()
        assert_close(torch.cat([model[0].weight.grad.flatten(), model[2].weight.grad.flatten()]), free.grad)
        assert_close(w, torch.cat([model[0].weight.flatten(), model[2].weight.flatten()]).detach())


# Dynamic network surgery


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 2)), min_size=1, max_size=20), st.floats(0.1, 1.5))
def test_surgery_cuts_what_is_small_splices_what_is_large_and_leaves_the_rest(groups, bar):
    r = torch.tensor([size for _, size in groups], dtype=torch.float64)
    was = torch.tensor([is_open for is_open, _ in groups])
    found = surgery(was, r, torch.tensor(bar, dtype=torch.float64))
    for i, (is_open, size) in enumerate(groups):
        wanted = False if size < 0.9 * bar else True if size >= 1.1 * bar else is_open
        assert bool(found[i]) == (wanted or size == max(s for _, s in groups))


def test_surgery_trains_cut_weights_by_the_gradient_at_the_masked_network():
    model = net()
    method = NetworkSurgery(c=0.5)
    stage, _ = stage_of(model)
    method.begin(stage)
    masked = net()
    with torch.no_grad():
        for i, layer in enumerate((masked[0], masked[2])):
            layer.weight *= method.tensors[f"open.{i}"].view(layer.weight.shape)
    assert 0 < (masked[0].weight == 0).sum() < masked[0].weight.numel()
    cross_entropy(masked(X), Y).backward()
    cross_entropy(method(model, X), Y).backward()
    assert_close(model[0].weight.grad, masked[0].weight.grad)
    method.end()
    assert_close(model[0].weight, masked[0].weight)


def test_surgery_looks_at_its_masks_as_often_as_it_says_and_not_in_the_last_tenth():
    model = net()
    method = NetworkSurgery(c=0.5, gamma=0.5)
    stage, _ = stage_of(model, epochs=4, steps=5)
    method.begin(stage)
    bars = [method.tensors[f"bar.{i}"].clone() for i in (0, 1)]
    gates = [method.tensors[f"open.{i}"].clone() for i in (0, 1)]
    changed = []
    for i in range(20):
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.copy_(layer.weight[torch.randperm(len(layer.weight))])
        torch.manual_seed(i)
        if torch.rand((), dtype=torch.float64).item() * (1 + 0.5 * i) < 1 and i + 1 <= 18:
            sizes = [layer.weight.detach().abs().flatten() for layer in (model[0], model[2])]
            gates = [surgery(*three) for three in zip(gates, sizes, bars, strict=True)]
            changed.append(i)
        torch.manual_seed(i)
        method.after_step()
        assert all(torch.equal(method.tensors[f"open.{k}"], gates[k]) for k in (0, 1))
    assert 3 <= len(changed) < 18 and changed[0] == 0


# l0


def test_the_chance_that_a_gate_is_open_is_the_share_of_draws_that_leave_it_open():
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for a in (-3.0, -0.5, 0.0, 2.0):
        draws = gate(torch.tensor(a, dtype=torch.float64), u, 2 / 3)
        assert (draws > 0).double().mean().item() == pytest.approx(
            chance(torch.tensor(a, dtype=torch.float64), 2 / 3).item(), abs=1e-4
        )
        stretched = 1 / (1 + math.exp(-a)) * (ZETA - GAMMA) + GAMMA
        assert settled(torch.tensor(a)).item() == pytest.approx(min(1, max(0, stretched)), abs=1e-6)


def test_the_l0_loss_counts_the_weights_behind_open_gates():
    model = net()
    method = HardConcrete(strength=0.7)
    stage, _ = stage_of(model, groups=["filters"])
    method.begin(stage)
    by_hand = 0.0
    for layer, a in zip((model[0], model[2]), method.log_alpha, strict=True):
        size = layer.weight[0].numel()
        by_hand += sum(size / (1 + math.exp(-(v - 2 / 3 * math.log(0.1 / 1.1)))) for v in a.tolist())
    assert method.loss().item() == pytest.approx(0.7 / 50 * by_hand, rel=1e-5)


def test_gates_multiply_the_weights_and_closed_ones_leave_zeros_behind():
    model = net()
    method = HardConcrete()
    stage, _ = stage_of(model, groups=["filters"])
    method.begin(stage)
    with torch.no_grad():
        method.log_alpha[0][2] = -5.0
        method.log_alpha[0][0] = 0.0
    before = weights(model)
    method.end()
    assert not model[0].weight[2].any()
    assert_close(model[0].weight[0].detach(), before["0.weight"][0] * 0.5, rtol=1e-5, atol=1e-7)


# Sparse variational dropout


def test_the_divergence_of_variational_dropout_is_near_the_true_one():
    """KL = E log|z + α^(−1/2)| − E log|z| for a standard normal z, by midpoints."""
    z = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000 * 20 - 10
    density = Normal(0.0, 1.0).log_prob(z).exp() * (z[1] - z[0])
    for a in (-4.0, -1.0, 0.0, 1.0, 3.0):
        shifted = (z + math.exp(-a / 2)).abs().log()
        true = (density * (shifted - z.abs().log())).sum().item()
        assert divergence(torch.tensor(a, dtype=torch.float64)).item() == pytest.approx(true, abs=0.02)


def test_noise_of_random_weights_has_their_mean_and_variance_at_the_outputs():
    model = nn.Sequential(nn.Linear(5, 4)).double()
    method = SparseVariationalDropout()
    stage, _ = stage_of(model)
    method.begin(stage)
    with torch.no_grad():
        method.of("log_variance", "0").copy_(torch.linspace(-3, 0, 20).view(4, 5))
    model.train()
    torch.manual_seed(0)
    drawn = model(X[:1].expand(40_000, 5)).detach()
    variance = (X[:1].square() @ method.of("log_variance", "0").exp().T).detach()[0]
    method.end()
    assert_close(drawn.mean(0), model(X[:1])[0].detach(), rtol=0.1, atol=0.05)
    assert_close(drawn.var(0), variance, rtol=0.05, atol=0)


def test_a_weight_of_variational_dropout_is_worth_its_signal_over_its_noise():
    model = net()
    method = SparseVariationalDropout(strength=2.0, warmup=0)
    stage, _ = stage_of(model)
    method.begin(stage)
    by_hand = sum(
        (0.63576 * (1 - torch.sigmoid(1.87320 + 1.48695 * a)) + 0.5 * torch.log(1 + torch.exp(-a))).sum()
        for a in ((-9.0 - w.square().log()).clamp(-8, 8) for w in (model[0].weight, model[2].weight))
    )
    assert_close(method.loss(), 2.0 / 50 * by_hand)
    method.end()
    found = method.score(stage).every(stage.units(), None)[0]
    alpha = math.exp(-9) / model[0].weight.detach().square()
    assert_close(found, (1 / alpha).clamp(math.exp(-8), math.exp(8)).flatten(), rtol=1e-5, atol=0)
    assert_close(log_alpha(torch.tensor(2.0), torch.tensor(math.log(4.0))), torch.tensor(0.0))


def test_a_divergence_counts_more_with_every_step_until_it_is_warm():
    method = SparseVariationalDropout(strength=2.0, warmup=2)
    stage, _ = stage_of(net(), epoch=1)  # three steps are done
    method.tensors = {f"log_variance.{i}": torch.zeros_like(net()[i].weight) for i in (0, 2)}
    method.begin(stage)
    weight = []
    for _ in range(4):
        weight.append(method.weighed(torch.ones((), dtype=torch.float64)).item())
        method.after_step()
    method.end()
    assert weight == [2.0 * w / 50 for w in (4 / 6, 5 / 6, 1.0, 1.0)]


# Bayesian compression


def test_divergences_of_bayesian_compression_are_those_of_the_distributions():
    mean, variance = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    true = kl_divergence(Normal(mean, variance.sqrt()), Normal(0 * one, one))
    assert_close(normal_divergence(mean, variance.log()), true)
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000 * 16 - 8
    x = (mean + variance.sqrt() * t).exp()
    density = Normal(0 * one, one).log_prob(t).exp() * (t[1] - t[0])
    q = LogNormal(mean, variance.sqrt()).log_prob(x)
    half = torch.tensor(0.5, dtype=torch.float64)
    for tau in (1.0, 0.2):
        true = (density * (q - Gamma(half, one / tau).log_prob(x))).sum()
        assert_close(gamma_divergence(mean, variance.log(), tau), true, rtol=1e-5, atol=1e-6)
    true = (density * (q - InverseGamma(half, one).log_prob(x))).sum()
    assert_close(inverse_gamma_divergence(mean, variance.log()), true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [GroupNormalJeffreys, GroupHorseshoe])
def test_scales_go_into_the_weights_and_the_settled_network_computes_the_same(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(4, 1, 3, 3)
    method = kind()
    stage, _ = stage_of(model, groups=["filters", "channels"])
    method.begin(stage)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(0.3 * torch.randn_like(p))
    model.eval()
    before = method(model, x)
    method.end()
    assert_close(model(x), before)
    scores = method.score(stage).every(stage.units(), None)
    assert_close(scores[0], method.worth("0"))  # filters of the convolution
    assert_close(scores[3], method.worth("3"))  # inputs of the linear layer
    largest = max(s.max() for s in (method.worth("0"), method.worth("3")))
    assert (scores[1] > 10 * largest).all() and (scores[2] > 10 * largest).all(), "no scale is theirs"


@pytest.mark.parametrize("kind", [GroupNormalJeffreys, GroupHorseshoe])
@pytest.mark.parametrize("groups", [["filters", "channels"], "coupled"])
def test_scales_of_bayesian_compression_prune_neurons_as_far_as_is_asked(kind, groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 4))
    example = torch.randn(4, 20)
    if groups == "coupled":
        groups = [dh.Coupled(model, example)]
    method = kind()
    stage, _ = stage_of(model, groups=groups)
    method.begin(stage)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(0.3 * torch.randn_like(p))
    method.end()
    worth = method.worth("2")
    found = value_for(targets.macs(model, example, 0.15), model, dh.Absolute, groups, score=method.score(stage))
    assert found.number <= 0.15
    dh.prune(model, dh.Absolute(found.value), groups, score=method.score(stage))
    alive = model[2].weight.any(0)
    assert worth[alive].min() > worth[~alive].max(), "neurons stay by the scale of the input that they are"


def test_the_scale_of_a_horseshoe_is_the_root_of_four_log_normals():
    model = nn.Sequential(nn.Linear(20_000, 1))
    method = GroupHorseshoe()
    stage, _ = stage_of(model)
    method.begin(stage)
    with torch.no_grad():
        for i, p in enumerate(method.parameters()[1:]):
            p.fill_(0.1 * i - 0.5)
    torch.manual_seed(0)
    t = {n: p.flatten()[0].item() for n, p in method.trained.items()}
    names = ("a_{}.0", "b_{}.0", "s_a_{}", "s_b_{}")
    logs = [
        t[n.format("mean")] + math.exp(t[n.format("log_variance")] / 2) * torch.randn(200_000, dtype=torch.float64)
        for n in names
    ]
    z = (sum(logs) / 2).exp()
    assert method.settled("0")[0].item() == pytest.approx(z.mean().item(), rel=0.02)
    drawn = method.scale("0").detach()
    assert drawn.log().mean().item() == pytest.approx(z.log().mean().item(), abs=0.03)
    assert drawn.log().std().item() == pytest.approx(z.log().std().item(), rel=0.03)


# Slimming, soft pruning, one cut


def test_slimming_adds_the_gradient_of_the_sum_of_scales():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    model[1].weight.data.copy_(torch.tensor([0.5, -0.2, 1.0, 0.1]))
    method = NetworkSlimming(strength=0.03)
    stage, _ = stage_of(model)
    method.begin(stage)
    (cross_entropy(model(X), Y) + 0.03 * model[1].weight.abs().sum()).backward()
    whole = model[1].weight.grad.clone()
    model.zero_grad()
    cross_entropy(model(X), Y).backward()
    method.after_backward()
    assert_close(model[1].weight.grad, whole)


def test_slimming_says_that_a_network_without_norms_is_not_for_it():
    with pytest.raises(dh.UserError, match="works on the scales of norms, and this network has none"):
        NetworkSlimming().begin(stage_of(net())[0])


@pytest.mark.parametrize("name", ["soft-filters", "fpgm"])
def test_soft_pruning_zeroes_filters_after_every_epoch_and_they_train_on(name):
    model = net()
    method = METHODS.make(name, keep=0.5)
    stage, held = stage_of(model, groups=["filters"], epochs=2)
    w = model[0].weight.detach().clone()
    distance = torch.cdist(w, w).sum(1)
    least = (w.norm(dim=1) if name == "soft-filters" else distance).argsort()[:4]
    method.begin(stage)
    method.before_epoch(0)
    assert model[0].weight.ne(0).all()
    method.before_epoch(1)
    assert not model[0].weight[least].any() and model[0].weight.ne(0).any(1).sum() == 4
    cross_entropy(model(X), Y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    assert model[0].bias.grad is not None and not held


def test_one_cut_by_the_l1_norm_takes_the_filters_with_the_smallest_sums():
    model = net()
    stage, _ = stage_of(model, groups=["filters"])
    score = METHODS.make("l1-filters").score(stage).every(stage.units(), None)[0]
    assert_close(score.detach(), model[0].weight.abs().sum(1).detach() / 5)


def test_one_cut_at_random_is_another_for_another_seed():
    kept = [dh.prune(net(), dh.Density(0.3), score=METHODS.make("random", seed=s).score(None)) for s in (0, 0, 1)]
    same = [torch.equal(kept[0]["0.weight"], other["0.weight"]) for other in kept]
    assert same == [True, True, False]


# RigL and gradual magnitude pruning: the places change within an epoch


def test_gradual_pruning_follows_its_cubic_down_to_the_target_and_prunes_the_smallest():
    model = net()
    stage, held = stage_of(model, keep=0.2, epochs=2, steps=10)
    method = GradualMagnitude(until=0.5, every=4)
    method.begin(stage)
    shares, before = [], torch.cat([p.detach().abs().flatten() for p in model.parameters() if p.dim() > 1])
    for _ in range(20):
        method.after_step()
        shares.append(len(held))
    assert [i + 1 for i, (a, b) in enumerate(zip([0, *shares], shares, strict=False)) if b > a] == [4, 8, 10]
    end = 1.05 * 0.2
    assert [m.density for m in held] == pytest.approx(
        [end + (1 - end) * (1 - done) ** 3 for done in (0.4, 0.8, 1.0)], abs=0.01
    )
    kept = torch.cat([held[-1][name].flatten() for name in held[-1]])
    assert before[kept].min() > before[~kept].max()
    assert density_at(1, end) == pytest.approx(end)


def test_rigl_moves_the_smallest_weights_to_the_largest_gradients_and_no_others():
    model = net()
    stage, held = stage_of(model, name="pretrain", keep=0.4, epochs=8, steps=5)
    method = RigL(move=0.5, every=3)
    method.begin(stage)
    first = held[0]
    assert first.density == pytest.approx(1.05 * 0.4, abs=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, (X, Y)).backward()
        method.after_backward()
        optimizer.step()
        first.apply(model) if len(held) == 1 else None
        weights = {name: dict(model.named_parameters())[name].detach().clone() for name in first}
        method.after_step()
    assert len(held) == 2
    part = 0.25 * (1 + math.cos(math.pi * 3 / 30))  # three of the six epochs' steps in which weights move
    for name, mask in held[1].items():
        gradient = dict(model.named_parameters())[name].grad.abs()
        count = int(first[name].sum())
        moving = min(round(part * count), count - 1)
        stay = weights[name].abs().masked_fill(~first[name], -1).flatten().argsort(descending=True)[: count - moving]
        expected = torch.zeros(mask.numel(), dtype=torch.bool)
        expected[stay] = True
        grown = gradient.flatten().masked_fill(expected, -1).argsort(descending=True)[:moving]
        expected[grown] = True
        assert torch.equal(mask.flatten(), expected)
        new = mask & ~first[name]
        assert not dict(model.named_parameters())[name][new].any(), "a new weight begins at zero"


@given(st.integers(2, 40), st.floats(0, 1), st.integers(0, 2**31))
def test_a_move_keeps_the_number_of_weights(count, part, seed):
    draws = torch.Generator().manual_seed(seed)
    worth, growth, place = (torch.rand(count, generator=draws) for _ in range(3))
    active = place < 0.5
    worth = worth.where(active & (growth < 0.9), torch.zeros(()))  # some that are new have had no gradient yet
    assert moved(active, worth, growth, part).sum() == active.sum()


@pytest.mark.parametrize(("epochs", "last"), [(2, 1), (3, 2), (4, 3), (8, 6), (14, 11)])
def test_rigl_has_an_epoch_left_to_train_what_is_left_of_its_last_cut(epochs, last):
    method, (stage, held) = RigL(), stage_of(net(), name="pretrain", epochs=epochs)
    method.begin(stage)
    for epoch in range(epochs):
        method.before_epoch(epoch)
        assert len(held) == 1 + (epoch >= last)


def test_rigl_keeps_as_many_weights_though_no_gradient_reaches_some_that_are_new():
    model = net()
    stage, held = stage_of(model, name="pretrain", keep=0.4, epochs=8, steps=5)
    method = RigL(move=0.9, every=1)
    method.begin(stage)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        method.after_backward()
        method.after_step()
    assert [m.density for m in held] == [held[0].density] * 4


@pytest.mark.parametrize(("method", "steps"), [(RigL(every=1), 1), (GradualMagnitude(until=0.1, every=1), 4)])
def test_biases_are_not_counted_as_weights_of_a_target_and_stay(method, steps):
    model = net()
    stage, held = stage_of(model, keep=0.3, epochs=8, steps=5, parameters="*")
    method.begin(stage)
    for _ in range(steps):
        method.after_backward()
        method.after_step()
    assert not [name for name in held[-1] if name.endswith("bias")]
    assert held[-1].density == pytest.approx(1.05 * 0.3, abs=0.02)


def test_the_projection_of_admm_spends_its_share_on_weights_and_leaves_biases_alone():
    model = net()
    with torch.no_grad():
        model[0].bias.fill_(9.0)  # larger than every weight
    stage, _ = stage_of(model, keep=0.3, parameters="*")
    method = ADMM(every=1)
    method.begin(stage)
    assert set(method.z) == {"0.weight", "2.weight"}
    assert sum(int(z.count_nonzero()) for z in method.z.values()) == round(0.3 * 64)
    train(ADMM(rho=10.0, every=1), model, stage)
    assert model[0].bias.min() > 8


@given(st.floats(0.01, 1))
def test_densities_of_layers_make_the_share_of_all_weights_and_small_layers_are_denser(total):
    units = stage_of(nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 10)))[0].units()
    large, small = densities(units, total)
    assert (30_000 * large + 1_000 * small) / 31_000 == pytest.approx(total)
    assert 0 < large <= small <= 1
    if small < 1:
        assert small / large == pytest.approx((110 / 1_000) / (400 / 30_000))


# All of them

SETTINGS = {
    "iterative-magnitude": {"steps": 2},
    "gradual-magnitude": {"every": 2},
    "rigl": {"every": 2},
    "admm": {"every": 1},
    "surgery": {"c": 0.5, "gamma": 0.1},
    "sparse-vd": {"warmup": 1},
    "bc-gnj": {"warmup": 1},
    "bc-ghs": {"warmup": 1},
    "soft-filters": {"keep": 0.5},
    "fpgm": {"keep": 0.5},
}


def network_for(name):
    model = net()
    if name == "slimming":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    return model


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_trains_a_network_that_is_plain_afterwards(name):
    model = network_for(name)
    keys = model.state_dict().keys()
    stage, _ = stage_of(model, groups=["filters"] if "keep" in SETTINGS.get(name, {}) else ["elements"])
    train(METHODS.make(name, **SETTINGS.get(name, {})), model, stage)
    assert model.state_dict().keys() == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_method_that_must_know_the_size_says_so():
    stage, _ = stage_of(net(), keep=None)
    with pytest.raises(dh.UserError, match="method admm: needs the final size while it trains"):
        ADMM().begin(stage)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("admm", {"rho": 0}),
        ("admm", {"keep": 2.0}),
        ("iterative-magnitude", {"steps": 0}),
        ("gradual-magnitude", {"until": 1.5}),
        ("rigl", {"move": 2}),
        ("l0", {"closed": 1.0}),
        ("sparse-vd", {"warmup": -1}),
        ("surgery", {"c": -1.0}),
        ("bc-ghs", {"tau": 0.0}),
    ],
)
def test_a_setting_that_can_not_be_meant_is_refused(name, settings):
    with pytest.raises(dh.UserError, match=f"method {name}: {next(iter(settings))} is"):
        METHODS.make(name, **settings)


def test_a_transposed_convolution_is_refused_by_noisy_layers():
    with pytest.raises(dh.UserError, match="only Linear and Conv layers"):
        SparseVariationalDropout().begin(stage_of(nn.Sequential(nn.ConvTranspose2d(1, 2, 3)))[0])
