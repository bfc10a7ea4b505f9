"""Networks that real code has and textbooks don't: what `compact` gives computes the same, or it says why not."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deephoyer as dh
from deephoyer.export import load_masks
from deephoyer.inference import plain_attention
from deephoyer.structure import compact_report
from deephoyer.structure.equality import Differs, same
from deephoyer.structure.fold_constants import fold
from deephoyer.structure.joints import ConstantLayer, Gather


class Net(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs):
        return self.way(self, *inputs)


def largest_gap(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs().max() / a.abs().max()).detach())


def linears(**sizes):
    return {name: nn.Linear(*size).double() for name, size in sizes.items()}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Channels that meet.


def test_a_gate_of_width_one_is_read_by_all_and_stays():
    def forward(net, x):
        h = F.relu(net.a(x))
        return net.o(h * torch.sigmoid(net.gate(h)))

    net, x = Net(forward, **linears(a=(8, 16), gate=(16, 1), o=(16, 3))), numbers(4, 8)
    net.gate.weight.data *= 1e-6
    groups = dh.Coupled(net, x)
    assert [len(s.channels) for s in groups.sets if s.reason is None] == [16]
    assert not any(("gate.weight", 0) in s.places for s in groups.sets)
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x)
    assert small.gate.in_features == 8 and largest_gap(net(1e5 * x), small(1e5 * x)) < 1e-9


def test_a_map_of_one_channel_does_not_tie_the_channels_it_is_laid_over():
    def forward(net, x):
        h = F.relu(net.a(x))
        return net.o(h * torch.sigmoid(net.psi(h)))

    layers = {"a": nn.Conv2d(3, 16, 3), "psi": nn.Conv2d(16, 1, 1), "o": nn.Conv2d(16, 2, 1)}
    net, x = Net(forward, **layers).double(), numbers(2, 3, 8, 8)
    masks = dh.prune(net, dh.Density(0.5), dh.Coupled(net, x))
    assert masks.density == pytest.approx(0.5, abs=0.01)
    small = dh.compact(net, x)
    assert small.a.out_channels == 8 and largest_gap(net(x), small(x)) < 1e-12


def test_a_network_that_draws_random_numbers_in_eval_mode_is_compared_with_the_same_ones():
    def forward(net, x):
        order = torch.rand(x.shape[1]).argsort()  # as masked autoencoders shuffle their patches
        return net.b(F.relu(net.a(x[:, order])))

    net, x = Net(forward, **linears(a=(4, 8), b=(8, 2))), numbers(2, 9, 4)
    dh.prune(net, dh.Density(0.5), dh.Coupled(net, x))
    assert dh.compact(net, x).a.out_features == 4


class Graph(nn.Module):
    """Attention over the neighbours in a graph, and their mean, as graph libraries write them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 3)
        self.key = nn.Parameter(torch.randn(1, 8))

    def forward(self, x, edges):
        x = self.a(x)
        score = (x * self.key).sum(-1)
        x = x[edges[0]] * (score[edges[0]] + score[edges[1]]).sigmoid()[:, None]
        x = torch.zeros_like(self.a.weight[:0]).new_zeros(5, x.shape[1]).index_add_(0, edges[1], x)
        count = torch.zeros(5, dtype=x.dtype).index_add_(0, edges[1], torch.ones(len(edges[1]), dtype=x.dtype))
        return self.c(torch.relu(self.b(x / count.clamp(min=1)[:, None].expand_as(x))))


def test_channels_that_are_summed_up_go_when_they_are_zero_and_expanded_counts_follow_them():
    net, edges = Graph().double().eval(), torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    inputs = (torch.randn(5, 6).double(), edges)
    groups = dh.Coupled(net, inputs)
    assert [unit.count for unit in groups.units()] == [8, 8]
    dh.prune(net, dh.Density(0.5), groups=groups)
    small = dh.compact(net, inputs, groups=groups)
    assert small.a.out_features == 4 and small.b.out_features == 4
    assert torch.allclose(small(*inputs), net(*inputs), atol=1e-12)
    with torch.no_grad():  # read by nobody but the sum
        net.b.weight[:, int(net.key[0].nonzero()[0])] = 0
    assert torch.allclose(dh.compact(net, inputs, groups=groups)(*inputs), net(*inputs), atol=1e-12)


class ResponseNorm(nn.Module):
    """ConvNeXt V2's, of either layout."""

    def __init__(self, width, dim):
        super().__init__()
        self.eps, self.dim = 1e-3, dim
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        x = x.movedim(self.dim, -1)
        r = x.norm(dim=(1, 2), keepdim=True)
        y = x + self.bias + self.weight * x * r / (r.mean(-1, keepdim=True) + self.eps)
        return y.movedim(-1, self.dim)


