"""ResNet-50 and AlexNet on 100 classes of Tiny-ImageNet: all runs in order, as `deephoyer run` does them, and a table.

    DEEPHOYER_DATA=… python benchmarks/tiny_imagenet.py --network resnet-50 --seconds 540 --out table.json

Dense networks are trained once. ResNet-50 is pruned in rounds, separately for each row; of AlexNet each regularized
network is pruned to several sizes. Runs are ordinary ones in `runs/`, and the same command resumes with those that are
missing. A run that would not end within `--seconds` is not started. `--scale 0.5` halves all epochs but those of
ResNet-50's dense start; an H200 needs about 19 minutes for both seeds of ResNet-50 at 0.27, and 7 for AlexNet at 0.5.
`--publish` writes records of finished runs meanwhile, on the CPU. `--rates` times inference at the end: the dense
network and those whose widths are multiples of 32, both compiled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deephoyer.lab.processes import UNTIMED
from measuring import machine, make_parser, show, write
from run_list import Job, Publisher, one_by_one, rates, with_scaled_epochs

SECONDS_PER_EPOCH = {"resnet-50": 4.2, "alexnet": 2.3}
"""A guess, until an epoch has been timed."""
OVERHEAD = 20.0
"""Seconds that a run takes besides its epochs: compiling, pruning, measuring."""


@dataclass(frozen=True)
class Plan:
    """The runs of a network; those that others start from come first."""

    scale: float
    changes: tuple[str, ...]
    seeds: tuple[int, ...]
    weights: str | None = None
    """A file that ResNet-50 starts from instead of the recipe's, or null."""
    strengths: dict[str, str] = field(default_factory=dict)
    """By method, instead of those here and in the recipes."""

    def penalty(self, method: str, *overrides: str) -> tuple[str, ...]:
        """These overrides, with the strength that was chosen for the method, if any."""
        if method not in self.strengths:
            return overrides
        others = (override for override in overrides if "strength" not in override)
        return (*others, f"regularize.strength={self.strengths[method]}")

    def from_dense(self, dense: Job) -> tuple[str, ...]:
        """The override that starts a run from the dense network, unless it is the one that the recipe names."""
        return () if not dense.overrides else (dense.start(),)

    def job(self, network: str, method: str, aim: str, base: str, *overrides: str, is_row: bool = True) -> Job:
        """A job whose epochs are scaled."""
        overrides = with_scaled_epochs(base, (*overrides, *self.changes), self.scale)
        return Job(network, method, aim, base, overrides, is_row)

    def resnet(self) -> Iterator[Job]:
        """Two fifths of the MACs by three methods, then a fast one; all with the same epochs and the same teacher."""
        base, name = "small/resnet-50-tiny", "resnet-50"
        weights = () if self.weights is None else (f"start={self.weights}",)
        # Not scaled: it is everybody's start and teacher.
        dense = Job(name, "dense, start", "", "parts/resnet-50-tiny-dense", (*weights, *self.changes))
        yield dense
        taught = () if not dense.overrides else (f"distill.teachers=[{json.dumps(dense.words)}]",)
        group_hs = self.penalty("Group-HS")
        all_channels = ("regularize.parameters=null", "prune.parameters=null")
        methods: dict[str, tuple[str, ...]] = {
            "magnitude": ("regularize.strength=0",),
            "Group-HS": group_hs,
            "group lasso": self.penalty("group lasso", "regularize.penalty=l1"),
            "Group-HS, multiples of 32": (*group_hs, *all_channels, "prune.multiple=32", "prune.target.macs=0.28"),
        }
        later: list[Job] = []
        for seed in self.seeds:
            start = (*self.from_dense(dense), *taught, f"seed={seed}")
            cut = [
                self.job(name, method, "0.28 MACs" if "multiples" in method else "0.4 MACs", base, *words, *start)
                for method, words in methods.items()
            ]
            # Not scaled but counted: the epochs of stages are rounded up one by one.
            as_long = ("regularize=null", "prune=null", "rounds=1", *start, f"finetune.epochs={cut[0].recipe.epochs}")
            yield Job(name, "dense, as long", "", base, (*as_long, *self.changes))
            yield from cut[:-1]
            if seed == self.seeds[0]:
                yield cut[-1]
            else:
                later.append(cut[-1])
        yield from later

    def alexnet(self) -> Iterator[Job]:
        """20, 50 and 100 times fewer weights by two penalties, each cut by two rules."""
        base, name, seed = "small/alexnet-tiny", "alexnet", f"seed={self.seeds[0]}"
        dense = self.job(name, "dense, start", "", "parts/alexnet-tiny-dense")
        yield dense
        start = (*self.from_dense(dense), seed)
        yield self.job(name, "dense, as long", "", base, "regularize=null", "prune=null", "finetune.epochs=14", *start)
        penalties: dict[str, tuple[str, ...]] = {
            "Hoyer-Square": self.penalty("Hoyer-Square"),
            "l1": self.penalty("l1", "regularize.penalty=l1", "regularize.strength=2e-5"),
        }
        only = ("prune=null", "finetune=null")
        regularized = {
            method: self.job(name, method, "", base, *penalty, *only, *start, is_row=False)
            for method, penalty in penalties.items()
        }
        yield from regularized.values()
        for rule in ("effective", "absolute"):
            for share in (0.05, 0.02, 0.01):
                for method, trained in regularized.items():
                    words = (
                        "regularize=null",
                        trained.start(),
                        f"prune.rule={rule}",
                        f"prune.target.density={share}",
                        seed,
                    )
                    yield self.job(name, f"{method}, {rule}", f"{1 / share:.0f} ×", base, *words)


