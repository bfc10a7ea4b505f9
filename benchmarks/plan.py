"""What a plan is worth: its accuracy beside magnitude pruning to the same MACs in the same epochs, seed by seed.

    python benchmarks/plan.py --images 5000 --epochs 10 --macs 0.2 --on validation
    python benchmarks/plan.py --network resnet-20 --data cifar10 --epochs 120 --optimizer sgd --lr 0.1 --macs 0.4

All ways train the same network on the same batches with one cosine decay over all epochs, and hand back the epoch after
the last prune that did best on images held out from training. Magnitude prunes once or in rounds, at the threshold
(in standard deviations of a layer) that leaves the MACs asked for. `--on validation` prints the accuracy on what was
held out, which is what defaults were chosen on; `--on test` that on the test set.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deephoyer as dh
from deephoyer import targets
from deephoyer.counting import count
from deephoyer.lab import data as datasets
from deephoyer.lab.models import make
from deephoyer.plan import Plan
from deephoyer.rules import StdRatio
from deephoyer.targets import Target


@dataclass
class Job:
    """Data, network and schedule that all ways share."""

    network: str
    images: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    floats: Callable[[Tensor], Tensor]
    epochs: int
    batch: int
    optimizer: str
    lr: float
    macs: float
    augment: bool

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = make(self.network).to(self.images[0].device)
        if self.optimizer == "adam":
            return model, torch.optim.Adam(model.parameters(), lr=self.lr)
        return model, torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)

    @property
    def example(self) -> Tensor:
        return self.floats(self.images[0][:2])

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, seed: int) -> None:
        model.train()
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        parts = list(torch.randperm(len(self.images[0]), generator=draw).split(self.batch))
        for i, part in enumerate(parts):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (1 + math.cos(math.pi * (epoch + i / len(parts)) / self.epochs)) / 2
            x, y = self.floats(self.images[0][part]), self.images[1][part]
            if self.augment:
                x = _augmented(x, draw)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    @torch.no_grad()
    def accuracy(self, model: nn.Module, images: tuple[Tensor, Tensor]) -> float:
        model.eval()
        parts = zip(*(t.split(1000) for t in images), strict=True)
        right = sum(int((model(self.floats(x)).argmax(1) == y).sum()) for x, y in parts)
        return right / len(images[0])


def _augmented(x: Tensor, draw: torch.Generator) -> Tensor:
    """Crops from a border of four pixels, and flips."""
    padded = F.pad(x, (4, 4, 4, 4))
    n, _, h, w = x.shape
    dy, dx = (torch.randint(0, 9, (n,), generator=draw).to(x.device) for _ in range(2))
    flip = torch.randint(0, 2, (n,), generator=draw).bool().to(x.device)
    rows = (dy[:, None] + torch.arange(h, device=x.device))[:, None, :, None]
    cols = dx[:, None] + torch.arange(w, device=x.device)
    cols = torch.where(flip[:, None], cols.flip(1), cols)[:, None, None, :]
    picked = torch.arange(n, device=x.device)[:, None, None, None]
    return padded[picked, torch.arange(x.shape[1], device=x.device)[None, :, None, None], rows, cols]


def by_plan(job: Job, seed: int, **settings: Any) -> nn.Module:
    model, optimizer = job.start(seed)
    plan = Plan(model, job.example, optimizer, Target(macs=job.macs), job.epochs, **settings)
    for epoch in range(job.epochs):
        job.train(model, optimizer, epoch, seed)
        plan.epoch(job.accuracy(model, job.held_out))
    return plan.finish()


def dense(job: Job, seed: int) -> nn.Module:
    model, optimizer = job.start(seed)
    for epoch in range(job.epochs):
        job.train(model, optimizer, epoch, seed)
    return model


def by_magnitude(job: Job, seed: int, moments: list[int]) -> nn.Module:
    """Prunes after these epochs, each time by the same share, and holds the zeros."""
    model, optimizer = job.start(seed)
    groups = dh.Coupled(model, job.example)
    goal = targets.macs(model, job.example, 1.0, groups)
    best, kept, held = -1.0, copy.deepcopy(model.state_dict()), None
    for epoch in range(job.epochs):
        job.train(model, optimizer, epoch, seed)
        done = sum(moment <= epoch + 1 for moment in moments)
        if done == len(moments) and epoch + 1 > moments[-1] and (now := job.accuracy(model, job.held_out)) > best:
            best, kept = now, copy.deepcopy(model.state_dict())
        if epoch + 1 in moments:
            wanted = targets.Goal(goal.name, goal.measure, job.macs ** (done / len(moments)))
            value = targets.value_for(wanted, model, StdRatio, groups).value
            if held is not None:
                held.release()
            held = dh.prune(model, StdRatio(value), groups).hold(optimizer)
    model.load_state_dict(kept)
    return dh.compact(model, job.example, groups=groups)


def ways(epochs: int) -> Iterator[tuple[str, Callable[[Job, int], nn.Module]]]:
    half = max(1, epochs // 2)
    rounds = sorted({max(1, round(half * share)) for share in (0.6, 0.8, 1.0)})
    yield "dense", dense
    yield "magnitude, once", lambda job, seed: by_magnitude(job, seed, [half])
    yield f"magnitude, {len(rounds)} rounds", lambda job, seed: by_magnitude(job, seed, rounds)
    same = [max(1, round(0.1 * epochs)) + i for i in (1, 2, 3)]  # a plan's own for ten epochs or so
    yield "magnitude, 3 rounds early", lambda job, seed: by_magnitude(job, seed, same)
    yield "plan", by_plan


def opened(args: argparse.Namespace) -> Job:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = datasets.load(args.data).to(device)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0)).to(device)
    held = order[:5000]
    pool = order[5000 : 5000 + args.images] if args.images else order[5000:]
    return Job(
        network=args.network,
        images=(data.train_x[pool], data.train_y[pool]),
        held_out=(data.train_x[held], data.train_y[held]),
        test=(data.test_x, data.test_y),
        floats=data.floats,
        epochs=args.epochs,
        batch=args.batch,
        optimizer=args.optimizer,
        lr=args.lr,
        macs=args.macs,
        augment=args.data == "cifar10",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="lenet-5")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--images", type=int, default=0, help="training images, 0 for all that are not held out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--macs", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--on", choices=("validation", "test"), default="test")
    parser.add_argument("--ways", nargs="+", help="only these, by their titles")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    job = opened(args)
    images = job.held_out if args.on == "validation" else job.test
    lines = []
    print(f"{args.network}, {len(job.images[0]):,} images, {job.epochs} epochs, {job.macs:g} of the MACs; {args.on}")
    for title, way in ways(job.epochs):
        if args.ways and title not in args.ways:
            continue
        found, sizes, began = [], [], time.monotonic()
        for seed in args.seeds:
            model = way(job, seed)
            found.append(job.accuracy(model, images))
            sizes.append(count(model, job.example)[1].macs_executed or 0)
        mean, spread = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
        whole = count(make(job.network), job.example.cpu())[1].macs_executed or 1
        share = statistics.mean(sizes) / whole
        seconds = (time.monotonic() - began) / len(args.seeds)
        print(f"{title:<26} {mean:.2%} ± {spread:.2%}   MACs {share:.3f}   {seconds:.0f} s a seed", flush=True)
        lines.append({"way": title, "accuracy": found, "macs": sizes, "seconds": seconds})
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        args.out.write_text(json.dumps({"settings": settings, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
