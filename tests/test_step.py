"""Steps of training: an epoch at once, its draws in tables on the device, replayed as a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import deephoyer as dh
from deephoyer import strength
from deephoyer.lab import data, models
from deephoyer.lab.stages import Training
from deephoyer.lab.train import batches
from deephoyer.lab.train.epoch_tensors import EpochTensors
from deephoyer.lab.train.optim import make_optimizer, rate_at, set_rate
from deephoyer.lab.train.step import CapturedStep, PlainStep, largest_divisor, warm_up

COSINE = Training(epochs=2, lr=1e-3, schedule="cosine")


class Case:
    """LeNet-300-100 with half of its weights masked away and a strength that rises for an epoch and a bit."""

    def __init__(self, kind, device="cpu", count=2000, schedule=None):
        torch.manual_seed(0)
        self.digits = data.load("mnist", limit=count).to(device).in_floats()
        self.model = models.make("lenet-300-100").to(device)
        self.pool, self.device = torch.arange(count), torch.device(device)
        self.masks = dh.prune(self.model, dh.Density(0.5))
        self.regularizer = dh.Regularizer(self.model, strength=schedule or strength.Linear(1e-5, steps=25))
        self.optimizer = make_optimizer(COSINE, self.model.parameters(), kind is CapturedStep)
        self.masks.hold(self.optimizer)
        self.step = kind(self.loss, self.optimizer, self.regularizer, self.device)

    def loss(self, draw):
        x, y = batches.images(self.digits, draw, 1)
        return F.cross_entropy(self.model(x), y)

    def draw(self, epoch):
        drawn = batches.draw(self.pool, 100, 1, True, seed=epoch)
        return drawn, [rate_at(COSINE, epoch * len(drawn) + i, len(drawn)) for i in range(len(drawn))]

    def train(self, epochs=2):
        losses = []
        for epoch in range(epochs):
            self.step.restart()
            self.step.epoch(*self.draw(epoch))
            losses.append(self.step.loss.item())
        return losses


def test_an_epoch_of_plain_steps_is_the_loop_by_hand():
    ours, hand = Case(PlainStep), Case(PlainStep)
    losses = ours.train()
    for epoch in range(2):
        drawn, rates = hand.draw(epoch)
        total = 0.0
        for i, rate in enumerate(rates):
            set_rate(hand.optimizer, rate)
            hand.optimizer.zero_grad()
            loss = hand.loss(drawn.step(i))
            loss.backward()
            hand.regularizer.add_grad_()
            hand.optimizer.step()
            total += loss.item()
        assert losses[epoch] == pytest.approx(total, rel=1e-5)
    assert ours.regularizer.steps == hand.regularizer.steps == 40
    for a, b in zip(ours.model.parameters(), hand.model.parameters(), strict=True):
        assert torch.equal(a, b)


@given(st.integers(1, 60), st.integers(1, 10), st.integers(0, 3), st.booleans())
def test_tables_give_the_steps_of_an_epoch_in_order(steps, unroll, begun, moves):
    first, drawn = (batches.draw(torch.arange(steps * 2), 2, int(moves), moves, seed) for seed in (0, 1))
    tables = EpochTensors(first, torch.device("cpu"))
    index = tables.drawn.index
    tables.fill(first, [0.0] * steps)
    assert tables.fit(drawn)
    tables.fill(drawn, [0.5 * i for i in range(steps)])
    assert tables.drawn.index is index, "a graph would go on reading the old one"
    unroll = largest_divisor(steps, unroll)
    plain = warm_up(steps, unroll, begun)
    assert begun <= plain or plain == steps
    tables.at(plain)
    for i in range(plain, steps, unroll):
        block, rates = tables.next(unroll)
        for k in range(unroll):
            assert rates[k] == 0.5 * (i + k)
            for got, want in zip(block.step(k), drawn.step(i + k), strict=True):
                assert got is want is None or torch.equal(got, want)
    assert tables.counter == steps


def test_an_epoch_of_another_shape_does_not_fit():
    tables = EpochTensors(batches.draw(torch.arange(10), 2, 0, False, 0), torch.device("cpu"))
    assert not tables.fit(batches.draw(torch.arange(12), 2, 0, False, 0))
    assert not tables.fit(batches.draw(torch.arange(10), 2, 1, False, 0))


@pytest.mark.cuda
@pytest.mark.parametrize("schedule", [1e-5, None], ids=["constant", "warm-up"])
def test_captured_and_plain_steps_agree(schedule):
    plain, captured = (Case(kind, "cuda", schedule=schedule) for kind in (PlainStep, CapturedStep))
    expected, found = plain.train(), captured.train()
    assert found == pytest.approx(expected, rel=1e-4)
    assert captured.regularizer.steps == plain.regularizer.steps == 40
    for group in (plain.optimizer, captured.optimizer):
        assert {int(state["step"]) for state in group.state.values()} == {40}
    assert set(captured.step.graphs) == ({10} if schedule else {1})
    for (name, a), b in zip(plain.model.named_parameters(), captured.model.parameters(), strict=True):
        assert (a - b).norm() <= 1e-4 * a.norm()
        if name in captured.masks:
            assert not b[~captured.masks[name]].any()


@pytest.mark.cuda
def test_a_warm_up_that_is_over_is_replayed_several_steps_at_a_time():
    plain, captured = (
        Case(kind, "cuda", schedule=strength.Linear(1e-5, steps=15)) for kind in (PlainStep, CapturedStep)
    )
    assert captured.train() == pytest.approx(plain.train(), rel=1e-4)
    assert set(captured.step.graphs) == {1, 10}
    assert captured.regularizer.steps == 40


@pytest.mark.cuda
def test_a_replayed_epoch_does_not_wait_for_the_device():
    case = Case(CapturedStep, "cuda", schedule=1e-5)
    case.train()
    drawn, rates = case.draw(2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.step.epoch(drawn.to(case.device), rates)
    finally:
        torch.cuda.set_sync_debug_mode("default")
