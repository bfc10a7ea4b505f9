"""Masks: what they zero stays exactly zero, with any optimizer, and across save and load."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import deephoyer as dh

OPTIMIZERS = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, weight_decay=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ]
    return nn.Sequential(*layers).to(dtype)


def train(model, optimizer, first=0, last=6, after_step=lambda: None):
    """Steps number `first` to `last`, each with a batch of its own and clipped gradients."""
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(8, 1, 5, 5, generator=random, dtype=next(model.parameters()).dtype)
        y = x.mean((1, 2, 3)).gt(0).long()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after_step()


def pruned_are_zero(model, masks):
    parameters = dict(model.named_parameters())
    return all(parameters[name][~mask].eq(0.0).all() for name, mask in masks.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zeros_stay_zero_after_every_step_also_in_the_optimizers_state(optimizer):
    model = net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    train(model, opt)  # momentum for all weights
    masks = dh.prune(model, dh.Density(0.3))
    masks.hold(opt)
    seen = []

    def look():
        assert pruned_are_zero(model, masks)
        for name, mask in masks.items():
            state = opt.state[dict(model.named_parameters())[name]]
            same = [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == mask.shape]
            assert all(v[~mask].eq(0).all() for v in same)
            seen.append(len(same))

    look()
    before = copy.deepcopy(model.state_dict())
    train(model, opt, after_step=look)
    assert min(seen) > 0
    for name, mask in masks.items():
        now = model.state_dict()[name]
        assert now.isfinite().all()
        assert not now[mask].equal(before[name][mask])  # the others do learn


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_saved_and_loaded_half_way_ends_bit_for_bit_as_one_unbroken(optimizer):
    def start(seed):
        model = net(seed)
        return model, OPTIMIZERS[optimizer](model.parameters())

    def before(model, opt):
        train(model, opt, last=3)
        masks = dh.prune(model, dh.StdRatio(0.8))
        masks.hold(opt)
        train(model, opt, 3, 6)
        return masks

    whole, opt = start(0)
    before(whole, opt)
    train(whole, opt, 6, 10)

    model, opt = start(0)
    masks = before(model, opt)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "masks": masks.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh, opt = start(1)
    fresh.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    held = dh.Masks.from_state_dict(state["masks"], fresh)
    held.hold(opt)
    train(fresh, opt, 6, 10, lambda: None if pruned_are_zero(fresh, held) else pytest.fail("a weight came back"))
    for a, b in zip(whole.parameters(), fresh.parameters(), strict=True):
        assert a.equal(b)


def test_without_hold_weights_come_back_and_release_lets_them():
    model = net()
    opt = OPTIMIZERS["adam"](model.parameters())
    train(model, opt)
    masks = dh.prune(model, dh.Density(0.3))
    hold = masks.hold(opt)
    train(model, opt, last=1)
    hold.release()
    assert pruned_are_zero(model, masks)
    train(model, opt, last=1)
    assert not pruned_are_zero(model, masks)


def test_state_loaded_after_hold_can_bring_nothing_back():
    model = net()
    opt = OPTIMIZERS["sgd momentum"](model.parameters())
    train(model, opt)
    state = copy.deepcopy(opt.state_dict())
    masks = dh.prune(model, dh.Density(0.3))
    masks.hold(opt)
    opt.load_state_dict(state)
    train(model, opt, last=2, after_step=lambda: None if pruned_are_zero(model, masks) else pytest.fail("came back"))


def test_a_step_with_a_closure_is_held_too():
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    masks = dh.prune(model, dh.Density(0.3))
    masks.hold(opt)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(2, 1, 5, 5)).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert pruned_are_zero(model, masks)


def test_a_regularizer_and_masks_work_on_one_optimizer():
    model = net()
    opt = OPTIMIZERS["adam"](model.parameters())
    dh.Regularizer(model, groups="filters+channels", strength=1e-2).attach(opt)
    masks = dh.prune(model, dh.Density(0.3))
    masks.hold(opt)
    train(model, opt)
    assert pruned_are_zero(model, masks)


def test_a_grad_scaler_and_half_precision_weights_are_held():
    model = net(dtype=torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    masks = dh.prune(model, dh.Density(0.3))
    masks.hold(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        opt.zero_grad()
        scaler.scale(model(torch.ones(2, 1, 5, 5, dtype=torch.bfloat16)).square().sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert pruned_are_zero(model, masks)


def test_a_single_number_that_is_pruned_leaves_the_step_count_alone():
    model = nn.Linear(2, 2)
    model.gain = nn.Parameter(torch.tensor(0.0))
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    masks = dh.prune(model, dh.Absolute(0), parameters="*")
    masks.hold(opt)
    for _ in range(3):
        opt.zero_grad()
        (model(torch.ones(1, 2)) * (1 + model.gain)).sum().backward()
        opt.step()
    assert model.gain == 0
    assert opt.state[model.gain]["step"] == 3


def test_tied_weights_are_pruned_and_held_once_under_either_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    masks = dh.prune(model, dh.Density(0.5))
    assert masks.counts() == {"0.weight": dh.masks.Count(16, 8)}
    other = dh.Masks({"1.weight": masks["0.weight"]}).apply(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other.hold(opt, model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
    assert model[0].weight[~masks["0.weight"]].eq(0).all()
    assert model[1].weight is model[0].weight


def test_an_optimizer_of_a_copy_is_refused_and_the_copy_can_be_given():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    twin = copy.deepcopy(model)
    opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    with pytest.raises(dh.UserError, match="holds no parameter of this model"):
        masks.hold(opt)
    masks.hold(opt, twin)
    train(twin, opt)
    assert pruned_are_zero(twin, masks)


def test_two_optimizers_are_held_one_by_one():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    halves = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model[:4], model[4:])]
    for half in halves:
        masks.hold(half)
    for _ in range(3):
        model(torch.ones(2, 1, 5, 5)).square().sum().backward()
        for half in halves:
            half.step()
        assert pruned_are_zero(model, masks)


@pytest.mark.parametrize("how", ["a group", "into a group"])
def test_parameters_that_an_optimizer_gets_later_are_held_too(how):
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    opt = torch.optim.Adam(model[4:].parameters(), lr=0.1)
    masks.hold(opt)
    train(model, opt, last=2)
    if how == "a group":
        opt.add_param_group({"params": model[:4].parameters()})
    else:
        opt.param_groups[0]["params"].extend(model[:4].parameters())
    train(model, opt, last=2)
    assert pruned_are_zero(model, masks) and any(state["exp_avg"].any() for state in opt.state.values())


def test_parameters_that_an_optimizer_gets_in_place_of_others_are_held_too():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    opt = torch.optim.SGD(model[4].parameters(), lr=0.1)
    masks.hold(opt)
    opt.param_groups[0]["params"] = list(model[6].parameters())
    train(model, opt, last=2)
    assert pruned_are_zero(model, masks)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_learning_with_pruned_weights_held(search):
    """Its directions led along weights that were zero again after each step: the loss rose."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.5, generator=draw)
    x, y = torch.randn(40, 6, generator=draw), torch.randint(0, 3, (40,), generator=draw)
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0 if search else 0.1, max_iter=5, line_search_fn=search)
    masks = dh.prune(model, dh.Density(0.5))
    held = masks.hold(opt)

    def closure():
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [opt.step(closure).item() for _ in range(12)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]
    assert pruned_are_zero(model, masks)
    held.release()
    opt.step(closure)
    assert not pruned_are_zero(model, masks)


