"""Attention and tables as people's code has them: heads go where they can, whatever sizes and slices the code names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deephoyer as dh
from small_networks import Net, largest_gap, linears

WIDTH, HEADS, TOKENS = 16, 4, 6


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def halved(net, *example):
    """The network with half of its channels zeroed, and without them."""
    torch.manual_seed(0)
    groups = dh.Coupled(net.double().eval(), example)
    dh.prune(net, dh.Density(0.5), groups=groups)
    return net, dh.compact(net, example, groups=groups)


def assert_same(net, small, *inputs):
    with torch.no_grad():
        torch.testing.assert_close(small(*inputs), net(*inputs), rtol=1e-9, atol=1e-9)


class Attention(nn.Module):
    """Queries, keys and values, and a layer that reads all heads."""

    def __init__(self):
        super().__init__()
        self.heads, self.per = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x):
        return x.view(len(x), -1, self.heads, self.per).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Bmm(Attention):
    """Heads and batch in one dimension, and a mask for those that give one: one call more that names sizes."""

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = (self.split(layer(x)).reshape(b * self.heads, -1, self.per) for layer in (self.q, self.k, self.v))
        scores = torch.bmm(q, k.transpose(1, 2))
        assert scores.shape == (b * self.heads, n, n)
        if mask is not None:
            scores = (scores.view(b, self.heads, n, n) + mask).view(b * self.heads, n, n)
        y = torch.bmm(scores.softmax(-1), v)
        assert y.shape == (b * self.heads, n, self.per)
        return self.o(y.view(b, self.heads, n, self.per).transpose(1, 2).reshape(b, n, WIDTH))


def test_heads_go_where_code_multiplies_their_number_by_the_batch_and_takes_one_way_or_another():
    net, small = halved(Bmm(), numbers(2, TOKENS, WIDTH))
    assert small.q.out_features == WIDTH // 2
    x = numbers(3, 9, WIDTH, seed=1)
    assert_same(net, small, x)
    assert_same(net, small, x, numbers(3, 1, 9, 9, seed=2))


class Unnamed(nn.Module):
    """Attention as tutorials write it: no attribute is called a head, and a head is wider than there are heads."""

    def __init__(self):
        super().__init__()
        self.h, self.d_k = 2, WIDTH // 2
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, self.h, self.d_k).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = (q @ k.transpose(-2, -1) / self.d_k**0.5).softmax(-1) @ v
        return self.o(y.transpose(1, 2).contiguous().view(b, n, self.h * self.d_k))


class Fused(Unnamed):
    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (self.h, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Written(Unnamed):
    def forward(self, x):
        q, k, v = (layer(x).view(len(x), -1, 2, 8) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
        return self.o(torch.einsum("bhts,bshd->bthd", scores, v).reshape(len(x), -1, WIDTH))


class FoldedIntoBatch(Unnamed):
    """(tokens, batch × heads, width of a head), as fairseq has it."""

    def forward(self, x):
        x = x.transpose(0, 1)
        n, b, _ = x.shape
        q, k, v = (layer(x).view(n, b * self.h, self.d_k).transpose(0, 1) for layer in (self.q, self.k, self.v))
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return self.o(y.transpose(0, 1).reshape(n, b, WIDTH)).transpose(0, 1)


class CrossCovariance(Unnamed):
    """Channels attend to channels of the same head (XCiT)."""

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, self.h, self.d_k).permute(0, 2, 3, 1) for layer in (self.q, self.k, self.v))
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.o(y.permute(0, 3, 1, 2).reshape(b, n, WIDTH))


class LinearAttention(Unnamed):
    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, self.h, self.d_k).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = q.softmax(-1), k.softmax(-2)
        return self.o((q @ (k.transpose(-2, -1) @ v)).transpose(1, 2).reshape(b, n, self.h * self.d_k))


@pytest.mark.parametrize("kind", [Unnamed, Fused, Written, FoldedIntoBatch, CrossCovariance, LinearAttention])
def test_whole_heads_go_though_nothing_is_called_a_head(kind):
    net = kind().double().eval()
    x = numbers(2, TOKENS, WIDTH)
    heads = dh.Heads(net, x)
    assert [unit.count for unit in heads.units([])] == [2]
    dh.prune(net, dh.Density(0.5), groups=heads)
    small = dh.compact(net, x, groups=heads)
    assert all(layer.out_features == WIDTH // 2 for layer in (small.q, small.k, small.v))
    assert_same(net, small, numbers(3, 9, WIDTH, seed=1))


class HeadByHead(Attention):
    """Three calls that ask for the same, of which only that for the values is about fewer channels."""

    def forward(self, x):
        parts = (layer(x).split(self.per, -1) for layer in (self.q, self.k, self.v))
        return self.o(
            torch.cat([(q @ k.mT / self.per**0.5).softmax(-1) @ v for q, k, v in zip(*parts, strict=True)], -1)
        )


def test_a_call_is_told_from_others_that_ask_for_the_same_by_what_it_splits():
    net, small = halved(HeadByHead(), numbers(2, TOKENS, WIDTH))
    assert (small.q.out_features, small.v.out_features) == (WIDTH, WIDTH // 2)
    assert_same(net, small, numbers(3, 9, WIDTH, seed=1))


class OneKey(Attention):
    """One key and one value for all heads, of layers of their own: heads lie beside channels that all of them share."""

    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, self.per), nn.Linear(WIDTH, self.per)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.split(self.q(x)), self.k(x)[:, None], self.v(x)[:, None]
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, -1))


def test_heads_go_where_all_of_them_have_one_key_and_one_value():
    net, small = halved(OneKey(), numbers(2, TOKENS, WIDTH))
    assert small.q.out_features == small.o.in_features == WIDTH // 2 and small.v.out_features == net.per
    assert_same(net, small, numbers(3, 9, WIDTH, seed=1))


class MultiQuery(Attention):
    """One key and one value for all heads, behind the queries in one layer (Falcon)."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH + 2 * self.per)
        del self.k, self.v

    def forward(self, x):
        b, n, _ = x.shape
        fused = self.q(x).view(b, n, self.heads + 2, self.per)
        q, k, v = (t.transpose(1, 2) for t in (fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, self.heads * self.per))


