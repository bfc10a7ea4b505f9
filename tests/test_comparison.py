"""The protocol: which runs it takes, what it chooses, that it goes on where it stopped; and a miniature that runs."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deephoyer as dh
from deephoyer.lab import comparison_protocol, models, recipe
from deephoyer.lab.choices import named
from deephoyer.lab.comparison import ComparedRun, Comparison, Job
from deephoyer.lab.comparison_protocol import Entry
from deephoyer.lab.methods import METHODS
from deephoyer.lab.report import comparison_results, methods_page, printed_results, record, verify
from deephoyer.lab.report.comparison_results import ComparisonResults
from deephoyer.lab.report.significance import holm, sign_flips, verdicts
from deephoyer.lab.schema import ordered

ROOT = Path(__file__).parents[1]


class Simulated(Comparison):
    """A comparison whose outcomes come from a function of the job; nothing is run."""

    def __init__(self, name, held_out, **settings):
        super().__init__(name, **settings)
        self.held_out = held_out

    def outcome(self, job):
        accuracy = self.held_out(job)
        if accuracy is None:
            return None
        return ComparedRun(**dataclasses.asdict(job), share=job.size, held_out=accuracy, accuracy=accuracy, seconds=1.0,
                       command="deephoyer run …", commit=None, device=None)  # fmt: skip

    def failure(self, job):
        return "can't be pruned that far" if self.held_out(job) is None else None


@pytest.mark.parametrize("name", comparison_protocol.names())
def test_every_comparison_gives_all_methods_the_same_epochs_and_as_many_settings(name):
    comparison = Comparison(name)
    large = name.startswith("resnet")  # of which a run takes minutes
    assert len(comparison.protocol.sizes) == 3 and "random" in comparison.methods
    assert (comparison.protocol.choose, comparison.protocol.final) == ((1, 2) if large else (3, 10))
    for method, entry in comparison.methods.items():
        assert len(entry.values) == (3 if large else 8), method
        *before, last = (
            comparison._read(words)
            for words in comparison.chain(Job(method, entry.values[1], 0, comparison.protocol.sizes[0]))
        )
        stages = [getattr(r, stage) for r in (*before, last) for stage in ("pretrain", "regularize", "finetune")]
        assert sum(s.epochs for s in stages if s) == comparison.dense_epochs + comparison.epochs, method
        assert last.prune is not None and all(r.prune is None for r in before)


def test_a_damaged_result_is_told_and_of_a_damaged_failure_the_run_is_needed_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = Comparison("lenet-300-100")
    job = next(comparison.jobs())
    folders = [comparison.folder(words) for words in comparison.chain(job)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "failed.json").write_text('"the lo')
    assert comparison.failure(job) is None and comparison.next().folder == folders[0]
    for folder in folders:
        (folder / "summary.json").write_text('{"format"')
    with pytest.raises(dh.UserError, match=r"summary.json: can't be read"):
        Comparison("lenet-300-100").outcome(job)


@pytest.mark.parametrize("name", comparison_protocol.names())
def test_methods_that_know_the_size_share_nothing_between_sizes(name):
    comparison = Comparison(name)
    for method, entry in comparison.methods.items():
        chosen = comparison._read(
            comparison.chain(Job(method, entry.values[0], 0, comparison.protocol.sizes[0]))[-1]
        ).method
        if chosen is None:
            continue
        method_name, settings = named(chosen)
        knows = METHODS[method_name].knows_size and "keep" not in settings
        assert knows == (entry.each_size or entry.way == "scratch"), method


def test_a_setting_may_be_chosen_at_the_middle_size_for_all_of_them():
    best = {"Group-HS": 0.45, "random": 0.2}  # the last at an end of its grid, which stays as it is
    comparison = Simulated("resnet-56", lambda job: 0.9 if job.value == best[job.method] else 0.8, only=list(best))
    wanted = list(comparison.jobs())
    assert {(job.method, job.value) for job in wanted if job.size != 0.333} == set(best.items())
    assert {job.seed for job in wanted if job.size != 0.333} == {1, 2} and len(wanted) == 2 * (3 + 3 * 2)
    runs, _ = comparison.cost()
    assert len(runs) == 3 + (3 + 3 + 2 + 6) + (3 + 6) and sum(runs.values()) == 240 + 3 * 48 + 2 * 112 + 3 * 48 + 6 * 48


def test_a_trained_network_serves_all_sizes_and_the_dense_one_all_methods():
    comparison = Comparison("lenet-300-100", only=["l1", "Hoyer", "ADMM"])
    chains = {size: comparison.chain(Job("l1", 1e-4, 0, size)) for size in comparison.protocol.sizes}
    assert len({chain[0] for chain in chains.values()}) == len({chain[1] for chain in chains.values()}) == 1
    assert len({chain[2] for chain in chains.values()}) == 3
    assert comparison.chain(Job("Hoyer", 0.01, 0, 0.01))[0] == chains[0.01][0]
    admm = comparison.chain(Job("ADMM", 1e-3, 0, 0.01))
    assert len(admm) == 2 and admm[0] == chains[0.01][0]


@pytest.mark.parametrize("name", comparison_protocol.names())
def test_the_epochs_of_a_plan_are_those_of_the_recipes(name):
    comparison = Comparison(name)
    runs, done = comparison.cost()
    assert not done and comparison.protocol.epochs.regularize == comparison.training_epochs
    for method, entry in comparison.methods.items():
        for words in comparison.chain(Job(method, entry.values[2], 4, comparison.protocol.middle)):
            settings = comparison._read(words)
            stages = [s for s in (settings.pretrain, settings.regularize, settings.finetune) if s]
            if (folder := comparison.folder(words)) in runs:
                assert runs[folder] == sum(s.epochs for s in stages), (method, words)


def test_words_of_ones_own_stand_above_a_comparisons_epochs():
    comparison = Comparison("lenet-300-100", ["regularize.epochs=3"])
    assert "regularize.epochs=3" in comparison.overrides
    assert [w for w in comparison.overrides if w.startswith("regularize.epochs")] == ["regularize.epochs=3"]
    assert comparison.training_epochs == 3 and comparison.dense_epochs == comparison.protocol.epochs.pretrain


def test_the_middle_size_comes_first_with_the_fresh_seeds_of_all_methods():
    comparison = Simulated("lenet-300-100", lambda job: 0.9 - abs(job.value - 1e-4), only=["l1", "Hoyer-Square"])
    jobs = list(comparison.jobs())
    place = [comparison.sizes.index(job.size) for job in jobs]
    assert place == sorted(place) and jobs[0].size == 0.0173
    first = [job for job in jobs if job.size == 0.0173]
    assert {job.method for job in first if job.seed >= 3} == {"l1", "Hoyer-Square"}


def test_while_all_wait_the_networks_are_trained_that_the_fresh_seeds_start_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = Comparison("lenet-300-100", only=["l1"])
    started = [comparison.next() for _ in range(14)]
    assert started[-1] is None
    assert [m.overrides[-1] for m in started[:-1]] == [f"seed={seed}" for seed in range(13)]
    assert all("regularize=null" in m.overrides for m in started[:-1])


def test_no_dense_networks_are_trained_for_methods_that_start_from_scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = Comparison("lenet-300-100", only=["SNIP"])
    started = list(iter(comparison.next, None))
    assert len(started) == 3 * 8 * 3 and all("method=snip" in member.overrides for member in started)


def test_no_dense_networks_are_trained_for_seeds_whose_results_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Simulated("lenet-300-100", lambda job: 0.9 - abs(job.value - 1e-4), only=["l1"]).content()
    comparison = Comparison("lenet-300-100", only=["l1"])
    assert comparison.recall(kept) and comparison.next() is None
    comparison.run_again(comparison.jobs_to_publish())
    assert [member.name for member in iter(comparison.next, None)] == ["dense, seed 3"]


def test_what_cannot_be_pruned_is_not_tried_again_and_what_failed_otherwise_is(tmp_path, monkeypatch):
    """Data that are missing and a disk that is full are exit status 2, too."""
    monkeypatch.chdir(tmp_path)
    first = Comparison("lenet-300-100", only=["random"])
    for status, said in ((2, "prune.target: out of reach"), (1, "CUDA error"), (2, "data mnist: is not there")):
        member = first.next()
        member.folder.mkdir(parents=True)
        (member.folder / "log.txt").write_text(said)
        if said.startswith("prune"):
            (member.folder / "failed.json").write_text(json.dumps(said))  # by the run itself
        member.status = status
        first.ended(member)
        assert first.failure(Job("random", first.methods["random"].values[0], int(member.overrides[-1][-1]), 0.01))
    again = Comparison("lenet-300-100", only=["random"])
    seeds = {job.seed: again.failure(job) for job in again.jobs()}
    assert seeds == {0: "prune.target: out of reach", 1: None, 2: None}
    assert again.next().overrides[-1] == "seed=1"


def test_after_its_minutes_a_comparison_starts_no_more_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Comparison("lenet-300-100", minutes=5).next() is not None
    over = Comparison("lenet-300-100", minutes=0)
    assert over.next() is None and not over.open()
    assert over.content()["outcomes"] == []


def test_the_setting_with_the_best_mean_on_held_out_images_is_chosen_for_each_size():
    best = {0.03: 1e-4, 0.0173: 2e-4, 0.01: 4e-4}
    comparison = Simulated(
        "lenet-300-100", lambda job: 0.9 - abs(job.value - best[job.size]) - 1e-4 * job.seed, only=["l1"]
    )
    assert {size: comparison.chosen("l1", size) for size in best} == best
    final = [job for job in comparison.jobs() if job.seed >= 3]
    assert {job.seed for job in final} == set(range(3, 13)) and len(final) == 30


def test_of_settings_with_equal_accuracies_the_first_is_chosen_also_after_they_were_rounded():
    right = {5e-5: (5800, 5801, 5815), 1e-4: (5801, 5814, 5801), 2e-4: (5815, 5800, 5801)}  # of 6,000 images

    def chosen(digits):
        def held_out(job):
            return round(right.get(job.value, (5700,) * 3)[job.seed] / 6000, digits) if job.seed < 3 else 0.9

        return Simulated("lenet-300-100", held_out, only=["l1"]).chosen("l1", 0.0173)

    assert {chosen(digits) for digits in range(7, 17)} == {5e-5}


def test_a_grid_whose_best_lies_at_its_end_goes_on_there():
    rising = Simulated("lenet-300-100", lambda job: min(0.9, job.value), only=["l1"])
    assert rising.values("l1", 0.01)[-4:] == [1.6e-3, 3.2e-3, 6.4e-3, 1.3e-2]
    falling = Simulated("lenet-300-100", lambda job: 0.9 - job.value, only=["l1"])
    assert falling.values("l1", 0.01)[:2] == pytest.approx([1.6e-6, 3.1e-6], rel=0.05)
    inside = Simulated("lenet-300-100", lambda job: 0.9 - abs(job.value - 1e-4), only=["l1"])
    assert inside.values("l1", 0.01) == list(inside.methods["l1"].values)


def test_the_page_says_which_setting_is_still_at_the_end_of_its_grid_and_which_better_ones_came_too_late():
    def results(held_out, only, name="lenet-300-100"):
        comparison = Simulated(name, held_out, only=only)
        return ComparisonResults(comparison.protocol, comparison.content())

    falling = results(lambda job: 0.9 - job.value, ["l1"])
    assert falling.is_at_an_open_end("l1", 0.01)
    table = methods_page._table(falling, 0.01)
    assert " § |" in table and "after 3 extensions" in table
    assert "Better settings of l1 were run" in methods_page._losses_by_setting(
        results(lambda job: 0.9 - 1000 * job.value, ["l1"])
    )
    rising = results(lambda job: min(0.9, job.value), ["Hoyer", "network surgery"])
    assert [rising.is_at_an_open_end(m, 0.01) for m in ("Hoyer", "network surgery")] == [True, False]
    inside = results(lambda job: 0.9 - abs(job.value - 8e-4), ["l1"])  # one extension was enough
    limited = results(lambda job: job.value / 10, ["gradual magnitude"])  # a share ends at 1
    for one, method in ((inside, "l1"), (limited, "gradual magnitude")):
        assert not one.is_at_an_open_end(method, 0.01) and "§" not in methods_page._table(one, 0.01)
    assert "Better settings" not in methods_page._losses_by_setting(inside)
    never = results(lambda job: job.value, ["random"], "resnet-56")  # whose grids are not extended
    assert never.is_at_an_open_end("random", 0.333) and "after no extension" in methods_page._table(never, 0.5)


def test_a_grid_stops_where_its_values_have_an_end():
    entry = Entry(vary="method={name: fpgm, keep: VALUE}", values=(0.25, 0.5, 1.0), most=1)
    assert entry.beyond(entry.values, -1) is None and entry.beyond(entry.values, 0) == 0.12
    steps = Entry(vary="x=VALUE", values=(1, 2, 3))
    assert steps.beyond(steps.values, 0) is None and steps.beyond(steps.values, -1) == 4


def test_settings_that_fail_are_passed_over_and_a_method_without_any_has_no_choice():
    comparison = Simulated("lenet-300-100", lambda job: None if job.value < 1e-3 else 0.9 - job.value, only=["l1"])
    assert comparison.chosen("l1", 0.01) == 1.6e-3
    assert Simulated("lenet-300-100", lambda job: None, only=["l1"]).chosen("l1", 0.01) is None


def test_a_penaltys_strengths_reach_a_decade_to_both_sides_of_its_best_and_choose_nothing():
    comparison = Simulated(
        "lenet-300-100", lambda job: 0.9 - abs(math.log10(job.value / 8e-4)) / 100, only=["l1", "SNIP"]
    )
    assert comparison.chosen("l1", 0.0173) == 8e-4
    assert comparison.strengths_near_best("l1") == [1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3]
    assert comparison.strengths_near_best("SNIP") == []
    assert comparison.values("l1", 0.0173) == list(comparison.methods["l1"].values)
    more = [job for job in comparison.jobs() if job.value > 1.6e-3 and job.method == "l1"]
    assert {(job.value, job.size) for job in more} == {(3.2e-3, 0.0173), (6.4e-3, 0.0173)}
    content = comparison.content()
    assert len(content["outcomes"]) == len(
        {(o["method"], o["value"], o["seed"], o["size"]) for o in content["outcomes"]}
    )


def test_what_a_strength_costs_that_is_off_is_told_and_drawn_from_the_runs_that_chose(tmp_path, monkeypatch):
    """A flat penalty and a steep one, each with its own best."""
    best, slope = {"l1": 4e-4, "Hoyer-Square": 2e-4}, {"l1": 2.0, "Hoyer-Square": 0.1}

    def held_out(job):
        off = abs(math.log2(job.value / best[job.method]))
        return None if job.method == "l1" and off > 2.5 else 0.98 - slope[job.method] * off / 100 + job.seed * 1e-4

    comparison = Simulated("lenet-300-100", held_out, only=list(best))
    results = ComparisonResults(comparison.protocol, comparison.content())
    lost = {method: results.losses_near_best(method) for method in best}
    assert list(lost["Hoyer-Square"]) == pytest.approx([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8])
    assert [sum(s) / len(s) for s in lost["Hoyer-Square"].values()] == pytest.approx([0.3, 0.2, 0.1, 0, 0.1, 0.2, 0.3])
    assert list(lost["l1"]) == pytest.approx([1 / 4, 1 / 2, 1, 2, 4])
    table = methods_page._losses_near_best(results).splitlines()
    assert "| l1 | 0.0004 | 2.40 | 4.00 | 4.00 | 0.25 to 4 | 2 |" in table  # an eighth and eight times
    assert "| Hoyer-Square | 0.0002 | 0.17 | 0.30 | 0.30 | 0.12 to 8 | 0 |" in table
    from deephoyer.lab.report.figures.methods import losses_near_best

    axes = losses_near_best("two penalties", lost).axes[0]
    assert [line.get_label() for line in axes.get_lines()][:2] == list(best)
    assert list(axes.get_lines()[1].get_ydata()) == pytest.approx([-0.3, -0.2, -0.1, 0, -0.1, -0.2, -0.3])


@given(st.lists(st.tuples(*[st.integers(9800, 9810)] * 2), min_size=1, max_size=8))
def test_the_paired_test_counts_all_ways_of_flipping_signs_and_every_tie(correct):
    """Of 10,000 test images; in whole numbers nothing is rounded."""
    whole = [a - b for a, b in correct]
    flips = itertools.product((1, -1), repeat=len(whole))
    every = [abs(sum(s * d for s, d in zip(signs, whole, strict=True))) for signs in flips]
    p = sum(e >= abs(sum(whole)) for e in every) / len(every)
    assert sign_flips([a / 10_000 - b / 10_000 for a, b in correct]) == p == sign_flips(whole)


def test_ties_among_accuracies_are_not_broken_by_rounding():
    a, b = [0.9825, 0.9815, 0.9824, 0.9817], [0.9821, 0.982, 0.9819, 0.982]
    whole = [round(1e4 * x) - round(1e4 * y) for x, y in zip(a, b, strict=True)]
    assert sign_flips([x - y for x, y in zip(a, b, strict=True)]) == sign_flips(whole) == 1.0


def test_ten_seeds_that_all_agree_are_as_sure_as_it_gets():
    assert sign_flips([0.1] * 10) == 2 / 1024
    assert holm({"a": 0.01, "b": 0.03, "c": 0.02}) == pytest.approx({"a": 0.03, "c": 0.04, "b": 0.04})


def by_seed(accuracies):
    return dict(enumerate(accuracies, 3))


def test_a_winner_is_called_only_where_it_is_told_from_every_other():
    a = [0.98 + 0.001 * (i % 3) for i in range(10)]
    clear = verdicts({"a": by_seed(a), "b": by_seed([x - 0.01 for x in a]), "none": {}})
    assert clear["a"] == "**best**" and clear["b"].startswith("p = 0.00")
    mixed = [x + (-1) ** i * 0.001 - 1e-5 for i, x in enumerate(a)]
    close = verdicts({"a": by_seed(a), "b": by_seed(mixed)})
    assert close["a"] == "highest mean" and "not significant" in close["b"]


def test_a_method_that_lacks_a_seed_is_not_judged_by_those_that_are_left():
    a = [0.98 + 0.001 * (i % 3) for i in range(10)]
    lower, lucky = [x - 0.01 for x in a], [x + 0.01 for x in a[:9]]
    judged = verdicts({"a": by_seed(a), "b": by_seed(lower), "c": by_seed(lucky)})
    assert judged["a"] == "highest mean" and judged["b"].startswith("p = 0.00") and judged["c"] == "seeds are missing"
    assert verdicts({"a": by_seed(a), "c": by_seed(lucky)}) == {"c": "seeds are missing"}


def test_a_slip_in_a_comparison_is_told_before_anything_runs(tmp_path, monkeypatch):
    with pytest.raises(dh.UserError, match=r"'lenet-300' is not a comparison\. Did you mean 'lenet-300-100'"):
        Comparison("lenet-300")
    with pytest.raises(dh.UserError, match="'l2' is not a method of this comparison"):
        Comparison("lenet-300-100", only=["l2"])
    with pytest.raises(dh.UserError, match=r"modle.*is not a key"):
        Comparison("lenet-300-100", ["modle=lenet-5"])
    file = tmp_path / "mine.yaml"
    file.write_text("about: x\nbase: demo\ntarget: live\nsizes: [0.1]\nmethods: {a: {vary: seed=1, values: [1, 2]}}")
    with pytest.raises(dh.UserError, match="has no VALUE in it"):
        Comparison(str(file))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("methods:", "metods:"), "'metods' is not a key. Did you mean 'methods'?"),
        (("{pretrain: 1", "{pretrane: 1"), "epochs: 'pretrane' is not a key. Did you mean 'pretrain'?"),
        (("target: live", ""), "target: is missing."),
        (("target: live", "target: mac"), "target: Input should be 'live' or 'macs'; it is 'mac'."),
        (("base: demo", "base: nix"), "'nix' is not a recipe"),
        (("seed=VALUE", "sead=VALUE"), "methods.a: recipe demo: 'sead' is not a key"),
        (("sizes: [0.1]", "sizes: [0.1"), "not valid YAML: line"),
        (None, "has no keys; it needs about, base, target, sizes, methods."),
    ],
)
def test_a_mistake_in_a_comparisons_file_is_told_in_a_line_with_its_place(tmp_path, change, told):
    text = """about: x
