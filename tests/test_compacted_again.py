"""Networks that are compacted a second time, and where joints may not be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deephoyer as dh
from deephoyer.structure.joints import ConstantLayer, Gather
from small_networks import Net, largest_gap, linears, numbers


def twice(net, x, joints=("gather", "gather")):
    for i, how in enumerate(joints):
        dh.prune(net, dh.Density(0.6 - 0.1 * i), "filters+channels")
        net = dh.compact(net, x, joints=how)
    return net


@pytest.mark.parametrize("joints", [("gather", "gather"), ("gather", "none"), ("none", "gather"), ("none", "none")])
@pytest.mark.parametrize("seed", range(4))
def test_a_compacted_network_is_pruned_compacted_and_stored_again(tmp_path, joints, seed):
    def fresh():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.Flatten(),
            nn.Linear(128, 16),
            nn.ReLU(),
            nn.Linear(16, 4),
        ).double()

    x = numbers(4, 3, 8, 8)
    small = twice(fresh(), x, joints)
    assert not any(isinstance(m, Gather) and not hasattr(m.layer, "weight") for m in small.modules())
    dh.save(small, tmp_path / "small.safetensors")
    assert torch.equal(small(x), dh.load(tmp_path / "small.safetensors", model=fresh())(x))


def test_two_joints_become_one_that_reads_and_writes_the_same():
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double(),
        numbers(4, 16),
    )
    dh.prune(net, dh.Density(0.6), "filters+channels")
    first = dh.compact(net, x, joints="gather")
    dh.prune(first, dh.Density(0.5), "filters+channels")
    second = dh.compact(first, x, joints="gather")
    assert largest_gap(first(x), second(x)) < 1e-12
    assert sum(p.numel() for p in second.parameters()) < sum(p.numel() for p in first.parameters())


def test_a_layer_in_a_joint_that_has_nothing_left_stands_still_in_its_place(tmp_path):
    def fresh():
        torch.manual_seed(0)
        return Net(lambda net, x: net.o(x + net.b(x)), **linears(b=(16, 16), o=(16, 4)))

    net, x = fresh(), numbers(4, 16)
    net.b.weight.data[::3] = 0
    net.b.weight.data[:, ::3] = 0
    first = dh.compact(net, x, joints="gather")
    assert isinstance(first.b, Gather) and first.b.fill is not None
    first.b.layer.weight.data.zero_()
    second = dh.compact(first, x, joints="gather")
    assert isinstance(second.b, ConstantLayer)
    dh.save(second, tmp_path / "a.safetensors")
    assert largest_gap(first(x), dh.load(tmp_path / "a.safetensors", model=fresh())(x)) < 1e-12


def test_a_forward_that_asks_a_layer_for_its_size_gets_no_joint_there():
    net, x = (
        Net(lambda net, x: net.b(F.relu(net.a(x.view(-1, net.a.in_features)))), **linears(a=(64, 16), b=(16, 4))),
        numbers(2, 1, 8, 8),
    )
    net.a.weight.data[:, :8] = 0
    net.a.weight.data[:4], net.a.bias.data[:4] = 0, 0
    small = dh.compact(net, x)
    assert small.a.in_features == 64 and small.a.out_features == 12 and largest_gap(net(x), small(x)) < 1e-12


def test_calls_that_joints_make_are_none_of_the_code_that_was_told_its_sizes():
    def forward(net, x):
        q, k = (layer(x).view(len(x), 4, -1).softmax(-1) for layer in (net.q, net.k))
        return net.o((q * k).flatten(1))

    net, x = Net(forward, **linears(q=(6, 12), k=(6, 12), o=(12, 2))), numbers(4, 6)
    net.o.weight.data[:, :3] = 0  # of one head
    net.q.weight.data[5], net.k.weight.data[7] = 0, 0
    small = dh.compact(net, x, joints="gather")
    assert isinstance(small.q, Gather) and small.q.layer.out_features == 8
    assert small.o.in_features == 9 and largest_gap(net(x), small(x)) < 1e-12