class Latent(Attention):
    """Keys of two parts, one the same for all heads, written into a tensor that was made for them (DeepSeek)."""

    def __init__(self):
        super().__init__()
        self.norm, self.shared = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 2)

    def attend(self, q, k, v):
        whole = k.new_empty(*k.shape[:-1], self.per + 2)
        whole[..., : self.per].copy_(k)
        whole[..., self.per :].copy_(self.turned.expand(-1, k.shape[1], -1, -1))
        q = torch.cat((q, self.turned.expand(-1, q.shape[1], -1, -1)), -1)
        return F.scaled_dot_product_attention(q, whole, v)

    def forward(self, x):
        self.turned = self.shared(x).unsqueeze(1)
        return super().forward(self.norm(x))


class Rotary(Attention):
    """Pairs of numbers turned as complex ones (Llama 4)."""

    def attend(self, q, k, v):
        turn = torch.polar(*torch.ones(2, q.shape[2], self.per // 2, dtype=q.dtype).cumsum(1))
        pairs = (torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turn for t in (q, k))
        return F.scaled_dot_product_attention(*(torch.view_as_real(t).flatten(3) for t in pairs), v)


class NormOfHeads(Attention):
    """Queries and keys by the root of their mean square within each head, after each place was scaled (nanochat)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH // HEADS))

    def attend(self, q, k, v):
        q, k = (self.scale * t for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v)


class ResizedBias(Attention):
    """A bias for each head and distance, resized to the picture (BEiT)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, HEADS))

    def attend(self, q, k, v):
        n = q.shape[2]
        grid = F.interpolate(self.table.reshape(1, 3, 3, -1).permute(0, 3, 1, 2), size=(n, n), mode="bilinear")
        return F.scaled_dot_product_attention(q, k, v, grid)


@pytest.mark.parametrize("kind", [MultiQuery, Latent, Rotary, NormOfHeads, ResizedBias])
def test_heads_go(kind):
    net, small = halved(kind(), numbers(2, TOKENS, WIDTH))
    assert small.o.in_features == WIDTH // 2
    assert_same(net, small, numbers(3, TOKENS + 3, WIDTH, seed=1))


class Interleaved(nn.Module):
    """Gate and value of a neuron lie side by side (gpt-oss)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        both = self.a(x)
        return self.b(both[..., ::2].sigmoid() * both[..., 1::2])


def test_neurons_whose_two_halves_lie_side_by_side_go_together():
    net, small = halved(Interleaved(), numbers(4, WIDTH))
    assert small.a.out_features == WIDTH and small.b.in_features == WIDTH // 2
    assert_same(net, small, numbers(5, WIDTH, seed=1))


class Sampled(nn.Module):
    """A picture read at places that another layer computes (Deformable DETR)."""

    def __init__(self):
        super().__init__()
        self.a, self.at, self.b = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(3, 2, 1), nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x):
        places = self.at(x).permute(0, 2, 3, 1).tanh()
        return self.b(F.grid_sample(self.a(x), places, align_corners=False))


def test_channels_of_a_picture_that_is_sampled_go():
    net, small = halved(Sampled(), numbers(2, 3, 5, 5))
    assert small.a.out_channels == WIDTH // 2
    assert_same(net, small, numbers(3, 3, 7, 7, seed=1))


class Table(nn.Module):
    """Distances looked up in the middle of a table, as far as the text is long (DeBERTa)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, WIDTH))
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        n = x.shape[1]
        far = self.table.tanh()[16 - n : 16 + n]
        return self.b(F.relu(self.a(x))) * (x @ far.t()).logsumexp(-1, keepdim=True)


def test_rows_of_a_table_that_only_longer_texts_read_stay():
    net, small = halved(Table(), numbers(2, TOKENS, WIDTH))
    assert len(small.table) == 32 and small.a.out_features == WIDTH // 2
    assert_same(net, small, numbers(2, 11, WIDTH, seed=1))


