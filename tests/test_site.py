"""The documentation: it builds without a warning, its code runs, and every recipe key says what it is."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import allowed_drop
import deephoyer as dh
import latency_targets
import plan
import trained_fronts
from character_gpt import Characters
from cifar_vit import Photographs
from deephoyer.lab.recipe_keys import keys

DOCS = Path(__file__).parents[1] / "docs"


def test_every_recipe_key_says_what_it_is():
    assert [key for key, _, _, words in keys() if not words] == []


def test_make_my_model_smaller_in_ten_minutes_is_a_notebook_that_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = DOCS / "ten-minutes.ipynb"
    made = runpy.run_path(str(DOCS / "make_notebook.py"))["notebook"]
    text = path.read_text(encoding="utf-8")
    assert text == made((DOCS / "ten-minutes.md").read_text(encoding="utf-8")), "run `python docs/make_notebook.py`"
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    names = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{path.name}, cell {number}", "exec"), names)


def test_the_readmes_code_makes_a_model_smaller_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS.parent / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        x = torch.randn(4, 8)

        def train(model, optimizer, x=x):
            model(x).square().mean().backward()
            optimizer.step()

        names = {"model": model, "example_inputs": x, "train": train, "validate": lambda model: 0.5, "dh": dh}
        names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "make_model": lambda model=model: model}
        exec(compile(block, "README.md", "exec"), names)
        assert names["small"][0].out_features < 32


def test_the_code_for_transformers_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "transformers.md").read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "transformers.md", "exec"), names)


@pytest.mark.parametrize("task", [Characters, Photographs])
def test_tables_of_trained_transformers_are_those_of_their_records(task):
    results = trained_fronts.read(DOCS.parent / "results" / "bench" / task.shown.name)
    assert "continued" in results or task is Photographs
    assert trained_fronts.block(results, task.shown) in (DOCS / "transformers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "record", sorted((DOCS.parent / "results" / "bench").glob("plan-*.json")), ids=lambda p: p.stem
)
def test_tables_of_plans_are_those_of_their_records(record):
    table = plan.table(json.loads(record.read_text(encoding="utf-8")))
    assert f"<!-- {record.stem} -->\n{table}" in (DOCS / "plan.md").read_text(encoding="utf-8")


def test_the_table_of_a_drop_alone_is_that_of_its_record():
    record = json.loads((DOCS.parent / "results" / "bench" / "allowed-drop.json").read_text(encoding="utf-8"))
    assert f"<!-- allowed-drop -->\n{allowed_drop.table(record)}" in (DOCS / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "record", sorted((DOCS.parent / "results" / "bench").glob("latency-targets-*.json")), ids=lambda p: p.stem
)
def test_tables_of_latency_targets_are_those_of_their_records(record):
    table = latency_targets.table(json.loads(record.read_text(encoding="utf-8")))
    assert f"<!-- {record.stem} -->\n{table}" in (DOCS / "costs.md").read_text(encoding="utf-8")


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    source = shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    shutil.copy(DOCS.parent / "CONTRIBUTING.md", tmp_path)
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", source, tmp_path / "site"]
    built = subprocess.run(words, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "recipe-keys.html").exists()


def test_links_between_pages_lead_somewhere():
    """Sphinx checks its own; this one also sees what readers follow in the repository."""
    pages = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    made = {"recipe-keys.md"}
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert target in made or (page.parent / target).exists(), f"{page.name}: {target}"