base: demo
epochs: {pretrain: 1}
target: live
sizes: [0.1]
methods: {a: {vary: seed=VALUE, values: [1, 2]}}"""
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(*change) if change else "")
    with pytest.raises(dh.UserError) as why:
        Comparison(str(file))
    assert str(why.value).startswith(f"comparison {file}: {told}") and len(str(why.value).splitlines()) == 1


@pytest.mark.parametrize("base", ["demo", "paper/lenet-5-structure", "own.yaml"])
@pytest.mark.parametrize("target", ["live", "macs"])
def test_a_comparison_prunes_to_its_sizes_whatever_value_its_recipe_prunes_by(base, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = recipe.text_of("demo").replace(
        "prune:      {rule: std-ratio, value: 0.1}", "prune: {rule: effective, value: 1}"
    )
    Path("own.yaml").write_text(own)
    text = MINIATURE.replace("compare/lenet-300-100", base).replace("target: live", f"target: {target}")
    Path("mine.yaml").write_text(text + "words: [epoch_selection=held-out]")
    comparison = Comparison("mine.yaml")
    for method, entry in comparison.methods.items():
        chain = [comparison._read(words) for words in comparison.chain(Job(method, entry.values[0], 0, 0.1))]
        assert getattr(chain[-1].prune.target, target) == 0.1 and chain[-1].prune.value is None
        assert all(run.prune is None for run in chain[:-1])
        for run, words in zip(chain[1:], comparison.chain(Job(method, entry.values[0], 0, 0.1)), strict=False):
            assert recipe.Command.parse(run.start).read().digest() == comparison._read(words).digest()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("demo", "small/lenet-5"), r"words: \[distill=null\]"),
        (("demo", "parts/lenet-5-teacher"), "it has no regularize and no prune and no finetune"),
        (("demo", "demo\nwords: [finetune=null]"), "finetune was taken out"),
        (("demo", "demo\nwords: [prune.rule=density]"), "'density' is not a rule that a target can use"),
        (("demo", "demo\nwords: ['prune.rule={name: effective, value: 1}']"), r"\(prune.rule=effective\)"),
        (("[0.1]", "[10]"), r"sizes: \[10.0\] must be different shares"),
        (("[0.1]", "[0.1, 0.1]"), "must be different shares"),
        (("[0.1]", "[0.1]\nfinal: 30"), "final: .* equal to 20; it is 30"),
    ],
)
def test_what_can_not_be_compared_is_told_with_what_to_change_before_anything_runs(tmp_path, change, told):
    text = "about: x\nbase: demo\ntarget: live\nsizes: [0.1]\nmethods: {a: {vary: finetune.lr=VALUE, values: [1, 2]}}"
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(*change))
    with pytest.raises(dh.UserError, match=told) as why:
        Comparison(str(file))
    assert len(str(why.value).splitlines()) == 1


def test_overrides_in_order_mean_what_they_meant():
    words = ["data.path=a", "data=folder", "data.path=b", "data.size=32", "seed=2", "seed=1", "model.width=3"]
    in_order = recipe.Command.parse(ordered(" ".join(["demo", *words]))).overrides
    assert sorted(in_order) == sorted(words) and ordered(" ".join(["demo", *in_order])) == " ".join(["demo", *in_order])
    assert recipe.choices(in_order) == recipe.choices(words)
    cut = ["finetune.epochs=3", "finetune=null", "prune=null", "regularize=null", "data.path=b", "data=mnist"]
    assert recipe.Command("demo", tuple(cut)).read() == recipe.Command.parse(ordered(" ".join(["demo", *cut]))).read()


def test_a_recipe_of_ones_own_that_was_changed_has_other_runs_and_no_old_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINIATURE.replace("compare/lenet-300-100", "own.yaml"))
    before = recipe.text_of("demo")
    Path("own.yaml").write_text(before)
    first = Comparison("mine.yaml")
    job = Job("l1", 0.001, 0, 0.1)
    content = first.content()
    Path("own.yaml").write_text("# the same\n" + before)
    assert Comparison("mine.yaml").result_folder(job) == first.result_folder(job)
    assert Comparison("mine.yaml").has_settings_of(content)
    comparison_results.write(Comparison("mine.yaml"))
    Path("own.yaml").write_text(before.replace("batch_size: 100", "batch_size: 50"))
    assert Comparison("mine.yaml").result_folder(job) != first.result_folder(job)
    assert not Comparison("mine.yaml").has_settings_of(content)
    with pytest.raises(dh.UserError, match=r"what own\.yaml was before it was changed"):
        comparison_results.refuse_another(Comparison("mine.yaml"))


def test_a_method_with_epochs_of_its_own_or_chosen_on_test_images_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    for words, why in (("regularize.epochs=7", "ADMM trains for"), ("epoch_selection=test-best", "held-out images")):
        file.write_text(MINIATURE.replace("words: [regularize.strength=0]", f"words: [regularize.strength=0, {words}]"))
        with pytest.raises(dh.UserError, match=why):
            Comparison(str(file))
    with pytest.raises(dh.UserError, match="epoch_selection=held-out, not last"):
        Comparison("lenet-300-100", ["epoch_selection=last"])


MINIATURE = """
about: a miniature
base: compare/lenet-300-100
target: live
sizes: [0.1]
choose: 1
final: 1
methods:
  l1: {words: [regularize.penalty=l1], vary: regularize.strength=VALUE, values: [0.0001, 0.001],
       least: 0.0001, most: 0.001}
  ADMM: {words: [regularize.strength=0], vary: "method={name: admm, every: 1, rho: VALUE}", values: [0.001, 0.01],
         each_size: true, least: 0.001, most: 0.01}
  SNIP: {words: [method=snip, prune.rule=absolute], vary: pretrain.lr=VALUE, values: [0.001, 0.003], way: scratch,
         least: 0.001, most: 0.003}
  random: {words: [method=random], vary: finetune.lr=VALUE, values: [0.001, 0.003], way: cut, least: 0.001, most: 0.003}
