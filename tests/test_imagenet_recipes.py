"""The recipes for ImageNet on a small folder in its place: AlexNet narrowed and at full size, all stages to the end."""

import pytest
import torch

import image_folders
from deephoyer.lab import models, recipe
from deephoyer.lab.recipe import Command
from deephoyer.lab.report.literature import Reported
from deephoyer.lab.report.paper_tables import paper_table
from deephoyer.lab.report.publish import publish
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run

FC = "prune.rule.rules.fc*.value"
PENALTIES = {
    "hoyer-square": [],
    "hoyer": ["regularize.penalty=hoyer", "regularize.strength=1e-3", f"{FC}=0.8"],
    "transformed-l1": ["regularize.penalty=transformed-l1", "regularize.strength=2e-5", f"{FC}=1.0"],
}


@pytest.fixture(autouse=True)
def times_small_batches_only(monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.result.BATCHES", (1,))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folders.make(tmp_path_factory.mktemp("photos"), classes=12, train=1, val=1, size=(260, 256))


def short(photos, *changes):
    trained = ("pretrain", "regularize", "finetune")
    stages = [f"{stage}.{key}" for stage in trained for key in ("epochs=1", "milestones=[1]")]
    here = f"data={{name: folder, path: {photos}, size: 227, resize: 256, workers: 0}}"
    return recipe.read("paper/alexnet", [here, "device=cpu", "precision=float32", "batch_size=6", *stages, *changes])


def test_the_papers_table_by_layer_is_made_from_a_record(tmp_path, photos, command):
    changes = ["model={name: alexnet, classes: 12, width: 0.06}", "data={name: folder, size: 227, resize: 256}"]
    changes += [f"data.path={photos}", "data.workers=0", "device=cpu", "precision=float32", "batch_size=6"]
    changes += [f"{stage}={{epochs: 0}}" for stage in ("pretrain", "finetune")]
    changes += ["regularize={epochs: 0, strength: 0}"]
    job = Run(recipe.read("paper/alexnet", changes), tmp_path / "run", command=Command("paper/alexnet", tuple(changes)))
    result = finish(job.execute())
    record = publish(tmp_path / "run", tmp_path / "results")
    assert record.measured.top5 == result["top5"]["finetuned"] and record.digest == job.recipe.digest()
    text = "".join(path.read_text() for path in (tmp_path / "results").rglob("*.json"))
    assert str(photos) not in text and '"right5"' in text
    status, said, _ = command("table", "alexnet-layers", "--results", tmp_path / "results")
    rows = {line.split("|")[1].strip(): line for line in said.splitlines()}
    assert status == 0 and list(rows)[2:] == [*(row["name"] for row in result["sparse"]["rows"]), "total"]
    for row in result["sparse"]["rows"]:
        assert f" {row['nonzeros']:,} |" in rows[row["name"]]
    assert "| 0.781M |" in rows["fc1"] and "ours: paper/alexnet on folder" in rows["layer"]
    elsewhere = record.model_copy(update={"tags": ("best",)})
    here = elsewhere.model_copy(update={"recipe": {**record.recipe, "data": "imagenet"}})
    vars(here).pop("settings", None)  # as if it had been read like that
    for given, shown in ((elsewhere, False), (here, True)):
        made = paper_table("alexnet").table([given])
        titles = [column.header for column in made.columns]
        own = [row for row in made.rows if not isinstance(row, Reported)]
        assert bool(own) == shown and titles.count("top-5, %") == 1
    cells = {column.header: column.cell(own[0]) for column in made.columns}
    assert cells["top-5, %"] == f"{100 * record.measured.top5:.2f}" and cells["top-5 error, points more"] is None


@pytest.mark.parametrize("penalty", PENALTIES)
def test_narrowed_alexnet_goes_through_every_stage(tmp_path, photos, penalty):
    job = short(photos, "model={name: alexnet, classes: 12, width: 0.06}", *PENALTIES[penalty])
    result = finish(Run(job, tmp_path / "run").execute())
    layers = {row["name"]: row for row in result["sparse"]["rows"]}
    assert list(layers) == ["conv1", "conv2", "conv3", "conv4", "conv5", "fc1", "fc2", "fc3"]
    fc = job.prune.make().rules["fc*"].value
    assert 0 < layers["fc1"]["nonzeros"] < (1 - 0.5 * fc) * layers["fc1"]["weights"]
    assert layers["conv3"]["nonzeros"] > 0.9 * layers["conv3"]["weights"]  # 1e-4 is far below what a convolution has
    assert result["changed_predictions"] == 0 and set(result["top5"]) == set(result["accuracy"])


@pytest.mark.slow
def test_alexnet_at_full_size_goes_through_every_stage(tmp_path, photos):
    result = finish(Run(short(photos, "model={name: alexnet, classes: 12}"), tmp_path / "run").execute())
    layers = {row["name"]: row["weights"] for row in result["sparse"]["rows"]}
    assert layers["conv1"] == 34_848 and layers["fc1"] == 37_748_736 and layers["fc2"] == 16_777_216
    assert result["changed_predictions"] == 0


def test_the_recipes_have_the_papers_numbers():
    alexnet, resnet = recipe.read("paper/alexnet"), recipe.read("paper/resnet-50")
    assert alexnet.data == {"name": "imagenet", "size": 227, "resize": 256} and resnet.data == "imagenet"
    assert alexnet.batch_size == resnet.batch_size == 256
    assert (alexnet.regularize.strength, resnet.regularize.strength) == (1e-6, 1e-5)
    assert (alexnet.regularize.lr, resnet.regularize.lr) == (1e-3, 0.1)
    assert sum(p.numel() for p in models.of(alexnet.model).parameters() if p.dim() > 1) == 60_954_656


# Networks and their weights


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18"])
def test_networks_of_other_libraries_are_made_by_name(name):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    network = models.make(name, classes=7).eval()
    assert models.input_shape(name) == (3, 224, 224)
    assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


@pytest.mark.parametrize(
    "name, said",
    [
        ("torchvision:resnet81", r"no network 'resnet81'. Did you mean torchvision:resnet18"),
        ("keras:resnet50", "a library is one of torchvision, timm"),
    ],
)
def test_a_network_that_no_library_has_is_told(name, said):
    with pytest.raises(ValueError, match=said):
        recipe.read("demo", [f"model={name}"])


def test_a_torch_file_fills_a_network_and_its_classifier_may_have_other_classes(tmp_path):
    source, path = models.make("resnet-20", classes=10), tmp_path / "weights.pth"
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}, "epoch": 3}, path)
    same, other = models.make("resnet-20", classes=10), models.make("resnet-20", classes=4)
    assert checkpoint.fill(same, path, "start") == []
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), source.parameters(), strict=True))
    fresh = other.linear.weight.clone()
    assert checkpoint.fill(other, path, "start", classes_may_differ=True) == ["linear.weight", "linear.bias"]
    assert torch.equal(other.conv1.weight, source.conv1.weight) and torch.equal(other.linear.weight, fresh)
    with pytest.raises(ValueError, match=r"start: .* does not fit the model"):
        checkpoint.fill(other, path, "start")
    with pytest.raises(ValueError, match=r"start: .* does not fit the model"):
        checkpoint.fill(models.make("resnet-32"), path, "start", classes_may_differ=True)


class Strange:
    pass


def test_a_torch_file_that_wants_to_run_something_is_not_opened(tmp_path):
    torch.save({"model": Strange()}, tmp_path / "strange.pt")
    with pytest.raises(ValueError, match="contains more than tensors and is not opened"):
        checkpoint.fill(models.make("lenet-5"), tmp_path / "strange.pt", "start")
