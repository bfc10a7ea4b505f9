"""What a plan gains: its accuracy beside that of magnitude pruning to the same MACs in the same epochs, seed by seed.

    python benchmarks/plan.py --images 5000 --epochs 10 --macs 0.2 --on validation
    python benchmarks/plan.py --network resnet-20 --data cifar10 --epochs 30 --batch 128 --optimizer sgd --lr 0.1 \\
        --macs 0.4 --device cuda --jobs 5

All ways train the same network on the same batches with one cosine decay over all epochs, and keep the epoch after the
last prune that is best on held-out training images. Magnitude prunes once or in rounds, at the threshold (in standard
deviations of a layer) that leaves the MACs asked for. Plans are also run with Group-HS, without a penalty, with
channels chosen by what they cost, and with a penalty that never pauses. `--on validation` prints the accuracy on the
held-out images, on which defaults were chosen; `--on test` that on the test set; `--out` keeps both, and `--page RECORD
PAGE` writes them into a page. On a GPU networks train in bfloat16, channels last, with forward and backward passes
captured in a CUDA graph, `--jobs` of them in parallel.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deephoyer as dh
import measuring
from deephoyer import targets
from deephoyer.counting import count
from deephoyer.lab import data as datasets
from deephoyer.lab.models import make
from deephoyer.plan import Plan
from deephoyer.rules import StdRatio
from deephoyer.targets import Target


@dataclass
class Job:
    """The data, network and schedule that all ways share."""

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

    @property
    def device(self) -> torch.device:
        return self.images[0].device

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = make(self.network).to(self.device)
        if self.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)
        if self.optimizer == "adam":
            return model, torch.optim.Adam(model.parameters(), lr=self.lr)
        return model, torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)

    @property
    def example(self) -> Tensor:
        return self.floats(self.images[0][:2])

    def steps(self, model: nn.Module) -> Callable[[Tensor, Tensor], None]:
        """A function that computes the gradients of a batch; on a GPU captured, as kernel launches take longer."""
        if self.device.type == "cuda":
            return Captured(model, self.example[:1].repeat(self.batch, 1, 1, 1))

        def plain(x: Tensor, y: Tensor) -> None:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

        return plain

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Callable[[Tensor, Tensor], None],
        epoch: int,
        seed: int,
    ) -> None:
        model.train()
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(self.images[0]), generator=draw)
        moves = torch.stack([torch.randint(0, most, (len(order),), generator=draw) for most in (9, 9, 2)])
        order, moves = order.to(self.device), moves.to(self.device)
        count = len(order) // self.batch if self.device.type == "cuda" else -(-len(order) // self.batch)
        for i in range(count):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (1 + math.cos(math.pi * (epoch + i / count) / self.epochs)) / 2
            part = order[i * self.batch : (i + 1) * self.batch]
            x, y = self.floats(self.images[0][part]), self.images[1][part]
            if self.augment:
                x = augmented(x, *moves[:, part])
            step(x, y)
            optimizer.step()

    @torch.no_grad()
    def accuracy(self, model: nn.Module, images: tuple[Tensor, Tensor]) -> float:
        model.eval()
        parts = zip(*(t.split(1000) for t in images), strict=True)
        right = sum(int((model(self.floats(x)).argmax(1) == y).sum()) for x, y in parts)
        return right / len(images[0])


class Captured:
    """Forward and backward of a batch as a CUDA graph: replaying it leaves gradients where the optimizer reads them."""

    def __init__(self, model: nn.Module, example: Tensor):
        self.x = example.contiguous(memory_format=torch.channels_last)
        self.y = torch.zeros(len(example), dtype=torch.long, device=example.device)
        before = copy.deepcopy(model.state_dict())  # warming up changes batch norms
        model.train()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._once(model)
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad(set_to_none=True)  # the graph has its own, and overwrites them each time
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._once(model)
        model.load_state_dict(before)

    def _once(self, model: nn.Module) -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(model(self.x), self.y)
        loss.backward()

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()


def augmented(x: Tensor, dy: Tensor, dx: Tensor, flip: Tensor) -> Tensor:
    """Random crops of images with a border of four pixels, and flips."""
    padded = F.pad(x, (4, 4, 4, 4))
    n, _, h, w = x.shape
    rows = (dy[:, None] + torch.arange(h, device=x.device))[:, None, :, None]
    cols = dx[:, None] + torch.arange(w, device=x.device)
    cols = torch.where(flip[:, None] > 0, cols.flip(1), cols)[:, None, None, :]
    picked = torch.arange(n, device=x.device)[:, None, None, None]
    return padded[picked, torch.arange(x.shape[1], device=x.device)[None, :, None, None], rows, cols]


def by_plan(job: Job, seed: int, **settings: Any) -> nn.Module:
    model, optimizer = job.start(seed)
    plan = Plan(model, job.example, optimizer, Target(macs=job.macs), job.epochs, **settings)
    step = job.steps(model)
    for epoch in range(job.epochs):
        job.train(model, optimizer, step, epoch, seed)
        plan.epoch(job.accuracy(model, job.held_out))
    return plan.finish()


def dense(job: Job, seed: int) -> nn.Module:
    model, optimizer = job.start(seed)
    step = job.steps(model)
    for epoch in range(job.epochs):
        job.train(model, optimizer, step, epoch, seed)
    return model


def by_magnitude(job: Job, seed: int, moments: list[int]) -> nn.Module:
    """Prunes after these epochs, each time by the same factor, and keeps the zeros."""
    model, optimizer = job.start(seed)
    groups = dh.Coupled(model, job.example)
    goal = targets.macs(model, job.example, 1.0, groups)
    step = job.steps(model)
    best, kept, held = -1.0, copy.deepcopy(model.state_dict()), None
    for epoch in range(job.epochs):
        job.train(model, optimizer, step, epoch, seed)
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
    yield "plan, group lasso", by_plan
    yield "plan, Group-HS", lambda job, seed: by_plan(job, seed, penalty="hoyer-square")
    yield "plan, no penalty", lambda job, seed: by_plan(job, seed, pull=0.0)
    yield "plan, by cost", lambda job, seed: by_plan(job, seed, by_cost=True)
    yield "plan, never resting", lambda job, seed: by_plan(job, seed, control=False)


def make_job(args: argparse.Namespace) -> Job:
    data = datasets.load(args.data, **({"folder": args.folder} if args.folder else {})).to(args.device)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0)).to(args.device)
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


def outcome(args: argparse.Namespace, title: str, seed: int) -> dict[str, Any]:
    """The result of one training; several may run in parallel, each in a process that keeps its data."""
    job = _job(args)
    began = time.monotonic()
    model = dict(ways(job.epochs))[title](job, seed)
    line = {"way": title, "seed": seed, "validation": job.accuracy(model, job.held_out)}
    line |= {"test": job.accuracy(model, job.test), "seconds": time.monotonic() - began}
    print(f"{title}, seed {seed}: {line[args.on]:.2%} in {line['seconds']:.0f} s", flush=True)
    return line | {"macs": count(model, job.example)[1].macs_executed or 0}


_JOBS: dict[str, Job] = {}


def _job(args: argparse.Namespace) -> Job:
    key = repr(args)
    if key not in _JOBS:
        _JOBS[key] = make_job(args)
    return _JOBS[key]


def table(record: dict[str, Any]) -> str:
    """The content of a record, in Markdown: means over seeds ± their deviation, the best on held-out images first."""

    def cell(seeds: list[dict[str, Any]], key: str) -> str:
        values = [100 * line[key] for line in seeds]
        return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")

    ways: dict[str, list[dict[str, Any]]] = {}
    for line in record["lines"]:
        ways.setdefault(line["way"], []).append(line)
    rows = ["| way | seeds | held-out accuracy, % | test accuracy, % | MACs left |", "|---|--:|--:|--:|--:|"]
    for way, seeds in sorted(ways.items(), key=lambda item: -statistics.mean(line["validation"] for line in item[1])):
        macs = statistics.mean(line["macs"] for line in seeds)
        rows.append(f"| {way} | {len(seeds)} | {cell(seeds, 'validation')} | {cell(seeds, 'test')} | {macs:.3f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--page", type=Path, nargs=2, help="only write the table of a record into a page: RECORD PAGE")
    parser.add_argument("--network", default="lenet-5")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--folder", help="the folder of the data; default: that of `deephoyer data`")
    parser.add_argument("--images", type=int, default=0, help="number of training images; 0: all that are not held out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--macs", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--on", choices=("validation", "test"), default="test")
    parser.add_argument("--ways", nargs="+", help="only these, by their titles")
    parser.add_argument("--jobs", type=int, default=1, help="parallel trainings, each in its own process")
    args = parser.parse_args()
    if args.page:
        record, page = args.page
        return measuring.put(page, record.stem, table(json.loads(record.read_text(encoding="utf-8"))))
    if args.brief:
        args.images, args.epochs, args.seeds, args.macs = 500, 4, [0], 0.5
    known = [title for title, _ in ways(args.epochs)]
    for title in args.ways or ():
        if title not in known:
            parser.error(f"--ways: {title!r} is not a way of this benchmark. Known: {', '.join(map(repr, known))}")
    titles = [title for title in known if not args.ways or title in args.ways]
    began = time.monotonic()
    print(f"{args.network} on {args.data}, {args.epochs} epochs, {args.macs:g} of the MACs; {args.on}", flush=True)
    tasks = [(title, seed) for title in titles for seed in args.seeds]
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(outcome, args, *task) for task in tasks]
            lines = [future.result() for future in futures]
    else:
        lines = [outcome(args, *task) for task in tasks]
    whole = count(make(args.network), _job(args).example.cpu())[1].macs_executed or 1
    rows = [["way", "accuracy", "±", "MACs", "seconds per seed"]]
    for line in lines:
        line["macs"] /= whole
    for title in titles:
        seeds = [line for line in lines if line["way"] == title]
        mean = {key: statistics.mean(line[key] for line in seeds) for key in (args.on, "macs", "seconds")}
        spread = statistics.stdev(line[args.on] for line in seeds) if len(seeds) > 1 else 0.0
        numbers = [f"{mean[args.on]:.2%}", f"{spread:.2%}", f"{mean['macs']:.3f}"]
        rows.append([title, *numbers, f"{mean['seconds']:.0f}"])
    measuring.show("a plan and magnitude pruning", rows, [f"{time.monotonic() - began:.0f} s in all"])
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "page")}
    measuring.write(args.out, {"machine": measuring.machine(args.device), "settings": settings, "lines": lines})


if __name__ == "__main__":
    main()