"""
TINY = [
    "model=small",
    "data={name: mnist, limit: 300}",
    "device=cpu",
    "pretrain.epochs=1",
    "regularize.epochs=1",
    "finetune.epochs=1",
]


def test_a_comparison_runs_to_its_end_goes_on_after_a_stop_and_writes_its_page(command, tmp_path, monkeypatch):
    """All four ways through the real queue; runs take place in this process, as starting Python would cost more."""
    from deephoyer.lab.train.result import finish
    from deephoyer.lab.train.run import Run

    def small():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.ReLU(), nn.Linear(12, 10))

    monkeypatch.setitem(models.MODELS._makers, "small", small)
    monkeypatch.setitem(models._INPUT_SHAPES, "small", (1, 28, 28))
    monkeypatch.setattr("deephoyer.lab.train.result.BATCHES", (1,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINIATURE)

    def run_children(begin, queue, jobs, devices, show=None, mps=True, say=print, most=None, timed=False):
        count, kept = 0, []  # the data of a run that is kept is not read again for the next
        while queue.open() and count != most:
            member = queue.next()
            base, *words = (*begin, *member.overrides)
            kept.append(Run(recipe.read(base, words), member.folder, command=recipe.Command(base, tuple(words))))
            finish(kept[-1].execute())
            member.status = 0
            queue.ended(member)
            count += 1

    stopped = Comparison("mine.yaml", TINY)
    run_children(["compare/lenet-300-100", *TINY], stopped, 1, [], most=5)
    before = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/summary.json")}
    assert len(before) == 5

    monkeypatch.setattr("deephoyer.lab.sweep.run_queue", run_children)
    code, said, error = command("compare", "mine.yaml", *TINY, "--plan")
    assert code == 0 and said.startswith("5 of ") and "epochs are left" in said, error
    code, said, error = command("compare", "mine.yaml", *TINY, "--write")
    assert code == 0, error
    assert all(path.stat().st_mtime_ns == moment for path, moment in before.items())

    page = Path("docs/methods-mine.md").read_text()
    assert page.startswith("# a miniature\n") and "`deephoyer compare mine.yaml model=small " in page
    assert all(f"| {method} | `" in page for method in stopped.methods) and not Path("docs/methods.md").exists()

    whole = Path("results/methods/mine.json").read_text()
    code, said, error = command("compare", "mine.yaml", *TINY, "--only", "l1", "--write")
    assert code == 0 and Path("results/methods/mine.json").read_text() == whole, "the other methods stay in it"

    shutil.rmtree("runs")
    code, said, error = command("compare", "mine.yaml", *TINY, "--write")
    assert code == 0 and "12 results are in results/methods already" in said and not Path("runs").exists(), error
    assert Path("results/methods/mine.json").read_text() == whole, "what was kept is not run again"
    code, _, error = command("compare", "mine.yaml", *TINY, "finetune.epochs=2", "--write")
    assert code == 2 and "has the results of other settings" in error and "finetune.epochs=1" in error
    code, said, _ = command("compare", "mine.yaml", *TINY, "finetune.epochs=2", "--plan")
    assert code == 0 and said.startswith("0 of "), "nor is it taken for results of other epochs"

    content = comparison_results.read_content(Path("results/methods/mine.json"))
    assert len(content["chosen"]) == 4 and not content["failed"]
    finals = [o for o in content["outcomes"] if o["seed"] >= 1]
    assert len(finals) == 4 and all(o["commit"] is None or len(o["commit"]) == 12 for o in finals)
    assert all(o["share"] <= o["size"] * 1.001 for o in finals if o["method"] != "l1")
    assert record.find(Path("results")) == []  # a comparison is no record
    results = ComparisonResults(comparison_protocol.read("mine.yaml"), content)
    table = methods_page._table(results, 0.1)
    assert table.count("`") == 8 and "regularize.strength=" in table and methods_page.NOT_RUN not in table
    assert "How much the setting matters" in methods_page._losses_by_setting(results)
    assert command("compare", "all")[0] == 0 and "Not run yet" in Path("docs/methods.md").read_text()
    last = recipe.Command.parse(finals[0]["command"].removeprefix("deephoyer run ")).read()
    assert last.start and last.pretrain is None

    code, said, error = command("compare", "mine.yaml", *TINY, "--only", "random", "--publish")
    assert code == 0 and said.count("published ") == 1, "for its record a run that was kept takes place again"
    (published,) = record.read_all(Path("results"))
    assert (published.row, published.seed, published.tags) == ("random", 1, (comparison_results.TAG,))
    accuracy = next(o["accuracy"] for o in finals if o["method"] == "random")
    assert published.measured.accuracy == pytest.approx(accuracy) and not verify.check(Path(published.path)).differences
    assert len(comparison_results.read_content(Path("results/methods/mine.json"))["outcomes"]) == len(
        content["outcomes"]
    )
    code, said, error = command("compare", "mine.yaml", *TINY, "--only", "random", "--publish")
    assert code == 0 and "published " not in said, "a run is published once"


def test_records_of_comparisons_are_runs_of_their_tables():
    """A table's number and the record of the same run must not differ."""
    records = [r for r in record.read_all(ROOT / "results") if comparison_results.TAG in r.tags]
    for name in comparison_protocol.names():
        protocol = comparison_protocol.read(name)
        results = comparison_results.read(name, protocol, ROOT / "results" / "methods")
        for published in records:
            if published.base == protocol.base:
                finals = results.finals(published.row, protocol.middle)
                (run,) = (run for run in finals if run.seed == published.seed)
                assert run.command.split() == published.command.split()
                assert run.accuracy == next(reversed(published.accuracy.values()))


