"""A regularizer attached to optimizers of many kinds: whose parameters it pulls, and how often."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.strength import Linear
from float64_training import batches, net, train


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
