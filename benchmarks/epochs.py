"""Seconds an epoch through `deephoyer run`: LeNet-300-100, LeNet-5 and ResNet-56, with and without the regularizer.

    python benchmarks/epochs.py --device cuda --out results/bench/epochs-cuda.json
    python benchmarks/epochs.py --device cuda --cases none --together 4 --out results/bench/together-cuda.json

MNIST is the real one; ResNet-56 trains on noise in CIFAR-10's shape (50,000 images, batch 128), which takes the
same time; on CUDA its blocks are compiled, and `resnet-56-eager` is the same without. LeNet-300-100 also gets the
time of the paper's 250 regularized epochs, which is 250 × the median. With --together N, a sweep of N strengths of
ResNet-56 is timed against one run by their steady epochs: the median of all but each run's first, which has the start,
the compilation and the capture in it. N at once take that long for N epochs, one of each network.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deephoyer.errors import UserError, unknown
from deephoyer.lab import recipe as recipes
from deephoyer.lab import sweep
from deephoyer.lab.data import DATASETS, Dataset
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train.run import Run
from measuring import machine, show, words, write

ADAM = {"optimizer": "adam", "lr": 1e-3}
SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 1e-4}
RESNET = (
    {"model": "resnet-56", "data": "noise", "batch_size": 128, "shift": 4, "flip": True},
    SGD,
    {"groups": "filters+channels", "strength": 2e-4},
)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lenet-300-100": ({"model": "lenet-300-100", "data": "mnist"}, ADAM, {"groups": "elements", "strength": 2e-4}),
    "lenet-5": ({"model": "lenet-5", "data": "mnist"}, ADAM, {"groups": "elements", "strength": 1e-4}),
    "resnet-56": RESNET,
    "resnet-56-eager": RESNET,
}
CUDA: dict[str, dict[str, Any]] = {
    "resnet-56": {"precision": "bfloat16", "channels_last": True, "compile": "blocks"},
    "resnet-56-eager": {"precision": "bfloat16", "channels_last": True},
}
EPOCHS = {"lenet-300-100": 12, "lenet-5": 12, "resnet-56": 4, "resnet-56-eager": 4}
PAPER_EPOCHS = 250


@cache
def noise() -> Dataset:
    """random images in CIFAR-10's shape"""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60_000, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (60_000,), generator=g)
    return Dataset("noise", x[:50_000], y[:50_000], x[50_000:], y[50_000:], 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


DATASETS.add("noise", noise)


def usual(device: str) -> list[str]:
    """All on CUDA; on a CPU nobody waits for the ResNets."""
    return [case for case in CASES if device == "cuda" or not case.startswith("resnet")]


def recipe(case: str, device: str, epochs: int, bare_epochs: int | None = None) -> Recipe:
    """Two stages of training; a network that learned noise has nothing to say which of its weights it needs."""
    base, training, penalty = CASES[case]
    fast = CUDA.get(case, {}) if device == "cuda" else {}
    stages = {
        "device": device,
        "epoch_selection": "test-best",
        "pretrain": {"epochs": epochs if bare_epochs is None else bare_epochs, **training},
        "regularize": {"epochs": epochs, **training, **penalty},
    }
    return Recipe.model_validate(base | fast | stages)


def times(case: str, device: str, epochs: int) -> dict[str, float]:
    """Median seconds an epoch, the first (with its warm-up and capture) left out; evaluation included."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipe(case, device, epochs), folder).execute()
        lines = run.folder.metrics()
    seconds = {s: [x["seconds"] for x in lines if x["stage"] == s][1:] for s in ("pretrain", "regularize")}
    bare, penalised = (statistics.median(seconds[s]) for s in ("pretrain", "regularize"))
    found = {"without": bare, "with": penalised, "share of the regularizer": (penalised - bare) / penalised}
    if case == "lenet-300-100" and len(seconds["regularize"]) >= 5:
        found[f"{PAPER_EPOCHS} epochs at the median"] = PAPER_EPOCHS * penalised
    return found


def rows(record: dict[str, Any]) -> list[list[str]]:
    made = [["an epoch", "without", "with the regularizer", "its share"]]
    for case in CASES:
        if case in record:
            each = record[case]
            both = (f"{each[key]:.3f} s" for key in ("without", "with"))
            made.append([case, *both, f"{each['share of the regularizer']:.1%}"])
    return made


# Several at once


def together(
    count: int, device: str, epochs: int, mps: bool = True, case: str = "resnet-56-eager", changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Seconds of a steady epoch, alone and `count` at once, and the wall clock of both sweeps."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{case}.yaml"
        file.write_text(recipe(case, device, epochs, bare_epochs=0).to_yaml())
        one, one_wall = _sweep(file, changes, 1, mps, said)
        many, many_wall = _sweep(file, changes, count, mps, said)
    return {
        "networks": count,
        "notes": [line for line in said if "regularize.strength=" not in line],  # not that runs start and end
        "one: seconds an epoch": one,
        "at once: seconds an epoch": many,
        "at once: seconds an epoch and network": many / count,
        "at once / one after the other": many / (count * one),
        "one: wall clock": one_wall,
        "at once: wall clock": many_wall,
    }


def _sweep(file: Path, changes: Sequence[str], count: int, mps: bool, said: list[str]) -> tuple[float, float]:
    strengths = ",".join(f"{i + 1}e-4" for i in range(count))
    team = sweep.members(str(file), changes, [f"regularize.strength={strengths}"], file.parent / str(count))
    began = time.monotonic()
    member = [sys.executable, str(Path(__file__).resolve())]
    sweep.run_all(str(file), changes, team, count, None, mps=mps, say=said.append, program=member)
    wall = time.monotonic() - began
    seconds: list[float] = []
    for each in team:
        if each.status != 0:
            raise UserError(f"a run of the sweep failed: {each.log_tail()}")
        lines = (each.folder / "metrics.jsonl").read_text().splitlines()
        seconds += [json.loads(line)["seconds"] for line in lines[1:]]
    return statistics.median(seconds), wall


def together_rows(found: dict[str, Any]) -> list[list[str]]:
    n = found["networks"]
    alone, each = found["one: seconds an epoch"], found["at once: seconds an epoch and network"]
    return [
        ["", "a network", "÷ alone", "wall clock, start and all"],
        ["alone", f"{alone:.3f} s", "1.00", f"{found['one: wall clock']:.1f} s"],
        [f"{n} at once", f"{each:.3f} s", f"{each / alone:.2f}", f"{found['at once: wall clock']:.1f} s"],
    ]


def main() -> None:
    parser = words(__doc__)
    parser.add_argument("--cases", help="comma-separated, or none; by default all, on a CPU the LeNets")
    parser.add_argument("--epochs", type=int, help="of each stage; by default 12 for the LeNets, 4 for the ResNets")
    parser.add_argument("--together", type=int, default=0, help="so many ResNet-56 at once against one (CUDA)")
    parser.add_argument("--no-mps", action="store_true", help="with --together: let the processes take turns")
    chosen = parser.parse_args()
    if chosen.together and chosen.device != "cuda":
        parser.error("--together needs a GPU for the runs to share")
    record: dict[str, Any] = {"machine": machine(chosen.device)}
    cases = chosen.cases.split(",") if chosen.cases else usual(chosen.device)
    count = 2 if chosen.brief else chosen.epochs
    for case in cases if cases != ["none"] else []:
        if case not in CASES:
            raise unknown("network of this benchmark", case, CASES)
        record[case] = times(case, chosen.device, count or EPOCHS[case])
        write(chosen.out, record)
    if len(record) > 1:
        show("through `deephoyer run`", rows(record))
    if chosen.together:
        record["together"] = found = together(
            chosen.together, chosen.device, count or EPOCHS["resnet-56"], mps=not chosen.no_mps
        )
        show("a steady epoch of ResNet-56", together_rows(found), found["notes"])
    write(chosen.out, record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:  # a member of the sweep: `epochs.py run RECIPE [key=value ...] --out FOLDER`
        _, _, name, *overrides, _, folder = sys.argv
        Run(recipes.read(name, overrides), Path(folder)).execute()
    else:
        main()
