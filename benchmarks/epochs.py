"""Seconds per epoch of `deephoyer run`: LeNet-300-100, LeNet-5 and ResNet-56, with and without the regularizer.

    python benchmarks/epochs.py --device cuda --out results/bench/epochs-cuda.json
    python benchmarks/epochs.py --device cuda --cases none --together 4 --out results/bench/together-cuda.json
    python benchmarks/epochs.py --device cuda --cases none --matrix 128 256 512 --images 12800 --out matrix.json

The LeNets train on MNIST; ResNet-56 trains on noise in CIFAR-10's shape (50,000 images, batch 128), which takes the
same time. On CUDA its blocks are compiled; `resnet-56-eager` is the same without. For LeNet-300-100 the time of the
paper's 250 regularized epochs is 250 × the median. --together N compares a sweep of N strengths of ResNet-56 with a
single run: the median of all epochs but each run's first, which includes start, compilation and capture. --matrix times
an epoch of ResNet-56 at each batch size, with compiled blocks and without, with a ResNet-110 as the teacher (run in
every step) and without; at the second batch size also four runs in parallel. Times of fewer --images are scaled to
50,000.
"""

from __future__ import annotations

import itertools
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
from deephoyer.lab import models, sweep
from deephoyer.lab import recipe as recipes
from deephoyer.lab.data import DATASETS, Dataset
from deephoyer.lab.runs.checkpoint import write_tensors
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train.run import Run
from measuring import machine, make_parser, show, write

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
CIFAR = 50_000


