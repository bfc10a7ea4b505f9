"""CONTRIBUTING's examples, followed as a new user would: each is run as it stands, then used by its name."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import deephoyer as dh
from deephoyer.groups import GROUPINGS
from deephoyer.lab import models
from deephoyer.lab.data import DATASETS
from deephoyer.lab.methods import METHODS, Stage
from deephoyer.penalties import PENALTIES
from deephoyer.scores import SCORES

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.fixture(scope="module", autouse=True)
def followed():
    registries = [r._makers for r in (PENALTIES, GROUPINGS, SCORES, DATASETS, METHODS, models.MODELS)]
    before = [dict(makers) for makers in registries]
    for example in EXAMPLES:
        exec(example, {"__name__": "example"})
    yield
    for makers, old in zip(registries, before, strict=True):
        makers.clear()
        makers.update(old)


def test_the_map_of_modules_names_files_and_folders_that_exist():
    package, rows = Path(dh.__file__).parent, re.findall(r"^\| (`.*?`) \|", TEXT, re.M)
    places = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    missing = [name for name in places if not any((folder / name).exists() for folder in (package, package / "lab"))]
    assert len(places) > 30 and missing == []


def test_the_penalty_has_a_name_a_setting_and_the_fast_path():
    model = nn.Linear(6, 4)
    reg = dh.Regularizer(model, PENALTIES.make("log", a=0.2), strength=1.0, backend="foreach")
    reg.add_grad_()
    w = model.weight.detach()
    torch.testing.assert_close(model.weight.grad, w.sign() / (0.2 + w.abs()))
    assert reg.stats()["backend"] == {"foreach": 1.0}


def test_the_grouping_takes_its_setting():
    model = nn.Linear(6, 4)
    (term,) = dh.Regularizer(model, groups={"name": "blocks", "size": 3}).terms
    torch.testing.assert_close(term.magnitudes(), model.weight.view(4, 2, 3).norm(dim=(0, 2)))


def test_the_score_prunes():
    masks = dh.prune(nn.Linear(6, 4), dh.Density(0.5), "filters", score="largest")
    assert masks["weight"].any(1).sum() == 2


def test_the_score_that_asks_for_gradients_prunes_by_them():
    model = nn.Linear(6, 4, bias=False)
    batch, weights = torch.randn(8, 6), torch.arange(4.0)  # the first output does not count
    loss = lambda model, x: (model(x) * weights).sum()  # noqa: E731
    masks = dh.prune(model, dh.Density(0.75), "filters", score="fisher", batches=[batch], loss=loss)
    assert masks["weight"].any(1).tolist() == [False, True, True, True]


def test_the_method_prunes_the_trained_weights_and_puts_back_those_of_the_start():
    model, held = nn.Linear(2, 2, bias=False), []
    start = model.weight.detach().clone()
    stage = Stage("regularize", model, ["elements"])
    stage.cut, stage.hold = (lambda done, score: dh.prune(model, dh.Density(0.5), score=score)), held.append
    method = METHODS.make("rewinding")
    method.begin(stage)
    nn.init.constant_(model.weight, 1.0)
    with torch.no_grad():
        model.weight[0] = 0.1
    method.end()
    assert torch.equal(model.weight, torch.stack([torch.zeros(2), start[1]])) and held[0].density == 0.5


def test_the_data_set_has_images():
    made = DATASETS.make("noise")
    assert len(made.train_x) == 500 and made.classes == 10


def test_the_model_takes_its_setting_and_images():
    assert models.of({"name": "small", "width": 4})(torch.zeros(2, *models.input_shape("small"))).shape == (2, 10)


def test_a_file_of_the_users_own_gives_names_to_every_command(tmp_path, monkeypatch, command):
    own = 'from deephoyer.lab.data import DATASETS, mnist\nDATASETS.add("my-digits", mnist.mnist)\n'
    (tmp_path / "mine.py").write_text(own)
    monkeypatch.setenv("DEEPHOYER_IMPORT", str(tmp_path / "mine.py"))
    status, said, _ = command("list", "data")
    assert status == 0 and "my-digits" in said
    monkeypatch.setenv("DEEPHOYER_IMPORT", str(tmp_path / "missing.py"))
    status, _, told = command("list", "data")
    assert status == 2 and "DEEPHOYER_IMPORT: there is no file" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\nimport nothing_there\n", "mine.py, line 2: ModuleNotFoundError: No module named 'nothing_there'"),
        ("x = 1\ny = = 2\n", "mine.py, line 2: SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "mine.py, line 2: ZeroDivisionError"),
        ("from beside import name\nraise ValueError(name)\n", "mine.py, line 2: ValueError: from the same folder"),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_told_with_its_line(tmp_path, monkeypatch, command, text, told):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "beside.py").write_text("name = 'from the same folder'")
    monkeypatch.setenv("DEEPHOYER_IMPORT", str(tmp_path / "mine.py"))
    status, _, err = command("list", "models")
    assert status == 2 and told in err and len(err.splitlines()) <= 2
