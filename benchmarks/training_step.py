"""What the penalty costs: a LeNet-300-100 step without it, with ours, and with a plain autograd loop; and an epoch.

    python benchmarks/training_step.py --out results/bench/training-step-cpu.json

All sides are measured in turns in one run, on the CPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import deephoyer as dh
from deephoyer.lab import data, models, recipe
from deephoyer.lab.train.run import Run
from measuring import make_parser, show, write

BATCH = 100


def autograd_penalty(model: torch.nn.Module) -> torch.Tensor:
    """Hoyer-Square as it is usually written: one term per tensor, and a check on the host that it is not all zero."""
    total = torch.zeros(())
    for p in model.parameters():
        if p.requires_grad and p.dim() > 1 and torch.sum(torch.abs(p)) > 0:
            total = total + torch.sum(torch.abs(p)) ** 2 / torch.sum(p**2)
    return total


def step_of(kind: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = models.make("lenet-300-100")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    digits = data.load("mnist")
    x, y = digits.floats(digits.train_x[:BATCH]), digits.train_y[:BATCH]
    regularizer = dh.Regularizer(model, "hoyer-square", "elements", 2e-4) if kind == "add_grad_" else None

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        if kind == "autograd loop":
            loss = loss + 2e-4 * autograd_penalty(model)
        optimizer.zero_grad()
        loss.backward()
        if regularizer is not None:
            regularizer.add_grad_()
        optimizer.step()

    return step


def steps(rounds: int = 60, burst: int = 10) -> dict[str, float]:
    """Median milliseconds per step; the kinds take turns, so that all are timed under the same conditions."""
    kinds = {kind: step_of(kind) for kind in ("bare", "add_grad_", "autograd loop")}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(rounds + 5):
        for kind, step in kinds.items():
            began = time.perf_counter()
            for _ in range(burst):
                step()
            if i >= 5:
                times[kind].append(1000 * (time.perf_counter() - began) / burst)
    return {kind: statistics.median(t) for kind, t in times.items()}


def hand_written_epoch() -> float:
    """Seconds for an epoch of the simplest loop over the same images in memory, without a penalty."""
    torch.manual_seed(0)
    digits = data.load("mnist")
    x, y = digits.floats(digits.train_x), digits.train_y
    model = models.make("lenet-300-100")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    began = time.perf_counter()
    for index in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return time.perf_counter() - began


def run_epoch() -> float:
    """Seconds for a whole regularized epoch of `deephoyer run`: batches, penalty, metrics, evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        stages = ["pretrain=null", "regularize.epochs=3", "finetune=null"]
        changes = ["data=mnist", *stages, "device=cpu", "epoch_selection=test-best"]
        run = Run(recipe.read("paper/lenet-300-100", changes), folder).execute()
        return statistics.median(line["seconds"] for line in run.folder.metrics())


def measured(rounds: int = 60, epochs: int = 3) -> dict[str, Any]:
    """Milliseconds of a step of each kind, and seconds of an epoch by hand and through `deephoyer run`."""
    step = steps(rounds)
    by_hand, ours = [], []
    for _ in range(epochs):
        by_hand.append(hand_written_epoch())
        ours.append(run_epoch())
    epoch = {"by hand": statistics.median(by_hand), "deephoyer run": statistics.median(ours)} if epochs else {}
    return {"step_ms": step, "epoch_s": epoch}


def rows(record: dict[str, Any]) -> list[list[str]]:
    step, epoch = record["step_ms"], record["epoch_s"]
    table: list[list[str]] = [["", "takes", "÷ the bare one"]]
    for kind, ms in step.items():
        table.append([f"step, {kind}", f"{ms:.3f} ms", f"{ms / step['bare']:.2f}"])
    for kind, seconds in epoch.items():
        table.append([f"epoch, {kind}", f"{seconds:.2f} s", f"{seconds / epoch['by hand']:.2f}"])
    return table


def main() -> None:
    chosen = make_parser(__doc__, device=False).parse_args()
    record = measured(rounds=5, epochs=0) if chosen.brief else measured()
    show("LeNet-300-100, batch 100, CPU", rows(record))
    write(chosen.out, record)


if __name__ == "__main__":
    main()