def test_lbfgs_forgets_what_it_learnt_along_weights_that_are_pruned_now():
    """It stepped for a while as the history of the whole network said."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))

    def learn(model, opt, steps):
        def closure():
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(steps):
            opt.step(closure)

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    learn(model, opt, 3)
    masks = dh.prune(model, dh.Density(0.5))
    other = copy.deepcopy(model)
    fresh = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=5)
    masks.hold(opt), masks.hold(fresh, other)
    learn(model, opt, 2), learn(other, fresh, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    masks.hold(opt)
    assert opt.state[next(model.parameters())]["n_iter"] == 10, "what it learnt without them is still right"


def test_state_along_axes_of_an_optimizers_own_is_left_to_it():
    """SOAP's second moments are of rotated gradients: zeros in them made its next steps enormous."""
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.state[model.weight] = {"Q": [torch.eye(4), torch.eye(4)], "exp_avg_sq": torch.ones(4, 4)}
    masks = dh.prune(model, dh.Density(0.5))
    masks.hold(opt)
    assert opt.state[model.weight]["exp_avg_sq"].all() and pruned_are_zero(model, masks)


def test_a_preconditioner_of_a_square_weight_is_no_state_to_be_held():
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt.state[model.weight]["inv_precond_0"] = torch.eye(4)
    dh.prune(model, dh.Density(0.5)).hold(opt)
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert torch.equal(opt.state[model.weight]["inv_precond_0"], torch.eye(4))


def test_masks_fit_the_average_of_a_models_weights():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, torch.optim.Adam(model.parameters(), lr=0.1), last=2)
    average.update_parameters(model)
    masks.apply(average)
    assert pruned_are_zero(average.module, masks)


def test_masks_survive_a_change_of_precision():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    model.double()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    masks.hold(opt)
    train(model, opt, last=2)
    assert pruned_are_zero(model, masks)


@pytest.mark.cuda
def test_masks_follow_a_model_to_another_device():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    masks.hold(opt)
    model.cuda()
    model(torch.ones(2, 1, 5, 5, device="cuda")).square().sum().backward()
    opt.step()
    assert pruned_are_zero(model.cpu(), masks)
    moved = dh.Masks({name: mask.cuda() for name, mask in masks.items()})
    assert (masks & moved).density == (moved | masks).density == masks.density


