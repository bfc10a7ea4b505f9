"""Records of real (tiny) runs: published, verified, tampered with; tables and figures made from them."""

import json
import re
import shlex
import shutil
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import image_folders
from deephoyer import UserError, summary
from deephoyer.export import load, save
from deephoyer.lab import models, recipe
from deephoyer.lab.recipe import Command
from deephoyer.lab.report import figures, measure, paper_tables, publish, record, stored_weights, verify
from deephoyer.lab.report.index import index
from deephoyer.lab.report.measure import timings
from deephoyer.lab.report.results_page import page, section
from deephoyer.lab.report.table import Column, Table
from deephoyer.lab.runs import find
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run

TINY = ["data={name: mnist, limit: 600}", "device=cpu", "batch_size=50", "prune={rule: density, value: 0.05}"]
EPOCHS = ["pretrain.epochs=2", "regularize.epochs=2", "finetune.epochs=2"]
ONCE = ["pretrain.epochs=1", "regularize.epochs=1", "finetune.epochs=1"]
ELEMENTS = paper_tables.TABLES["lenet-300-100-elements"]
STRUCTURE = paper_tables.TABLES["lenet-5-structure"]


def run(name, folder, *changes):
    words = Command(name, (*TINY, *EPOCHS, *changes))
    finish(Run(words.read(), folder, command=words).execute())
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, timed):
    """Finished runs: three of one method, one of another network."""
    place = tmp_path_factory.mktemp("runs")
    with timed():
        for seed in (0, 1):
            run("paper/lenet-300-100", place / f"hs{seed}", f"seed={seed}")
        run("paper/lenet-300-100", place / "hs-held-out", "epoch_selection=held-out")
        # A convolution takes its time over 10,000 test images: as few looks at them as can be.
        run("paper/lenet-5-structure", place / "group-hs", "epoch_selection=held-out", "channels_last=true", *ONCE)
    return place


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory):
    """A folder of results, and the path of each run's record in it."""
    place = tmp_path_factory.mktemp("published") / "results"
    for folder in sorted(runs.iterdir()):
        tags = ["paper-settings"] if folder.name.startswith("hs") else []
        publish.publish(folder, place, row="ours" if tags else "Group-HS", tags=tags)
    return place