@pytest.mark.parametrize("dim", [1, -1])
def test_norms_of_responses_by_their_mean_lose_channels_exactly(dim, tmp_path):
    def made():
        convs = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        linears = nn.Linear(5, 8), nn.Linear(8, 2)
        first, last = convs if dim == 1 else linears
        return nn.Sequential(first, ResponseNorm(8, dim), last).double().eval()

    net, x = made(), torch.randn(2, 3, 6, 5).double()
    groups = dh.Coupled(net, x)
    dh.prune(net, dh.Density(0.5), groups=groups)
    small = dh.compact(net, x, groups=groups)
    assert len(small[1].weight) == 4 and small[1].eps == pytest.approx(2e-3)
    assert torch.allclose(small(x), net(x), atol=1e-12)
    dh.save(small, tmp_path / "small.safetensors")
    assert torch.equal(dh.load(tmp_path / "small.safetensors", made()).eval()(x), small(x))


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


def test_parts_of_a_bias_that_are_joined_on_the_way_are_followed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 12, bias=False)
            self.left, self.right = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
            self.outer = nn.Linear(12, 2)

        def forward(self, x):
            return self.outer(torch.relu(self.inner(x) + torch.cat((self.left, self.right))))

    assert sum(unit.count for unit in dh.Coupled(Net().eval(), torch.randn(3, 4)).units()) == 12


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


def gated_linear_units(net, x):
    return net.o(F.glu(net.a(x), -1))


def windows(net, x):
    h = F.relu(net.f(F.unfold(net.c(x), 3, padding=1).transpose(1, 2))).transpose(1, 2)
    return net.d(F.relu(F.fold(h, x.shape[2:], 3, padding=1)))


def upsampled(net, x):
    return net.d(F.relu(net.t(F.relu(net.c(x)))))


@pytest.mark.parametrize(
    "forward, layers, shape, left",
    [
        (gated_linear_units, {"a": nn.Linear(5, 16), "o": nn.Linear(8, 3)}, (4, 5), {"a": 8}),
        (
            windows,
            {"c": nn.Conv2d(3, 8, 1), "f": nn.Linear(72, 108), "d": nn.Conv2d(12, 2, 1)},
            (2, 3, 6, 6),
            {"c": 4, "f": 54},
        ),
        (
            upsampled,
            {"c": nn.Conv2d(3, 16, 1), "t": nn.ConvTranspose2d(16, 32, 3, groups=16), "d": nn.Conv2d(32, 2, 1)},
            (2, 3, 5, 5),
            {"c": 8, "t": 8},
        ),
    ],
    ids=["glu", "windows", "transposed in groups"],
)
def test_half_of_the_channels_go_through(forward, layers, shape, left, tmp_path):
    net, x = Net(forward, **copy.deepcopy(layers)).double(), numbers(*shape)
    groups = dh.Coupled(net, x)
    assert {s.reason for s in groups.sets} <= {None, "network input", "network output", "whole groups go"}
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x, groups=groups)
    assert {name: len(getattr(small, name).weight) for name in left} == left
    assert largest_gap(net(x), small(x)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=Net(forward, **copy.deepcopy(layers)).double())
    assert torch.equal(again(x), small(x))


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


def test_a_depthwise_convolution_by_hand_loses_channels_and_its_groups_follow():
    def forward(net, x):  # as Mamba has it
        h, gate = net.a(x).transpose(1, 2).chunk(2, 1)
        weight = net.c.weight.squeeze(1).unsqueeze(1)
        h = F.conv1d(h, weight, net.c.bias, padding=2, groups=h.shape[1])[:, :, : x.shape[1]]
        return net.o((F.silu(h) * gate.sigmoid()).transpose(1, 2))

    conv = nn.Conv1d(12, 12, 3, groups=12).double()
    net, x = Net(forward, **linears(a=(6, 24), o=(12, 3)), c=conv), numbers(2, 7, 6)
    groups = dh.Coupled(net, x)
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x, groups=groups)
    assert small.c.weight.shape == (6, 1, 3) and small.c.groups == small.c.in_channels == 6
    assert small.a.out_features == 12 and largest_gap(net(x), small(x)) < 1e-12


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


