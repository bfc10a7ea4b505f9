"""Records of real (tiny) runs: published, verified, tampered with; tables and figures made from them."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from deephoyer import UserError, summary
from deephoyer.export import load, save
from deephoyer.lab import models, recipe
from deephoyer.lab.report import figures, publish, record, rows, verify
from deephoyer.lab.report.measure import build
from deephoyer.lab.report.origin import origin, settings
from deephoyer.lab.report.page import page
from deephoyer.lab.report.tables import table
from deephoyer.lab.report.timing import timings
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run

TINY = ["data={name: mnist, limit: 600}", "device=cpu", "batch_size=50", "prune={rule: density, value: 0.05}"]
EPOCHS = ["pretrain.epochs=2", "regularize.epochs=2", "finetune.epochs=2"]


def run(name, folder, *changes):
    job = Run(recipe.read(name, [*TINY, *EPOCHS, *changes]), folder).execute()
    finish(job)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs: three of one method, two of another network."""
    place = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        run("lenet-300-100-hs", place / f"hs{seed}", f"seed={seed}")
    run("lenet-300-100-hs", place / "hs-held-out", "select=held-out")
    # A convolution takes its time over 10,000 test images: as few looks at them as can be.
    once = ["pretrain.epochs=1", "regularize.epochs=1", "finetune.epochs=1"]
    run("lenet-5-group-hs", place / "group-hs", "select=held-out", "channels_last=true", *once)
    return place


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory):
    place = tmp_path_factory.mktemp("results")
    for folder in sorted(runs.iterdir()):
        publish.publish(folder, place / folder.name, row="ours" if folder.name.startswith("hs") else None)
    return place


