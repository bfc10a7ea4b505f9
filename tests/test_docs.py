"""What this repository publishes: a page of results made from its records, and prose that says what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from deephoyer.lab import recipe
from deephoyer.lab.report import record, verify
from deephoyer.lab.report.page import page

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_the_page_of_results_is_made_from_the_records():
    made = page(record.read_all(ROOT / "results"), ROOT / "docs" / "figures")
    assert made == PAGE, "stale: run `deephoyer table --write`"


def test_a_handful_of_published_records_verify():
    there = record.find(ROOT / "results") if (ROOT / "results").is_dir() else []
    folders = [f for f in there if record.read(f).settings.data == "mnist"]  # the package has only these images
    for folder in folders[:: max(1, len(folders) // 5)][:5]:
        assert verify.check(folder).differences == []


def test_the_readmes_results_stand_in_the_generated_page():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| | the paper | ours")[1].split("\n\n")[0]
    found = re.findall(r"([\d,]{5,}) \(([\d.]+) %\)", table)
    assert len(found) == 8
    for size, accuracy in found:
        assert any(size in line and accuracy in line for line in PAGE.splitlines()), f"{size} at {accuracy} %"


def test_the_readmes_cifar_results_stand_in_the_generated_page():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| times fewer MACs |")[1].split("\n\n")[0]
    found = re.findall(r"([\d.]+) \| ([\d.]+) \| \**([\d.]+)", table)
    assert len(found) >= 5
    for fewer, front, ours in found:
        assert any(f"| {ours} | {front} (" in line and f"{fewer}×" in line for line in PAGE.splitlines()), fewer


def test_the_commands_of_the_page_have_recipes_and_folders_that_can_be_made():
    commands = re.findall(r"`deephoyer (?:run|sweep) ([a-z][^`]+)`", PAGE)
    assert len(commands) > 50
    names = set()
    for words in map(shlex.split, commands):
        name, *changes = [*words[: words.index("--grid")], "seed=0"] if "--grid" in words else words
        recipe.read(name, changes)
        names.add(recipe.folder_name(name, changes))
    assert max(len(name) for name in names) <= 80 and not any(set(name) & set(",= ") for name in names)
    assert len(names) > 50  # other overrides, another folder, also where a digest stands for them


@pytest.mark.parametrize("file", ["README.md", "docs/search.md"])
def test_means_and_spreads_are_those_of_the_generated_page(file):
    found = re.findall(r"[\d,.]+ ± [\d,.]*\d", (ROOT / file).read_text(encoding="utf-8"))
    assert len(found) >= 4
    for number in found:
        assert f"| {number} |" in PAGE, f"{file} says {number}"