def test_an_outer_product_loses_channels_of_one_side_and_keeps_the_other():
    net, x = (
        Net(
            lambda net, x: net.o((net.a(x)[:, :, None] * net.b(x)[:, None, :]).flatten(1)),
            **linears(a=(8, 4), b=(8, 6), o=(24, 2)),
        ),
        numbers(4, 8),
    )
    groups = dh.Coupled(net, x)
    dh.prune(net, dh.Density(0.5), groups)
    small = dh.compact(net, x, groups=groups)
    assert (small.a.out_features, small.b.out_features, small.o.in_features) == (4, 3, 12)
    assert largest_gap(net(x), small(x)) < 1e-12


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


def test_neurons_of_torchs_encoder_go_where_padded_tokens_are_left_out():
    """It makes nested tensors of them, which have no shape."""
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double().eval()
    padded = torch.tensor([[False] * 3, [False, True, True]])
    x = {"src": torch.randn(2, 3, 8, dtype=torch.float64), "src_key_padding_mask": padded}
    neurons = dh.Neurons(net, x)
    assert [unit.count for unit in neurons.units()] == [16, 16]
    net.layers[0].linear1.weight.data[:4] = 0
    net.layers[0].linear1.bias.data[:4] = 0
    small = dh.compact(net, x, groups=neurons)
    assert [layer.linear1.out_features for layer in small.layers] == [12, 16]
    assert same(net, small, x) < 1e-12


def test_a_head_of_zeros_does_not_hide_that_a_width_is_written_into_the_network():
    def forward(net, x):
        h = F.relu(net.a(x))
        return net.o(F.relu(net.b(h) / h.shape[-1] ** 0.5))

    net, x = Net(forward, **linears(a=(8, 16), b=(16, 16), o=(16, 3))), numbers(4, 8)
    nn.init.zeros_(net.o.weight)
    before = {s.name: s.reason for s in dh.Coupled(net, x).sets}
    nn.init.normal_(net.o.weight)
    assert before == {s.name: s.reason for s in dh.Coupled(net, x).sets} and before["a"] is not None
    assert net.o.weight.any() and dh.compact(net, x)


def test_any_number_of_blocks_may_have_a_size_written_into_them():
    def block():
        def forward(net, x):
            h = F.relu(net.a(x))
            return x + net.b(h / h.shape[1])

        return Net(forward, **linears(a=(8, 12), b=(12, 8)))

    net = nn.Sequential(*[block() for _ in range(24)])
    assert len([s for s in dh.Coupled(net, numbers(2, 8)).sets if s.reason]) >= 24


def test_outputs_in_which_no_tensor_is_found_are_refused():
    class Answer:
        __slots__ = ("logits",)

        def __init__(self, logits):
            self.logits = logits

    net = Net(lambda net, x: Answer(net.a(x)), **linears(a=(8, 4)))
    with pytest.raises(dh.UserError, match="Answer in which no tensor"):
        dh.compact(net, numbers(2, 8))


def test_a_network_of_nan_is_refused():
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data.fill_(float("nan"))
    with pytest.raises(dh.UserError, match="nothing but NaN"):
        dh.compact(net, torch.randn(3, 8))


# What only looks constant.


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


def test_what_a_network_notes_of_its_inputs_is_not_changed_by_compaction():
    def forward(net, x):
        h = F.relu(net.a(x))
        net.peak.copy_(torch.maximum(net.peak, h.max()))
        net.last = h
        return net.o(h)

    net, x = Net(forward, **linears(a=(5, 16), o=(16, 3))), numbers(4, 5)
    net.register_buffer("peak", torch.zeros(()).double())
    net.a.weight.data[::2], net.a.bias.data[::2] = 0, 0.3
    small = dh.compact(net, x)
    assert compact_report(small).folded == {"o": 8} and small.peak == 0 and not hasattr(small, "last")


def test_a_network_with_a_state_of_its_own_is_compared_from_the_same_state():
    def forward(net, x):
        net.state.mul_(0.9).add_(net.b(F.relu(net.a(x))).mean(0))
        return net.state

    net, x = Net(forward, **linears(a=(5, 16), b=(16, 3))), numbers(4, 5)
    net.register_buffer("state", torch.zeros(3).double())
    small = half_of(net, x)
    assert small.a.out_features == 8 and not small.state.any() and largest_gap(net(x), small(x)) < 1e-12


# Joints.


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


def test_a_forward_that_asks_a_layer_for_its_size_gets_no_joint_there():
    net, x = (
        Net(lambda net, x: net.b(F.relu(net.a(x.view(-1, net.a.in_features)))), **linears(a=(64, 16), b=(16, 4))),
        numbers(2, 1, 8, 8),
    )
    net.a.weight.data[:, :8] = 0
    net.a.weight.data[:4], net.a.bias.data[:4] = 0, 0
    small = dh.compact(net, x)
    assert small.a.in_features == 64 and small.a.out_features == 12 and largest_gap(net(x), small(x)) < 1e-12


