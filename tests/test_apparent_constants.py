"""What only looks constant is not folded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deephoyer as dh
from deephoyer.structure import compact_report
from deephoyer.structure.fold_constants import fold
from deephoyer.structure.joints import ConstantLayer
from small_networks import Net, largest_gap, linears, numbers


@pytest.mark.parametrize("examples", [torch.zeros(2, 7, dtype=torch.long), torch.full((2, 7), 3)])
def test_whole_numbers_that_do_not_vary_make_no_constant(examples):
    net = Net(
        lambda net, ids: net.b(F.relu(net.a(net.bag(ids)))),
        bag=nn.EmbeddingBag(50, 16).double(),
        **linears(a=(16, 32), b=(32, 5)),
    )
    small = dh.compact(net, examples)
    others = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    assert largest_gap(net(others), small(others)) < 1e-12


@pytest.mark.parametrize("bags", [(0, 2), (0,)])
def test_whole_numbers_that_must_fit_together_stay_where_others_would_fail(bags):
    net = Net(
        lambda net, x, ids, begin: net.b(F.relu(net.a(torch.cat((net.bag(ids, begin), x), 1)))),
        bag=nn.EmbeddingBag(50, 16).double(),
        **linears(a=(20, 32), b=(32, 5)),
    )
    examples = numbers(len(bags), 4), torch.tensor([3, 1, 4, 1, 5]), torch.tensor(bags)
    groups = dh.Coupled(net, examples)
    dh.prune(net, dh.Density(0.5), groups)
    with torch.no_grad():  # a neuron that gives a constant, to be folded
        net.a.weight[int(net.a.weight.any(1).nonzero()[0])] = 0
    small = dh.compact(net, examples, groups=groups)
    assert sum(compact_report(small).folded.values()) > 0
    others = 9 * numbers(3, 4, seed=1), torch.randint(0, 50, (7,)), torch.tensor([0, 1, 5])
    assert small.a.out_features < 32 and largest_gap(net(*others), small(*others)) < 1e-12


def test_images_in_bytes_may_be_black_examples():
    net = Net(
        lambda net, x: net.o(F.relu(net.bn(net.a(x / 255))).flatten(1)),
        a=nn.Conv2d(3, 8, 3),
        bn=nn.BatchNorm2d(8),
        o=nn.Linear(288, 5),
    ).eval()
    small = dh.compact(net, torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    x = torch.randint(0, 256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert not any(isinstance(m, ConstantLayer) for m in small.modules()) and largest_gap(net(x), small(x)) < 1e-5


@pytest.mark.parametrize(
    "act", [lambda x: (x > 0).to(x.dtype), torch.sign, lambda x: torch.where(x > 1, 1.0, 0.0), torch.nan_to_num]
)
def test_what_makes_a_number_of_nan_makes_no_constant(act):
    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3), "bn": nn.BatchNorm2d(8), "o": nn.Conv2d(8, 2, 1)}
    net = Net(lambda net, x: net.o(F.relu(net.bn(net.b(act(net.a(x)))))), **layers).eval()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert fold(net, x).still == {}
    assert largest_gap(net(x), dh.compact(net, x)(x)) < 1e-4


def test_a_choice_between_known_numbers_is_still_a_constant():
    def forward(net, x):
        constant = net.a(x) * 0 + 1
        return net.o(torch.where(torch.tensor([True] * 8), net.b(x), constant))

    net, x = Net(forward, **linears(a=(8, 8), b=(8, 8), o=(8, 2))), numbers(4, 8)
    net.b.weight.data[:3] = 0
    net.b.bias.data[:3] = 2
    small = dh.compact(net, x)
    assert small.compact_report.folded == {"o": 3} and largest_gap(net(x), small(x)) < 1e-12


@pytest.mark.parametrize("bias", [1e-5, 5e-4, 1.0])
def test_fused_attention_over_constant_values(bias):
    def forward(net, x):
        return net.o(F.scaled_dot_product_attention(net.q(x), net.k(x), net.v(x)))

    torch.manual_seed(0)
    net, x = Net(forward, **linears(q=(8, 8), k=(8, 8), v=(8, 8), o=(8, 8))).float(), torch.randn(2, 5, 8)
    net.v.weight.data[:4], net.v.bias.data[:4] = 0, bias
    assert dh.compact(net, x).compact_report.error < 1e-6


def test_a_map_of_one_place_shows_no_borders_but_larger_inputs_have_them():
    torch.manual_seed(0)
    net = (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        .double()
        .eval()
    )
    net[0].weight.data.zero_()
    small = dh.compact(net, numbers(2, 3, 1, 1))
    x = numbers(2, 3, 8, 8)
    assert largest_gap(net(x), small(x)) < 1e-12


def summed(net, x):
    return net.o(F.relu(net.a(x)).sum(1))


def by_its_place(net, x):
    return net.o(F.relu(net.a(x)) + torch.arange(x.shape[1], dtype=x.dtype)[:, None])


def by_the_number_of_tokens(net, x):
    return net.o(F.relu(net.a(x)) * x.shape[1] ** 0.5)


@pytest.mark.parametrize("forward", [summed, by_its_place, by_the_number_of_tokens])
@pytest.mark.parametrize("tokens", [1, 6])
def test_what_depends_on_the_number_of_tokens_is_no_constant(forward, tokens):
    net = Net(forward, **linears(a=(5, 16), o=(16, 3)))
    net.a.weight.data[::2], net.a.bias.data[::2] = 0, 0.3
    small = dh.compact(net, numbers(2, tokens, 5))
    for others in (numbers(2, 9, 5), numbers(1, 1, 5)):
        assert largest_gap(net(others), small(others)) < 1e-12


def test_what_only_much_shorter_or_longer_inputs_change_is_no_constant():
    def forward(net, x):
        places = torch.arange(x.shape[1], dtype=x.dtype)[:, None].clamp(min=2)
        return net.o((F.relu(net.a(x)) * places).amax(1))

    net = Net(forward, **linears(a=(5, 16), o=(16, 3)))
    net.a.weight.data[::2], net.a.bias.data[::2] = 0, 0.3
    small = dh.compact(net, numbers(2, 3, 5))
    for tokens in (1, 2, 9):
        others = numbers(2, tokens, 5)
        assert largest_gap(net(others), small(others)) < 1e-12


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()

    def forward(self, x, gate=None, times=1.0):
        h = self.a(x) * times
        return self.b(h if gate is None else h * gate)


def test_the_report_says_which_arguments_what_was_folded_is_constant_without():
    """With them it may be none, which nobody can try: what they would be is not known."""
    net, x, gate = Gated(), numbers(5, 4), numbers(5, 1)
    net.a.weight.data[:2] = 0
    small = dh.compact(net, x)
    assert small.a.out_features == 4 and "what is folded is constant without gate: " in str(compact_report(small))
    small = dh.compact(net, (x, gate))
    assert not compact_report(small).without and largest_gap(net(x, gate), small(x, gate)) < 1e-12
