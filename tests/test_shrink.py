"""Widths chosen by cost and worth, networks cut at once, and times by widths; no time is asserted."""

from __future__ import annotations

import copy
import math
import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deephoyer as dh
from deephoyer import layer_times
from deephoyer.counting import count
from deephoyer.cutting import MOST_LOOKS, Cut, Cutter, search
from deephoyer.lab import recipe
from deephoyer.lab.models import make
from deephoyer.lab.train.run import Run
from deephoyer.latency import Beside, runner
from deephoyer.layer_times import LayerTimes, forget_layer_times, latency_cost
from deephoyer.rules import Scores
from deephoyer.shrink import recalibrate
from deephoyer.structure import Coupled
from deephoyer.targets import Target
from deephoyer.widths import CostTerm, Side, WidthCost, choose, macs_cost, parameters_cost

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Times of layers that tests measure are not kept for the user."""
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layer-times"


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 40),
        nn.ReLU(),
        nn.Linear(40, 5),
    )


@pytest.mark.parametrize("name", ["own", "resnet-20"])
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_what_widths_cost_is_what_compaction_leaves(name, share):
    """Depthwise layers, flattened maps and parameter-free shortcuts included; nothing is corrected here."""
    model, example = (network(), X) if name == "own" else (make(name), torch.zeros(1, 3, 32, 32))
    for target in (Target(macs=share), Target(parameters=share)):
        cutter = Cutter(model, example, target)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        cut = cutter.plan(share)
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        cutter.apply(cut)
        assert cutter.share_of(cutter.compacted()) == pytest.approx(cut.share, rel=1e-3)
        assert cut.share <= 1.02 * share
        model.load_state_dict(before)


def test_the_whole_network_costs_what_is_counted():
    model = network()
    groups = Coupled(model, X)
    total = count(model, X)[1]
    assert macs_cost(X, groups).dense == total.macs_executed
    assert parameters_cost(groups).dense == total.parameters


def two_sets(first, second):
    """A cost that is first · a + second · b for the numbers of channels of two sets."""
    sides = {name: Side(16, 0.0, {name: 1.0}) for name in "ab"}
    terms = [CostTerm((sides["a"],), lambda n: first * n), CostTerm((sides["b"],), lambda n: second * n)]
    return WidthCost("cost", {"a": 16, "b": 16}, terms)


def scores(seed):
    draw = torch.Generator().manual_seed(seed)
    return [Scores([name], torch.rand(16, generator=draw) + 0.01, 1.0) for name in "ab"]


@given(st.integers(0, 1000), st.floats(0.2, 0.95), st.sampled_from([1, 2, 4]), st.booleans())
def test_a_choice_keeps_the_bound_the_multiples_and_the_best_of_each_set(seed, share, multiple, by_cost):
    cost, of = two_sets(1.0, 3.0), scores(seed)
    choice = choose(cost, ["a", "b"], of, share, multiple=multiple, by_cost=by_cost, least=0.25)
    live = [int(keep.sum()) for keep in choice.keeps]
    assert (live[0] + 3 * live[1]) / 64 == pytest.approx(choice.share) and choice.share <= max(1.02 * share, 0.25)
    assert all(n % multiple == 0 and n >= 4 for n in live)
    for keep, s in zip(choice.keeps, of, strict=True):
        if 0 < keep.sum() < 16:
            assert s.score[keep].min() >= s.score[~keep].max()


@given(st.integers(0, 1000))
def test_by_cost_the_dear_set_gives_more(seed):
    cost = two_sets(1.0, 10.0)
    dear = choose(cost, ["a", "b"], scores(seed), 0.5, by_cost=True).live
    plain = choose(cost, ["a", "b"], scores(seed), 0.5).live
    assert dear["b"] <= plain["b"] + 1, "one may come back where it still fits"


def test_a_channel_of_a_dear_set_comes_back_for_several_of_a_cheap_one():
    cost = two_sets(1.0, 10.0)
    dear, cheap = Scores(["b"], torch.arange(16, 0, -1) * 0.1, 1.0), Scores(["a"], torch.arange(16, 0, -1) * 1.0, 1.0)
    choice = choose(cost, ["a", "b"], [cheap, dear], 100 / 176)
    assert choice.share == pytest.approx(100 / 176, rel=0.02)


def of_widths(*widths):
    """A cut that keeps the first so many channels of 64 in each set."""
    return Cut([torch.arange(64) < width for width in widths], math.nan, [])


def widths(cut):
    return [int(keep.sum()) for keep in cut.keeps]


@given(st.floats(0.3, 0.9), st.floats(0.5, 2.0), st.sampled_from([1, 4, 8, 16]))
def test_a_search_ends_near_what_is_asked_whatever_the_estimate_is_off_by(share, off, block):
    """Four sets that are cut in turns, a time that rises by a step for each block of channels."""
    seen = []

    def plan(bound):
        total = round(bound * 256)
        return of_widths(*(max(1, min(64, (total + 3 - i) // 4)) for i in range(4)))

    def real(cut):
        assert widths(cut) not in seen, "nothing is measured twice"
        seen.append(widths(cut))
        return (sum(math.ceil(width / block) * block for width in widths(cut)) / 256) ** off

    found = search(plan, real, share, under=0.1)
    step = block / 256
    assert found.share <= max(1.02 * share, (4 * step) ** off) + 1e-9
    assert found.share >= 0.9 * share or found.share ** (1 / off) >= share ** (1 / off) - step - 1e-9
    assert len(seen) <= MOST_LOOKS


@pytest.mark.parametrize("share", [0.5, 0.45, 0.6])
def test_where_no_bound_lies_between_too_slow_and_far_too_fast_sets_are_taken_one_by_one(share):
    """All sets give at once, at one bound: such a step took a half that was asked for to a quarter."""

    def plan(bound):
        return of_widths(*[64 if bound > 0.37 else 16] * 16)

    found = search(plan, lambda cut: sum(widths(cut)) / 1024, share, under=0.1)
    assert 0.9 * share <= found.share <= 1.02 * share
    assert set(widths(found)) == {16, 64}


def test_a_search_goes_on_past_a_step_of_the_estimate():
    """No cut comes of the next bounds but the one that is known to be too slow."""

    def plan(bound):
        return of_widths(64 if bound > 0.31 else round(100 * bound))

    assert search(plan, lambda cut: widths(cut)[0] / 64, 0.4, under=0.1).share == pytest.approx(0.4, rel=0.1)


def test_a_search_keeps_the_fast_cut_where_there_is_nothing_between():
    def plan(bound):
        return of_widths(64 if bound > 0.4 else 8)

    assert search(plan, lambda cut: widths(cut)[0] / 64, 0.5, under=0.1).share == 0.125


def test_a_search_that_can_not_get_there_hands_back_what_is_nearest():
    assert (
        search(lambda bound: of_widths(max(48, round(64 * bound))), lambda cut: widths(cut)[0] / 64, 0.5).share == 0.75
    )


def test_a_smaller_share_keeps_a_part_of_what_a_larger_one_keeps():
    model = make("resnet-20")
    cutter = Cutter(model, torch.zeros(1, 3, 32, 32), Target(macs=0.5))
    large, small = cutter.plan(0.6), cutter.plan(0.3)
    assert large.kept() > small.kept()
    assert sum(bool((b & ~a).any()) for a, b in zip(large.keeps, small.keeps, strict=True)) <= 2


def test_shrink_leaves_the_model_alone_and_tells_what_it_lost():
    model = network().eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))) for _ in range(3)]
    small = dh.shrink(model, X, Target(macs=0.5), batches)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    share = count(small, X)[1].macs_executed / count(model, X)[1].macs_executed
    report = small.shrink_report
    assert report.reached == pytest.approx(share) and 0.49 <= share <= 0.51
    assert report.recalibrated == 1 and 0 < report.error < 2 and 0 <= report.same <= 1 and report.scores is None
    assert "asked for: 0.5 of the MACs; reached 0." in str(report) and "changed by" in str(report)


@pytest.mark.parametrize(
    ("examples", "batch"),
    [
        (torch.zeros(1, 6), [torch.ones(4, 6), torch.ones(4, 3)]),  # a regression's labels are no whole numbers
        (torch.zeros(1, 6), (torch.ones(4, 6), torch.ones(4), ["a name"] * 4)),
        ({"x": torch.zeros(1, 6)}, {"x": torch.ones(4, 6), "labels": torch.ones(4).long()}),
        ({"x": torch.zeros(1, 6)}, (torch.ones(4, 6), torch.ones(4).long())),
        ((torch.zeros(1, 6), torch.zeros(1).long()), (torch.ones(4, 6), torch.ones(4).long())),
    ],
    ids=["regression", "more than labels", "dict", "named examples", "two inputs"],
)
def test_of_a_batch_the_model_gets_what_the_example_inputs_have(examples, batch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, x, kind=None):
            assert (kind is not None) == (len(examples) == 2)
            return self.b(self.norm(self.a(x)).relu())

    report = dh.shrink(Net(), examples, Target(macs=0.5), [batch]).shrink_report
    assert report.recalibrated == 1 and report.reached == 0.5
    with pytest.raises(dh.UserError, match="can't be run on the first of the batches"):
        dh.shrink(Net(), examples, Target(macs=0.5), [torch.ones(4, 7)])


def test_a_network_that_is_frozen_for_use_is_shrunk_and_stays_frozen():
    model = network().requires_grad_(False)
    small = dh.shrink(model, X, Target(macs=0.5))
    assert small.shrink_report.reached == pytest.approx(0.5, rel=0.03)
    assert not any(p.requires_grad for m in (model, small) for p in m.parameters())


def test_shrink_cuts_only_the_kind_of_group_that_is_given():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(2, 3, 16)
    small = dh.shrink(layer, x, Target(parameters=0.8), groups=dh.Heads(layer, x))
    assert small.linear1.out_features == 32 and small.self_attn.num_heads < 4
    assert "was asked for: at their least width" in str(dh.shrink(layer, x, Target(parameters=0.1)).shrink_report)


def test_shrink_by_nothing_loses_nothing():
    model = network().eval()
    report = dh.shrink(model, X, Target(macs=1.0)).shrink_report
    assert report.error < 1e-5 and report.same == 1.0


def test_shrink_stops_where_the_allowed_drop_is_used_up():
    """The score is the share of the parameters left, so a drop of 0.3 leaves about 0.7 of them."""
    model = network()
    whole = sum(p.numel() for p in model.parameters())
    validate = lambda m: sum(p.numel() for p in m.parameters()) / whole  # noqa: E731
    small = dh.shrink(model, X, Target(parameters=0.2, drop=0.3), validate=validate)
    assert 0.7 <= small.shrink_report.scores[1] <= 0.75
    assert "more was lost than the drop of 0.3" in str(small.shrink_report)
    small = dh.shrink(model, X, Target(parameters=0, drop=0.3), validate=validate)
    assert 0.7 <= small.shrink_report.scores[1] <= 0.75 and "note" not in str(small.shrink_report)
    assert "asked for: as few parameters as possible, losing at most 0.3; reached 0.7" in str(small.shrink_report)
    gone = lambda m: 1.0 if m is model else float("nan")  # noqa: E731
    assert dh.shrink(model, X, Target(parameters=0.2, drop=0.3), validate=gone).shrink_report.reached == 1.0
    with pytest.raises(dh.UserError, match="what validate= gives is None"):
        dh.shrink(model, X, Target(parameters=0.2, drop=0.3), validate=lambda m: None)
    with pytest.raises(dh.UserError, match="needs validate="):
        dh.shrink(model, X, Target(parameters=0.2, drop=0.3))


def test_shrink_can_ask_the_loss_what_channels_are_worth():
    model = network()
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))) for _ in range(2)]
    loss = lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1])  # noqa: E731
    small = dh.shrink(model, X, Target(macs=0.5), batches, score="taylor", loss=loss)
    assert small.shrink_report.reached == pytest.approx(0.5, rel=0.03)


def test_recalibrated_norms_have_the_statistics_of_the_batches():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    model[0].running_mean.fill_(7.0)
    batches = [torch.randn(50, 3) + i for i in range(4)]
    assert recalibrate(model, batches) == 1
    torch.testing.assert_close(model[0].running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    assert not model.training and not model[0].training and model[0].momentum == 0.1


def test_times_between_measured_widths_are_between_theirs():
    table = LayerTimes(nn.Conv2d(16, 32, 3, padding=1), (2, 16, 8, 8))
    corners = [table.at(o, i) for o in (16, 24) for i in (8, 12)]
    assert min(corners) <= table.at(20, 10) <= max(corners)
    assert table.at(0, 16) == 0.0 and table.at(16, 8) == table.at(16, 8), "measured once"


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 16, 3, groups=4), nn.Conv2d(16, 16, 5, groups=16), nn.Conv1d(8, 12, 3, stride=2), nn.Linear(8, 12)],
)
def test_a_narrowed_layer_runs_at_every_measured_width(layer):
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    shape = {2: (4, channels), 3: (4, channels, 20), 4: (4, channels, 20, 20)}[layer.weight.dim()]
    table = LayerTimes(layer, shape)
    out, into = table.whole
    assert all(table.at(out * f, max(1, into * g)) > 0 for f in (0.3, 1.0) for g in (0.3, 1.0))


def test_times_of_layers_are_read_from_disk_until_they_are_forgotten(own_cache):
    def at():
        return LayerTimes(nn.Linear(24, 16), (4, 24)).at(16, 24)

    first = at()
    (file,) = own_cache.iterdir()
    layer_times._KNOWN.clear()  # as in a new process
    assert at() == first
    layer_times._KNOWN.clear()
    file.write_text(file.read_text().replace(str(first), "123.0") + '{"cut off: Lin')
    assert at() == 123.0, "a line that was cut off is passed over"
    forget_layer_times()
    assert not file.exists() and at() < 123.0
    layer_times._KNOWN.clear()
    file.unlink()
    file.mkdir()
    assert at() > 0, "what can't be kept is measured again"


def test_processes_that_write_times_at_once_keep_all_lines(own_cache):
    def write(who):
        for i in range(200):
            layer_times._append(own_cache / "a.jsonl", {f"{who} {i} {'x' * 200}": i + 1.0})

    several = [multiprocessing.get_context("fork").Process(target=write, args=(who,)) for who in "abc"]
    for process in several:
        process.start()
    for process in several:
        process.join()
    times = layer_times._read(own_cache / "a.jsonl")
    assert len(times) == 600 and len((own_cache / "a.jsonl").read_text().splitlines()) == 600


def test_heads_of_torch_attention_have_a_price():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 5, 32)
    groups = Coupled(model, x)
    cost = latency_cost(x, groups, batch=4)
    heads = [one.name for one in groups.sets if one.heads]
    assert len(heads) == 2
    for name in heads:
        assert cost.change(dict(cost.widths), name, -2) < 0


def test_a_layer_that_is_called_twice_costs_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.again(self.again(self.first(x).relu()).relu())

    model = Twice()
    calls = layer_times._calls(model, torch.randn(2, 64), "eager")
    assert {name: seen.count for name, seen in calls.items()} == {"first": 1, "again": 2}


def test_a_network_takes_about_as_long_as_its_copy_and_says_how_sure_that_is():
    model = network().eval()
    share = Beside(model, X, batch=4, seconds=0.2).share(copy.deepcopy(model))
    assert share.value > 0 and share.error >= 0


def test_a_latency_target_cuts_by_measured_times_and_says_what_it_measured():
    model = network().eval()
    groups = Coupled(model, X)
    cost = latency_cost(X, groups, batch=8)
    fewer = {name: width // 2 for name, width in cost.widths.items()}
    assert cost.value(fewer) > 0 and cost.dense > 0  # which of the two is less is a matter of a moment
    small = dh.shrink(model, X, Target(latency=0.8, batch=4))
    assert small.shrink_report.reached > 0 and count(small)[1].parameters < count(model)[1].parameters
    assert small[0].out_channels % 2 == 0 and small[5].out_channels % 4 == 0


def test_a_recipe_may_ask_for_a_share_of_the_time(tmp_path):
    short = ["data={name: mnist, limit: 200}", "device=cpu", "pretrain={epochs: 1}", "regularize.epochs=1"]
    pruned = "prune={groups: coupled, target: {latency: 0.7, batch: 8}}"
    made = recipe.read("demo", [*short, "finetune.epochs=1", pruned])
    run = Run(made, tmp_path).execute()
    alive = [int(mask.any(1).sum()) for name, mask in run.masks.items() if name.startswith("fc") and mask.dim() == 2]
    assert 0 < alive[0] < 300 and alive[0] % 8 == 0
    for change, told in [
        ("prune={groups: elements, target: {latency: 0.7}}", "also set prune.groups=coupled"),
        ("prune.target.latency=0.7", "also set prune.groups=coupled prune.value=null"),
        ("prune={groups: coupled, target: {macs: 0.7, batch: 8}}", "batch is only allowed with latency"),
        ("prune={groups: coupled, target: {macs: 0.7, mode: eager}}", "mode is only allowed with latency"),
        ("prune={groups: coupled, allow_empty: true, target: {latency: 0.7}}", "remove parameters and allow_empty"),
    ]:
        with pytest.raises(dh.UserError, match=told):
            recipe.read("demo", [*short, change])
    with pytest.raises(dh.UserError, match="remove joints"):
        recipe.read("demo", [*short, pruned, "joints=gather"])


def test_a_compiled_or_captured_run_gives_what_the_network_gives():
    model = nn.Linear(3, 2).eval()
    assert torch.equal(runner(model, X[:1, :, 0, 0])(), model(X[:1, :, 0, 0]))
    with pytest.raises(dh.UserError, match="needs the network on a CUDA device"):
        runner(model, X[:1, :, 0, 0], "cuda-graph")
    with pytest.raises(dh.UserError, match="mode of running"):
        runner(model, X[:1, :, 0, 0], "fast")


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["eager", "cuda-graph"])
def test_on_a_gpu_a_latency_target_cuts_in_either_mode(mode):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(), nn.Conv2d(256, 8, 3))
    model = wide.cuda().to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 3, 32, 32, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(runner(model, x, mode)(), model(x))
    small = dh.shrink(model, x, Target(latency=0.6, batch=64, mode=mode, dtype=torch.bfloat16))
    assert count(small)[1].parameters < count(model)[1].parameters and small.shrink_report.reached > 0
    assert small[2].weight.is_contiguous(memory_format=torch.channels_last)