@cache
def noise(images: int = CIFAR) -> Dataset:
    """random images in CIFAR-10's shape: this number for training, a fifth of it for testing"""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (images + images // 5, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (len(x),), generator=g)
    train, test = (slice(images), slice(images, None))
    return Dataset("noise", x[train], y[train], x[test], y[test], 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


DATASETS.add("noise", noise)


def default_cases(device: str) -> list[str]:
    """All on CUDA; on a CPU the ResNets would take too long."""
    return [case for case in CASES if device == "cuda" or not case.startswith("resnet")]


def recipe(case: str, device: str, epochs: int, bare_epochs: int | None = None) -> Recipe:
    """Two stages of training, without pruning: a network that learned noise needs none of its weights."""
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
    """Median seconds per epoch, evaluation included, without the first epoch, which has the warm-up and the capture."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipe(case, device, epochs), folder).execute()
        lines = run.folder.metrics()
    seconds = {s: [x["seconds"] for x in lines if x["stage"] == s][1:] for s in ("pretrain", "regularize")}
    bare, penalised = (statistics.median(seconds[s]) for s in ("pretrain", "regularize"))
    medians = {"without": bare, "with": penalised, "share of the regularizer": (penalised - bare) / penalised}
    if case == "lenet-300-100" and len(seconds["regularize"]) >= 5:
        medians[f"{PAPER_EPOCHS} epochs at the median"] = PAPER_EPOCHS * penalised
    return medians


def rows(record: dict[str, Any]) -> list[list[str]]:
    table = [["an epoch", "without", "with the regularizer", "its share"]]
    for case in CASES:
        if case in record:
            medians = record[case]
            both = (f"{medians[key]:.3f} s" for key in ("without", "with"))
            table.append([case, *both, f"{medians['share of the regularizer']:.1%}"])
    return table


# Several runs in parallel


def together(
    count: int, device: str, epochs: int, mps: bool = True, case: str = "resnet-56-eager", changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Seconds of a steady epoch, of one run alone and of `count` in parallel, and the wall clock of both sweeps."""
    messages: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{case}.yaml"
        file.write_text(recipe(case, device, epochs, bare_epochs=0).to_yaml())
        one, one_wall = _sweep(file, changes, 1, mps, messages)
        many, many_wall = _sweep(file, changes, count, mps, messages)
    return {
        "networks": count,
        "notes": [line for line in messages if "regularize.strength=" not in line],  # not that runs start and end
        "one: seconds an epoch": one,
        "at once: seconds an epoch": many,
        "at once: seconds an epoch and network": many / count,
        "at once / one after the other": many / (count * one),
        "one: wall clock": one_wall,
        "at once: wall clock": many_wall,
    }


def _sweep(file: Path, changes: Sequence[str], count: int, mps: bool, messages: list[str]) -> tuple[float, float]:
    strengths = ",".join(f"{i + 1}e-4" for i in range(count))
    runs = sweep.grid_runs(str(file), changes, [f"regularize.strength={strengths}"], file.parent / str(count))
    began = time.monotonic()
    program = [sys.executable, str(Path(__file__).resolve())]
    sweep.run_all(str(file), changes, runs, count, None, mps=mps, say=messages.append, program=program)
    wall = time.monotonic() - began
    seconds: list[float] = []
    for run in runs:
        if run.status != 0:
            raise UserError(f"a run of the sweep failed: {run.log_tail()}")
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        seconds += [json.loads(line)["seconds"] for line in lines[1:]]
    return statistics.median(seconds), wall


# What makes an epoch fast


def matrix(
    device: str, batches: Sequence[int], images: int, epochs: int, parallel: int, mps: bool
) -> list[dict[str, Any]]:
    """Seconds of a steady epoch of all training images, by batch size, compiled blocks and a teacher."""
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        teacher = Path(folder) / "teacher.safetensors"
        write_tensors(teacher, models.make("resnet-110").state_dict())
        file = Path(folder) / "resnet-56.yaml"
        file.write_text(recipe("resnet-56-eager", device, epochs, bare_epochs=0).to_yaml())
        for batch, blocks, taught in itertools.product(batches, ("off", "blocks"), (False, True)):
            words = [f"data={{name: noise, images: {images}}}", f"batch_size={batch}", f"compile={blocks}"]
            words += [f"distill={{teachers: [{{file: {teacher}, model: resnet-110}}]}}"] if taught else []
            case = {"batch": batch, "blocks": blocks, "teacher": taught}
            scale = CIFAR / images
            with tempfile.TemporaryDirectory() as run_folder:
                lines = Run(recipes.read(str(file), words), run_folder).execute().folder.metrics()
            case["alone"] = scale * statistics.median(line["seconds"] for line in lines[1:])
            if parallel and batch == batches[min(1, len(batches) - 1)]:
                seconds, _ = _sweep(file, words, parallel, mps, [])
                case["at once, each"] = scale * seconds / parallel
            cases.append(case)
            print(json.dumps(case), flush=True)  # so that an interrupted benchmark has results
    return cases


def matrix_rows(cases: Sequence[dict[str, Any]], parallel: int) -> list[list[str]]:
    table = [["batch", "blocks", "teacher", "alone", f"{parallel} at once, each"]]
    for case in cases:
        many = f"{case['at once, each']:.3f} s" if "at once, each" in case else ""
        kinds = ["compiled" if case["blocks"] == "blocks" else "eager", "asked" if case["teacher"] else "none"]
        table.append([str(case["batch"]), *kinds, f"{case['alone']:.3f} s", many])
    return table


def together_rows(times: dict[str, Any]) -> list[list[str]]:
    n = times["networks"]
    alone, each = times["one: seconds an epoch"], times["at once: seconds an epoch and network"]
    return [
        ["", "a network", "÷ alone", "wall clock, with the start"],
        ["alone", f"{alone:.3f} s", "1.00", f"{times['one: wall clock']:.1f} s"],
        [f"{n} at once", f"{each:.3f} s", f"{each / alone:.2f}", f"{times['at once: wall clock']:.1f} s"],
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", help="comma-separated, or none; default: all, on a CPU the LeNets")
    parser.add_argument(
        "--epochs", type=int, help="epochs of each stage; default: 12 for the LeNets, 4 for the ResNets"
    )
    parser.add_argument("--together", type=int, default=0, help="compare this many parallel ResNet-56 with one (CUDA)")
    parser.add_argument("--no-mps", action="store_true", help="with --together: let the processes take turns")
    parser.add_argument("--matrix", type=int, nargs="+", metavar="BATCH", help="ResNet-56 at these batch sizes")
    parser.add_argument(
        "--images", type=int, default=CIFAR, help="with --matrix: train on this many, and scale the time to all"
    )
    chosen = parser.parse_args()
    if chosen.together and chosen.device != "cuda":
        parser.error("--together needs a GPU for the runs to share")
    record: dict[str, Any] = {"machine": machine(chosen.device)}
    cases = chosen.cases.split(",") if chosen.cases else default_cases(chosen.device)
    count = 2 if chosen.brief else chosen.epochs
    for case in cases if cases != ["none"] else []:
        if case not in CASES:
            raise unknown("network of this benchmark", case, CASES)
        record[case] = times(case, chosen.device, count or EPOCHS[case])
        write(chosen.out, record)
    if len(record) > 1:
        show("through `deephoyer run`", rows(record))
    if chosen.together and not chosen.matrix:
        record["together"] = times_together = together(
            chosen.together, chosen.device, count or EPOCHS["resnet-56"], mps=not chosen.no_mps
        )
        show("a steady epoch of ResNet-56", together_rows(times_together), times_together["notes"])
    if chosen.matrix:
        parallel = (chosen.together or 4) if chosen.device == "cuda" else 0
        options = (chosen.device, chosen.matrix, chosen.images, count or 3, parallel, not chosen.no_mps)
        record["matrix"] = matrix(*options)
        show("a steady epoch of ResNet-56", matrix_rows(record["matrix"], parallel), words=3)
    write(chosen.out, record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:  # one run of the sweep: `epochs.py run RECIPE [key=value ...] --out FOLDER`
        _, _, name, *overrides, _, folder = sys.argv
        Run(recipes.read(name, overrides), Path(folder)).execute()
    else:
        main()
