"""The regularizer in real training loops: three ways to use it, one trajectory; and its numbers."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.penalties import PENALTIES
from deephoyer.strength import Linear
from float64_training import batches, gradient, net, train

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}


# Three ways, one trajectory


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("groups", ["elements", "filters+channels"])
@pytest.mark.parametrize("penalty", ["hoyer-square", "l1"])
def test_loss_add_grad_and_attach_train_alike(optimizer, groups, penalty):
    ends = []
    for way in ("loss", "add_grad_", "attach", "none"):
        model = net()
        opt = OPTIMIZERS[optimizer](model.parameters())
        reg = dh.Regularizer(model, penalty, groups, strength=Linear(0.1, steps=4, start=0.01))
        if way == "loss":
            ends.append(train(model, opt, before_backward=lambda loss, r=reg: (loss + r.loss(), r.step())[0]))
        elif way == "add_grad_":
            ends.append(train(model, opt, before_step=reg.add_grad_))
        elif way == "attach":
            reg.attach(opt)
            ends.append(train(model, opt))
        else:
            ends.append(train(model, opt))
    for a, b, c, bare in zip(*ends, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert b.equal(c)
        assert not c.equal(bare)


def test_an_attached_regularizer_is_not_clipped_and_add_grad_before_clipping_is():
    model = net()
    twin = copy.deepcopy(model)
    x, y = next(batches())
    for m, attached in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        reg = dh.Regularizer(m, "l1", strength=5.0)
        start = [p.detach().clone() for p in m.parameters()]
        penalty = gradient(reg, m)
        cross_entropy(m(x), y).backward()  # on top of the penalty's gradient
        if attached:
            m.zero_grad()
            cross_entropy(m(x), y).backward()
            reg.attach(optimizer)
        nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
        optimizer.step()
        moved = [a - p for a, p in zip(start, m.parameters(), strict=True)]
        rest = [d - g for d, g in zip(moved, penalty, strict=True) if g is not None]
        if attached:
            assert max(r.norm() for r in rest) <= 1.01e-3
        else:
            assert torch.cat([d.flatten() for d in moved]).norm() <= 1.01e-3


# Mixed precision


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "make", [*OPTIMIZERS.values(), *FUSED.values()], ids=[*OPTIMIZERS, *(f"fused {k}" for k in FUSED)]
)
def test_a_grad_scaler_changes_nothing(make, clip):
    ends = []
    for scaling in (False, True):
        model = net(torch.float32)
        optimizer = make(model.parameters())
        dh.Regularizer(model, groups="filters+channels", strength=0.05).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaling)
        for x, y in batches(dtype=torch.float32):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(x), y)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        ends.append(list(model.parameters()))
    for a, b in zip(*ends, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_that_the_scaler_skips_does_not_count():
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = dh.Regularizer(model, strength=0.1).attach(optimizer)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(batches(dtype=torch.float32))
    scaler.scale(cross_entropy(model(x * math.inf), y)).backward()
    scaler.step(optimizer)
    assert reg.steps == 0
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())


# Which parameters


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    reg = dh.Regularizer(model, "l1", strength=1.0)
    assert_close(reg.loss(), model[0].weight.abs().sum())
    reg.add_grad_()
    assert_close(model[0].weight.grad, model[0].weight.sign())


def test_frozen_parameters_are_left_alone_also_when_frozen_later():
    model = net()
    model[0].requires_grad_(False)
    reg = dh.Regularizer(model, "l1", strength=1.0)
    model[2].requires_grad_(False)
    reg.attach(torch.optim.SGD(model[5].parameters(), lr=0.1))
    grads = gradient(reg, model)
    assert [g is not None for g in grads] == [False, False, False, False, True, False]
    loss_grads = torch.autograd.grad(reg.loss(), [model[5].weight])
    assert loss_grads[0].equal(grads[4])


def test_parameters_thawed_later_are_served_by_their_own_optimizer():
    model = net()
    reg = dh.Regularizer(model, "l1", strength=1.0)
    model[5].requires_grad_(False)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[:5], model[5]))
    reg.attach(first, second)
    model[5].requires_grad_(True)
    first.step()
    assert model[5].weight.grad is None
    second.step()
    assert model[5].weight.grad is not None


def test_parameters_without_a_gradient_get_the_penaltys():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    reg = dh.Regularizer(model, "l1", strength=1.0).attach(optimizer)
    w = model[5].weight.detach().clone()
    optimizer.step()
    assert reg.steps == 1
    assert_close(model[5].weight, w - 0.25 * w.sign())
    assert model[5].bias.grad is None


# Numbers


@pytest.mark.parametrize("penalty", list(PENALTIES))
@pytest.mark.parametrize("groups", ["elements", "filters", "channels", "filters+channels"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zeros_never_make_nan(penalty, groups, dtype):
    model = net(dtype)
    nn.init.zeros_(model[0].weight)  # a whole layer
    model[2].weight.data[1] = 0  # a filter
    model[5].weight.data[:, 3] = 0  # a channel
    reg = dh.Regularizer(model, penalty, groups, strength=1.0)
    loss = reg.loss()
    loss.backward()
    by_autograd = [p.grad for p in model.parameters()]
    closed = gradient(reg, model)
    assert loss.isfinite()
    for p, a, b in zip(model.parameters(), by_autograd, closed, strict=True):
        if a is not None:
            assert a.isfinite().all() and b.isfinite().all()
            assert a[p == 0].eq(0).all() and b[p == 0].eq(0).all()
    model.apply(lambda m: [nn.init.zeros_(p) for p in m.parameters()])
    assert reg.loss() == 0
    assert all(g is None or g.eq(0).all() for g in gradient(reg, model))
    assert all(math.isfinite(x) for row in reg.stats().values() for x in row.values())


@pytest.mark.parametrize("penalty", list(PENALTIES))
@pytest.mark.parametrize("groups", ["elements", "filters"])
def test_weights_that_decayed_to_almost_nothing_keep_finite_gradients(penalty, groups):
    model = nn.Linear(40, 40)
    model.weight.data *= 10.0 ** -torch.arange(0.0, 40.0)[:, None]  # down to denormal numbers
    gradient(dh.Regularizer(model, penalty, groups, strength=1e3), model)
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", ["elements", "filters", "channels"])
def test_half_precision_weights_are_summed_in_float32(dtype, groups):
    torch.manual_seed(0)
    half = nn.Linear(300, 300).to(dtype)
    full = copy.deepcopy(half).float()
    a, b = (dh.Regularizer(m, groups=groups, strength=100.0) for m in (half, full))
    assert a.loss().dtype == torch.float32
    assert_close(a.loss(), b.loss())
    gradient(a, half), gradient(b, full)
    assert half.weight.grad.dtype == dtype
    assert_close(half.weight.grad, full.weight.grad.to(dtype), rtol=torch.finfo(dtype).eps * 2, atol=1e-3)


@given(st.integers(0, 1000), st.sampled_from(["elements", "filters", "channels"]))
def test_a_step_on_hoyer_square_shrinks_the_groups_under_the_threshold_and_grows_the_others(seed, groups):
    torch.manual_seed(seed)
    model = nn.Linear(6, 5).double()
    model.weight.data[:, 0] *= 1e-3
    reg = dh.Regularizer(model, groups=groups, strength=1e-6)

    def magnitudes():
        w = model.weight.detach()
        return {"elements": w.abs().flatten(), "filters": w.norm(dim=1), "channels": w.norm(dim=0)}[groups]

    before = magnitudes()
    threshold = dh.trimming_threshold(before)
    gradient(reg, model)
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    after = magnitudes()
    assert (after < before).equal(before < threshold)
    assert (after > before).equal(before > threshold)


def test_channels_last_weights_give_the_same_numbers():
    model, twin = net(), net().to(memory_format=torch.channels_last)
    for groups in ("elements", "filters+channels", dh.IndexGroups({"0.weight": [[0, 5, 7], [7, 20]]})):
        a, b = (dh.Regularizer(m, groups=groups, strength=1.0) for m in (model, twin))
        assert_close(a.loss(), b.loss())
        for x, y in zip(gradient(a, model), gradient(b, twin), strict=True):
            assert (x is None and y is None) or x.allclose(y, rtol=1e-12, atol=0)
    assert twin[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("groups", ["elements", "filters+channels"])
def test_the_regularizer_follows_a_model_to_another_precision(groups):
    model = net(torch.float32)
    early = dh.Regularizer(model, groups=groups, strength=1e-4)
    early.add_grad_()
    model.double()
    late = dh.Regularizer(model, groups=groups, strength=1e-4)
    assert_close(early.loss(), late.loss(), rtol=1e-14, atol=0)
    for a, b in zip(gradient(early, model), gradient(late, model), strict=True):
        assert (a is None and b is None) or a.equal(b)


@pytest.mark.cuda
@pytest.mark.parametrize("groups", ["elements", "filters+channels", dh.IndexGroups({"0.weight": [[0, 5, 7], [7, 20]]})])
def test_the_regularizer_follows_a_model_to_another_device_and_over_several(groups):
    model = net()
    reg = dh.Regularizer(model, groups=groups, strength=1.0)
    here = gradient(reg, model)
    loss, density = reg.loss().item(), reg.effective_density().item()
    for move in (lambda: model.cuda(), lambda: model[0].cpu(), lambda: model[5].cpu()):
        move()
        assert reg.loss().item() == pytest.approx(loss)
        assert reg.effective_density().item() == pytest.approx(density)
        for a, b in zip(here, gradient(reg, model), strict=True):
            assert (a is None and b is None) or a.allclose(b.cpu())


# Looking at it


@pytest.mark.parametrize("groups", ["elements", "filters"])
def test_stats_are_what_they_say(groups):
    model = net()
    reg = dh.Regularizer(model, "l1", groups, strength=7.0)
    row = reg.stats()[f"5.weight ({groups})"]
    w = model[5].weight.detach()
    r = w.abs().flatten() if groups == "elements" else w.norm(dim=1)
    assert row["value"] == pytest.approx(r.sum().item())
    assert row["effective_density"] == pytest.approx(dh.hoyer_square(r).item() / len(r))
    assert row["hoyer_measure"] == pytest.approx(dh.hoyer_measure(r).item())
    assert row["trimming_threshold"] == pytest.approx(dh.trimming_threshold(r).item())
    assert row["share_below"] == pytest.approx((r < dh.trimming_threshold(r)).double().mean().item())


def test_effective_density_is_one_for_equal_weights_and_small_for_few():
    model = nn.Linear(10, 10)
    nn.init.constant_(model.weight, -0.3)
    assert_close(dh.Regularizer(model).effective_density(), torch.tensor(1.0))
    model.weight.data.zero_()[2, 3] = 5.0
    assert_close(dh.Regularizer(model).effective_density(), torch.tensor(0.01))


@pytest.mark.parametrize("penalty", [dh.HoyerSquare, 3, None, ["l1"]])
def test_what_is_no_penalty_is_refused(penalty):
    with pytest.raises(dh.UserError, match="penalty"):
        dh.Regularizer(net(), penalty)


# Groups of many sizes


@pytest.mark.parametrize("penalty", ["hoyer-square", "hoyer", "l1"])
@pytest.mark.parametrize("backend", ["plain", "foreach"])
def test_weighed_by_size_a_weight_is_pulled_alike_in_small_groups_and_in_large_ones(penalty, backend):
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(100, 6, bias=False)).double()
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.arange(1.0, 7.0).unsqueeze(1).expand_as(layer.weight))
    alike = gradient(dh.Regularizer(model, penalty, "filters", 0.1, backend=backend), model)
    assert alike[1][:, 0].abs().sum() < 0.5 * alike[0][:, 0].abs().sum()
    reg = dh.Regularizer(model, penalty, "filters", Linear(0.1, steps=2), backend=backend, weigh="size")
    for _ in range(3):
        small, large = gradient(reg, model)
        assert_close(large[:, :1], small[:, :1])
    assert_close(small, alike[0])
    value = reg.loss()
    assert_close(value, sum(t.scale * t.penalty.value(t.magnitudes()) for t in reg.terms))


def test_an_unknown_way_to_weigh_groups_is_refused():
    with pytest.raises(dh.UserError, match="Did you mean 'size'"):
        dh.Regularizer(net(), weigh="sizes")