@pytest.fixture
def results(published, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(published, tmp_path / "results")
    return tmp_path / "results"


HS0 = Path("lenet-300-100/paper/ours-test-best-s0.json")
HS1 = Path("lenet-300-100/paper/ours-test-best-s1.json")
HELD_OUT = Path("lenet-300-100/paper/ours-held-out-s0.json")
GROUP_HS = Path("lenet-5/paper/group-hs-held-out-s0.json")


def edit(path, *keys, to):
    content = json.loads(path.read_text())
    *outer, last = keys
    place = content
    for key in outer:
        place = place[key]
    place[last] = to
    path.write_text(json.dumps(content))


# A table


def test_a_table_is_markdown_and_csv_and_leaves_out_what_is_empty():
    columns = [Column("a|b", lambda r: r[0]), Column("n", lambda r: r[1], "right"), Column("none", lambda r: None)]
    table = Table("title", columns, [("x, y", 1), ("z|", 2)])
    assert table.markdown() == "| a\\|b | n |\n|---|---:|\n| x, y | 1 |\n| z\\| | 2 |"
    assert table.csv() == 'a|b,n,none\n"x, y",1,\nz|,2,\n'


# Publishing


def test_a_record_is_small_plainly_named_and_holds_what_the_run_came_to(runs, published):
    files = {path.relative_to(published) for path in record.find(published)}
    assert files == {HS0, HS1, HELD_OUT, GROUP_HS}
    stored = record.read(published / HS1)
    summary = json.loads((runs / "hs1" / "summary.json").read_text())
    assert stored.measured.total.nonzeros == summary["sparse"]["total"]["nonzeros"]
    assert stored.measured.layer_widths == summary["sparse"]["layer_widths"]
    assert stored.measured.right == pytest.approx(10_000 * summary["accuracy"]["finetuned"], abs=4)
    assert stored.protocol == "test-best" and stored.seed == 1 and stored.selected == summary["selected"]
    assert stored.environment["device"] == "cpu" and "git" not in stored.environment
    assert (published / HS1).stat().st_size < 5_000
    assert (published / "weights" / stored.weights.file).stat().st_size < 100_000


def test_a_record_carries_the_words_of_the_run_and_its_whole_recipe(runs, published):
    stored = record.read(published / HS0)
    words = recipe.Command(stored.base, stored.overrides)
    assert words.base == "paper/lenet-300-100" and "seed=0" in words.overrides and stored.command == str(words)
    theirs = recipe.parse((runs / "hs0" / "recipe.yaml").read_text(), "the run's")
    assert words.read().digest() == theirs.digest() == stored.digest == stored.settings.digest()


def test_a_run_without_words_is_refused(tmp_path):
    finish(Run(recipe.read("paper/lenet-300-100", [*TINY, *ONCE]), tmp_path / "run").execute())
    with pytest.raises(UserError, match="which command started it"):
        publish.publish(tmp_path / "run", tmp_path / "results")


def test_matrices_are_halved_where_all_counts_stay_and_tiny_weights_do_not_vanish(published):
    stored = record.read(published / HS0)
    assert stored.weights.matrices == "float16"
    net = models.make("lenet-300-100")
    with torch.no_grad():
        net.fc1.weight[0, :2] = torch.tensor([1e-12, -1e-12])
    halved = publish.in_float16(net).fc1.weight
    assert halved.dtype == torch.float16 and (halved[0, :2].float() == torch.tensor([2.0**-24, -(2.0**-24)])).all()
    assert torch.equal(halved != 0, net.fc1.weight != 0)


def test_a_record_says_what_halving_its_matrices_changed(command, runs, monkeypatch):
    """The run itself measures float32; here halves are so coarse that it shows."""

    def coarse(model):
        halved = in_float16(model)
        with torch.no_grad():
            for matrix in (p for p in halved.parameters() if p.dim() > 1):
                matrix.copy_(matrix.to(torch.float8_e5m2))
        return halved

    in_float16 = publish.in_float16
    monkeypatch.setattr(publish, "in_float16", coarse)
    monkeypatch.setattr(publish, "ROUNDING", 1.0)
    seen = json.loads((runs / "hs0" / "summary.json").read_text())["accuracy"]["finetuned"]
    status, out, _ = command("publish", runs / "hs0")
    stored = record.read(record.find(Path("results"))[0])
    assert status == 0 and stored.weights.matrices == "float16" and stored.measured.right != round(10_000 * seen)
    assert stored.weights.right_in_float32 == round(10_000 * seen) == round(10_000 * stored.accuracy["finetuned"])
    assert f"{stored.measured.accuracy:.2%} as stored in float16 ({seen:.2%} in float32)" in out
    assert "of the networks as they are stored" in command("verify")[1]


def test_weights_can_be_left_out_and_the_record_still_has_their_digest(command, runs, tmp_path):
    status, out, _ = command("publish", runs / "hs0", "--no-weights", "--as", "mine", "--note", "a note")
    assert status == 0 and not (tmp_path / "results" / "weights").exists()
    [path] = record.find(Path("results"))
    stored = record.read(path)
    assert stored.weights.file is None and len(stored.weights.sha256) == 64 and stored.notes == ("a note",)
    status, out, _ = command("verify")
    assert status == 0 and "0 of 0 records verified" in out and "1 more without weights" in out


def test_two_runs_of_one_row_get_two_names_and_publishing_twice_gives_one(runs, results):
    publish.publish(runs / "hs0", results, row="ours", tags=["paper-settings"])
    assert len(record.find(results)) == 4
    with pytest.raises(UserError, match=r"is published already, as .*delete that record to give it another row") as why:
        publish.publish(runs / "group-hs", results, row="Group-HS", tags=["front"])
    assert len(record.read_all(results)) == 4
    Path(re.search(r"as (\S+);", str(why.value))[1]).unlink()
    other = publish.publish(runs / "group-hs", results, row="Group-HS", tags=["front"])
    assert Path(other.path).name == f"group-hs-held-out-{other.digest[:8]}-s0.json"
    shutil.copy(other.path, results / "lenet-300-100" / "copy.json")
    with pytest.raises(UserError, match="the same run as"):
        record.read_all(results)


def test_runs_may_be_published_at_the_same_time(runs, tmp_path):
    with ThreadPoolExecutor() as pool:
        again = [runs / name for name in ("hs0", "hs1", "hs0", "hs-held-out")]
        list(pool.map(lambda run: publish.publish(run, tmp_path / "results", row="ours"), again))
    assert len(record.read_all(tmp_path / "results")) == 3
    assert not [path for path in (tmp_path / "results").rglob("*") if path.name.endswith(".tmp")]


def test_a_place_is_short_and_plain_whatever_the_row_is_called(published):
    stored = record.read(published / HS0)
    long = stored.model_copy(
        update={"row": "a row, with = signs and " + "very " * 40 + "many words", "tags": ("front",)}
    )
    place = (Path("results") / record.place(long)).as_posix()
    assert len(place) <= record.LONGEST_PATH and not set(place) & set(",= ") and "test-best" in place
    assert record.place(stored) == HS0 and record.place(stored, taken=True) != HS0


def test_thinned_metrics_keep_both_ends_and_the_selected_epoch():
    stages = ("pretrain", "regularize", "finetune")
    lines = [{"stage": stage, "epoch": epoch, "loss": 1 / 3} for stage in stages for epoch in range(1, 251)]
    kept = record.thin(lines, {"pretrain": 17, "finetune": 101})
    assert len(kept) <= record.LINES
    have = {(line["stage"], line["epoch"]) for line in kept}
    assert have >= {("pretrain", 1), ("pretrain", 17), ("pretrain", 250), ("regularize", 250), ("finetune", 101)}
    assert record.thin(lines[:3], {}) == [{**line, "loss": 0.33333} for line in lines[:3]]


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


def test_words_that_name_a_file_of_this_machine_are_refused(runs, tmp_path):
    odd = shutil.copytree(runs / "hs0", tmp_path / "odd")
    words = json.loads((odd / "command.json").read_text())
    (odd / "command.json").write_text(json.dumps(words | {"base": "/home/me/mine.yaml"}))
    with pytest.raises(UserError, match="which others don't have"):
        publish.publish(odd, tmp_path / "results")


def test_a_record_of_the_last_epoch_has_the_best_one_beside_it_and_times_of_an_untimed_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPHOYER_UNTIMED", "1")
    run("paper/lenet-300-100", Path("runs/last"), "epoch_selection=last", *ONCE, "finetune.epochs=3")
    lines = [line for line in RunFolder("runs/last").metrics() if line["stage"] == "finetune"]
    published = publish.publish("runs/last", tmp_path / "results")
    assert published.protocol == "last" and published.selected["finetune"] == 3
    assert published.measured.accuracy == pytest.approx(lines[-1]["test"], abs=4e-4)
    assert published.best_test_epoch == pytest.approx(max(line["test"] for line in lines), abs=1e-5)
    assert published.model_copy(update={"protocol": "test-best"}).best_test_epoch is None
    assert [(t.device, t.batch) for t in published.latency] == [("cpu", 1), ("cpu", 64), ("cpu", 256)]


def test_a_held_out_run_with_teachers_selected_on_test_images_is_not_published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for select in ("held-out", "test-best"):
        run("paper/lenet-300-100", Path(f"runs/teacher-{select}"), f"epoch_selection={select}", *ONCE)
        teacher = f"distill={{teachers: [runs/teacher-{select}/finetuned.safetensors]}}"
        run("paper/lenet-300-100", Path(f"runs/run-{select}"), "epoch_selection=held-out", teacher, *ONCE)
    publish.publish("runs/run-held-out", tmp_path / "results")
    with pytest.raises(UserError, match="selected on test images"):
        publish.publish("runs/run-test-best", tmp_path / "results")


# Finding weights again


def test_the_words_of_a_published_run_lead_to_its_weights(published, tmp_path, monkeypatch):
    stored = record.read(published / HS1)
    path = stored_weights.find_stored_weights(stored.digest, 1, published)
    assert path == published / "weights" / stored.weights.file
    assert stored_weights.find_stored_weights(stored.digest, 7, published) is None
    assert stored_weights.find_stored_weights("0" * 64, 1, published) is None
    monkeypatch.chdir(published.parent)
    words = str(Command(stored.base, stored.overrides)).removeprefix("deephoyer run ")
    found_network = find.network(words, "start")
    assert found_network.path.samefile(path) and found_network.epoch_selection == "test-best"
    net = load(found_network.path, models.of(found_network.model))
    assert int((net.fc1.weight != 0).sum()) == stored.measured.layers[0].nonzeros


def test_the_same_content_is_stored_once(tmp_path):
    assert stored_weights.store(b"abc", tmp_path) == stored_weights.store(b"abc", tmp_path)
    [file] = (tmp_path / "weights").iterdir()
    assert file.name == "ba7816bf8f01cfea.safetensors"


# Verifying


def test_published_records_verify(command, results):
    status, out, _ = command("verify", results)
    assert status == 0 and "4 of 4 records verified" in out and out.count("ok ") == 4


def test_a_run_on_a_users_own_images_is_published_without_their_place_and_verified_at_another(
    tmp_path, command, monkeypatch
):
    monkeypatch.setattr(measure, "BATCHES", (1,))
    photos = image_folders.make(tmp_path / "photos")
    image_folders.recipe_file(tmp_path, photos)
    network = "model={name: 'torchvision:squeezenet1_1', classes: 4}"
    words = Command("recipe.yaml", (network, "pretrain.epochs=1", "regularize=null", "prune=null", "finetune=null"))
    finish(Run(words.read(), tmp_path / "runs" / "one", command=words).execute())
    assert command("evaluate", "runs/one/compact.safetensors")[0] == 0
    photos.rename(tmp_path / "moved")
    status, out, err = command("publish", "runs/one", "data.path=moved")
    assert status == 0 and "results/torchvision-squeezenet1_1/own/recipe-held-out-s0.json" in out
    for file in (*(tmp_path / "results").rglob("*.*"), *(tmp_path / "runs").rglob("*.safetensors")):
        assert str(tmp_path).encode() not in file.read_bytes()
    assert command("verify")[0] == 1
    assert command("verify", "results", "data.path=moved")[0] == 0
    shutil.rmtree("runs")
    image_folders.make(tmp_path / "others", size=(44, 32))
    moved, others = (shlex.join(["recipe.yaml", *words.overrides, f"data.path={at}"]) for at in ("moved", "others"))
    assert find.network(moved, "start").path.parent.name == "weights"
    with pytest.raises(find.NetworkMissing):
        find.network(others, "start")
    status, out, _ = command("verify", "results", "data.path=others")
    assert status == 1 and "the images are not those of the run" in out
    status, _, err = command("verify", "data.size=30")
    assert status == 2 and "data.size: it would be another run" in err


def test_a_file_of_the_user_does_not_say_where_its_record_lies(published):
    stored = record.read(published / HS0)
    for base in ("../mine.yaml", "/home/me/mine.yaml", "my recipes/mine.yml"):
        assert record.place(stored.model_copy(update={"base": base})).parts[:2] == ("lenet-300-100", "own")


@pytest.mark.parametrize(
    ("keys", "to", "told"),
    [
        (("measured", "right"), 9900, "test images right"),
        (("measured", "layer_widths"), "1-2-3", "layer_widths"),
        (("measured", "total", "nonzeros"), 12, "total.nonzeros"),
        (("measured", "total", "macs_paper"), 12, "total.macs_paper"),
        (("measured", "compact", "macs"), 12, "compact.macs"),
        (("measured", "layers", 1, "nonzeros"), 12, "fc2.nonzeros"),
        (("measured", "layers", 0, "live_filters"), 12, "fc1.live_filters"),
        (("measured", "layers"), [], "measured.layers"),
        (("weights", "sha256"), "0" * 64, "is not the file that was published"),
        (("weights", "file"), "../../etc/passwd", "can't be read"),
        (("recipe", "finetune", "lr"), 0.5, "digest"),
        (("recipe", "model"), "lenet-6", "recipe.model"),
        (("digest",), "0" * 64, "digest"),
        (("protocol",), "held-out", "epoch_selection 'test-best'"),
        (("accuracy",), {"dense": 0.5}, "accuracy.regularized: the record says nothing"),
        (("accuracy", "finetuned"), 0.123, "accuracy.finetuned"),
        (("accuracy", "pruned"), float("nan"), "accuracy.pruned"),
        (("seconds",), "long", "seconds"),
        (("format",), "deephoyer-record-1", "a record of another version of deephoyer"),
    ],
)
def test_an_edited_record_fails_and_says_where(command, results, keys, to, told):
    edit(results / HS0, *keys, to=to)
    status, out, _ = command("verify", results / HS0)
    assert status == 1 and "FAILED" in out and told in out


def test_two_images_more_or_less_are_rounding_and_three_are_not(results):
    right = record.read(results / HS0).measured.right
    for more, fails in ((2, False), (-2, False), (3, True), (-3, True)):
        edit(results / HS0, "measured", "right", to=right + more)
        assert bool(verify.check(results / HS0).differences) == fails


def test_other_weights_fail_even_when_their_digest_is_written_over(results):
    own, other = (record.read(results / name).weights for name in (HS0, HS1))
    edit(results / HS0, "weights", to=own.model_copy(update={"file": other.file}).model_dump())
    assert "not the file that was published" in verify.check(results / HS0).differences[0]
    edit(results / HS0, "weights", to=other.model_dump())
    assert any("test images right" in line for line in verify.check(results / HS0).differences)


def test_one_weight_more_is_noticed(results):
    stored = record.read(results / HS0)
    model = load(results / "weights" / stored.weights.file, models.of("lenet-300-100"))
    with torch.no_grad():
        model.fc2.weight.view(-1)[(model.fc2.weight.view(-1) == 0).nonzero()[0]] = 1e-9
    save(model, results / "more.safetensors")
    file, digest = stored_weights.store((results / "more.safetensors").read_bytes(), results)
    edit(results / HS0, "weights", to={"sha256": digest, "bytes": 0, "file": file})
    assert any(line.startswith("fc2.nonzeros") for line in verify.check(results / HS0).differences)


def test_a_damaged_record_fails_and_the_others_are_still_verified(command, results):
    (results / HS0).write_text('{"format": ')
    (results / "weights" / record.read(results / HS1).weights.file).write_bytes(b"\x80\x02 not weights")
    (results / "weights" / record.read(results / HELD_OUT).weights.file).unlink()
    status, out, _ = command("verify", results)
    assert status == 1 and "1 of 4 records verified" in out
    assert "is damaged" in out and "not the file that was published" in out and "can't be read" in out


def test_no_such_record_is_a_mistake_of_the_user(command, tmp_path):
    for words in (["verify", "nowhere"], ["verify", tmp_path], ["table", "lenet-6"], ["figure", "pie"],
                  ["figure", "histograms"], ["table", "--results", "nowhere"], ["publish", "nowhere"]):  # fmt: skip
        status, _, err = command(*words)
        assert status == 2 and err.startswith("deephoyer: ") and len(err.splitlines()) <= 2


def test_a_table_of_a_damaged_record_is_refused_in_a_line(command, results):
    edit(results / HS0, "measured", "layers", to=[])
    status, _, err = command("table", "--results", results)
    assert status == 2 and "measured.layers" in err and len(err.splitlines()) <= 2


def test_verifying_without_the_images_fails_and_says_how_to_fetch_them(command, results, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path / "nothing"))
    resnet = as_resnet(record.read(results / GROUP_HS))
    save(models.of("resnet-56"), tmp_path / "weights.safetensors")
    file, digest = stored_weights.store((tmp_path / "weights.safetensors").read_bytes(), results)
    kept = resnet.weights.model_copy(update={"file": file, "sha256": digest})
    record.write(resnet.model_copy(update={"weights": kept}), results / "resnet.json")
    status, out, _ = command("verify", results / "resnet.json")
    assert status == 1 and "`deephoyer data cifar10` fetches it" in out


