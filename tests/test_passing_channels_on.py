"""Channels on their way from layer to layer, in networks that real code has and textbooks don't: all that may go go."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import DeformConv2d

import deephoyer as dh
from small_networks import Net, half_of, largest_gap, linears, numbers


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


def gated_linear_units(net, x):
    return net.o(F.glu(net.a(x), -1))


def windows(net, x):
    h = F.relu(net.f(F.unfold(net.c(x), 3, padding=1).transpose(1, 2))).transpose(1, 2)
    return net.d(F.relu(F.fold(h, x.shape[2:], 3, padding=1)))


def upsampled(net, x):
    return net.d(F.relu(net.t(F.relu(net.c(x)))))


def pairs(net, x):
    return net.o(F.relu(net.w(F.relu(net.a(x)), F.relu(net.b(x)))))


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
        (
            upsampled,
            {"c": nn.Conv2d(3, 16, 1), "t": nn.ConvTranspose2d(16, 24, 3, 2, groups=2), "d": nn.Conv2d(24, 2, 1)},
            (2, 3, 5, 5),
            {"c": 8, "t": 8, "d": 2},
        ),
        (
            pairs,
            {"a": nn.Linear(5, 8), "b": nn.Linear(5, 12), "w": nn.Bilinear(8, 12, 10), "o": nn.Linear(10, 3)},
            (4, 7, 5),
            {"a": 4, "b": 6, "w": 5},
        ),
    ],
    ids=["glu", "windows", "transposed in groups", "transposed in few groups", "bilinear"],
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_of_single_precision_lose_channels_too(kind):
    def forward(net, x):
        return net.head(net.layer(x)[0][:, -1])

    net, x = Net(forward, layer=kind(6, 16, batch_first=True), head=nn.Linear(16, 3)), torch.randn(2, 5, 6)
    small = half_of(net, x)
    assert small.layer.hidden_size == 8 and torch.allclose(net(x), small(x), atol=1e-6)


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


def test_parts_of_a_split_that_an_attribute_names_alike_may_be_left_with_different_sizes(tmp_path):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.i, self.left, self.right, self.o = nn.Linear(5, 8), nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)
            self.width = 4

        def forward(self, x):
            a, b = self.i(x).split((self.width, self.width), -1)
            return self.o(self.left(a).relu() + self.right(b).relu())

    net, x = Parts().double(), numbers(3, 5)
    net.left.weight.data[:, :3], net.right.weight.data[:, 3] = 0, 0
    small = dh.compact(net, x)
    assert small.left.in_features == 1 and small.right.in_features == 3
    assert largest_gap(net(x), small(x)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    assert torch.equal(dh.load(tmp_path / "small.safetensors", model=Parts().double())(x), small(x))


class Gates(nn.Module):
    """Layers whose channels are taken apart by one width, as in WaveNet."""

    def __init__(self):
        super().__init__()
        self.width, self.i, self.o = 12, nn.Linear(5, 12), nn.Linear(12, 2)
        self.gates = nn.ModuleList(nn.Linear(12, 24) for _ in range(3))
        self.parts = nn.ModuleList(nn.Linear(12, 24) for _ in range(3))

    def forward(self, x):
        x, skips = self.i(x), 0
        for gate, part in zip(self.gates, self.parts, strict=True):
            h = gate(x)
            h = part(torch.tanh(h[..., : self.width]) * torch.sigmoid(h[..., self.width :]))
            x, skips = x + h[..., : self.width], skips + h[..., self.width :]
        return self.o(skips)


def test_slices_by_one_width_in_many_layers_may_be_left_with_different_sizes(tmp_path):
    net, x = Gates().double(), numbers(3, 5)
    for part, unread in zip(net.parts, (5, 0, 2), strict=True):
        part.weight.data[:, :unread] = 0
    net.o.weight.data[:, 3:7] = 0
    small = dh.compact(net, x)
    assert [part.weight.shape[1] for part in small.parts] == [7, 12, 10] and small.o.in_features == 8
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=Gates().double())
    for others in (x, numbers(2, 7, 5)):
        assert largest_gap(net(others), small(others)) < 1e-12 and torch.equal(again(others), small(others))


class Ends(nn.Module):
    """Reads the last place forwards and the first backwards."""

    def __init__(self):
        super().__init__()
        self.width = 8
        self.r = nn.LSTM(5, 8, bidirectional=True, batch_first=True)
        self.o = nn.Linear(16, 3)

    def forward(self, x):
        y, _ = self.r(x)
        return self.o(torch.cat([y[:, -1, : self.width], y[:, 0, self.width :]], -1))


class Modulated(nn.Module):
    """Scales and shifts of each layer come from one vector (FiLM)."""

    def __init__(self):
        super().__init__()
        self.width, self.count = 8, 2
        self.i, self.o, self.film = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(5, 2 * 2 * 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        film, h = self.film(x.mean(1)).view(-1, self.count, 2 * self.width), self.i(x)
        for i, layer in enumerate(self.layers):
            scale, shift = film[:, i, : self.width], film[:, i, self.width :]
            h = h + torch.relu(layer(h) * scale[:, None] + shift[:, None])
        return self.o(h)


@pytest.mark.parametrize("kind", [Ends, Modulated])
def test_slices_of_channels_beside_single_places_follow_them(kind, tmp_path):
    torch.manual_seed(0)
    net, x = kind().double(), numbers(3, 4, 5)
    small = half_of(net, x)
    assert sum(p.numel() for p in small.parameters()) < 0.55 * sum(p.numel() for p in net.parameters())
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=kind().double())
    for others in (x, numbers(2, 7, 5)):
        assert largest_gap(net(others), small(others)) < 1e-12 and torch.equal(again(others), small(others))


@pytest.mark.parametrize("heads", [2, 8])
def test_torchs_attention_may_read_fewer_channels_than_its_width(heads, tmp_path):
    def made():
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, heads, batch_first=True)
        layers = {"i": nn.Linear(5, 8), "a": attention, "o": nn.Linear(8, 3)}
        return Net(lambda net, x: net.o(net.a(h := net.i(x), h, h, need_weights=False)[0]), **layers).double().eval()

    net, x = made(), numbers(2, 4, 5)
    net.i.weight.data[:3], net.i.bias.data[:3], net.a.in_proj_weight.data[:, :3] = 0, 0, 0
    small = dh.compact(net, x)
    assert small.a.in_proj_weight.shape == (24, 5)
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=made())
    for others in (x, numbers(1, 7, 5)):
        with torch.no_grad():  # torch's own forward takes a fast path then
            assert largest_gap(net(others), small(others)) < 1e-12 and torch.equal(again(others), small(others))


class Halves(nn.Module):
    """Takes its channels apart by half of however many there are."""

    def __init__(self):
        super().__init__()
        self.i, self.left, self.right, self.o = nn.Linear(5, 12), nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x):
        h = self.i(x)
        a, b = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
        return self.o(self.left(a).relu() + self.right(b).relu())


@pytest.mark.parametrize("left, right", [(0, 5), (5, 0), (4, 2), (3, 3)])
def test_halves_that_the_code_counts_may_be_left_with_different_sizes(left, right, tmp_path):
    net, x = Halves().double(), numbers(3, 5)
    net.left.weight.data[:, :left], net.right.weight.data[:, :right] = 0, 0
    small = dh.compact(net, x)
    assert small.left.in_features == 6 - left and small.right.in_features == 6 - right
    assert largest_gap(net(x), small(x)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    assert torch.equal(dh.load(tmp_path / "small.safetensors", model=Halves().double())(x), small(x))


def test_a_transposed_convolution_that_is_left_with_one_group_is_loaded(tmp_path):
    def made():
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1)
        return nn.Sequential(*layers).double()

    net, x = made(), numbers(2, 3, 5, 5)
    net[4].weight.data[:, 1:] = 0
    small = dh.compact(net, x)
    assert small[2].groups == 1 and largest_gap(net(x), small(x)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    assert torch.equal(dh.load(tmp_path / "small.safetensors", model=made())(x), small(x))


def test_single_channels_that_the_code_adds_by_itself_stay():
    def forward(net, x):
        h, ones = net.a(x).relu(), net.one.expand(len(x), -1)
        return net.o(torch.cat([h, ones], 1)) + net.p(torch.cat([ones, net.b(h).relu()], 1))

    net, x = Net(forward, **linears(a=(5, 6), b=(6, 4), o=(7, 2), p=(5, 2))), numbers(3, 5)
    net.one = nn.Parameter(numbers(1, 1))
    net.o.weight.data[:, [0, 6]], net.p.weight.data[:, [0, 2]] = 0, 0
    assert largest_gap(net(x), dh.compact(net, x)(x)) < 1e-12


def global_filters(net, x):  # as GFNet has it
    h = net.a(x)
    spectrum = torch.fft.rfft2(h, norm="ortho") * torch.polar(torch.ones_like(net.f), net.f)
    return net.b(F.relu(h + torch.fft.irfft2(spectrum, s=h.shape[-2:], norm="ortho")))


def test_channels_go_through_fourier_transforms_that_run_along_other_dimensions():
    net, x = Net(global_filters, a=nn.Conv2d(3, 16, 1), b=nn.Conv2d(16, 2, 1)).double(), numbers(2, 3, 6, 6)
    net.f = nn.Parameter(numbers(16, 6, 4))
    small = half_of(net, x)
    assert small.a.out_channels == 8 and small.f.shape == (8, 6, 4)
    assert largest_gap(net(3 * x), small(3 * x)) < 1e-12
    mixed = Net(lambda net, x: net.b(torch.fft.fft(net.a(x)).real), **linears(a=(4, 8), b=(8, 2)))
    with pytest.raises(dh.UserError, match="_fft_r2c in the model itself"):
        dh.Coupled(mixed, numbers(3, 4)).units()


@pytest.mark.parametrize("laid_out", ["expanded", "repeated", "a buffer of that length"])
def test_channels_that_are_blurred_one_by_one_go(laid_out):
    def forward(net, x):
        h, kernel = F.relu(net.a(x)), net.kernel
        if laid_out == "expanded":
            kernel = kernel.expand(h.shape[1], -1, -1, -1)
        elif laid_out == "repeated":
            kernel = kernel.repeat(h.shape[1], 1, 1, 1)
        return net.b(F.conv2d(h, kernel, padding=1, stride=2, groups=h.shape[1]))

    net, x = Net(forward, a=nn.Conv2d(3, 16, 1), b=nn.Conv2d(16, 2, 1)).double(), numbers(2, 3, 8, 8)
    times = 16 if laid_out == "a buffer of that length" else 1
    net.register_buffer("kernel", numbers(1, 1, 3, 3).repeat(times, 1, 1, 1))
    small = half_of(net, x)
    assert small.a.out_channels == 8 and largest_gap(net(x), small(x)) < 1e-12


def test_channels_that_only_a_buffer_reads_go_when_they_are_zero():
    def forward(net, x):
        return net.b(torch.cos(F.relu(net.a(x)) @ net.random))

    net, x = Net(forward, **linears(a=(4, 16), b=(20, 2))), numbers(3, 4)
    net.register_buffer("random", numbers(16, 20))
    small = half_of(net, x)
    assert small.random.shape == (8, 10) and small.a.out_features == 8
    assert largest_gap(net(x), small(x)) < 1e-12
    net.a.bias.data[:] = 1
    assert dh.compact(net, x).a.out_features == 16


def test_channels_with_a_scale_in_a_buffer_that_may_not_be_zero_go():
    def forward(net, x):
        return net.b(torch.tanh(net.a(x) / net.width))

    net, x = Net(forward, **linears(a=(4, 16), b=(16, 2))), numbers(3, 4)
    net.register_buffer("width", numbers(16).abs() - 2)
    small = half_of(net, x)
    assert len(small.width) == 8 and largest_gap(net(x), small(x)) < 1e-12


def test_a_slice_that_is_only_a_template_holds_no_channels():
    def forward(net, t, x):  # a time beside the channels, as neural differential equations have it
        h = F.relu(net.a(x))
        h = h + net.b(torch.cat([torch.ones_like(h[:, :1]) * t, h], 1))
        return net.c(h + net.noise * h.new_zeros(h[:, :1].shape))

    net, x = Net(forward, **linears(a=(4, 12), b=(13, 12), c=(12, 2))), (torch.tensor(0.5), numbers(3, 4))
    net.noise = nn.Parameter(numbers(12))
    small = half_of(net, x)
    assert small.b.weight.shape == (6, 7) and largest_gap(net(*x), small(*x)) < 1e-12
    used = Net(lambda net, x: net.c(net.a(x)) * net.a(x)[:, :1], **linears(a=(4, 12), c=(12, 2)))
    with pytest.raises(dh.UserError, match="the model itself \\(Net\\) takes channels by their position"):
        dh.Coupled(used, numbers(3, 4)).units()


def test_channels_of_a_deformable_convolution_go():
    def forward(net, x):
        h = F.relu(net.a(x))
        return net.c(F.relu(net.b(h, net.where(h), net.mask(h).sigmoid())))

    layers = {"a": nn.Conv2d(3, 16, 1), "b": DeformConv2d(16, 12, 3, padding=1), "c": nn.Conv2d(12, 2, 1)}
    where, mask = (nn.Conv2d(16, outputs, 3, padding=1) for outputs in (18, 9))
    net, x = Net(forward, where=where, mask=mask, **layers).double(), numbers(2, 3, 8, 8)
    small = half_of(net, x)
    assert small.b.weight.shape == (6, 8, 3, 3) and small.where.weight.shape == (18, 8, 3, 3)
    larger = numbers(1, 3, 9, 12)
    assert largest_gap(net(larger), small(larger)) < 1e-12
    net.a.weight.data[:4] = 0  # constants to be looked for: its kernel takes no NaN for a place
    net.a.bias.data[:4] = 1
    assert largest_gap(net(larger), dh.compact(net, x)(larger)) < 1e-12
