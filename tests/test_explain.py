"""What hangs together, and what it costs to go without."""

import pytest
import torch
from torch import nn

import deephoyer as dh


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head(x + self.outer(self.inner(x).relu()))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Residual().double()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()


def test_what_a_shortcut_ties_is_one_set_and_the_output_stays_with_a_reason(net):
    made = dh.explain(net, X)
    free = {frozenset(one.layers): one for one in made.sets if one.reason is None}
    assert frozenset({"stem", "inner", "outer", "head"}) in free and frozenset({"inner", "outer"}) in free
    assert any(one.reason for one in made.sets)
    assert made.parameters - made.removable == net.head.bias.numel(), "all else lies in some channel that can go"


def test_a_share_of_a_set_is_gone_while_it_is_scored_and_back_afterwards(net):
    before = {name: p.clone() for name, p in net.named_parameters()}
    seen = []

    def evaluate(model):
        seen.append(int((model.inner.weight == 0).all(1).sum()))
        return model(X).square().mean().item()

    made = dh.explain(net, X, evaluate, shares=(0.2, 0.6))
    inner = next(one for one in made.sets if set(one.layers) == {"inner", "outer"} and one.reason is None)
    assert set(inner.scores) == {0.2, 0.6} and seen[0] == 0 and {1, 3} <= set(seen)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert made.score == pytest.approx(net(X).square().mean().item())


def test_the_score_without_a_share_is_that_of_the_pruned_and_compacted_network(net):
    groups = dh.Coupled(net, X)
    made = dh.explain(net, X, lambda model: model(X).square().mean().item(), shares=(0.5,), groups=groups)
    inner = next(one for one in made.sets if set(one.layers) == {"inner", "outer"} and one.reason is None)
    least = groups.units()[[u.name for u in groups.units()].index(inner.name)].magnitudes().argsort()[:2]
    with torch.no_grad():
        net.inner.weight[least], net.inner.bias[least], net.outer.weight[:, least] = 0, 0, 0
    assert inner.scores[0.5] == pytest.approx(dh.compact(net, X)(X).square().mean().item())


def test_an_evaluation_that_fails_leaves_the_model_as_it_was(net):
    before = {name: p.clone() for name, p in net.named_parameters()}
    calls = []

    def evaluate(model):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        dh.explain(net, X, evaluate)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("share", [0, 1, -0.5, 2])
def test_a_share_lies_between_nothing_and_everything(net, share):
    with pytest.raises(dh.UserError, match="is not a share"):
        dh.explain(net, X, lambda model: 0.0, shares=(share,))


def test_it_prints_as_a_table_and_as_html(net):
    made = dh.explain(net, X, lambda model: 0.25)
    assert "50% gone" in str(made) and "inner" in str(made) and "0.25" in str(made)
    assert made._repr_html_().count("<tr>") == len(made.sets) + 1


def test_an_evaluation_that_returns_no_number_is_a_users_mistake(net):
    with pytest.raises(dh.UserError, match=r"evaluate\(model\) must return a number, not None"):
        dh.explain(net, torch.randn(2, 4).double(), lambda model: None)