# The paper's tables


def test_tables_without_records_show_what_was_reported(tmp_path):
    text = page(record.read_all(tmp_path), tmp_path)
    assert "0 published runs" in text and text.count("Not run by us yet") == 8
    assert "| Hoyer-Square | DeepHoyer | 98.4 | 4.6k |" in text and "353-45-11" in text


def test_a_table_gives_mean_spread_and_best_over_seeds_apart_by_protocol(published):
    records = record.read_all(published)
    text = section(ELEMENTS, records)
    own = [r for r in records if r.protocol == "test-best" and r.network == "lenet-300-100"]
    mean = sum(r.measured.total.nonzeros for r in own) / 2
    accuracy = statistics.fmean(100 * r.measured.accuracy for r in own)
    assert (
        f"| **ours** | ours, its settings | test-best | 2 | {accuracy:.2f} ± " in text and f"| {mean:,.0f} ± " in text
    )
    assert "| **ours** | ours, its settings | held-out | 1 |" in text and "| 0 of 2 |" in text
    assert "exact settings" not in text and "Group-HS" not in text
    assert "Not run by us yet" in section(STRUCTURE, records)  # no tag says that it stands there


def test_a_tag_puts_a_record_into_a_table_and_its_name_does_not(published):
    records = [r.model_copy(update={"tags": ("best",)}) for r in record.read_all(published)]
    text = section(STRUCTURE, records)
    assert "| **Group-HS** | ours, best | held-out | 1 |" in text and "exact settings" in text


