"""MACs that are executed: torch's flop counter says the same where it counts, and recurrent layers count, too."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import deephoyer as dh
from deephoyer.counting import count
from deephoyer.executed import executed
from deephoyer.summary import summary


def by_torch(model, inputs):
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not look into torch's fused layers
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(**inputs) if isinstance(inputs, dict) else model.eval()(inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    return counter.get_total_flops() // 2 // len(first)


def by_us(model, inputs):
    s = summary(model, inputs, latency=False)
    assert s.total.macs_executed == sum(row.macs_executed for row in s.rows)
    return s.total.macs_executed


def halved(model, inputs):
    groups = dh.Coupled(model, inputs)
    dh.prune(model, dh.Density(0.5), groups=groups)
    return dh.compact(model, inputs, groups=groups)


def convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 4, 2, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 14 * 14, 5)), torch.randn(2, 3, 9, 9)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)), torch.randn(
        2, 7, 16
    )


def vision_transformer():
    models = pytest.importorskip("torchvision.models")
    size = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return models.VisionTransformer(**size, num_classes=3), torch.randn(2, 3, 16, 16)


def swin():
    models = pytest.importorskip("torchvision.models")
    size = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": [4, 4]}
    return models.SwinTransformer(**size, num_classes=3), torch.randn(2, 3, 16, 16)


def gpt2():
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)), {
        "input_ids": torch.arange(12).view(2, 6) % 11
    }


@pytest.mark.parametrize("network", [convolutions, encoder, vision_transformer, swin, gpt2])
def test_the_executed_macs_are_those_of_the_flop_counter_before_and_after_compaction(network):
    torch.manual_seed(0)
    model, inputs = network()
    model = model.eval()
    assert by_us(model, inputs) == by_torch(model, inputs) > 0
    small = halved(model, inputs)
    assert by_us(small, inputs) == by_torch(small, inputs) < by_us(model, inputs)


@pytest.mark.parametrize("kind, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_step_of_a_recurrent_layer_multiplies_by_both_of_its_matrices(kind, gates, dtype):
    layer = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True).to(dtype)
    s = summary(layer, torch.randn(2, 7, 5, dtype=dtype), latency=False)
    assert s.total.macs_executed == 7 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    rows = {row.name: row.macs_executed for row in s.rows}
    assert rows["weight_ih_l0"] == 7 * gates * 6 * 5 and rows["weight_hh_l1_reverse"] == 7 * gates * 6 * 6


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("make", [nn.LSTM, lambda size, width, **kw: nn.TransformerEncoderLayer(size, 2, width, **kw)])
def test_an_example_of_a_layer_that_takes_the_length_first_costs_what_it_costs_batch_first(make, embedded):
    for length, batch in ((7, 3), (3, 7), (5, 1)):
        net, tokens = nn.Sequential(nn.Embedding(9, 8), make(8, 6, batch_first=True)), torch.zeros(batch, length).long()
        x = tokens if embedded else torch.randn(batch, length, 8)
        usual = count(net if embedded else net[1], x)[1].macs_executed
        net[1] = make(8, 6, batch_first=False)
        assert count(net if embedded else net[1], x.transpose(0, 1))[1].macs_executed == usual


def test_attention_has_a_row_of_its_own_and_the_projection_of_queries_keys_and_values_another():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    weights = {name: p for name, p in attention.named_parameters() if p.dim() > 1}
    used, other = executed(attention, (x, x, x), weights)
    assert used == {"in_proj_weight": 5 * 24 * 8, "out_proj.weight": 5 * 8 * 8}
    assert other == {"": 2 * 5 * 5 * 8}


def test_a_weight_used_through_a_function_counts_for_that_weight():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x):
            return nn.functional.linear(x, self.inner.weight)[:, 0] + x @ self.inner.weight[0]

    rows = summary(Functional(), torch.randn(2, 4), latency=False).rows
    assert [(row.name, row.macs_executed) for row in rows] == [("inner", 24 + 4)]


def test_tied_weights_are_put_down_to_the_module_that_uses_them():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Flatten(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    assert [row.macs_executed for row in summary(net, torch.randn(2, 3, 4)[:, 0], latency=False).rows] == [16, 16]


def test_a_bilinear_layer_multiplies_all_pairs_of_its_inputs():
    pairs = torch.randn(2, 7, 4), torch.randn(2, 7, 5)
    rows = summary(nn.Bilinear(4, 5, 6), pairs, latency=False).rows
    assert [row.macs_executed for row in rows] == [7 * 6 * 4 * 5]


def test_counting_in_another_precision_changes_nothing():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert [r.macs_executed for r in summary(net, torch.randn(2, 4), latency=False).rows] == [24, 12]
