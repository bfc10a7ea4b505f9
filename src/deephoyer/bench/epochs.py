"""Seconds an epoch through `deephoyer run`: LeNet-300-100, LeNet-5 and ResNet-56, with and without the regularizer.

MNIST is the real one; ResNet-56 trains on noise in CIFAR-10's shape (50,000 images, batch 128), which takes the
same time; on CUDA its blocks are compiled, and `resnet-56-eager` is the same without. LeNet-300-100 also gets the
time of the paper's 250 regularized epochs, which is 250 × the median.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import deephoyer.bench.noise  # noqa: F401
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train.run import Run

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


def usual(device: str) -> list[str]:
    """All on CUDA; on a CPU nobody waits for the ResNets."""
    return [case for case in CASES if device == "cuda" or not case.startswith("resnet")]


def recipe(case: str, device: str, epochs: int, bare_epochs: int | None = None) -> Recipe:
    base, training, penalty = CASES[case]
    fast = CUDA.get(case, {}) if device == "cuda" else {}
    return Recipe.model_validate(
        base
        | fast
        | {
            "device": device,
            "select": "test-best",
            "pretrain": {"epochs": epochs if bare_epochs is None else bare_epochs, **training},
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


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = [("an epoch", "without", "with the regularizer", "its share")]
    for case in CASES:
        if case in record:
            each = record[case]
            times_ = (f"{each[key]:.3f} s" for key in ("without", "with"))
            made.append((case, *times_, f"{each['share of the regularizer']:.1%}"))
    return made