def test_the_best_keeps_the_accuracy_before_it_is_small(published):
    [one] = [r for r in record.read_all(published) if r.network == "lenet-5"]

    def like(right, macs):
        total = one.measured.total.model_copy(update={"macs_paper": macs})
        return one.model_copy(update={"measured": one.measured.model_copy(update={"right": right, "total": total})})

    [series] = STRUCTURE.series([like(9900, 170_000), like(9899, 90_000), like(9930, 180_000)])
    assert series.best(0.99).measured.total.macs_paper == 170_000 and len(series.reaching(0.99)) == 2
    [series] = STRUCTURE.series([like(9880, 100_000), like(9890, 120_000)])
    assert series.best(0.99).measured.right == 9890 and not series.reaching(0.99)


def test_penalties_under_one_search_stand_in_one_row_each_with_both_protocols(published):
    records = [r.model_copy(update={"tags": ("compare",), "row": "l1"}) for r in record.read_all(published)]
    table = paper_tables.comparison(records)
    assert [line[:2] for line in table.cells()] == [
        ["LeNet-300-100, single weights", "l1"],
        ["LeNet-5, structure", "l1"],
    ]
    first = dict(zip([c.header for c in table.columns], table.cells()[0], strict=True))
    assert "±" in first["accuracy, %: test-best"] and first["held-out"] and "±" not in first["held-out"]


