"""The regularizer in real training loops: three ways to use it, one trajectory."""

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

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
}


def net(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(dtype)


def batches(count=6, dtype=torch.float64):
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 2, 5, 5, generator=random, dtype=dtype)
        yield x, x[:, 0].mean((1, 2)).gt(0).long() + x[:, 1].mean((1, 2)).gt(0).long()


def train(model, optimizer, count=6, before_backward=None, before_step=None):
    """A plain loop with room for what a user adds to it."""
    for x, y in batches(count, next(model.parameters()).dtype):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss if before_backward is None else before_backward(loss)).backward()
        if before_step is not None:
            before_step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def gradient(reg, model):
    """What `add_grad_` adds, for each parameter."""
    model.zero_grad()
    reg.add_grad_()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


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


# Whose parameters


def test_two_optimizers_share_the_work_and_count_one_step():
    model, twin = net(), net()
    halves = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2:].parameters(), lr=0.1)
    both = dh.Regularizer(model, groups="filters", strength=Linear(0.1, steps=3)).attach(*halves)
    one = torch.optim.SGD(twin.parameters(), lr=0.1)
    dh.Regularizer(twin, groups="filters", strength=Linear(0.1, steps=3)).attach(one)
    for x, y in batches(4):
        for m in (model, twin):
            m.zero_grad()
            cross_entropy(m(x), y).backward()
        for optimizer in (*halves, one):
            optimizer.step()
    assert both.steps == 4
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("backend", ["plain", "foreach"])
@pytest.mark.parametrize("penalty", ["hoyer-square", "l1"])
def test_a_group_whose_weights_several_optimizers_hold_is_pulled_by_each(penalty, backend):
    model, twin = net(), net()
    x = next(batches())[0]
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    both = [torch.optim.SGD(kind, lr=0.0) for kind in kinds]  # a pull on weights that stand still can be compared
    reg = dh.Regularizer(model, penalty, dh.Coupled(model, x), 0.1, backend=backend).attach(*both)
    for optimizer in both:
        optimizer.step()
    dh.Regularizer(twin, penalty, dh.Coupled(twin, x), 0.1, backend="plain").add_grad_()
    assert reg.steps == 1
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(a.grad, b.grad, msg=name)
    model.zero_grad()
    both[1].step()
    assert all(p.grad is None for p in kinds[0])


def test_sparse_gradients_of_an_embedding_get_the_penalty_and_sparse_adam_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
    twin, ids = copy.deepcopy(model), torch.tensor([[1, 2], [3, 3]])
    twin[0].sparse = False
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        dh.Regularizer(m, "l1", parameters="*", strength=0.1).attach(optimizer)
        m(ids).square().sum().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(a, b)
    two = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[2].parameters())
    with pytest.raises(dh.UserError, match=r"0\.weight is regularized, but SparseAdam"):
        dh.Regularizer(model, parameters="*").attach(*two)
    dh.Regularizer(model).attach(*two)


def test_an_optimizer_given_twice_counts_once():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = dh.Regularizer(model).attach(optimizer, optimizer)
    train(model, optimizer, count=2)
    assert reg.steps == 2


def test_a_parameter_that_no_optimizer_holds_is_named():
    model = net()
    reg = dh.Regularizer(model)
    with pytest.raises(dh.UserError, match=r"5\.weight is regularized, but no optimizer"):
        reg.attach(torch.optim.SGD(model[:5].parameters(), lr=0.1))
    with pytest.raises(dh.UserError, match=r"0\.weight"):
        reg.attach()
    with pytest.raises(dh.UserError, match="not of a copy"):
        reg.attach(torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model[:5].parameters(), lr=0.1)
    optimizer.add_param_group({"params": model[5].parameters()})
    reg.attach(optimizer)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_step_with_a_closure_gets_the_gradient_after_the_closure_has_run(how):
    model, other = net(), net()
    other.load_state_dict(model.state_dict())
    x = torch.ones(1, 2, 5, 5).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = dh.Regularizer(model, strength=0.1).attach(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    assert (optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)).requires_grad
    (other(x).sum() + dh.Regularizer(other, strength=0.1).loss()).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert reg.steps == 1


class _CallsSuper(torch.optim.SGD):
    """As somebody extends an optimizer of torch: both its `step` and that of `super` may call the hooks."""

    def step(self, closure=None):
        return super().step(closure)


class _AsksTwice(torch.optim.SGD):
    """As sharpness-aware optimizers do, which look at the loss at two places."""

    def step(self, closure=None):
        with torch.enable_grad():
            closure(), closure()
        return super().step()


def test_an_optimizer_whose_step_calls_that_of_its_parent_adds_the_penalty_once():
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # from now on torch's own step calls hooks as well
    model = net()
    optimizer = _CallsSuper(model.parameters(), lr=1.0)
    before = model[0].weight.detach().clone()
    reg = dh.Regularizer(model, "l1", strength=0.01).attach(optimizer)
    optimizer.step()
    assert_close(model[0].weight, before - 0.01 * before.sign())
    assert reg.steps == 1


