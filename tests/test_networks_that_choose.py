"""Networks that draw random numbers, or choose by what they compute: experts, detectors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deephoyer as dh
from deephoyer.structure.equality import Differs, same
from small_networks import Net, half_of, largest_gap, linears, numbers


def test_a_network_that_draws_random_numbers_in_eval_mode_is_compared_with_the_same_ones():
    def forward(net, x):
        order = torch.rand(x.shape[1]).argsort()  # as masked autoencoders shuffle their patches
        return net.b(F.relu(net.a(x[:, order])))

    net, x = Net(forward, **linears(a=(4, 8), b=(8, 2))), numbers(2, 9, 4)
    before = torch.get_rng_state()
    dh.prune(net, dh.Density(0.5), dh.Coupled(net, x))
    net.a.bias.data[0] = 1  # a constant to be folded
    assert dh.compact(net, x).a.out_features == 4
    assert torch.equal(torch.get_rng_state(), before)  # the user's own random numbers stay what they would have been


def test_a_detector_that_keeps_the_other_of_two_equal_boxes_is_compacted():
    class Detector(nn.Module):
        """Gives the best three of its places; many have the same score but for rounding."""

        def __init__(self):
            super().__init__()
            self.features, self.score = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 1, 1)

        def forward(self, images):
            x = torch.stack(images)
            scores = self.score(torch.relu(self.features(x))).flatten(1)
            best, where = scores.topk(3)
            return [{"scores": s, "boxes": torch.stack([w, w + 1], 1)} for s, w in zip(best, where, strict=True)]

    net = Detector().double().eval()
    images = [torch.randn(3, 1, 1).double().expand(3, 8, 9) * (1 + 1e-15 * torch.randn(8, 9).double())]
    groups = dh.Coupled(net, (images,))
    dh.prune(net, dh.Density(0.5), groups=groups)
    small = dh.compact(net, (images,), groups=groups)
    assert small.features.out_channels == 8
    assert torch.allclose(small(images)[0]["scores"], net(images)[0]["scores"], atol=1e-12)
    assert dh.summary(small, (images,), latency=False).total.macs_executed == 8 * 9 * 8 * 4


@pytest.mark.parametrize("part", [slice(None), slice(0, 1)])
def test_a_network_that_decides_by_a_sum_that_it_adds_up_in_place_keeps_what_its_other_way_reads(part):
    def forward(net, x):
        h, total = F.relu(net.a(x)), x.new_zeros(2, dtype=x.dtype)
        total[part] += x.sum()
        return net.b(h) if total.max() < 1000 else net.c(h)

    net, x = Net(forward, **linears(a=(4, 8), b=(8, 2), c=(8, 2))), numbers(3, 4).abs()
    with pytest.raises(dh.UserError, match="decides by the values of a tensor"):
        half_of(net, x)


def test_of_a_detector_that_finds_nothing_in_the_examples_what_its_layers_give_is_compared():
    def forward(net, x):
        boxes, scores = net.boxes(h := F.relu(net.a(x))), net.scores(h)[..., 0].sigmoid()
        return boxes[scores > net.least]

    net, x = Net(forward, **linears(a=(8, 16), boxes=(16, 4), scores=(16, 1))), numbers(20, 8)
    net.least = 2.0
    groups = dh.Coupled(net, x)
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x, groups=groups)
    assert small.a.out_features == 8 and small(x).numel() == 0
    net.least = small.least = 0.4
    assert len(net(x)) > 3 and largest_gap(net(x), small(x)) < 1e-12
    small.boxes.weight.data[0, 0] += 1
    net.least = small.least = 2.0
    with pytest.raises(Differs, match="boxes"):
        same(net, small, x)


class Experts(nn.Module):
    """Each row goes to the expert that a router chooses: matrices picked by number, or in one grouped product."""

    def __init__(self, grouped):
        super().__init__()
        self.grouped = grouped
        self.router = nn.Linear(16, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 16, 16)), nn.Parameter(torch.randn(3, 4, 16))

    def forward(self, x):
        ids = self.router(x).argmax(-1)
        if not self.grouped:
            return torch.bmm(self.down[ids], F.silu(torch.bmm(self.up[ids], x.unsqueeze(-1)))).squeeze(-1)
        ids, order = ids.sort()
        ends = torch.bincount(ids, minlength=3).cumsum(0).int()
        h = F.silu(torch._grouped_mm(x[order], self.up.transpose(1, 2), offs=ends))
        return torch._grouped_mm(h, self.down.transpose(1, 2), offs=ends)[order.argsort()]


@pytest.mark.parametrize("grouped", [False, True], ids=["picked", "grouped"])
def test_the_same_neuron_of_all_experts_goes(grouped):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), Experts(grouped))
    net, x = (net, torch.randn(40, 5)) if grouped else (net.double(), numbers(40, 5))
    groups = dh.Coupled(net, x)
    assert [len(s.channels) for s in groups.sets if s.reason is None] == [16, 16]
    assert [unit.count for unit in dh.Neurons(net, x).units()] == [16]
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x, groups=groups)
    assert small[2].up.shape == (3, 8, 8) and small[2].down.shape == (3, 4, 8)
    assert largest_gap(net(x), small(x)) < (1e-5 if grouped else 1e-12)
    small[2].down.data[:, :, :3] = 0  # a kernel for groups wants multiples of eight
    assert dh.compact(small, x)[2].down.shape == (3, 4, 8 if grouped else 5)


def test_a_value_taken_out_of_given_whole_numbers_by_a_list_decides_nothing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)
            self.out = nn.Linear(6, 2)

        def forward(self, ids):
            if 8 in ids[:, [-1, 0]]:
                print("a padded sentence without a mask")
            return self.out(torch.relu(self.layer(self.table(ids))))

    assert len(dh.Coupled(Net().eval(), torch.tensor([[1, 2, 3], [4, 5, 6]])).units()) == 2


def test_a_network_that_samples_loses_all_channels_but_those_that_it_draws_for():
    def forward(net, x):
        h = net.a(x).relu()
        mean, spread = net.m(h), net.s(h)
        z = mean + torch.randn_like(spread) * spread.exp()
        return net.c(net.b(z).relu()), mean, spread

    net, x = Net(forward, **linears(a=(6, 16), m=(16, 4), s=(16, 4), b=(4, 16), c=(16, 6))), numbers(3, 6)
    small = half_of(net, x)
    assert small.a.out_features < 16 and small.b.out_features < 16 and small.m.out_features == 4
    torch.manual_seed(1)
    before = net(x)
    torch.manual_seed(1)
    assert all(torch.allclose(a, b) for a, b in zip(before, small(x), strict=True))


def test_random_numbers_are_no_constant():
    def forward(net, x):
        return net.b(net.a(x) + torch.rand(1, 8, dtype=x.dtype))

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), numbers(3, 6)
    net.a.weight.data[::2], net.a.bias.data[::2] = 0, 0
    assert dh.compact(net, x).b.in_features == 8


def routed(net, x):
    """Each row to the expert with the largest gate; an expert without rows is not called."""
    h = net.i(x).relu()
    chosen, out = net.g(h).argmax(1), torch.zeros_like(h)
    for k, expert in enumerate((net.e, net.f)):
        if len(rows := (chosen == k).nonzero().flatten()):
            out = out.index_add(0, rows, expert(h[rows]))
    return net.o(out)


def routed_by_mask(net, x):
    h = net.i(x).relu()
    chosen, out = net.g(h).argmax(1), torch.zeros_like(h)
    for k, expert in enumerate((net.e, net.f)):
        mine = h[chosen == k]
        out = out + expert(mine).sum(0) if len(mine) else out
    return net.o(out)


def experts(bias, forward=routed):
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    net = Net(forward, e=part, f=copy.deepcopy(part), **linears(i=(6, 8), g=(8, 2), o=(8, 3)))
    net.g.bias.data += torch.tensor([bias, 0.0])
    return net


def test_experts_that_only_some_of_the_examples_reach_lose_channels():
    net, x = experts(0.0), numbers(32, 6)
    small = half_of(net, x)
    assert all(len(expert[0].weight) < 16 and expert[0].in_features < 8 for expert in (small.e, small.f))
    assert largest_gap(net(x.flip(0)), small(x.flip(0))) < 1e-12


@pytest.mark.parametrize("forward", [routed, routed_by_mask])
def test_what_an_expert_would_be_given_stays_where_no_example_reaches_it(forward):
    net, x = experts(50.0, forward), numbers(32, 6)
    groups = dh.Coupled(net, x)
    assert any("'f.0.weight' is not used" in why for why in groups.held())
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x, groups=groups)
    assert len(small.e[0].weight) < 16 and small.i.out_features == 8
    net.g.bias.data[0], small.g.bias.data[0] = -50, -50
    assert largest_gap(net(x), small(x)) < 1e-12


def test_a_one_hot_choice_of_a_given_number_of_classes_is_no_decision():
    def forward(net, x):
        h = net.i(x).relu()
        chosen = F.one_hot(net.g(h).argmax(1), num_classes=2).to(h)
        return net.o(chosen[:, :1] * net.e(h) + chosen[:, 1:] * net.f(h))

    net, x = experts(0.0, forward), numbers(32, 6)
    small = half_of(net, x)
    assert small.i.out_features < 8 and all(len(expert[0].weight) < 16 for expert in (small.e, small.f))
    assert largest_gap(net(x.flip(0)), small(x.flip(0))) < 1e-12


def test_constants_are_folded_though_an_expert_gets_no_rows():
    def forward(net, x):
        h = net.i(x).relu()
        mine = (net.g(h).argmax(1) == 0).nonzero().flatten()
        return net.o(torch.zeros_like(h).index_add(0, mine, net.e(h[mine])) + net.f(h))

    net, x = experts(-50.0, forward), numbers(8, 6)
    net.f[0].weight.data[::2], net.f[0].bias.data[::2] = 0, 0.3
    small = dh.compact(net, x)
    assert len(small.f[0].weight) == 8 and largest_gap(net(x), small(x)) < 1e-12
    net.g.bias.data[0], small.g.bias.data[0] = 50, 50
    assert largest_gap(net(x), small(x)) < 1e-12


def by_task(net, x, task):
    return (net.e, net.f)[int(task)](net.i(x).relu())


def with_a_token(net, x, masked):
    h = net.i(x)
    return net.e(torch.where(masked[:, None], net.token, h) if masked.any() else h)


@pytest.mark.parametrize("forward, gone", [(by_task, torch.tensor(0)), (with_a_token, torch.tensor([False] * 4))])
def test_what_another_task_or_mask_would_need_stays(forward, gone):
    net, x = Net(forward, **linears(i=(6, 8), e=(8, 3), f=(8, 3))), numbers(4, 6)
    net.token = nn.Parameter(numbers(8))
    groups = dh.Coupled(net, (x, gone))
    assert not any(s.reason is None for s in groups.sets)
    net.i.weight.data[:4], net.i.bias.data[:4], net.e.weight.data[:, :4] = 0, 0, 0
    small = dh.compact(net, (x, gone), groups=groups)
    assert largest_gap(net(x, gone + 1 > 0), small(x, gone + 1 > 0)) < 1e-12


def test_a_policy_that_gives_a_distribution_loses_the_channels_before_it():
    def forward(net, x):
        h = net.a(x).relu()
        return torch.distributions.Normal(net.m(h), net.s(h).exp()), net.v(h)

    net, x = Net(forward, **linears(a=(6, 16), m=(16, 4), s=(16, 4), v=(16, 1))), numbers(3, 6)
    checks = torch.distributions.Distribution._validate_args
    small = half_of(net, x)
    assert small.a.out_features < 16 and small.m.out_features == 4
    assert torch.allclose(net(x)[0].mean, small(x)[0].mean)
    assert torch.distributions.Distribution._validate_args == checks
