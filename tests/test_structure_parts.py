"""Parts of the channel graph by themselves: what a layer is, what clearing and resizing do, joints, sizes, folding."""

import copy
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.structure.asked_sizes import asked_sizes
from deephoyer.structure.attention import NarrowAttention, opened
from deephoyer.structure.channels import ChannelGraph
from deephoyer.structure.equality import Differs, answers, compare, error, same, tolerance
from deephoyer.structure.fold_constants import fold
from deephoyer.structure.inputs import random_like
from deephoyer.structure.joints import Gather, merged
from deephoyer.structure.layers import CONV, EMBEDDING, LINEAR, TRANSPOSED_CONV, clear, filled, kind_of
from deephoyer.structure.remove import resize
from deephoyer.structure.shape import describe, reshape_


def test_a_layer_that_computes_its_weight_or_changes_it_is_none_of_ours():
    assert kind_of(nn.Linear(3, 2)) is LINEAR and kind_of(nn.Embedding(3, 2)) is EMBEDDING
    assert kind_of(nn.ConvTranspose2d(4, 4, 3)) is TRANSPOSED_CONV
    assert kind_of(weight_norm(nn.Linear(3, 2))) is None
    assert kind_of(nn.ConvTranspose2d(4, 4, 3, groups=2)) is None
    assert kind_of(nn.Embedding(3, 2, max_norm=1.0)) is None


def test_clearing_an_input_of_a_grouped_convolution_leaves_the_others_as_they_were():
    layer = nn.Conv2d(4, 6, 3, groups=2)
    before = layer.weight.detach().clone()
    clear(layer, CONV, "in", torch.tensor([False, True, False, False]))  # the second of the first group
    assert not layer.weight[:3, 1].any()
    assert torch.equal(layer.weight[:3, 0], before[:3, 0]) and torch.equal(layer.weight[3:], before[3:])


def test_what_is_filled_is_what_a_comparison_with_zero_says():
    weight = torch.tensor([0.0, 0.0, -1.0, float("nan"), -0.0, float("inf")]).repeat(4).view(2, 3, 2, 2)
    for tensor in (weight, weight[:, :, :, 0], weight[:1], torch.zeros(3, 2), torch.zeros(3, 0), weight[0, 0, 0]):
        for dim in range(tensor.dim()):
            plain = [bool((tensor.select(dim, i) != 0).any()) for i in range(tensor.shape[dim])]
            assert filled(tensor, dim).tolist() == plain


def test_complex_numbers_are_compared_by_both_of_their_parts():
    one = torch.complex(torch.ones(3), torch.ones(3))
    assert error(one, one) == 0.0 and error(one, one.conj()) == 2.0
    assert error(one, one + 1e-6j) < tolerance(one) == tolerance(one.real)


def test_the_error_leaves_out_what_is_infinite_in_both_and_is_infinite_otherwise():
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([4.0, inf, nan, -inf])
    assert error(a, a) == 0 and error(a, torch.tensor([3.0, inf, nan, -inf])) == 0.25
    assert error(a, a.nan_to_num()) == error(torch.zeros(1), torch.tensor([nan])) == inf
    largest = torch.tensor([1e308], dtype=torch.float64)
    assert error(largest, -largest) == inf


@pytest.mark.parametrize(
    "func, args, kwargs, sizes",
    [
        (torch.reshape, (), {"shape": (2, 6)}, [2, 6]),
        (torch.Tensor.view, (3, 4), {}, [3, 4]),
        (torch.Tensor.reshape, ((3, -1),), {}, [3, -1]),
        (torch.split, (4,), {"dim": 1}, [4]),
        (torch.Tensor.unflatten, (0, (2, 6)), {}, [2, 6]),
        (torch.Tensor.expand, (), {}, []),
    ],
)
def test_the_sizes_of_a_call_are_found_by_place_and_by_name(func, args, kwargs, sizes):
    assert asked_sizes(func, (torch.zeros(12), *args), kwargs) == sizes