class ZeroedKeyBias(Attention):
    """The keys' part of one bias is set to zero on the way (Swin V2)."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        bias = self.qkv.bias.clone()
        third = bias.numel() // 3
        bias[third : 2 * third].zero_()
        q, k, v = F.linear(x, self.qkv.weight, bias).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_heads_go_though_a_part_of_their_bias_is_zeroed_on_the_way():
    net, small = halved(ZeroedKeyBias(), numbers(2, TOKENS, WIDTH))
    assert small.o.in_features == WIDTH // 2
    assert_same(net, small, numbers(3, TOKENS + 3, WIDTH, seed=1))


class Crops(nn.Module):
    """Takes parts of its channels by number, and of a long text only the first tokens: calls that a short one lacks."""

    def __init__(self):
        super().__init__()
        self.inner, self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(10, 3), nn.Linear(4, 3)

    def parts(self, h):
        return h[..., :10], h[..., 10:-2]

    def forward(self, x):
        if x.shape[1] > TOKENS:
            x = x[:, :TOKENS]
        left, right = self.parts(F.relu(self.inner(x)))
        return self.left(left) + self.right(right)


class Splits(Crops):
    def parts(self, h):
        if h.shape[1] == TOKENS:
            h = torch.cat(h.split(2, 1), 1)
        return h.split([10, 4, 2], -1)[:2]


@pytest.mark.parametrize("kind", [Crops, Splits])
def test_parts_are_taken_rightly_where_longer_texts_take_another_way(kind, tmp_path):
    net, small = halved(kind(), numbers(2, TOKENS - 1, WIDTH))
    assert small.inner.out_features < WIDTH
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=kind().double())
    for tokens in (1, TOKENS - 1, TOKENS, TOKENS + 3):
        for one in (small, again):
            assert_same(net, one, numbers(3, tokens, WIDTH, seed=1))
    compiled = torch.compile(small, backend="eager", fullgraph=True, dynamic=False)
    assert_same(net, compiled, numbers(3, TOKENS, WIDTH))


class TwoAlike(nn.Module):
    """Two layers whose halves are taken by the same numbers: only the order of the calls tells them apart."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x):
        a, b = F.relu(self.a(x)), F.relu(self.b(x))
        if x.shape[1] > TOKENS:
            a, b = a[:, :TOKENS], b[:, :TOKENS]
        halves = [a[..., :8], a[..., 8:], b[..., :8], b[..., 8:]]
        if x.shape[1] > 2 * TOKENS:
            halves[2] = halves[2] + b[..., :8]
        return sum(layer(half) for layer, half in zip(self.out, halves, strict=True))


def test_calls_that_ask_for_the_same_are_told_apart_by_their_order_and_others_refused():
    net, x = TwoAlike().double().eval(), numbers(2, TOKENS, WIDTH)
    groups = dh.Coupled(net, x)
    for layer, gone in ((net.a, [0, 1, 2, 8]), (net.b, [0, 8, 9, 10])):
        layer.weight.data[gone], layer.bias.data[gone] = 0, 0
    small = dh.compact(net, x, groups=groups)
    assert [layer.in_features for layer in small.out] == [5, 7, 7, 5]
    for tokens in (TOKENS, TOKENS + 1):
        assert_same(net, small, numbers(3, tokens, WIDTH))
    with pytest.raises(dh.UserError, match="takes another way"):
        small(numbers(3, 2 * TOKENS + 1, WIDTH))


def test_heads_go_where_their_width_is_taken_from_a_tensor_that_loses_channels_too():
    def forward(net, x):
        x = net.i(x)
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, net.heads, -1).transpose(1, 2) for f in (net.q, net.k, net.v))
        y = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return net.out(x + net.o(y.transpose(1, 2).reshape(b, t, c)))

    layers = linears(i=(5, 16), q=(16, 16), k=(16, 16), v=(16, 16), o=(16, 16), out=(16, 2))
    net, x = Net(forward, **layers), numbers(2, 6, 5)
    net.heads = 4
    groups = dh.Coupled(net, x)
    assert sorted(len(s.channels) for s in groups.sets if s.reason is None) == [4, 16]
    dh.prune(net, dh.Density(0.6), groups=groups)
    small = dh.compact(net, x, groups=groups)
    longer = numbers(3, 9, 5)
    assert small.i.out_features < 16 and largest_gap(net(longer), small(longer)) < 1e-12


def test_a_layers_own_width_stays_where_code_splits_others_by_it(tmp_path):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.qkv, self.o = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            b, n, _ = x.shape
            parts = self.qkv(x).split(self.o.out_features, 2)
            q, k, v = (part.view(b, n, self.heads, -1).transpose(1, 2) for part in parts)
            return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))

    net, small = halved(Fused(), numbers(2, TOKENS, WIDTH))
    assert small.o.in_features == WIDTH // 2 and small.o.out_features == WIDTH
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=Fused().double()).eval()
    for tokens in (TOKENS, TOKENS + 3):
        x = numbers(3, tokens, WIDTH, seed=1)
        assert_same(net, small, x)
        assert_same(net, again, x)
