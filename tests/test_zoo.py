"""The zoo runs over other people's networks, on small ones here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytest.importorskip("torchvision")


def run(script, *words):
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_zoo_halves_networks_goes_on_where_it_stopped_and_writes_its_page(tmp_path):
    out = tmp_path / "zoo.jsonl"
    small = ["--out", out, "--families", "own", "yolo", "--names", "audio*", "unet", "yolov5n"]
    assert "unet" in run("zoo.py", *small)
    lines = {r["name"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert lines["unet"]["status"] == "smaller" and lines["unet"]["difference"] < 1e-12
    assert lines["yolov5n"]["status"] == "not built"
    assert "unet  " not in run("zoo.py", *small)  # all are there already
    run("zoo.py", "--out", out, "--render", tmp_path / "zoo.md")
    page = (tmp_path / "zoo.md").read_text()
    assert "| own | 2 of 20 | 2 |" in page and "| unet | 227k |" in page and "under the AGPL" in page


def test_the_zoo_knows_how_to_build_every_family_of_its_list():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from zoo_networks import FAMILIES, names
        from zoo_own import NETWORKS
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert set(names()) == set(FAMILIES) and set(names()["own"]) == set(NETWORKS)
    assert sum(map(len, names().values())) == 309