def test_a_resized_module_says_the_sizes_of_its_tensors():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = conv1d(nf=4, nx=3)
    layer.weight = nn.Parameter(layer.weight.detach()[:2])
    resize(layer)
    assert (layer.nx, layer.nf) == (2, 4)
    grouped = nn.Conv2d(4, 6, 3, groups=2)
    grouped.weight = nn.Parameter(grouped.weight.detach()[:4, :1])
    resize(grouped)
    assert (grouped.in_channels, grouped.out_channels) == (2, 4)


def test_sets_of_channels_are_what_looking_at_each_channel_by_itself_gives():
    places = {("a.weight", 0): [0, 1, 2, 3, 4], ("a.bias", 0): [0, 1, 2, 3, 4], ("b.weight", 1): [2, 2, 3, 4, 6]}
    fixed = {3: "network input", 6: "network output", 7: "lies nowhere"}
    graph = ChannelGraph({p: torch.tensor(c) for p, c in places.items()}, fixed=fixed, heads={2}, count=8)
    plain = {}
    for channel in range(graph.count):
        where = [place for place, lying in places.items() if channel in lying]
        if where:
            plain.setdefault((tuple(where), fixed.get(channel)), []).append(channel)
    sets = graph.sets()
    assert {(tuple(s.places), s.reason): s.channels for s in sets} == plain
    assert [s.channels[0] for s in sets] == [0, 2, 3, 6]
    assert [s.name for s in sets if s.heads] == ["a#2"]
    assert [s.share for s in sets] == [4 / 15, 7 / 15, 3 / 15, 1 / 15]
    assert ChannelGraph().sets() == []


READS = [None, torch.tensor([2, 0, 3, 1])]
WRITES = [None, torch.tensor([1, 3, 0, 2]), torch.tensor([3, 0, 2, 1, 0])]


@pytest.mark.parametrize("reads", list(itertools.product(READS, READS)), ids=str)
@pytest.mark.parametrize("writes", list(itertools.product(WRITES, WRITES[:2])), ids=str)
def test_two_joints_become_one_that_gives_the_same(reads, writes):
    """Of writes, a number as large as the layer's outputs stands for a channel that has none."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    if writes[1] is None:
        layer = nn.Linear(4, 4)
    inner = Gather(layer, reads[1], writes[1], torch.randn(4) if writes[1] is not None else None, 4)
    fill = torch.randn(len(writes[0])) if writes[0] is not None else None
    between = nn.Linear(4, 4)  # the outer one is made around a layer of the inner one's size
    outer = Gather(between, reads[0], writes[0], fill, 4)
    y = inner(x if reads[0] is None else x[:, reads[0]])
    if writes[0] is not None:
        y = F.pad(y, (0, 1))[:, writes[0]] + fill
    assert_close(merged(outer, inner)(x), y)


@pytest.mark.parametrize("middle", ["grouped", "transposed", "plain"])
def test_constants_are_folded_into_every_kind_of_convolution(middle):
    torch.manual_seed(0)
    layer = {
        "grouped": lambda: nn.Conv2d(4, 6, 1, groups=2),
        "transposed": lambda: nn.ConvTranspose2d(4, 6, 1),
        "plain": lambda: nn.Conv2d(4, 6, 1),
    }[middle]()
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), layer, nn.ReLU(), nn.Conv2d(6, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 0, 0.7
    x = torch.randn(2, 3, 5, 5)
    before = net(x)
    found = fold(net, x)
    assert not found.kept.get("")
    if middle == "transposed":
        return
    assert found.folded["2"] == 1
    with torch.no_grad():
        net[0].bias[1] = 100.0  # nobody reads it any more
    assert_close(net(x), before)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_narrowed_attention_takes_its_batch_where_torch_does(batch_first, weights):
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(8, 4, batch_first=batch_first).eval()
    x = torch.randn(3, 5, 8)
    want, seen = whole(x, x, x, need_weights=weights)
    assert opened(whole)
    whole.fused, whole._qkv_same_embed_dim = whole._qkv_same_embed_dim, False
    whole.__class__ = NarrowAttention  # as `narrow` does it, with all of its heads
    got, its = whole(x, x, x, need_weights=weights)
    assert_close(got, want)
    if weights:
        assert_close(its, seen)


class OverTokens(nn.Module):
    """Normalises over what is no channel, with the channels in front."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.fc2(F.layer_norm(self.fc1(x).T, (len(x),)).T)