def test_the_index_has_a_line_for_each_record_with_the_command_that_makes_it(published):
    lines = index(record.read_all(published), published).csv().splitlines()
    assert len(lines) == 5 and lines[0].startswith("record,network,")
    assert lines[1].startswith(f"{HELD_OUT},lenet-300-100,") and "deephoyer run paper/lenet-300-100" in lines[1]


# CIFAR-10


def as_resnet(one, *changes, **measured):
    """A record as a run of a ResNet would have it; nobody trains one in a test."""
    words = Command("small/resnet-56-coupled", ("seed=0", *changes))
    settings = words.read()
    content = one.model_dump(mode="json") | {"base": words.base, "overrides": list(words.overrides), "tags": ["best"]}
    content |= {"recipe": settings.model_dump(mode="json", exclude_defaults=True), "protocol": settings.epoch_selection}
    content |= {"digest": settings.digest(), "row": "mine", "accuracy": {"start": 0.93}}
    content["measured"] = {**content["measured"], **measured}
    content["latency"] = [{"device": "cpu", "name": "2 CPU threads", "batch": 64, "dense_ms": 300, "ms": 150}]
    return record.Record.model_validate(content)


def test_seeds_are_one_row_where_each_began_with_a_network_of_its_own_seed(published):
    stored = record.read(published / GROUP_HS)

    def starts(seeds, start):
        words = [(f"seed={seed}", f"start=parts/resnet-56-dense{start.format(seed)}") for seed in seeds]
        return [as_resnet(stored, *own, compact={"macs": 50_000_000, "parameters": 1}) for own in words]

    def counted(records):
        return sorted(len(series.records) for series in paper_tables.TABLES["resnet-56"].series(records))

    assert counted(starts((0, 1, 2), " seed={}")) == [3]
    assert counted([*starts((0,), ""), *starts((1,), " seed={}")]) == [2]  # without a word the seed is 0
    assert counted(starts((0, 1, 2), " seed=0")) == [3]  # all from one network
    assert counted([*starts((1,), " seed=1"), *starts((2,), " seed=5")]) == [1, 1]


