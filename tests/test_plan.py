"""A plan in loops of many kinds: it ends at its target, survives being killed, and lets an allowed drop win."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import deephoyer as dh
from deephoyer.counting import count
from deephoyer.cutting import Cutter
from deephoyer.lab.models import make
from deephoyer.pace import Stages
from deephoyer.plan import Plan
from deephoyer.targets import Target
from small_training import X, adam, batches, macs_share, network, train

EPOCHS = 8


def test_a_plan_to_a_share_of_the_time_says_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path))
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, target=Target(latency=0.7, batch=16), epochs=3, rounds=1, pull=0)
    for epoch in range(3):
        train(model, optimizer, epoch, count=2)
        plan.epoch()
    small = plan.finish()
    assert count(small)[1].parameters < count(model)[1].parameters and plan.report.reached > 0
    far = abs(plan.report.reached / 0.7 - 1) > 0.1
    assert bool(plan.report.notes) == far, "only what is more than a tenth away is explained"
    assert "0.7 of the time" in str(plan.report) and list(tmp_path.glob("layer-times/*.jsonl"))


def test_six_lines_take_a_resnet_20_to_its_target():
    torch.manual_seed(0)
    model = make("resnet-20")
    example = torch.zeros(1, 3, 32, 32)
    whole = count(model, example)[1].macs_executed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = Plan(model, example, optimizer, target=Target(macs=0.4), epochs=6, pull=0)
    for epoch in range(6):
        train(model, optimizer, epoch, count=2, size=(3, 32, 32), of=8)
        plan.epoch()
    small = plan.finish()
    share = count(small, example)[1].macs_executed / whole
    assert 0.392 <= share <= 0.408
    assert plan.report.reached == pytest.approx(share) and not plan.report.notes
    x = next(batches(99, size=(3, 32, 32)))[0]
    torch.testing.assert_close(small.eval()(x), model.eval()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["macs", "parameters", "density"])
@pytest.mark.parametrize("share", [0.5, 0.15])
def test_a_plan_ends_within_two_percent_of_every_size(kind, share):
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(**{kind: share}), EPOCHS, rounds=2)
    for epoch in range(EPOCHS):
        train(model, optimizer, epoch, count=3)
        plan.epoch()
    small = plan.finish()
    total = count(small, X)[1]
    whole = count(network(), X)[1]
    reached = {
        "macs": total.macs_executed / whole.macs_executed,
        "parameters": total.parameters / whole.parameters,
        "density": count(model)[1].density,
    }[kind]
    assert share * 0.97 < reached <= share * 1.02, "so few channels are coarse"
    assert plan.report.reached == pytest.approx(reached)


def run(until=EPOCHS, state=None, start=0, **settings):
    """A loop with its own checkpoint; the states after `until` epochs, and the plan."""
    model = network()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    plan = Plan(model, X, optimizer, Target(macs=0.3), EPOCHS, **settings)
    if state is not None:
        for part, saved in zip((model, optimizer, schedule, plan), state, strict=True):
            part.load_state_dict(saved)
    for epoch in range(start, until):
        train(model, optimizer, epoch)
        schedule.step()
        with torch.no_grad():
            score = sum(int((model.eval()(x).argmax(1) == y).sum()) for x, y in batches(100)) / 96
        plan.epoch(score)
    return [part.state_dict() for part in (model, optimizer, schedule, plan)], plan


def test_a_plan_killed_in_any_of_its_phases_ends_bit_for_bit_the_same():
    settings = {"stages": Stages(0.25, 0.5), "rounds": 2}
    _, whole = run(**settings)
    expected = whole.finish().state_dict()
    stages = set()
    for cut in (1, 3, 5, 7):  # after three epochs it is still looking for its first strength
        saved, killed = run(cut, **settings)
        stages.add(killed.stage)
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        _, resumed = run(EPOCHS, torch.load(file, weights_only=True), cut, **settings)
        found = resumed.finish().state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found), cut
        assert resumed.report.to_json() == whole.report.to_json()
    assert stages == {"dense", "regularize", "finetune"}


def test_whether_the_penalty_has_done_enough_is_seen_when_the_zeros_are_zero_again():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # momentum moves what was pruned
    plan = Plan(model, X, optimizer, Target(density=0.3), EPOCHS, strength=1e-4, stages=Stages(0, 0.75), rounds=2)
    pressed, undone = plan._pressed, []
    plan._pressed = lambda: undone.append([] if plan.masks is None else plan.masks.undone()) or pressed()
    for epoch in range(EPOCHS):
        train(model, optimizer, epoch)
        plan.epoch()
    assert len(undone) > 1 and not any(undone)


def test_the_penalty_presses_while_it_regularizes_and_lets_go_afterwards():
    _, plan = run(6, stages=Stages(0.25, 0.5), rounds=1, control=False)
    strengths = [line["strength"] for line in plan.history]
    assert strengths[0] == strengths[1] == {}, "dense"
    assert all(s["coupled"] > 0 for s in strengths[3:6]), "of the third epoch it looked at the gradients"
    _, plan = run(8, stages=Stages(0.25, 0.5), rounds=1)
    assert plan.history[-1]["strength"] == {} and plan.history[-1]["stage"] == "finetune"
    assert plan.metrics()["strength"] == 0 and plan.metrics()["share"] <= 0.306


def test_the_penalty_rests_when_the_density_is_on_its_way_to_what_the_next_prune_keeps():
    """However hard it pulls: pressed on, so many channels die that layers are left with a few."""

    def density(**settings):
        model = network()
        optimizer = adam(model)
        plan = Plan(model, X, optimizer, Target(macs=0.5), 5, stages=Stages(0.0, 1.0), rounds=1, pull=1.0, **settings)
        for epoch in range(3):
            train(model, optimizer, epoch, count=20)
            plan.epoch()
        kept = plan.cutter.plan(0.5).kept()
        return plan.regularizer.effective_density().item() / kept, plan.history[-1]["strength"]

    (pressed, strength), (collapsed, still) = density(), density(control=False)
    assert strength == {} and still["coupled"] > 0
    assert pressed > 0.8 and collapsed < 0.85 * pressed


def test_a_stronger_pull_leaves_less_of_what_is_pruned():
    def lost(pull):
        _, plan = run(5, stages=Stages(0.0, 0.75), rounds=1, pull=pull, control=False)
        return plan.regularizer.effective_density().item()

    assert lost(0.3) < lost(0.03) < lost(0.0)


def test_a_plan_that_is_never_told_of_an_epoch_says_so():
    model = network()
    plan = Plan(model, X, adam(model), Target(macs=0.5), 4)
    with pytest.warns(UserWarning, match=r"plan.epoch\(\) was never called: call it after every epoch"):
        plan.finish()


def hooks_of(optimizer):
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def plan_with_every_hook(model, optimizer):
    """In its second round: the penalty presses, the zeros of the first prune are held, and steps are looked at."""
    plan = Plan(model, X, optimizer, Target(macs=0.3), 4, strength=1e-3, control=False, stages=Stages(0, 0.5), rounds=2)
    train(model, optimizer, 0, count=2)
    plan.epoch()
    return plan


def fill(model):
    """As where weights are loaded: nothing is zero."""
    with torch.no_grad():
        model[0].weight.add_(0.1)


def test_a_plan_that_is_stopped_leaves_model_and_optimizer_alone():
    model = network()
    optimizer = adam(model)
    plan = plan_with_every_hook(model, optimizer)
    assert len(hooks_of(optimizer)) == 3
    state = plan.state_dict()
    plan.stop()
    plan.stop()
    assert not hooks_of(optimizer)
    fill(model)
    train(model, optimizer, 1)
    assert plan.masks.undone(model) == ["0.weight"]
    with pytest.raises(dh.UserError, match=r"it was stopped after 1 of 4"):
        plan.epoch()
    plan.load_state_dict(state)
    assert len(hooks_of(optimizer)) == 3 and not plan.masks.undone(model), "a state that is loaded goes on"
    plan.stop()
    assert macs_share(plan.finish(), model) == pytest.approx(0.3, rel=0.05) and not hooks_of(optimizer)


def test_an_exception_that_leaves_a_plan_takes_its_hooks_along():
    model = network()
    optimizer = adam(model)
    with pytest.raises(RuntimeError, match="out of memory"), plan_with_every_hook(model, optimizer) as plan:
        raise RuntimeError("out of memory")
    assert not hooks_of(optimizer) and plan.stage == "regularize"


def test_a_plan_that_nobody_has_any_more_does_nothing():
    def trained(drop):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        plan = plan_with_every_hook(model, optimizer)
        drop(plan)
        del plan
        fill(model)
        train(model, optimizer, 1)
        return model.state_dict()

    stopped, dropped = trained(Plan.stop), trained(lambda plan: None)
    assert all(torch.equal(stopped[name], dropped[name]) for name in stopped)


def test_a_plan_may_be_collected_while_the_optimizer_calls_its_hooks():
    model = network()
    optimizer = adam(model)
    optimizer.register_step_post_hook(lambda *_: gc.collect())
    circle = [plan_with_every_hook(model, optimizer)]
    circle.append(circle)
    del circle
    fill(model)
    train(model, optimizer, 1, count=2)
    assert model[0].weight.flatten(1).any(1).all()


def test_weights_that_came_back_behind_the_hooks_are_zero_again_and_told():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(density=0.2), 6)
    before = copy.deepcopy(model.state_dict())
    for epoch in range(6):
        train(model, optimizer, epoch, count=2)
        plan.epoch()
    model.load_state_dict(before)
    with pytest.warns(UserWarning, match=r"weights of 0\.weight, 3\.weight, 7\.weight, … that had been"):
        plan.finish()
    assert plan.report.reached == pytest.approx(0.2, rel=0.02) and "zero again" in str(plan.report)


def test_an_average_of_the_weights_becomes_as_small_with_the_masks_of_the_plan():
    model = network()
    optimizer = adam(model)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    plan = Plan(model, X, optimizer, Target(macs=0.4), 4)
    for epoch in range(4):
        train(model, optimizer, epoch, count=2)
        average.update_parameters(model)
        plan.epoch()
    small = plan.finish()
    plan.masks.apply(average.module)
    averaged = dh.compact(average.module, X)
    assert [p.shape for p in averaged.parameters()] == [p.shape for p in small.parameters()]
    assert not torch.equal(averaged[0].weight, small[0].weight)


def test_an_optimizer_that_makes_no_step_is_told():
    model = network()
    plan = Plan(model, X, adam(model), Target(macs=0.5), 4)
    train(model, adam(model), 0, count=2)
    with pytest.warns(UserWarning, match="made no step while it regularized"):
        plan.epoch()


def test_what_a_module_keeps_beside_its_tensors_comes_back_with_the_best_epoch():
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = nn.Sequential(Counting(8, 16), nn.ReLU(), nn.Linear(16, 2))
    plan = Plan(model, torch.zeros(1, 8), adam(model), Target(macs=0.5), 4, stages=Stages(0, 0.25), rounds=1, pull=0)
    for model[0].seen, score in enumerate([0.5, 0.6, 0.9, 0.7]):
        plan.epoch(score)
    plan.finish()
    assert model[0].seen == 2


def test_a_target_beyond_reach_names_the_layers_that_could_not_give_more():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.05), 2, protect=["3", "7"], rounds=1, pull=0)
    for epoch in range(2):
        train(model, optimizer, epoch, count=1)
        plan.epoch()
    plan.finish()
    (note,) = plan.report.notes
    assert (
        "0.05 was asked for: at their least width: 0;" in note and "3 (protected)" in note and "7 (protected)" in note
    )
    assert [(n, b, a) for n, b, a, _ in plan.report.widths if n in ("3", "7")] == [("3", 32, 32), ("7", 48, 48)]


def test_frozen_layers_are_named_among_those_that_could_not_be_cut():
    model = network()
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    plan = Plan(model, X, optimizer, Target(macs=0.05), 2, rounds=1)
    for epoch in range(2):
        train(model, optimizer, epoch, count=1)
        plan.epoch()
    plan.finish()
    assert "3 (frozen)" in plan.report.notes[0] and "7 (frozen)" not in plan.report.notes[0]


def test_widths_are_left_in_multiples():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.5), 2, multiple=4, rounds=1)
    for epoch in range(2):
        train(model, optimizer, epoch, count=1)
        plan.epoch()
    small = plan.finish()
    assert {small[0].out_channels % 4, small[3].out_channels % 4, small[7].out_features % 4} == {0}
    assert macs_share(small, model) <= 0.51


def test_a_plan_counts_steps_where_there_are_no_epochs():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.3), steps=60)
    for epoch in range(10):
        for x, y in batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            plan.step()
    assert macs_share(plan.finish(), model) == pytest.approx(0.3, rel=0.03)
    with pytest.raises(dh.UserError, match="finished already"):
        plan.finish()
    with pytest.raises(dh.UserError, match=r"call plan.step\(\)"):
        plan.epoch()


def test_gradient_accumulation_and_amp_end_at_the_target_with_the_zeros_held():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plan = Plan(model, X, optimizer, Target(macs=0.3), 4)
    for epoch in range(4):
        for i, (x, y) in enumerate(batches(epoch, count=8)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
            if i % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        plan.epoch()
    dead = {n: m for n, m in plan.masks.items() if not m.all()}
    assert dead and all(not dict(model.named_parameters())[n][~m].any() for n, m in dead.items())
    assert 1e-8 < max(s for line in plan.history for s in line["strength"].values()) < 10, "as without a scaler"
    assert macs_share(plan.finish(), model) == pytest.approx(0.3, rel=0.03)


def parallel(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = Plan(model, X, optimizer, Target(macs=0.3, drop=0.1), 4)
    for epoch in range(4):
        for x, y in batches(2 * epoch + rank):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        plan.epoch(0.9 - 0.5 * rank)  # what another process than the first has seen does not count
    torch.save([plan.finish().state_dict(), plan.report.reached, plan.report.score], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_processes_hand_back_the_same_network(tmp_path):
    mp.spawn(parallel, args=(str(tmp_path),), nprocs=2)
    (first, share, score), (second, other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first if "running" not in k)
    assert share == other == pytest.approx(0.3, rel=0.03) and score == 0.9


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"epochs": None}, "either epochs= or steps="),
        ({"epochs": 2, "steps": 3}, "either epochs= or steps="),
        ({"epochs": 0}, "1 or more"),
        ({"epochs": 2, "rounds": 0}, "rounds is 0"),
        ({"epochs": 2, "protect": "conv*"}, r"no layer is called 'conv\*'"),
        ({"epochs": 2, "protect": "*"}, "protect fewer"),
        ({"epochs": 2, "penalty": "hoyer_sq"}, "Did you mean"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(settings, told):
    model = network()
    with pytest.raises(dh.UserError, match=told):
        Plan(model, X, adam(model), Target(macs=0.5), **settings)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ({}, "give one of macs"),
        ({"macs": 0.5, "latency": 0.5}, "there are 2"),
        ({"macs": 1.5}, "at most 1"),
        ({"macs": 0}, "it needs a drop="),
        ({"macs": 0.5, "drop": -1}, "drop"),
        ({"latency": 0.5, "batch": 0}, "batch is 0"),
        ({"latency": 0.5, "dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"latency": 0.5, "mode": "fast"}, "mode of running"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(target, told):
    with pytest.raises(dh.UserError, match=told):
        Target(**target)


def test_what_the_loop_gets_wrong_is_told():
    model = network()
    plan = Plan(model, X, adam(model), Target(macs=0.5, drop=0.1), 1, pull=0)
    with pytest.raises(dh.UserError, match="needs your validation score"):
        plan.epoch()
    for baseline in ("0.9", float("nan")):
        with pytest.raises(dh.UserError, match="plan: the baseline is"):
            Plan(model, X, adam(model), Target(macs=0.5, drop=0.1), 1, baseline=baseline)
    for score in ({"accuracy": 0.5}, "good", torch.ones(2)):
        with pytest.raises(dh.UserError, match=r"the score is .* must be one number"):
            plan.epoch(score)
    plan.epoch(0.5)
    with pytest.raises(dh.UserError, match="are over"):
        plan.epoch(0.5)
    others = [
        ({"epochs": 3}, "a plan of 1 epochs, 3 rounds, 0.5 of the MACs, not of 3 epochs, 3 rounds, 0.5 of the MACs"),
        ({"steps": 1}, "not of 1 steps"),
        ({"epochs": 1, "rounds": 2}, "not of 1 epochs, 2 rounds"),
        ({"epochs": 1, "target": Target(macs=0.4)}, "0.4 of the MACs"),
    ]
    for other, told in others:
        with pytest.raises(dh.UserError, match=told):
            Plan(model, X, adam(model), **{"target": Target(macs=0.5), **other}).load_state_dict(plan.state_dict())
    Plan(model, X, adam(model), Target(macs=0.5, drop=0.2), 1).load_state_dict(plan.state_dict())
    for state in ({"model": {}}, None, 3):
        with pytest.raises(dh.UserError, match="is not what a plan's state_dict"):
            plan.load_state_dict(state)


def test_matrices_and_the_rest_may_have_an_optimizer_each():
    model = network()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=3e-3)]
    plan = Plan(model, X, optimizers, Target(macs=0.4), EPOCHS)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch, count=6):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        plan.epoch()
    assert macs_share(plan.finish(), model) == pytest.approx(0.4, rel=0.02)
    assert any(line["strength"] for line in plan.history)


def test_the_penalty_finds_its_strength_where_each_weight_is_stepped_within_backward():
    model = network()
    optimizers = {p: torch.optim.Adam([p], lr=3e-3) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    plan = Plan(model, X, list(optimizers.values()), Target(macs=0.4), EPOCHS)
    for epoch in range(EPOCHS):
        for x, y in batches(epoch, count=12):
            F.cross_entropy(model(x), y).backward()
        plan.epoch()
    assert macs_share(plan.finish(), model) == pytest.approx(0.4, rel=0.02)
    assert any(line["strength"] for line in plan.history) and not plan.report.notes


def test_an_optimizer_of_something_else_may_stand_still():
    model, critic = network(), nn.Linear(4, 1)
    optimizer = adam(model)
    plan = Plan(model, X, [optimizer, adam(critic)], Target(macs=0.4), EPOCHS)
    for epoch in range(EPOCHS):
        train(model, optimizer, epoch, count=12)
        plan.epoch()
    plan.finish()
    assert any(line["strength"] for line in plan.history) and not plan.report.notes


def test_a_plan_whose_penalty_had_too_few_steps_says_so():
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(macs=0.4), EPOCHS)
    for epoch in range(EPOCHS):
        train(model, optimizer, epoch, count=1)
        plan.epoch()
    plan.finish()
    assert any("takes 8 steps with gradients" in note for note in plan.report.notes)


def test_optimizers_that_a_plan_cannot_work_with_are_told_when_it_is_made():
    model = network()
    with pytest.raises(dh.UserError, match=r"0\.weight is regularized, but no optimizer given holds it"):
        Plan(model, X, adam(model[7:]), Target(macs=0.5), 9)
    with pytest.raises(dh.UserError, match="pull=0"):
        Plan(model, X, torch.optim.LBFGS(model.parameters()), Target(macs=0.5), 9)
    Plan(model, X, torch.optim.LBFGS(model.parameters()), Target(macs=0.5), 9, pull=0)


def test_a_plan_and_its_statistics_print_as_tables():
    _, plan = run(6)
    assert "0.3 of the MACs: finetune, 6 of 8" in str(plan) and "effective_density" in str(plan)
    stats = plan.regularizer.stats()
    assert "effective density" in str(stats) and stats["0 (coupled)"]["value"] > 0
    assert stats.flat()["0 (coupled)/value"] == stats["0 (coupled)"]["value"]
    plan.finish()
    told = str(plan.report)
    assert "kept because" in told and "network output" in told and str(plan) == told
    assert told.count("regularize") >= 2 and "finetune" in told


def test_the_page_about_plans_runs_as_it_stands(capsys):
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
    exec(compile(page.split("```python\n")[1].split("```")[0], "plan.md", "exec"), {})
    assert "asked for: 0.4 of the MACs" in capsys.readouterr().out


def test_a_report_names_the_layers_that_eval_mode_never_calls():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.auxiliary = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 4)

        def forward(self, x):
            x = self.body(x).relu()
            return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)

    torch.manual_seed(0)
    model = Auxiliary()
    optimizer = adam(model)
    plan = Plan(model, torch.randn(4, 8), optimizer, Target(macs=0.5), 2, rounds=1)
    for _ in range(2):
        sum(out.square().mean() for out in model(torch.randn(8, 8))).backward()
        optimizer.step()
        plan.epoch()
    plan.finish()
    assert plan.report.idle == ["auxiliary"] == plan.report.to_json()["idle"]
    assert "not called in eval mode, so unchanged; may no longer fit in training: auxiliary" in str(plan.report)


def test_a_density_beyond_reach_goes_as_far_as_it_can_and_says_why():
    """No layer is emptied, and of four layers at least one weight each stays."""
    model = network()
    optimizer = adam(model)
    plan = Plan(model, X, optimizer, Target(density=1e-6), 2, rounds=1, groups="filters")
    for epoch in range(2):
        train(model, optimizer, epoch, count=1)
        plan.epoch()
    plan.finish()
    assert "no layer may be emptied" in plan.report.notes[0] and plan.report.reached < 0.5
    assert f"it is {plan.report.reached:.4g} at std-ratio" in plan.report.notes[0], "no further than was reached"


def test_single_weights_go_by_one_threshold_for_all_layers():
    """By multiples of each layer's deviation the wide layer would keep as much as the others, and accuracy falls."""
    model = network()
    chosen = Cutter(model, X, Target(density=0.3)).plan(0.3)
    weights = [p.detach().abs().flatten() for p in model.parameters() if p.dim() > 1]
    kept, gone = (torch.cat([w[k == side] for w, k in zip(weights, chosen.keeps, strict=True)]) for side in (1, 0))
    assert kept.min() > gone.max() and chosen.share == pytest.approx(0.3, rel=0.01) and not chosen.stuck


def test_a_layer_whose_weights_are_all_smaller_than_others_keeps_some():
    model = network()
    with torch.no_grad():
        model[7].weight *= 1e-3
    chosen = Cutter(model, X, Target(density=0.02)).plan(0.02)
    kept = [keep.double().mean().item() for keep in chosen.keeps]
    assert kept[2] == pytest.approx(0.002, rel=0.1) and chosen.share == pytest.approx(0.02, rel=0.01)
    model[0].weight.requires_grad_(False)
    chosen = Cutter(model, X, Target(density=0.02)).plan(0.02)
    assert "frozen" in chosen.stuck[0] and chosen.share > 0.03


def test_single_weights_of_a_network_that_can_not_be_followed_are_pruned_all_the_same():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), Branch(), nn.Linear(20, 4))
    optimizer = adam(model)
    plan = Plan(model, torch.randn(4, 6), optimizer, Target(density=0.25), 2)
    for _ in range(2):
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        plan.epoch()
    small = plan.finish()
    assert small is not model and count(small)[1].density == pytest.approx(0.25, rel=0.02)
