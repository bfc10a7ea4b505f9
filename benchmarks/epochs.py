"""Seconds an epoch through `deephoyer run`: LeNet-300-100, LeNet-5 and ResNet-56, with and without the regularizer.

    python benchmarks/epochs.py --device cuda --out results/bench/epochs-cuda.json

MNIST is the real one; ResNet-56 trains on noise in CIFAR-10's shape (50,000 images, batch 128), which takes the
same time; on CUDA its blocks are compiled, and `resnet-56-eager` is the same without. LeNet-300-100 also gets the
time of the paper's 250 regularized epochs, which is 250 × the median. With --together N, N ResNet-56 runs at once,
as a sweep does, are timed against one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from deephoyer.data import DATASETS, Dataset
from deephoyer.train.run import Run
from deephoyer.train.schema import Recipe


@cache
def noise() -> Dataset:
    """random images in CIFAR-10's shape"""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60_000, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (60_000,), generator=g)
    return Dataset("noise", x[:50_000], y[:50_000], x[50_000:], y[50_000:], 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


DATASETS.add("noise", noise)

ADAM = {"optimizer": "adam", "lr": 1e-3}
SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 1e-4}
RESNET = (
    {"model": "resnet-56", "data": "noise", "batch_size": 128, "shift": 4, "flip": True},
    SGD,
    {"groups": "filters+channels", "strength": 2e-4},
)
CASES = {
    "lenet-300-100": ({"model": "lenet-300-100", "data": "mnist"}, ADAM, {"groups": "elements", "strength": 2e-4}),
    "lenet-5": ({"model": "lenet-5", "data": "mnist"}, ADAM, {"groups": "elements", "strength": 1e-4}),
    "resnet-56": RESNET,
    "resnet-56-eager": RESNET,
}
CUDA = {
    "resnet-56": {"precision": "bfloat16", "channels_last": True, "compile": "blocks"},
    "resnet-56-eager": {"precision": "bfloat16", "channels_last": True},
}
EPOCHS = {"lenet-300-100": 12, "lenet-5": 12, "resnet-56": 4, "resnet-56-eager": 4}
PAPER_EPOCHS = 250


def recipe(case: str, device: str, epochs: int) -> Recipe:
    base, training, penalty = CASES[case]
    fast = CUDA.get(case, {}) if device == "cuda" else {}
    return Recipe.model_validate(
        base
        | fast
        | {
            "device": device,
            "select": "test-best",
            "pretrain": {"epochs": epochs, **training},
            "regularize": {"epochs": epochs, **training, **penalty},
            "prune": {"rule": "density", "value": 0.5},
            "finetune": {"epochs": 0},
        }
    )


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


def together(count: int, epochs: int) -> dict[str, float]:
    """Wall-clock of `count` runs of ResNet-56 at once against one, processes and all."""
    words = [sys.executable, __file__, "--device", "cuda", "--cases", "resnet-56", "--epochs", str(epochs)]
    took = []
    for n in (1, count):
        began = time.monotonic()
        for process in [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(n)]:
            process.wait()
        took.append(time.monotonic() - began)
    return {
        "one": took[0],
        f"{count} at once": took[1],
        f"{count} at once / {count} × one": took[1] / (count * took[0]),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    words.add_argument("--cases", default=",".join(CASES))
    words.add_argument("--epochs", type=int, help="a stage; by default 12 for the LeNets, 4 for the ResNets")
    words.add_argument("--together", type=int, default=0)
    words.add_argument("--out", type=Path)
    chosen = words.parse_args()
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    record: dict[str, object] = {"machine": machine, "torch": torch.__version__}
    for case in chosen.cases.split(","):
        record[case] = found = times(case, chosen.device, chosen.epochs or EPOCHS[case])
        print(case, " ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
    if chosen.together:
        record["together"] = found = together(chosen.together, chosen.epochs or EPOCHS["resnet-56"])
        print("resnet-56", " ".join(f"{key} {value:.2f}" for key, value in found.items()), flush=True)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