def test_times_do_not_go_by_the_name_of_a_machine_they_were_not_measured_on():
    net, example = models.make("lenet-300-100"), torch.zeros(1, 1, 28, 28)
    timed = summary(net, example, baseline=net, seconds=0.01).to_json()
    trained = {"device": "cuda", "device_name": "a GPU", "threads": 16}
    measured = timings({"compact": timed, "environment": trained}, net, net, example)
    assert {(t.device, t.name) for t in measured} == {("cpu", f"{torch.get_num_threads()} CPU threads")}


def test_a_record_knows_what_compaction_leaves_and_how_fast_that_is(runs, published):
    for name, path in (("hs0", HS0), ("group-hs", GROUP_HS)):
        stored = record.read(published / path)
        summary = json.loads((runs / name / "summary.json").read_text())
        assert stored.measured.compact.macs == summary["compact"]["total"]["macs_executed"]
        assert stored.measured.compact.parameters == summary["compact"]["total"]["parameters"]
        assert [(t.device, t.batch) for t in stored.latency] == [("cpu", 1), ("cpu", 64), ("cpu", 256)]


def test_a_cifar_table_has_both_ways_of_counting_and_the_time_beside_what_was_reported(published):
    stored = record.read(published / GROUP_HS)
    total = stored.measured.total.model_dump() | {"macs_paper": 40_000_000}
    resnet = as_resnet(stored, right=9380, total=total, compact={"macs": 50_000_000, "parameters": 345_678})
    text = section(paper_tables.TABLES["resnet-56"], [resnet])
    assert "| Group-HS 2e-4 | DeepHoyer ||| 93.58 || 93.14 || 2.38× ||" in text
    assert "| DepGraph | Fang et al. 2023 ||| 93.64 || 93.53 ||| 2.57× |" in text
    assert (
        "| 1 | 93.80 || 93.00 | 93.56 (+0.24) | 3.14× | 2.51× | 345,678 | 2.00× | `small/resnet-56-coupled` |" in text
    )
    assert "| OCSPruner | its public network |||| 93.65 |||| 2.60× |" in text
    assert "Not run by us yet" in section(paper_tables.TABLES["resnet-110"], [resnet])
    assert section(STRUCTURE, [resnet]) == section(STRUCTURE, [])