@pytest.fixture
def results(published, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(published, tmp_path / "results")
    return tmp_path / "results"


def edit(folder, *path, to):
    content = json.loads((folder / "record.json").read_text())
    *outer, last = path
    place = content
    for key in outer:
        place = place[key]
    place[last] = to
    (folder / "record.json").write_text(json.dumps(content))


# Publishing


def test_a_record_is_small_and_holds_what_the_run_came_to(runs, published):
    made = record.read(published / "hs1")
    summary = json.loads((runs / "hs1" / "summary.json").read_text())
    assert made.measured.total.nonzeros == summary["sparse"]["total"]["nonzeros"]
    assert made.measured.structure == summary["sparse"]["structure"]
    assert made.measured.right == pytest.approx(10_000 * summary["accuracy"]["finetuned"], abs=2)
    assert made.protocol == "test-best" and made.seed == 1 and made.selected == summary["selected"]
    assert made.environment["device"] == "cpu"
    assert (published / "hs1" / "record.json").stat().st_size < 12_000
    assert (published / "hs1" / "weights.safetensors").stat().st_size < 120_000


def test_the_command_of_a_record_gives_the_settings_of_the_run(runs, published):
    for folder in published.iterdir():
        verb, action, name, *overrides = shlex.split(record.read(folder).command)
        assert (verb, action) == ("deephoyer", "run")
        theirs = recipe.parse((runs / folder.name / "recipe.yaml").read_text(), "the run's")
        assert settings(recipe.read(name, overrides)) == settings(theirs)


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_is_its_own_origin(name):
    base, overrides = origin(recipe.read(name, ["seed=7"]))
    assert (base, overrides) == (name, ["seed=7"])


@pytest.mark.parametrize(
    "changes",
    [
        ["regularize.warmup={kind: cosine, epochs: 2}", "regularize.schedule=cosine"],
        ["regularize.schedule=step", "regularize.milestones=[2, 5]"],
        ["regularize.penalty={name: transformed-l1, a: 2.0}", "regularize.strength=1e-5"],
        ["regularize.groups=filters+channels", "regularize.strength={filters: 1e-3, channels: 2e-3}"],
        ["prune.rule=per-layer", "prune.value=null", "prune.rules={fc1: {rule: absolute, value: 1e-4}}"],
        ["data={name: mnist, normalize: true}", "regularize.select=[fc1.weight, 'fc2*']"],
    ],
)
def test_any_settings_can_be_said_as_a_recipe_and_overrides(changes):
    wanted = recipe.read("lenet-300-100-hs", changes)
    name, overrides = origin(wanted)
    assert settings(recipe.read(name, overrides)) == settings(wanted)


def test_thinned_metrics_keep_both_ends_and_the_selected_epoch():
    stages = ("pretrain", "regularize", "finetune")
    lines = [{"stage": stage, "epoch": epoch, "loss": 1 / 3} for stage in stages for epoch in range(1, 251)]
    kept = publish.thin(lines, {"pretrain": 17, "finetune": 101})
    assert len(kept) <= 40
    have = {(line["stage"], line["epoch"]) for line in kept}
    assert have >= {("pretrain", 1), ("pretrain", 17), ("pretrain", 250), ("regularize", 250), ("finetune", 101)}
    assert publish.thin(lines[:3], {}) == [{**line, "loss": 0.33333} for line in lines[:3]]


def test_what_is_not_a_finished_run_is_refused(runs, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        publish.publish(tmp_path / "nowhere", tmp_path / "results")
    cut = shutil.copytree(runs / "hs0", tmp_path / "cut")
    (cut / "summary.json").unlink()
    with pytest.raises(UserError, match="not the folder of a finished run"):
        publish.publish(cut, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_run_whose_weights_are_not_those_it_measured_is_refused(runs, tmp_path):
    swapped = shutil.copytree(runs / "hs0", tmp_path / "swapped")
    shutil.copy(runs / "hs0" / "dense.safetensors", swapped / "finetuned.safetensors")
    with pytest.raises(UserError, match="nonzeros"):
        publish.publish(swapped, tmp_path / "results")


def test_a_recipe_that_names_a_file_of_this_machine_is_refused(runs, tmp_path):
    odd = shutil.copytree(runs / "hs0", tmp_path / "odd")
    change = "pretrain={checkpoint: /home/me/dense.safetensors}"
    content = recipe.parse((odd / "recipe.yaml").read_text(), "odd", [change])
    (odd / "recipe.yaml").write_text(content.to_yaml())
    summary = json.loads((odd / "summary.json").read_text()) | {"recipe": content.model_dump(mode="json")}
    (odd / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match="which others don't have"):
        publish.publish(odd, tmp_path / "results")


# Verifying


def test_published_records_verify(command, results):
    status, out, _ = command("verify", results)
    assert status == 0 and "4 of 4 records verified" in out and out.count("ok") == 4


@pytest.mark.parametrize(
    ("path", "to", "told"),
    [
        (("measured", "right"), 9900, "test images right"),
        (("measured", "structure"), "1-2-3", "structure"),
        (("measured", "total", "nonzeros"), 12, "total.nonzeros"),
        (("measured", "total", "macs_paper"), 12, "total.macs_paper"),
        (("measured", "layers", 1, "nonzeros"), 12, "fc2.nonzeros"),
        (("measured", "layers", 0, "live_filters"), 12, "fc1.live_filters"),
        (("weights", "sha256"), "0" * 64, "weights.safetensors"),
        (("recipe", "finetune", "lr"), 0.5, "recipe of the command, finetune"),
        (("recipe", "model"), "lenet-6", "recipe.model"),
        (("protocol",), "held-out", "selects by 'test-best'"),
        (("command",), "deephoyer run demo", "is not what base and overrides make"),
        (("seconds",), "long", "seconds"),
    ],
)
def test_an_edited_record_fails_and_says_where(command, results, path, to, told):
    edit(results / "hs0", *path, to=to)
    status, out, _ = command("verify", results / "hs0")
    assert status == 1 and "FAILED" in out and told in out


def test_two_images_more_or_less_are_rounding_and_three_are_not(results):
    right = record.read(results / "hs0").measured.right
    for more, fails in ((2, False), (-2, False), (3, True), (-3, True)):
        edit(results / "hs0", "measured", "right", to=right + more)
        assert bool(verify.check(results / "hs0").differences) == fails


def test_swapped_weights_fail_even_when_their_digest_is_written_over(results):
    shutil.copy(results / "hs1" / "weights.safetensors", results / "hs0" / "weights.safetensors")
    [told, *_] = verify.check(results / "hs0").differences
    assert "not the file that was published" in told
    edit(results / "hs0", "weights", to=publish.described(results / "hs0" / "weights.safetensors").model_dump())
    assert any("test images right" in line for line in verify.check(results / "hs0").differences)


def test_one_weight_more_is_noticed(results):
    folder = results / "hs0"
    model = load(folder / "weights.safetensors", build(record.read(folder).recipe))
    with torch.no_grad():
        model.fc2.weight[model.fc2.weight == 0] = torch.tensor([1e-9] + [0.0] * int((model.fc2.weight == 0).sum() - 1))
    save(model, folder / "weights.safetensors")
    edit(folder, "weights", to=publish.described(folder / "weights.safetensors").model_dump())
    assert any(line.startswith("fc2.nonzeros") for line in verify.check(folder).differences)


def test_a_damaged_record_fails_and_the_others_are_still_verified(command, results):
    (results / "hs0" / "record.json").write_text('{"format": ')
    (results / "hs1" / "weights.safetensors").write_bytes(b"\x80\x02 not weights")
    (results / "hs-held-out" / "weights.safetensors").unlink()
    status, out, _ = command("verify", results)
    assert status == 1 and "1 of 4 records verified" in out
    assert "is damaged" in out and "pickle" in out and "can't be read" in out


def test_no_such_record_is_a_mistake_of_the_user(command, tmp_path):
    for words in (["verify", "nowhere"], ["verify", tmp_path], ["table", "lenet-6"], ["figure", "pie"],
                  ["figure", "histograms"], ["table", "--results", "nowhere"], ["publish", "nowhere"]):  # fmt: skip
        status, _, err = command(*words)
        assert status == 2 and err.startswith("deephoyer: ") and len(err.splitlines()) <= 2


# Tables


def test_tables_without_records_show_what_was_reported(tmp_path):
    text = page(record.read_all(tmp_path), tmp_path)
    assert "0 published runs" in text and text.count("There are no records of ours in the results folder") == 6
    assert "| Hoyer-Square | reported: DeepHoyer | 98.4 | 4.6k |" in text and "353-45-11" in text


def test_a_table_gives_mean_spread_and_best_over_seeds_apart_by_protocol(published):
    records = record.read_all(published)
    text = table("lenet-300-100-elements", records)
    own = [r for r in records if r.protocol == "test-best" and r.model == "lenet-300-100"]
    mean = sum(r.measured.total.nonzeros for r in own) / 2
    best = max(own, key=lambda r: r.measured.right)
    accuracy = 100 * sum(r.measured.accuracy for r in own) / 2
    assert f"mean ± sd of 2 seeds; 0 of them keep the accuracy | {accuracy:.2f} ± " in text
    assert f"| {mean:,.0f} ± " in text
    assert f"best of 2, seed {best.seed} | {100 * best.measured.accuracy:.2f} †" in text
    assert "measured, held-out: one seed, 0" in text
    assert f"`{best.command}`" in text and "--grid seed=0,1`" in text
    assert "group" not in text


def test_variants_go_to_the_front_and_ablations_to_their_own_table(published):
    records = record.read_all(published)
    assert "There are no records of ours in the results folder" in table("lenet-5-structure", records)
    assert "### Front: LeNet-5" in table("lenet-5-structure", records)
    tagged = [r.model_copy(update={"tags": ("ablation",), "row": "no shifts"}) for r in records]
    text = table("lenet-5-structure", tagged)
    assert "### Ablations: LeNet-5" in text and "| no shifts |" in text and "### Front" not in text


def test_the_best_keeps_the_accuracy_before_it_is_small(published):
    [one] = [r for r in record.read_all(published) if r.model == "lenet-5"]
    kind = rows.KINDS["lenet-5-structure"]

    def like(right, macs):
        total = one.measured.total.model_copy(update={"macs_paper": macs})
        return one.model_copy(update={"measured": one.measured.model_copy(update={"right": right, "total": total})})

    [row] = rows.rows([like(9900, 170_000), like(9899, 90_000), like(9930, 180_000)], kind)
    assert row.best().measured.total.macs_paper == 170_000 and len(row.reaching()) == 2
    [row] = rows.rows([like(9880, 100_000), like(9890, 120_000)], kind)
    assert row.best().measured.right == 9890 and not row.reaching()


def test_a_held_out_run_with_teachers_selected_on_test_images_is_not_published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    once = ["pretrain.epochs=1", "regularize.epochs=1", "finetune.epochs=1"]
    for select in ("held-out", "test-best"):
        run("lenet-300-100-hs", Path(f"teacher-{select}"), f"select={select}", *once)
        teacher = f"distill={{model: lenet-300-100, checkpoints: [teacher-{select}/finetuned.safetensors]}}"
        run("lenet-300-100-hs", Path(f"run-{select}"), "select=held-out", teacher, *once)
    publish.publish("run-held-out", tmp_path / "results")
    with pytest.raises(UserError, match="selected on test images"):
        publish.publish("run-test-best", tmp_path / "results")


def test_the_same_run_published_twice_is_refused(results):
    shutil.copytree(results / "hs0", results / "again")
    with pytest.raises(UserError, match="the same run as"):
        record.read_all(results)


# CIFAR-10


def as_resnet(one, *changes, **measured):
    """A record as a run of a ResNet would have it; nobody trains one in a test."""
    content = one.model_dump(mode="json") | {"base": "resnet-56-best", "overrides": ["seed=0", *changes]}
    made = recipe.read("resnet-56-best", content["overrides"])
    content |= {"recipe": made.model_dump(mode="json", exclude_none=True), "protocol": made.select, "row": None}
    content |= {
        "command": record.command(content["base"], content["overrides"]),
        "measured": {**content["measured"], **measured},
    }
    content["latency"] = [{"device": "cpu", "name": "2 CPU threads", "batch": 256, "dense_ms": 300, "ms": 150}]
    return record.Record.model_validate(content)


def test_times_do_not_go_by_the_name_of_a_machine_they_were_not_measured_on():
    net, example = models.make("lenet-300-100"), torch.zeros(1, 1, 28, 28)
    timed = summary(net, example, baseline=net, seconds=0.01).to_json()
    trained = {"device": "cuda", "device_name": "a GPU", "threads": 16}
    made = timings({"compact": timed, "environment": trained}, net, {"model": "lenet-300-100"})
    assert {(t.device, t.name) for t in made} == {("cpu", f"{torch.get_num_threads()} CPU threads")}


def test_a_record_knows_what_compaction_leaves_and_how_fast_that_is(runs, published):
    for folder in published.iterdir():
        made = record.read(folder)
        summary = json.loads((runs / folder.name / "summary.json").read_text())
        assert made.measured.compact.macs == summary["compact"]["total"]["macs_executed"]
        assert made.measured.compact.parameters == summary["compact"]["total"]["parameters"]
        assert [(t.device, t.batch) for t in made.latency] == [("cpu", 1), ("cpu", 64), ("cpu", 256)]


def test_other_macs_after_compaction_are_noticed(results):
    edit(results / "hs0", "measured", "compact", "macs", to=12)
    assert any(line.startswith("compact.macs") for line in verify.check(results / "hs0").differences)


def test_a_cifar_table_has_both_ways_of_counting_and_the_time_beside_what_was_reported(published):
    one = record.read(published / "group-hs")
    total = one.measured.total.model_dump() | {"macs_paper": 40_000_000}
    made = as_resnet(one, right=9380, total=total, compact={"macs": 50_000_000, "parameters": 345_678})
    text = table("resnet-56", [made])
    assert "| Group-HS 2e-4 | reported: DeepHoyer | 93.14 | 93.58 |  | 2.38× |" in text
    assert "| DepGraph | reported: Fang et al. 2023 | 93.53 | 93.64 |  |  | 2.57× |" in text
    assert "93.80 | 93.56 (+0.24) | 40.0M, 3.14× | 50.0M, 2.51× | 345,678 |  |  | 300 → 150, 2.00× |" in text
    assert "- resnet-56-best, 2.51×, test-best: `deephoyer run resnet-56-best seed=0`" in text
    assert "no records of ours" in table("resnet-110", [made])
    assert table("lenet-5-structure", [made]) == table("lenet-5-structure", [])


@pytest.mark.parametrize(
    ("macs", "right", "there"),
    [
        (62_000_000, 9380, ""),  # 2.02 times fewer: before the paper's first point
        (125_485_696 / 2.5923, 9300, "93.54 (−0.54)"),  # between 93.58 % at 2.38 times and 93.45 % at 3.07
        (125_485_696 / 5.63, 9300, "92.23 (+0.77)"),
        (15_000_000, 9200, "92.23 (−0.23)"),  # past the last
    ],
)
def test_the_papers_front_is_straight_between_its_points_and_flat_past_them(published, macs, right, there):
    made = as_resnet(record.read(published / "group-hs"), right=right, compact={"macs": int(macs), "parameters": 1})
    assert f"| {right / 100:.2f} | {there} |" in table("resnet-56", [made])


def test_the_cifar_figure_needs_no_records_and_shows_those_there_are(command, published, tmp_path):
    one = record.read(published / "group-hs")
    for records in ([], [as_resnet(one, right=9380), as_resnet(one, "select=held-out", right=9300)]):
        figures.save(figures.cifar(records), tmp_path, "cifar")
    assert "ours, physically executed (held-out)" in (tmp_path / "cifar.svg").read_text()
    assert command("figure", "cifar", "--out", "drawn")[0] == 0 and (tmp_path / "drawn" / "cifar.png").exists()


def test_verifying_without_the_images_fails_and_says_how_to_fetch_them(command, published, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path / "nothing"))
    made = as_resnet(record.read(published / "group-hs"))
    record.write(made, tmp_path)
    save(build(made.recipe), tmp_path / "weights.safetensors")
    status, out, _ = command("verify", tmp_path)
    assert status == 1 and "`deephoyer data cifar10` fetches it" in out


# Figures


def test_every_figure_is_drawn_by_its_command(command, runs, published, tmp_path):
    for words in (["contours"], ["histograms", runs / "group-hs"], ["front", "--results", published]):
        assert command("figure", *words, "--out", "drawn")[0] == 0
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert names >= {"contours.svg", "histograms-lenet-5.png", "front.png", "front-held-out.svg"}


def test_publish_and_table_by_their_commands(command, runs, tmp_path):
    status, _, _ = command("publish", runs / "hs0", runs / "hs1", "--as", "mine", "--tag", "front")
    assert status == 0 and len(list((tmp_path / "results").iterdir())) == 2
    (tmp_path / "docs").mkdir()
    assert command("table", "--write")[0] == 0
    assert "| mine | `lenet-300-100-hs " in (tmp_path / "docs" / "results.md").read_text()
    assert command("table", "lenet-300-100-elements")[1] in (tmp_path / "docs" / "results.md").read_text()
    assert command("publish", runs / "hs0", runs / "hs1", "--name", "one")[0] == 2