def test_a_norm_over_something_else_leaves_channels_free():
    (unit,) = dh.Coupled(OverTokens(), torch.randn(7, 3)).units()
    assert unit.count == 6


class Neighbours(nn.Module):
    """Adds up rows of a graph's nodes."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        index = torch.tensor([0, 1, 1, 2, 0])
        return self.fc2(torch.zeros(3, h.shape[1]).index_add(0, index, h) + h[:3])


def test_channels_go_through_sums_over_neighbours():
    torch.manual_seed(0)
    net, x = Neighbours(), torch.randn(5, 3)
    with torch.no_grad():
        net.fc1.weight[:4], net.fc1.bias[:4] = 0, 0
    small = dh.compact(net, x)
    assert small.fc1.out_features == 2
    assert_close(small(x), net(x))


def test_a_group_norm_right_behind_the_input_is_followed():
    net = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    (unit,) = dh.Coupled(net, torch.randn(2, 4, 3, 3)).units()
    assert unit.count == 6


def test_inputs_like_the_given_ones_are_drawn_anew_and_what_cannot_be_drawn_stays():
    given = {
        "x": torch.zeros(4, 50),
        "ids": torch.tensor([[3, 7, 5]]),
        "mask": torch.ones(2, 40, dtype=torch.bool),
        "none": torch.zeros(0, 3),
        "flag": 3,
    }
    drawn, bold = random_like(given), random_like(given, bold=True)
    assert drawn["x"].shape == (4, 50) and 0.8 < drawn["x"].std() < 1.2
    assert drawn["ids"].min() >= 3 and drawn["ids"].max() <= 7 and bold["ids"].min() >= 0
    assert drawn["mask"].all() and 0 < bold["mask"].sum() < 80
    assert drawn["none"].shape == (0, 3) and drawn["flag"] == 3


def test_a_loose_tensor_may_shrink_to_a_single_number_and_attention_to_fewer_heads():
    net = nn.Module()
    net.scale = nn.Parameter(torch.ones(4))
    described = describe(net)
    described["tensors"]["scale"] = [1]
    reshape_(net, described)
    assert net.scale.shape == (1,)
    attention = nn.MultiheadAttention(8, 4)
    reshape_(attention, describe(attention) | {"sizes": {"": {"num_heads": 2}}})
    assert isinstance(attention, NarrowAttention) and attention.num_heads == 2


class Between(nn.Module):
    """Something between two linear layers, on the channels' tensor."""

    def __init__(self, middle, width):
        super().__init__()
        self.fc1, self.fc2, self.middle = nn.Linear(3, 6), nn.Linear(width, 2), middle

    def forward(self, x):
        return self.fc2(self.middle(torch.relu(self.fc1(x))))


def gated(h):
    a, b = torch.split(h, 3, 2)
    return a * b.sigmoid()


def turned_in_place(h):
    before = h.detach()
    h.transpose_(1, 2).unsqueeze_(0)
    h.squeeze_(0)
    return before + h.transpose_(1, 2)


@pytest.mark.parametrize(
    "middle, width, channels",
    [
        (lambda h: torch.roll(h, 2, 1), 6, 6),
        (lambda h: h.flip([1]), 6, 6),
        (gated, 3, 3),
        (turned_in_place, 6, 6),
        (lambda h: h.unbind(1)[0][:, None], 6, 6),
    ],
    ids=["rolled", "flipped", "split", "turned", "unbound"],
)
def test_channels_are_followed_through_what_moves_other_dimensions(middle, width, channels):
    torch.manual_seed(0)
    net, x = Between(middle, width), torch.randn(2, 5, 3)
    (unit,) = dh.Coupled(net, x).units()
    assert unit.count == channels
    with torch.no_grad():
        net.fc1.weight[::3], net.fc1.bias[::3], net.fc2.weight[:, ::3] = 0, 0, 0
    small = dh.compact(net, x)
    assert small.fc1.out_features == 4
    assert_close(small(x), net(x))