@pytest.mark.parametrize(
    ("macs", "right", "there"),
    [
        (62_000_000, 9380, " "),  # 2.02 times fewer: before the paper's first point
        (125_485_696 / 2.5923, 9300, " 93.54 (−0.54) "),  # between 93.58 % at 2.38 times and 93.45 % at 3.07
        (125_485_696 / 5.63, 9300, " 92.23 (+0.77) "),
        (15_000_000, 9200, " 92.23 (−0.23) "),  # past the last
    ],
)
def test_the_papers_front_is_straight_between_its_points_and_flat_past_them(published, macs, right, there):
    resnet = as_resnet(record.read(published / GROUP_HS), right=right, compact={"macs": int(macs), "parameters": 1})
    table = paper_tables.TABLES["resnet-56"].table([resnet])
    line = dict(zip([c.header for c in table.columns], table.cells()[-1], strict=True))
    assert line["the paper's front there"] == there.strip()


def test_the_cifar_figure_needs_no_records_and_shows_those_there_are(command, published, tmp_path):
    stored = record.read(published / GROUP_HS)
    for records in ([], [as_resnet(stored, right=9380), as_resnet(stored, "epoch_selection=held-out", right=9300)]):
        figures.save(figures.cifar_front(records), tmp_path, "cifar")
    assert "ours, physically executed (held-out)" in (tmp_path / "cifar.svg").read_text()
    assert command("figure", "cifar", "--out", "drawn")[0] == 0 and (tmp_path / "drawn" / "cifar.png").exists()


# Figures and commands


def test_every_figure_is_drawn_by_its_command(command, runs, published, tmp_path):
    for words in (["contours"], ["histograms", runs / "group-hs"], ["front", "--results", published]):
        assert command("figure", *words, "--out", "drawn")[0] == 0
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert names >= {"contours.svg", "histograms-lenet-5.png", "front.png", "front-held-out.svg"}


def test_publish_and_table_by_their_commands(command, runs, tmp_path):
    status, out, _ = command("publish", runs / "hs0", runs / "hs1", "--as", "mine", "--tag", "best")
    assert status == 0 and "results/lenet-300-100/paper/mine-test-best-s1.json: " in out
    (tmp_path / "docs").mkdir()
    assert command("table", "--write")[0] == 0
    assert "| **mine** | ours, best | test-best | 2 |" in (tmp_path / "docs" / "results.md").read_text()
    assert (tmp_path / "results" / "index.csv").read_text() == command("table", "--csv")[1]
    assert command("table", "lenet-300-100-elements")[1] in (tmp_path / "docs" / "results.md").read_text()
    assert command("table", "lenet-300-100-elements", "--csv")[1].startswith("method,numbers,")
