"""The smallest network that loses at most half a point: a plan told only that, beside a training for each size.

    python benchmarks/allowed_drop.py --out results/bench/allowed-drop.json

A LeNet-5 is trained on 5,000 images of MNIST; then every way has ten more epochs from there, for each size that it
tries. A way that is told sizes tries six of them, and the smallest network counts whose accuracy on held-out images has
fallen by no more than the drop; the drop alone takes one training. Test images are looked at once, at the end.
`--page RECORD PAGE` writes the table of a record into a page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import measuring
import plan as plans
from deephoyer.counting import count
from deephoyer.lab import data as datasets
from deephoyer.plan import Plan
from deephoyer.targets import OutOfReach, Target

DROP = 0.005
SIZES = (0.3, 0.2, 0.13, 0.09, 0.06, 0.04)


@dataclass
class Pretrained(plans.Job):
    """The training that all ways have, from the same trained network."""

    weights: dict[str, Tensor]

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = super().start(seed)
        model.load_state_dict(self.weights)
        return model, optimizer


def pretrained(job: plans.Job, seed: int) -> Pretrained:
    model = plans.dense(job, seed)
    return Pretrained(**vars(job), weights={name: t.clone() for name, t in model.state_dict().items()})


def by_drop(job: Pretrained, seed: int) -> nn.Module:
    model, optimizer = job.start(seed)
    before = job.accuracy(model, job.held_out)
    plan = Plan(model, job.example, optimizer, Target(drop=DROP), job.epochs, baseline=before)
    step = job.steps(model)
    for epoch in range(job.epochs):
        job.train(model, optimizer, step, epoch, seed)
        plan.epoch(job.accuracy(model, job.held_out))
    return plan.finish()


def by_size(job: Pretrained, seed: int, way: Callable[[plans.Job, int], nn.Module]) -> nn.Module | None:
    """The smallest of the networks that a way makes of these sizes, of those that lose no more than the drop."""
    model, _ = job.start(seed)
    least, smallest = job.accuracy(model, job.held_out) - DROP, None
    for size in SIZES:
        try:
            small = way(replace(job, macs=size), seed)
        except OutOfReach:  # no threshold leaves that little without emptying a layer
            continue
        if job.accuracy(small, job.held_out) >= least:
            smallest = small
    return smallest


def ways(epochs: int) -> Iterator[tuple[str, int, Callable[[Pretrained, int], nn.Module | None]]]:
    """Titles, how many trainings each takes, and what each comes to."""
    early = [max(1, round(0.1 * epochs)) + i for i in range(3)]
    yield "a plan, told the drop alone", 1, by_drop
    yield "a plan for each size", len(SIZES), lambda job, seed: by_size(job, seed, plans.by_plan)
    magnitude = lambda job, seed: plans.by_magnitude(job, seed, early)  # noqa: E731
    yield "magnitude in 3 rounds, for each size", len(SIZES), lambda job, seed: by_size(job, seed, magnitude)


def measured(job: plans.Job, seeds: list[int]) -> list[dict[str, Any]]:
    lines = []
    for seed in seeds:
        trained = pretrained(job, seed)
        dense, _ = trained.start(seed)
        whole = count(dense, job.example)[1].macs_executed or 1
        titled = [("dense", 0, dense)]
        titled += [(title, trainings, way(trained, seed)) for title, trainings, way in ways(job.epochs)]
        for title, trainings, model in titled:
            line: dict[str, Any] = {"way": title, "seed": seed, "trainings": trainings}
            if model is not None:  # else each of the sizes lost too much
                line["macs"] = (count(model, job.example)[1].macs_executed or 0) / whole
                line |= {key: job.accuracy(model, getattr(job, key)) for key in ("held_out", "test")}
            lines.append(line)
            print(", ".join(f"{key} {value:.4g}" if key != "way" else value for key, value in line.items()), flush=True)
    return lines


def table(record: dict[str, Any]) -> str:
    """The content of a record, in Markdown: means over seeds ± their deviation."""
    rows = ["| way | trainings | MACs left | held-out accuracy, % | test accuracy, % |", "|---|--:|--:|--:|--:|"]
    for way in dict.fromkeys(line["way"] for line in record["lines"]):
        seeds = [line for line in record["lines"] if line["way"] == way]
        cells = [way, f"{seeds[0]['trainings'] or ''}"]
        for key, scale, digits in (("macs", 1, 3), ("held_out", 100, 2), ("test", 100, 2)):
            values = [scale * line[key] for line in seeds if key in line]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}" if len(values) == len(seeds) else "–")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--page", type=Path, nargs=2, help="only write the table of a record into a page: RECORD PAGE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    if args.page:
        record, page = args.page
        return measuring.put(page, record.stem, table(json.loads(record.read_text(encoding="utf-8"))))
    data = datasets.load("mnist").to(args.device)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0)).to(args.device)
    held, pool = order[:5000], order[5000:10000]
    job = plans.Job(
        network="lenet-5",
        images=(data.train_x[pool], data.train_y[pool]),
        held_out=(data.train_x[held], data.train_y[held]),
        test=(data.test_x, data.test_y),
        floats=data.floats,
        epochs=10,
        batch=100,
        optimizer="adam",
        lr=1e-3,
        macs=1.0,
        augment=False,
    )
    if args.brief:
        job = replace(job, images=(job.images[0][:300], job.images[1][:300]), epochs=4)
        args.seeds = [0]
    lines = measured(job, args.seeds)
    record = {"machine": measuring.machine(args.device), "drop": DROP, "sizes": SIZES, "lines": lines}
    print(table(record))
    measuring.write(args.out, record)


if __name__ == "__main__":
    main()