def test_a_network_that_would_fail_on_torchs_fast_path_is_refused():
    net, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    net.linear1.weight.data[:, :4] = 0
    with pytest.raises(dh.UserError, match="fails in"):
        dh.compact(net, x, joints="gather")
    with torch.no_grad():
        assert largest_gap(net(x), dh.compact(net, x)(x)) < 1e-4


def test_threads_that_take_attention_apart_at_the_same_time_leave_torchs_fast_path_as_it_was():
    both = threading.Barrier(2)

    def first():
        with plain_attention:
            both.wait()  # the other is inside, too
        both.wait()  # and goes out after this one

    other = threading.Thread(target=first)
    other.start()
    with plain_attention:
        both.wait()
        both.wait()
        assert not torch.backends.mha.get_fastpath_enabled()
    other.join()
    assert torch.backends.mha.get_fastpath_enabled()


# Wrapped, and in files.


def test_a_buffer_outside_the_state_dict_is_cut_and_stored(tmp_path):
    def fresh():
        torch.manual_seed(0)
        net = Net(
            lambda net, x: net.b(F.relu(net.a(x)) * net.scale), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)
        ).double()
        net.register_buffer("scale", torch.arange(1.0, 9).double().view(1, 8, 1, 1), persistent=False)
        return net

    net, x = fresh(), numbers(2, 3, 8, 8)
    net.a.weight.data[0::2], net.a.bias.data[0::2] = 0, 0
    small = dh.compact(net, x)
    dh.save(small, tmp_path / "c.safetensors")
    loaded = dh.load(tmp_path / "c.safetensors", model=fresh())
    assert loaded.scale.flatten().tolist() == [2, 4, 6, 8] and torch.equal(small(x), loaded(x))
    assert "scale" not in net.state_dict()


def test_a_table_that_grows_while_the_network_runs_is_made_again_by_the_loaded_one(tmp_path):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.length = nn.Linear(5, 8), nn.Linear(8, 2), 0
            self.register_buffer("table", torch.zeros(0), persistent=False)

        def forward(self, x):
            if x.shape[1] > self.length:
                self.length, self.table = x.shape[1], torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
            return self.b(F.relu(self.a(x)) * self.table[: x.shape[1]])

    net, x = Grows().double(), numbers(2, 4, 5)
    net.a.weight.data[1::2], net.a.bias.data[1::2] = 0, 0.3  # constants, but for the table
    net.a.weight.data[:1], net.a.bias.data[:1] = 0, 0
    small = dh.compact(net, x)
    assert small.a.out_features < 8 and small.length == 0
    for tokens in (2, 7):
        others = numbers(3, tokens, 5)
        assert largest_gap(net(others), small(others)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=Grows().double())
    assert torch.equal(again(others), small(others))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_a_wrapped_network_is_grouped_compacted_and_stored_like_the_one_inside(wrap, tmp_path):
    def fresh():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    net, x = fresh(), torch.randn(4, 8)
    wrapped = wrap(net)
    masks = dh.prune(wrapped, dh.Density(0.5), dh.Coupled(wrapped, x))
    dh.save(wrapped, tmp_path / "whole.safetensors", masks=masks)
    assert torch.equal(dh.load(tmp_path / "whole.safetensors", model=wrap(fresh()))(x), net(x))
    assert load_masks(tmp_path / "whole.safetensors", model=net).density == masks.density
    small = dh.compact(wrapped, x, groups=dh.Coupled(wrapped, x))
    assert type(small) is nn.Sequential and small[0].out_features == 4
    with pytest.raises(dh.UserError, match="must be a `Coupled`"):
        dh.compact(net, x, groups="coupled")


# What ordinary training code has around a network.


class Result:
    """Neither a tuple nor a data class."""

    def __init__(self, **values):
        vars(self).update(values)


def half_of(net, x, **more):
    """The network with half of its channels zero, and the smaller one."""
    groups = dh.Coupled(net, x, **more)
    dh.prune(net, dh.Density(0.5), groups=groups)
    return dh.compact(net, x, groups=groups, **more)