class CountsHeads(nn.Module):
    """Attention that divides by its number of heads, so that it can't just be told another."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        per = k.shape[-1] // self.heads
        q, k, v = (t.view(b, n, self.heads, per).transpose(1, 2) for t in (q, k, v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_sizes_set_at_a_call_are_kept_where_the_batch_size_is_left_open():
    torch.manual_seed(0)
    net, x = CountsHeads().eval(), torch.randn(2, 5, 16)
    heads = dh.Heads(net, x)
    dh.prune(net, dh.Density(0.5), heads)
    small = dh.compact(net, x, groups=heads)
    assert small.q.out_features == 8 and small.heads == 4 and small.narrowed_sizes
    assert str(inspect.signature(small.forward)) == "(x)"
    open_batch = ({0: torch.export.Dim("batch", min=1, max=99)},)
    exported = torch.export.export(small, (x,), dynamic_shapes=open_batch).module()
    assert_close(exported(torch.cat([x, -x, x])), net(torch.cat([x, -x, x])))


@pytest.mark.parametrize("index", [(slice(2, None),), (slice(None), slice(1, 3)), (..., slice(0, 2)), slice(None, 4)])
def test_a_batch_size_that_is_left_open_changes_no_count_of_calls(index):
    class Notes(nn.Module):
        def forward(self, x):
            seen.append(len(asked_sizes(torch.Tensor.__getitem__, (x, index), {})))
            seen.append(len(asked_sizes(torch.Tensor.view, (x, x.shape[0], -1), {})))
            return x[index]

    seen = []
    open_batch = ({0: torch.export.Dim("batch", min=5, max=99)},)
    torch.export.export(Notes(), (torch.zeros(6, 4),), dynamic_shapes=open_batch)
    assert seen == [2, 2]


class SharesPositions(CountsHeads):
    """Attention that lays out something for each head of each sample: it must be told how many heads are left."""

    def __init__(self):
        super().__init__()
        self.far, self.scale = nn.Linear(16, 16), 1.0

    def forward(self, x):
        q, k, v, far = (
            self._heads(layer(t)) for layer, t in ((self.q, x), (self.k, x), (self.v, x), (self.far, x[:1]))
        )
        far = far.repeat(q.size(0) // self.heads, 1, 1)
        y = (q @ (k + far).transpose(1, 2)).softmax(-1) @ v
        return self.o(y.view(-1, self.heads, *y.shape[1:]).transpose(1, 2).flatten(2)) * self.scale

    def _heads(self, t):
        t = t.view(*t.shape[:2], self.heads, -1)
        return t.transpose(1, 2).reshape(-1, t.size(1), t.size(-1))


def test_a_number_of_heads_that_the_code_divides_by_is_told_where_a_trial_asks_for_it():
    torch.manual_seed(0)
    net = nn.Sequential(SharesPositions(), SharesPositions()).double().eval()
    net[1].scale = 1e-6  # what a wrong number would change is hidden from the outputs
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    skip = Residual(net)
    heads = dh.Heads(skip, x)
    assert [unit.count for unit in heads.units()] == [4, 4]
    dh.prune(skip, dh.Density(0.5), heads)
    small = dh.compact(skip, x, groups=heads)
    assert sorted(m.heads for m in small.net) == sorted(m.q.out_features // 4 for m in small.net)
    assert_close(small(x), skip(x), rtol=1e-13, atol=1e-13)


class Residual(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        for layer in self.net:
            x = x + layer(x)
        return x


def test_a_module_that_gives_something_else_is_found_though_outputs_hide_it():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double(), torch.randn(2, 4, dtype=torch.float64)
    net[1].weight.data *= 1e-14
    other = copy.deepcopy(net)
    other[0].weight.data[0] += 1
    same(net, other, x)
    inside = []
    before = answers(net, x, inside)
    with pytest.raises(Differs, match="something else in 0"):
        compare(before, other, x, lambda: net, inside=inside)
    assert [name for name, _ in inside] == ["0", "1", ""] and compare(before, net, x, lambda: net, inside=inside) == 0


def test_answers_are_those_of_a_network_that_nobody_listens_to():
    """torch's encoder layers have a fused kernel for that."""
    torch.manual_seed(0)
    net, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    inside = []
    before = answers(net, x, inside)
    assert torch.equal(before[0], answers(net, x)[0]) and "linear1" in dict(inside)
    assert compare(before, net, x, lambda: net, inside=inside) == 0
