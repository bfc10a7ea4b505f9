"""What is shipped: a wheel and an sdist that hold everything, and a command that works from them in any folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from deephoyer.lab import recipe

ROOT = Path(__file__).parents[1]
QUICK = [
    "data={name: mnist, limit: 300}",
    "device=cpu",
    "pretrain.epochs=1",
    "regularize.epochs=1",
    "finetune.epochs=1",
]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A wheel and an sdist, built from a copy of what is in the tree."""
    place = tmp_path_factory.mktemp("ship")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta as b; print(b.build_wheel('.')); print(b.build_sdist('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(place.glob("*.whl")), next(place.glob("*.tar.gz"))


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_recipe_and_the_digits(shipped):
    with zipfile.ZipFile(shipped[0]) as one, tarfile.open(shipped[1]) as other:
        wheel, sdist = one.namelist(), other.getnames()
    for name in recipe.names():
        assert f"deephoyer/lab/recipes/{name}.yaml" in wheel
        assert any(path.endswith(f"/src/deephoyer/lab/recipes/{name}.yaml") for path in sdist)
    assert "deephoyer/lab/recipes/renamed.yml" in wheel and "deephoyer/py.typed" in wheel
    assert sum("lab/data/mnist/" in path for path in wheel) >= 4


@pytest.mark.slow
def test_the_installed_command_runs_the_demo_in_an_empty_folder(shipped, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, shipped[0]]
    subprocess.run(install, check=True)
    (tmp_path / "empty").mkdir()
    words = [site / "bin" / "deephoyer", "run", "demo", *QUICK]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(words, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = (tmp_path / "empty" / "runs").iterdir()
    assert (run / "summary.json").exists() and "run folder: runs/" in done.stdout