def test_tensors_in_an_object_of_any_class_are_outputs_of_the_network():
    def forward(net, x):
        h = net.a(x).relu()
        return Result(aux=Result(map=[net.c(h)])), net.b(h)

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2), c=(8, 12))), numbers(3, 6)
    small = half_of(net, x)
    assert small.c.out_features == 12 and small.a.out_features < 8
    assert torch.allclose(net(x)[0].aux.map[0], small(x)[0].aux.map[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_of_single_precision_lose_channels_too(kind):
    def forward(net, x):
        return net.head(net.layer(x)[0][:, -1])

    net, x = Net(forward, layer=kind(6, 16, batch_first=True), head=nn.Linear(16, 3)), torch.randn(2, 5, 6)
    small = half_of(net, x)
    assert small.layer.hidden_size == 8 and torch.allclose(net(x), small(x), atol=1e-6)


def test_compaction_within_autocast_compares_in_full_precision():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        small = half_of(net, x)
    assert small[0].out_features < 64 and compact_report(small).error < 1e-5


def test_a_network_that_keeps_what_it_computed_last_is_compacted():
    def forward(net, x):
        net.seen = {"hidden": [net.a(x)]}
        return net.b(net.seen["hidden"][0].relu())

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), numbers(3, 6)
    net(x)  # with gradients, which copy.deepcopy refuses
    assert half_of(net, x).a.out_features < 8


def test_examples_may_lie_in_a_dict_that_is_one_argument():
    def forward(net, batch):
        return {"logits": net.b(net.a(batch["table"]).relu())}

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), ({"table": numbers(4, 6), "names": ["a", "b"]},)
    small = half_of(net, x)
    total = dh.summary(small, x, baseline=net, seconds=0.01).total
    assert total.macs_executed == small.a.weight.numel() + small.b.weight.numel()


def test_a_graph_with_its_edges_is_timed_as_it_is():
    def forward(net, x, edges):
        return net.b(net.a(x).relu()[edges[0]])

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), (numbers(4, 6), torch.tensor([[0, 3, 2], [1, 2, 3]]))
    timed = dh.summary(net, x, seconds=0.01).latency
    assert [one.batch for one in timed] == [4]


def test_channels_that_stay_because_parameters_are_frozen_are_told():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].requires_grad_(False)
    with pytest.raises(dh.UserError, match="71% stay because parameters of theirs are frozen"):
        dh.Coupled(net, torch.randn(2, 6)).units()


def test_a_quantized_network_is_refused_in_a_line():
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    with pytest.raises(dh.UserError, match=r"0.weight is a .*: compact the network before it is quantized"):
        dh.compact(net, torch.randn(2, 64))


# Weights that are computed from parameters.


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


def test_what_torchs_own_pruning_masks_is_removed():
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double(), numbers(4, 6)
    nn.utils.prune.ln_structured(net[0], "weight", 0.5, n=2, dim=0)
    net[0].bias.data[net[0].weight_mask[:, 0] == 0] = 0
    net(x)  # leaves a weight with gradients behind
    small = dh.compact(net, x)
    assert small[0].out_features == 4 and "weight_orig" not in dict(small[0].named_parameters())
    assert largest_gap(net(x), small(x)) < 1e-12 and nn.utils.prune.is_pruned(net)


# Operations that hand channels on.


def test_packed_sequences_lose_the_channels_of_embedding_and_recurrent_layer():
    def forward(net, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(net.words(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(net.layer(packed)[0], batch_first=True)
        return net.head(y)

    layers = nn.Embedding(9, 8), nn.LSTM(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3)
    net = Net(forward, **dict(zip(("words", "layer", "head"), layers, strict=True))).double()
    x, lengths = torch.randint(0, 9, (3, 6), generator=torch.Generator().manual_seed(0)), torch.tensor([6, 2, 4])
    small = half_of(net, (x, lengths))
    assert small.layer.hidden_size < 16 and small.words.embedding_dim < 8
    assert largest_gap(net(x.flip(0), lengths), small(x.flip(0), lengths)) < 1e-12


def test_maps_that_are_read_at_given_places_lose_channels():
    def forward(net, x, grid):
        return net.b(F.grid_sample(net.a(x).relu(), grid, align_corners=True))

    net = Net(forward, a=nn.Conv2d(3, 8, 3).double(), b=nn.Conv2d(8, 2, 1).double())
    x = numbers(2, 3, 9, 9), numbers(2, 4, 4, 2, seed=1).tanh()
    small = half_of(net, x)
    assert small.a.out_channels < 8 and largest_gap(net(*x), small(*x)) < 1e-12


def test_a_tensor_that_is_filled_part_by_part_has_the_channels_of_its_parts():
    def forward(net, x):
        y = x.new_zeros(x.shape[0], net.a.weight.shape[0], 3)
        y[:, :, :1], y[:, :, 1:] = net.a(x)[:, :, None], net.a(2 * x)[:, :, None]
        return net.b(y.relu().sum(2))

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), numbers(3, 6)
    small = half_of(net, x)
    assert small.a.out_features < 8 and largest_gap(net(x), small(x)) < 1e-12


# Networks that draw random numbers, or choose.


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