# As a mapping


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return tuple(torch.rand(shape, generator=random) < 0.5 for _ in range(2))


@given(pairs())
def test_and_keeps_what_is_in_both_and_or_what_is_in_either(pair):
    a, b = (dh.Masks({"w": m}) for m in pair)
    assert (a & b)["w"].equal(pair[0] & pair[1])
    assert (a | b)["w"].equal(pair[0] | pair[1])
    assert (a & b).density <= min(a.density, b.density) <= max(a.density, b.density) <= (a | b).density
    assert (a & b).density + (a | b).density == pytest.approx(a.density + b.density)


def test_a_parameter_without_a_mask_counts_as_whole():
    one, two = torch.tensor([True, False]), torch.tensor([False, True])
    a, b = dh.Masks({"x": one, "y": one}), dh.Masks({"y": two, "z": two})
    assert {name: m.tolist() for name, m in (a & b).items()} == {
        "x": [True, False],
        "y": [False, False],
        "z": [False, True],
    }
    assert {name: m.tolist() for name, m in (a | b).items()} == {"y": [True, True]}


@given(st.floats(0.05, 1))
def test_counts_and_density_add_up(density):
    masks = dh.prune(net(), dh.Density(density))
    counts = masks.counts()
    assert [c.total for c in counts.values()] == [36, 288, 24]
    assert [c.left for c in counts.values()] == [round(density * c.total) for c in counts.values()]
    assert masks.density == sum(c.left for c in counts.values()) / 348
    assert all(c.density == c.left / c.total for c in counts.values())


def test_a_state_dict_is_a_copy_and_comes_back_the_same():
    model = net()
    masks = dh.prune(model, dh.Density(0.3))
    state = masks.state_dict()
    fresh = net(1)
    again = dh.Masks.from_state_dict(state, fresh)
    assert all(again[name].equal(masks[name]) for name in masks)
    assert pruned_are_zero(fresh, masks)
    for mask in masks.state_dict().values():
        mask.zero_()
    assert masks.density == again.density > 0


def test_pruning_in_steps_and_joining_gives_the_stricter_masks():
    model = net()
    loose = dh.prune(model, dh.Density(0.5))
    strict = dh.prune(model, dh.Density(0.2))
    assert all((loose & strict)[name].equal(strict[name]) for name in strict)


def test_masks_that_do_not_fit_are_refused():
    model, ones = nn.Linear(3, 2), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(dh.UserError, match="not a boolean"):
        dh.Masks({"weight": torch.ones(2, 3)})
    with pytest.raises(dh.UserError, match="not a boolean"):
        dh.Masks({"weight": [True]})
    with pytest.raises(dh.UserError, match="no parameter 'wieght'"):
        dh.Masks({"wieght": ones}).apply(model)
    with pytest.raises(dh.UserError, match="weight is 2×3, its mask 3×2"):
        dh.Masks({"weight": ones.t()}).apply(model)
    with pytest.raises(dh.UserError, match="shapes 2×3 and 3×2"):
        dh.Masks({"weight": ones}) & dh.Masks({"weight": ones.t()})
    with pytest.raises(dh.UserError, match="which model"):
        dh.Masks({"weight": ones}).apply()
    with pytest.raises(dh.UserError, match="its mask"):
        dh.Masks({"weight": ones.t()}).hold(torch.optim.SGD(model.parameters()), model)


def test_a_mask_that_does_not_fit_leaves_the_others_unapplied():
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(dh.UserError):
        dh.Masks({"weight": torch.zeros(2, 3).bool(), "bias": torch.zeros(3).bool()}).apply(model)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())


def test_masks_say_their_density_and_what_they_leave_out():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    assert repr(dh.prune(net, dh.Density(0.5))).startswith(
        "Masks(1 tensors, density 0.5; left out: 1 embedding (0.weight)"
    )
    one = dh.Masks({"w": torch.ones(1, dtype=torch.bool)})
    assert repr(one) == "Masks(1 tensors, density 1)" and dh.Masks({}).density == 0


def test_of_many_frozen_layers_three_are_named():
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    for layer in net[:4]:
        layer.requires_grad_(False)
    with pytest.warns(UserWarning, match="weights: 0.weight, 1.weight, 2.weight, …"):
        dh.prune(net, dh.Density(0.5))
    net[3].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"weights: 0.weight, 1.weight, 2.weight\."):
        dh.prune(net, dh.Density(0.5))


def test_scores_from_batches_are_taken_of_weights_that_are_not_sharded():
    net, x = nn.Linear(3, 2), torch.ones(4, 3)
    masks = dh.prune(net, dh.Density(0.5), score="snip", batches=[x], loss=lambda model, batch: model(batch).sum())
    assert masks.density == 0.5