class SharpnessAware(torch.optim.Optimizer):
    """SAM as most have it: the loop calls its two steps, not `step`, and the optimizer inside moves the weights."""

    def __init__(self, params, lr, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad, alpha=self.defaults["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.parametrize("how", ["two steps", "a closure"])
def test_sharpness_aware_minimization_gets_the_penalty_and_holds_zeros_however_it_is_called(how):
    model, plain = net(), net()
    x = torch.ones(1, 2, 5, 5).double()

    def step(model, optimizer):
        model(x).sum().backward()
        if how == "a closure":
            return optimizer.step(lambda: model(x).sum().backward())
        optimizer.first_step()
        model(x).sum().backward()
        return optimizer.second_step()

    optimizer = SharpnessAware(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    reg = dh.Regularizer(model, "l1", strength=0.01).attach(optimizer)
    step(model, optimizer)
    step(plain, SharpnessAware(plain.parameters(), lr=0.1))
    assert_close(model[0].weight, plain[0].weight - 0.1 * 0.01 * before.sign())
    assert reg.steps == 1
    masks = dh.prune(model, dh.Density(0.3))
    held = masks.hold(optimizer)
    step(model, optimizer)
    assert not masks.undone()
    held.release()
    step(model, optimizer)
    assert masks.undone()


class _Lookahead(torch.optim.Optimizer):
    """As timm and others have it: without its parent's `__init__`, so that torch does not make its step call hooks."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state = {p: {"slow": p.detach().clone()} for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        for p, state in self.state.items():
            p.copy_(state["slow"].lerp_(p, 0.5))


def test_an_optimizer_without_its_parents_init_gets_the_penalty_and_holds_zeros():
    model = net()
    optimizer = _Lookahead(torch.optim.SGD(model.parameters(), lr=1.0))
    masks = dh.prune(model, dh.Density(0.3))
    masks.hold(optimizer)
    before = model[0].weight.detach().clone()
    dh.Regularizer(model, "l1", strength=0.01).attach(optimizer)
    optimizer.step()
    after = optimizer.state[model[0].weight]["slow"]  # what is pruned came half way back before
    assert_close(model[0].weight, (before - 0.005 * before.sign()) * masks["0.weight"])
    assert_close(after, model[0].weight)


def test_a_loss_within_torch_func_which_would_have_no_gradient_is_refused_and_add_grad_works_there():
    model = net()
    reg = dh.Regularizer(model, strength=0.1)
    (x, y), *_ = batches(1)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    with pytest.raises(dh.UserError, match=r"call reg\.add_grad_\(\)"):
        torch.func.grad(lambda p: loss(p) + reg.loss())(parameters)
    for name, g in torch.func.grad(loss)(parameters).items():
        parameters[name].grad = g
    reg.add_grad_()
    found = {name: p.grad for name, p in parameters.items()}
    model.zero_grad()
    (cross_entropy(model(x), y) + reg.loss()).backward()
    for name, p in parameters.items():
        assert_close(found[name], p.grad)


def test_a_step_that_calls_its_closure_twice_counts_once():
    model = net()
    optimizer = _AsksTwice(model.parameters(), lr=0.1)
    reg = dh.Regularizer(model).attach(optimizer)
    for _ in range(2):
        optimizer.step(lambda: model(torch.ones(1, 2, 5, 5).double()).sum().backward())
    assert reg.steps == 2


def test_an_optimizer_that_maximizes_is_refused():
    model = net()
    with pytest.raises(dh.UserError, match="maximize=False"):
        dh.Regularizer(model).attach(torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


def test_lbfgs_is_refused_when_it_is_attached_to():
    model = net()
    reg = dh.Regularizer(model)
    with pytest.raises(dh.UserError, match=r"reg\.loss\(\)"):
        reg.attach(torch.optim.LBFGS(model.parameters(), lr=0.1))


def test_detach_ends_it_and_attach_works_again():
    model, bare = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = dh.Regularizer(model, strength=0.1).attach(optimizer)
    with pytest.raises(dh.UserError, match="detach"):
        reg.attach(optimizer)
    reg.detach()
    reg.detach()
    without = train(model, optimizer)
    assert all(
        a.equal(b) for a, b in zip(without, train(bare, torch.optim.SGD(bare.parameters(), lr=0.1)), strict=True)
    )
    assert reg.steps == 0
    reg.attach(optimizer)
    train(model, optimizer, count=1)
    assert reg.steps == 1


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


def test_an_optimizer_inside_a_wrapper_is_found():
    class Wrapper:
        """What Accelerate hands out: no hooks of its own, the optimizer in `.optimizer`."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reg = dh.Regularizer(model).attach(Wrapper(optimizer))
    dh.prune(model, dh.Density(0.5)).hold(Wrapper(optimizer))
    optimizer.step()
    assert reg.steps == 1
    with pytest.raises(dh.UserError, match="not a PyTorch optimizer"):
        dh.Regularizer(model).attach(model)


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
