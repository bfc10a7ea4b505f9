"""Weights that are computed from parameters, or used in more than one place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deephoyer as dh
from small_networks import Net, half_of, largest_gap, linears, numbers


def test_a_weight_that_is_divided_by_its_length_loses_outputs_without_being_zero():
    norm = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(norm(nn.Conv1d(3, 8, 3)), nn.ReLU(), nn.Conv1d(8, 2, 1)).double().eval()
    x = numbers(2, 3, 9)
    groups = dh.Coupled(net, x)
    (unit,) = groups.units()
    assert "0.parametrizations.weight.original1" not in unit.names
    dh.prune(net, dh.Density(0.5), groups=groups)
    small = dh.compact(net, x, groups=groups)
    assert small[0].weight.shape == (4, 3, 3) and largest_gap(net(x), small(x)) < 1e-12


def test_layers_that_share_a_bias_lose_the_same_outputs():
    net, x = (
        Net(lambda net, x: net.c(F.relu(net.b(F.relu(net.a(x))))), **linears(a=(8, 8), b=(8, 8), c=(8, 4))),
        numbers(4, 8),
    )
    net.b.bias = net.a.bias
    net.a.weight.data[:3], net.a.bias.data[:3] = 0, 1
    assert largest_gap(net(x), dh.compact(net, x)(x)) < 1e-12
    dh.prune(net, dh.Density(0.5), dh.Coupled(net, x))
    small = dh.compact(net, x)
    assert small.a.bias is small.b.bias and small.a.out_features == 4 and largest_gap(net(x), small(x)) < 1e-12


def test_layers_that_share_a_weight_get_no_joints(tmp_path):
    def fresh():
        torch.manual_seed(0)
        net = Net(
            lambda net, x, y: net.o(torch.cat([net.a(x), net.b(y)], 1).relu()), **linears(a=(8, 6), b=(8, 6), o=(12, 2))
        )
        net.b.weight = net.a.weight
        return net

    net, x = fresh(), (numbers(4, 8), numbers(4, 8, seed=1))
    net.a.weight.data[:, :3] = 0
    small = dh.compact(net, x)
    assert small.a.weight is small.b.weight
    assert small.compact_report.parameters_after <= small.compact_report.parameters_before
    dh.save(small, tmp_path / "b.safetensors")
    assert torch.equal(small(*x), dh.load(tmp_path / "b.safetensors", model=fresh())(*x))


def test_a_layer_whose_weight_is_used_elsewhere_too_keeps_its_inputs():
    def forward(net, x):
        return F.linear(F.relu(net.b(F.relu(net.a(x)))), net.b.weight.t())

    net, x = Net(forward, **linears(a=(6, 16), b=(16, 8))), numbers(4, 6)
    net.a.weight.data[::2], net.a.bias.data[::2] = 0, 0.3
    net.b.weight.data[:4], net.b.bias.data[:4] = 0, 0
    small = dh.compact(net, x)
    assert small.b.weight.shape == (4, 16) and largest_gap(net(x), small(x)) < 1e-12


class Masked(nn.Linear):
    """As in autoregressive networks."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, dtype=torch.float64)
        self.register_buffer("mask", (torch.rand_like(self.weight) < 0.7).double())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Rounded(nn.Linear):
    """Fake quantization, as in training for few bits."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, dtype=torch.float64)

    def forward(self, x):
        return F.linear(x, torch.round(self.weight / 0.01).clamp(-128, 127) * 0.01, self.bias)


class Exponential(Rounded):
    """Its weight is never zero."""

    def forward(self, x):
        return F.linear(x, self.weight.exp(), self.bias)


@pytest.mark.parametrize("layer", [Masked, Rounded])
def test_layers_that_scale_or_round_their_weight_lose_channels(layer):
    net, x = nn.Sequential(layer(6, 32), nn.ReLU(), layer(32, 16), nn.ReLU(), layer(16, 3)), numbers(4, 6)
    small = half_of(net, x)
    left = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in net.parameters())
    assert left < 0.45 and largest_gap(net(x), small(x)) < 1e-12


def test_a_function_of_a_weight_that_makes_something_of_zero_keeps_its_inputs():
    net, x = nn.Sequential(nn.Linear(6, 32).double(), nn.ReLU(), Exponential(32, 3)), numbers(4, 6)
    net[2].weight.data[:, ::2] = 0
    assert dh.compact(net, x)[0].out_features == 32


def test_a_network_whose_layers_all_have_weight_norm_is_regularized_pruned_and_compacted():
    norm = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(norm(nn.Conv1d(4, 32, 3)), nn.ReLU(), norm(nn.ConvTranspose1d(32, 16, 4)), nn.ReLU())
    net, x = nn.Sequential(*net, norm(nn.Conv1d(16, 1, 3))).double(), numbers(2, 4, 9)
    dh.Regularizer(net, groups=dh.Coupled(net, x)).add_grad_()
    small = half_of(net, x)
    assert small[0].out_channels < 24 and largest_gap(net(x), small(x)) < 1e-12
    with pytest.raises(dh.UserError, match="computed from other tensors"):
        dh.prune(net, dh.Density(0.5))


@pytest.mark.parametrize(
    "norm, names",
    [
        (nn.utils.parametrizations.weight_norm, ("0.parametrizations.weight.original0", "*original1")),
        (nn.utils.weight_norm, ("0.weight_g", "*weight_v")),
    ],
)
def test_a_row_that_weight_norm_divides_by_its_length_is_not_pruned_to_nothing(norm, names):
    """The weight was NaN."""
    torch.manual_seed(0)
    net, x = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 6)
    for groups, density in (("filters", 0.5), ("elements", 0.02)):
        with pytest.raises(dh.UserError, match=f"Prune '{names[0]}' instead"):
            dh.prune(net, dh.Density(density), groups=groups, parameters=names[1])
    dh.prune(net, dh.Density(0.9), parameters=names[1])
    assert net(x).isfinite().all()
    masks = dh.prune(net, dh.Density(0.5), groups="filters", parameters=names[0])
    assert masks.density == 0.5 and net(x).isfinite().all() and not net[0].weight.any(1).all()
    net = nn.Sequential(norm(nn.Linear(6, 8), dim=None), nn.Linear(8, 2))
    dh.prune(net, dh.Density(0.5), groups="filters", parameters=names[1])
    assert net(x).isfinite().all() and not net[0].weight.any(1).all()


def test_what_torchs_own_pruning_masks_is_removed():
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double(), numbers(4, 6)
    nn.utils.prune.ln_structured(net[0], "weight", 0.5, n=2, dim=0)
    net[0].bias.data[net[0].weight_mask[:, 0] == 0] = 0
    net(x)  # leaves a weight with gradients behind
    small = dh.compact(net, x)
    assert small[0].out_features == 4 and "weight_orig" not in dict(small[0].named_parameters())
    assert largest_gap(net(x), small(x)) < 1e-12 and nn.utils.prune.is_pruned(net)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_layers_with_spectral_norm_lose_channels(norm):
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), norm(nn.Conv2d(12, 12, 3)), nn.ReLU(), norm(nn.Conv2d(12, 2, 1))
    )
    net, x = net.double(), numbers(2, 3, 9, 9)
    net(x)  # in training, which turns the vectors towards the largest singular value
    net.eval()
    small = half_of(net, x)
    assert small[0].out_channels == 6 and largest_gap(net(3 * x), small(3 * x)) < 1e-12
    small.train()(x).sum().backward()
