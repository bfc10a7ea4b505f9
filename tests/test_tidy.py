"""Weights that nothing depends on are zeroed, and outputs stay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deephoyer.counting import count
from deephoyer.lab import models, recipe
from deephoyer.lab.train import result
from deephoyer.lab.train.run import Run
from deephoyer.masks import Masks
from deephoyer.structure import compact, tidy


def sparse_(model, density, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand(p.shape, generator=g) < density)
    return model.double().eval()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.02, 0.5), st.integers(0, 10**6))
def test_outputs_stay_and_counting_zeros_tells_what_compaction_leaves(density, seed):
    torch.manual_seed(seed)
    net = sparse_(
        nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 4)), density, seed
    )
    x = torch.randn(7, 12, dtype=torch.float64)
    made = tidy(net, x)
    torch.testing.assert_close(made(x), net(x))
    assert count(made)[1].nonzeros <= count(net)[1].nonzeros
    assert count(made)[1].nonzeros == count(compact(net, x))[1].nonzeros


def test_a_pruned_lenet_5_has_no_more_idle_weights():
    torch.manual_seed(0)
    net = sparse_(models.make("lenet-5"), 0.01, 1)
    x = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    made = tidy(net, x)
    torch.testing.assert_close(made(x), net(x))
    assert count(made, x)[1].nonzeros < 0.9 * count(net, x)[1].nonzeros
    assert count(made, x)[1].macs_paper < count(net, x)[1].macs_paper
    again = tidy(made, x)
    assert count(again, x)[1].nonzeros == count(made, x)[1].nonzeros


def test_a_layer_without_a_bias_takes_no_constant():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    with torch.no_grad():
        net[0].weight[1] = 0
        net[0].bias[1] = 1
    x = torch.randn(5, 3, dtype=torch.float64)
    made = tidy(net, x)
    assert made.state_dict().keys() == net.state_dict().keys()
    torch.testing.assert_close(made(x), net(x))


def test_zero_padding_brings_no_weight_back():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)).double()
    with torch.no_grad():
        net[0].weight[1:3] = 0
        net[0].bias[1:3] = 1
        net[2].weight[0, 1] = 0  # what one constant leaves out, the other would have to carry
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    made = tidy(net, x)
    assert not ((net[2].weight == 0) & (made[2].weight != 0)).any()
    torch.testing.assert_close(made(x), net(x))


class Gate(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, t):
        return self.gate(t)


@pytest.mark.parametrize(
    "gate",
    [
        lambda t: torch.where(t > 9, t, torch.zeros_like(t)),
        lambda t: torch.fmax(t, torch.full_like(t, 9.0)),
        lambda t: (t > 9).to(t.dtype),
        lambda t: (t - 9).nan_to_num().clamp(min=0),
    ],
)
def test_a_gate_that_only_large_inputs_open_is_no_constant(gate):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Gate(gate), nn.Linear(8, 3)).double()
    x = torch.randn(2, 6, dtype=torch.float64)
    wide = 40 * torch.randn(50, 6, dtype=torch.float64)
    for made in (tidy(net, x), compact(net, x)):
        torch.testing.assert_close(made(wide), net(wide))


def test_what_a_run_saves_as_zero_is_zero_and_a_bias_that_took_a_constant_is_not():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    masks = Masks({name: torch.ones_like(p, dtype=torch.bool) for name, p in net.named_parameters()}, net)
    masks["0.weight"][1] = False
    masks["2.bias"][:] = False
    masks.apply()
    with torch.no_grad():
        net[0].bias[1] = 1
    made = tidy(net, torch.randn(5, 3))
    zeros = result._zeros(made, masks)
    assert zeros.keys() == masks.keys()
    for name, p in made.named_parameters():
        assert not (p != 0)[~zeros[name]].any()
    assert zeros["2.bias"].all() and not zeros["2.weight"][:, 1].any()


def test_a_network_that_would_predict_otherwise_is_kept_as_it_was_trained(tmp_path, monkeypatch):
    quick = [
        "data={name: mnist, limit: 300}",
        "device=cpu",
        "pretrain.epochs=1",
        "regularize.epochs=1",
        "finetune.epochs=1",
    ]
    job = Run(recipe.read("demo", quick), tmp_path).execute()
    monkeypatch.setattr(result, "tidy", lambda model, example, groups: models.make("lenet-300-100"))
    record = result.finish(job)
    assert record["sparse"]["total"]["nonzeros"] == sum(
        int((p != 0).sum()) for p in job.model.parameters() if p.dim() > 1
    )
    assert any("idle weights were left in" in str(part) for part in result.tables(record, 120))