def rows(jobs: Sequence[Job]) -> list[list[str]]:
    titles = [
        "network",
        "method",
        "size",
        "seed",
        "top-1",
        "top-5",
        "MACs",
        "nonzeros",
        "MACs left",
        "images/s, training",
    ]
    table = [titles]
    for job in jobs:
        if not (job.record and job.is_row):
            continue
        last = next(reversed(job.record["accuracy"]))
        total = job.record["sparse"]["total"]
        macs = job.record.get("compact", {}).get("total", {}).get("macs_executed") or total["macs_executed"]
        top5 = job.record.get("top5", {}).get(last)
        cells = [job.network, job.method, job.aim, str(job.recipe.seed), f"{job.record['accuracy'][last]:.2%}"]
        cells += ["–" if top5 is None else f"{top5:.2%}", f"{macs / 1e6:,.0f}M", f"{total['nonzeros']:,}"]
        rate = job.record.get("images a second")
        cells += [f"{macs / total['macs_executed']:.3f}", "–" if rate is None else f"{rate:,.0f}"]
        table.append(cells)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--network", choices=("resnet-50", "alexnet", "both"), default="both")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no run that would not finish within this time"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all numbers of epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", help="only these methods, and the networks they start from")
    parser.add_argument("--publish", type=Path, help="write records into this folder")
    parser.add_argument("--weights", help="a file of weights for ResNet-50 to start from, or null")
    parser.add_argument(
        "--strengths", nargs="+", default=[], metavar="METHOD=VALUE", help="initial strength of a method"
    )
    parser.add_argument("--rates", action="store_true", help="time inference at the end")
    parser.add_argument("--size", type=int, default=224, help="image size for timing inference")
    parser.add_argument("--batch", type=int, default=256, help="batch size for timing inference")
    parser.add_argument("changes", nargs="*", help="overrides for all runs, as of `deephoyer run`")
    chosen = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # records are written by the others
    device = ("device=cpu",) if chosen.device == "cpu" and torch.cuda.is_available() else ()
    os.environ[UNTIMED] = "1"  # --rates times what is to be fast, in turns
    strengths = {method: value for method, _, value in (word.partition("=") for word in chosen.strengths)}
    plan = Plan(chosen.scale, (*device, *chosen.changes), tuple(chosen.seeds), chosen.weights, strengths)
    resnet = plan.resnet() if chosen.network != "alexnet" else ()
    jobs = [*resnet, *(plan.alexnet() if chosen.network != "resnet-50" else ())]
    if chosen.methods:
        jobs = [job for job in jobs if "dense" in job.method or not job.is_row or job.method in chosen.methods]
    left = one_by_one(jobs, chosen.seconds, Publisher(chosen.publish), SECONDS_PER_EPOCH, OVERHEAD)
    show("Tiny-ImageNet, 100 classes", rows(jobs), words=3)
    in_blocks = [job for job in jobs if job.record and "multiples" in job.method] if chosen.rates else []
    inference = rates(in_blocks, (chosen.batch, 3, chosen.size, chosen.size), chosen.device)
    for name, rate in inference.items():
        print(f"{name}: {rate:,.0f} images a second ({chosen.size} px, batch {chosen.batch})")
    print("\n".join(f"not yet: {line}" for line in left))
    table = rows(jobs)
    content = {"machine": machine(chosen.device), "titles": table[0], "rows": table[1:], "inference": inference}
    write(chosen.out, content | {"left": left, "scale": chosen.scale})


if __name__ == "__main__":
    main()