def test_results_of_one_protocol_do_not_replace_those_of_another(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deephoyer.lab.sweep.run_queue", lambda *_, **__: pytest.fail("told before anything runs"))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "mine.yaml").write_text(MINIATURE)
    (tmp_path / "b" / "mine.yaml").write_text(MINIATURE.replace("sizes: [0.1]", "sizes: [0.2]"))
    (tmp_path / "a" / "lenet-5.yaml").write_text(MINIATURE)
    comparison_results.write(Comparison("lenet-5"))
    kept = comparison_results.write(Comparison("a/mine.yaml")).read_text()
    code, _, error = command("compare", "a/lenet-5.yaml", "--write")
    assert code == 2 and "'lenet-5' that comes with deephoyer" in " ".join(error.split())
    code, _, error = command("compare", "b/mine.yaml", "--write")
    assert code == 2 and "mine.json has the results of another protocol than b/mine.yaml" in " ".join(error.split())
    assert Path("results/methods/mine.json").read_text() == kept
    retitled = MINIATURE.replace("a miniature", "the same under another title").replace(
        "choose: 1\n", "choose: 1 # so\n"
    )
    (tmp_path / "b" / "mine.yaml").write_text(retitled)
    comparison_results.write(Comparison("b/mine.yaml"))


def test_a_method_that_is_added_or_changed_leaves_the_results_of_the_others(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deephoyer.lab.sweep.run_queue", lambda *_, **__: None)
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINIATURE)
    kept = comparison_results.write(Simulated("mine.yaml", lambda job: 0.8))
    outcomes = len(comparison_results.read_content(kept)["outcomes"])
    added = "  one cut: {vary: finetune.lr=VALUE, values: [0.001, 0.003], way: cut}\n"
    mine.write_text(MINIATURE.replace("rho: VALUE", "keep: 0.1, rho: VALUE") + added)
    code, said, error = command("compare", "mine.yaml", "--write")
    assert code == 0 and f"{outcomes * 3 // 4} results are in results/methods already" in said, error
    assert {o["method"] for o in comparison_results.read_content(kept)["outcomes"]} == {"l1", "SNIP", "random"}
    mine.write_text(MINIATURE)
    code, _, error = command("compare", "mine.yaml", "--write")
    assert code == 2 and "the results of another protocol" in error, "those of a method that is not there any more stay"


def test_results_of_another_protocol_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = Simulated("lenet-300-100", lambda job: 0.8, only=["l1", "random"])
    path = comparison_results.write(comparison)
    assert "80.00" in methods_page.page()
    path.write_text(path.read_text().replace(comparison.protocol.digest(), "somebody's own"))
    assert "| l1 |" not in methods_page.page()


def test_the_page_of_methods_is_made_from_what_is_kept():
    page = methods_page.page(ROOT / "results" / "methods", ROOT / "docs" / "figures")
    assert page == (ROOT / "docs" / "methods.md").read_text(encoding="utf-8"), "stale: run `deephoyer compare all`"
    assert len(re.findall(r"`deephoyer compare ", page)) == len(comparison_protocol.names())


def test_a_comparison_without_results_is_one_sentence(tmp_path):
    text = methods_page._planned("lenet-5", comparison_protocol.read("lenet-5"))
    assert "iterative magnitude; gradual magnitude; ADMM" in text and "at 1.63, 0.81 and 0.5 % of the weights" in text
    assert "10 epochs of regularize, 6 epochs of finetune and `finetune.lr=4e-3`" in text
    assert "| method |" not in methods_page.page(tmp_path / "methods")


def test_every_row_by_printed_results_can_be_run_and_is_judged_from_its_records():
    for result in (*printed_results.PAPER, *printed_results.METHODS):
        recipe.Command.parse(result.words).read()
    assert len({result.words for result in printed_results.PAPER}) == 16
    result = printed_results.PAPER[4]
    assert result.title == "LeNet-300-100, Hoyer-Square, by the appendix"
    assert printed_results.verdict(result, 98.36, 4500) == "reproduced"
    assert printed_results.verdict(result, 98.1, 9200) == "0.30 points less, 2.00 times as large"
    assert printed_results.table([result], []) == []
    listed = methods_page._repeated([result], [])
    assert listed.endswith(f"- {result.title} (4,600 at 98.4 %): `paper/lenet-300-100`")


def test_a_run_is_called_by_its_method_setting_size_and_seed():
    comparison = Comparison("lenet-300-100", only=["l1"])
    job = next(iter(comparison.jobs()))
    titles = [comparison._title(job, words) for words in comparison.chain(job)]
    assert titles == ["dense, seed 0", "l1, 1.25e-05, trained, seed 0", "l1, 1.25e-05, 1.73 %, seed 0"]
    assert comparison.next().title == titles[0]
