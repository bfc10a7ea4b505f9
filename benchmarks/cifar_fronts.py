"""ResNet-56 and -110 on CIFAR-10: points of the front and their seeds, an ablation, the paper's schedules.

    DEEPHOYER_DATA=… python benchmarks/cifar_fronts.py --plan
    DEEPHOYER_DATA=… python benchmarks/cifar_fronts.py --items points --networks resnet-56 --seconds 540 --jobs 4 \\
        --publish results --pack home

Runs are ordinary ones in `runs/`. When `--seconds` are over they are stopped, and the same command resumes them: on the
same machine as it is, on another one after `cat home/runs-* | tar xz`. `--publish` writes records of finished runs, the
weights of one seed per row, and times them on this CPU: with `--jobs 0`, afterwards, when nothing else runs. `--rates`
times 256 images on the GPU, compiled, at the end. `--scale 0.5` halves all epochs. Items, in order:

points    1.9, 2.1 and 2.6 times fewer MACs, each seed from its own dense network, which had as many epochs and the same
          teacher; one regularized network per seed for all three
ablation  Group-HS, group lasso, magnitude and random, with and without a teacher, 2.6 times fewer MACs, ResNet-56
seeds     more seeds of the points at 3.5 to 5.9 times, each from its own dense network
held-out  the same chain once with a tenth of the training images held out
paper     the paper's schedules and strengths, ResNet-56
cpu       channels chosen for a time of 0.62 of the dense network's for 64 images on this CPU
gpu       channels chosen for 0.75 of its time for 256 images on this GPU (with --jobs 1: other runs would distort it)

The methods under one protocol are `deephoyer compare resnet-56`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from measuring import machine, show, write
from pack_runs import pack_jobs
from run_list import (
    Job,
    Publisher,
    in_parallel,
    list_parser,
    plan_rows,
    rates,
    with_scaled_epochs,
    without_repeats,
)

SECONDS_PER_EPOCH = {"resnet-56": 1.1, "resnet-110": 2.2}
"""On an H200, with four runs at a time: their time divided by four."""
SIZES = {
    "resnet-56": {"1.9×": 0.526, "2.1×": 0.476, "2.6×": 0.385},
    "resnet-110": {"1.9×": 0.526, "2.1×": 0.476, "2.67×": 0.374},
}
TAUGHT, HALF = "parts/resnet-56-taught", "small/resnet-56-half"
FOR_CPU = "{latency: 0.62, batch: 64}"
FOR_GPU = "{latency: 0.75, batch: 256, mode: cuda-graph, dtype: bfloat16}"
"""Not compiled: each of up to ten tries would be, for a minute. `--rates` compiles what was chosen."""
HELD_OUT = "epoch_selection=held-out"


@dataclass(frozen=True)
class Plan:
    """The runs of each item; those that others start from come first."""

    networks: tuple[str, ...]
    seeds: tuple[int, ...]
    scale: float = 1.0
    changes: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()
    """Of `points`; without them all three."""

    def job(
        self,
        network: str,
        method: str,
        aim: str,
        seed: int,
        base: str,
        *overrides: str,
        tags: tuple[str, ...] = (),
        row: bool = True,
    ) -> Job:
        all_overrides = with_scaled_epochs(base, (*overrides, f"seed={seed}", *self.changes), self.scale)
        return Job(network, method, aim, base, all_overrides, row, tags, keep_weights=seed == self.seeds[0])

    def points(self) -> Iterator[Job]:
        for network in self.networks:
            for seed in self.seeds:
                dense, regularized = self._regularized(network, seed)
                yield from (dense, regularized)
                for aim, macs in SIZES[network].items():
                    if not self.sizes or float(aim.rstrip("×")) in self.sizes:
                        yield self._cut(regularized, "coupled Group-HS", aim, macs, ("best",))

    def _regularized(self, network: str, seed: int, *changes: str) -> tuple[Job, Job]:
        """A dense network that learned from the teacher, and the run that trains it on under the penalty."""
        dense = self.job(network, "dense, taught", "", seed, TAUGHT, *_model(network), tags=("dense",))
        overrides = (*_model(network), *changes, "prune=null", "finetune=null", dense.start())
        return dense, self.job(network, "coupled Group-HS", "", seed, HALF, *overrides, row=False)

    def _cut(self, start: Job, method: str, aim: str, macs: float, tags: tuple[str, ...], *changes: str) -> Job:
        """A regularized network, pruned to a share of its MACs and finetuned."""
        overrides = (*_model(start.network), "regularize=null", f"prune.target.macs={macs}", start.start(), *changes)
        return self.job(start.network, method, aim, start.recipe.seed, HALF, *overrides, tags=tags)

    def ablation(self) -> Iterator[Job]:
        """Equal epochs for all: networks that are not regularized are finetuned for as many epochs more."""
        name, aim, macs, tags = "resnet-56", "2.6×", SIZES["resnet-56"]["2.6×"], ("ablation",)
        longer = "finetune.epochs=162"
        for seed in self.seeds[:2]:
            for teacher, title in (((), "taught"), (("distill=null",), "no teacher")):
                dense = self.job(name, f"dense, {title}", "", seed, TAUGHT, *teacher, tags=("dense",))
                yield dense
                start = (*teacher, dense.start())
                for method, penalty in (("Group-HS", ()), ("group lasso", ("regularize.penalty=l1",))):
                    only = ("prune=null", "finetune=null")
                    regularized = self.job(name, method, "", seed, HALF, *penalty, *start, *only, row=False)
                    row = f"coupled {method}" + (f", {title}" if penalty or teacher else "")
                    yield regularized
                    yield self._cut(regularized, row, aim, macs, tags, *teacher)
                for method, score in (("magnitude", ()), ("random", ("prune.score=random",))):
                    overrides = ("regularize=null", f"prune.target.macs={macs}", longer, *score, *start)
                    yield self.job(name, f"{method}, {title}", aim, seed, HALF, *overrides, tags=tags)

    def more_seeds(self) -> Iterator[Job]:
        for seed in self.seeds[1:]:
            yield from self._chains(seed)

    def held_out(self) -> Iterator[Job]:
        yield from self._chains(self.seeds[0], HELD_OUT)

    def _chains(self, seed: int, *protocol: str) -> Iterator[Job]:
        """The published rows at 3.5 to 5.9 times fewer MACs, once more from a dense network of this seed.

        The teachers of held-out runs were not trained on the held-out images either.
        """
        teachers = [
            self.job(name, "dense", "", seed, f"parts/{name}-dense", *protocol, tags=("dense",))
            for name in ("resnet-56", "resnet-110")
        ]
        small, large = teachers
        if protocol:
            yield from teachers

        def taught(*by: Job) -> tuple[str, ...]:
            return (f"distill.teachers={[teacher.words for teacher in by]}", *protocol) if protocol else ()

        if "resnet-56" in self.networks:
            name, base = "resnet-56", "small/resnet-56-gather"
            sized = ("finetune.epochs=153", "prune.target.macs=0.284", "regularize.effective_density=0.48")
            first = taught(small) or ("distill.teachers=[parts/resnet-56-dense]",)
            yield small
            start = self.job(name, "Group-HS per layer", "", seed, base, *first, *sized, small.start(), tags=("front",))
            yield start
            again = (*taught(large), start.start())
            finetuned, pruned = f"{base}-finetuned-twice", f"{base}-pruned-twice"
            yield self.job(name, "Group-HS per layer, finetuned twice", "", seed, finetuned, *again, tags=("best",))
            smaller = self.job(name, "Group-HS per layer, pruned twice", "", seed, pruned, *again, tags=("best",))
            yield smaller
            harder = ("finetune.epochs=115", "prune.target.macs=0.1775", "regularize.effective_density=0.4")
            harder += ("regularize.epochs=12", "regularize.lr=0.1", "regularize.strength=0.0001", *taught(large))
            title = "Group-HS per layer, pruned three times"
            yield self.job(name, title, "", seed, pruned, *harder, smaller.start(), tags=("best",))
        if "resnet-110" in self.networks:
            name, base = "resnet-110", "small/resnet-110-gather"
            yield large
            first = (*taught(small, large), large.start())
            start = self.job(name, "Group-HS per layer", "", seed, base, *first, tags=("front",))
            yield start
            again, base = (*taught(large), start.start()), f"{base}-pruned-twice"
            same = ("finetune.epochs=120", "prune.groups=elements", "prune.rule=absolute", "prune.target=null")
            same += ("prune.value=0", "regularize=null")
            yield self.job(name, "Group-HS per layer, finetuned twice", "", seed, base, *same, *again, tags=("best",))
            for sized in ((), ("prune.target.macs=0.1705", "regularize.effective_density=0.36")):
                yield self.job(name, "Group-HS per layer, pruned twice", "", seed, base, *sized, *again, tags=("best",))

    def paper(self) -> Iterator[Job]:
        """One dense network per seed for four strengths."""
        name, base = "resnet-56", "paper/resnet-56"
        for seed in self.seeds[:2]:
            only = ("regularize=null", "prune=null", "finetune=null")
            dense = self.job(name, "dense, the paper's schedule", "", seed, base, *only, tags=("dense",))
            yield dense
            for strength in ("2e-4", "2.5e-4", "3e-4", "5e-4"):
                overrides = ("pretrain=null", f"regularize.strength={strength}", dense.start())
                yield self.job(name, f"Group-HS {strength}", "", seed, base, *overrides, tags=("paper-settings",))

    def for_cpus(self) -> Iterator[Job]:
        """From the regularized networks of `points`; channels are chosen by a run of their own on the CPU."""
        seed = self.seeds[0]
        for network in self.networks:
            dense, regularized = self._regularized(network, seed)
            both = (*_model(network), "regularize=null")
            on_cpu = ("distill=null", "finetune=null", "device=cpu", f"prune.target={FOR_CPU}", regularized.start())
            cut = self.job(network, "channels for CPUs", "", seed, HALF, *both, *on_cpu, row=False)
            yield from (dense, regularized, cut)
            same = ("prune.rule=absolute", "prune.value=0", "prune.groups=elements", "prune.target=null", cut.start())
            yield self.job(network, "coupled Group-HS for CPUs", "", seed, HALF, *both, *same, tags=("best",))

    def for_the_gpu(self) -> Iterator[Job]:
        for network in self.networks:
            dense, regularized = self._regularized(network, self.seeds[0])
            overrides = (*_model(network), "regularize=null", f"prune.target={FOR_GPU}", regularized.start())
            yield from (dense, regularized)
            yield self.job(network, "coupled Group-HS for an H200", "", self.seeds[0], HALF, *overrides, tags=("best",))


def _model(network: str) -> tuple[str, ...]:
    return () if network == "resnet-56" else (f"model={network}",)


ITEMS: dict[str, Callable[[Plan], Iterator[Job]]] = {
    "points": Plan.points,
    "ablation": Plan.ablation,
    "seeds": Plan.more_seeds,
    "held-out": Plan.held_out,
    "paper": Plan.paper,
    "cpu": Plan.for_cpus,
    "gpu": Plan.for_the_gpu,
}


def rows(jobs: list[Job]) -> list[list[str]]:
    """Of each finished run the accuracy it started and ended with, and its MACs."""
    table = [["network", "method", "size", "seed", "start", "accuracy", "MACs left"]]
    for job in jobs:
        if job.record and job.is_row:
            accuracy, total = list(job.record["accuracy"].values()), job.record["sparse"]["total"]
            macs = job.record.get("compact", {}).get("total", total)["macs_executed"]
            numbers = [f"{accuracy[0]:.2%}", f"{accuracy[-1]:.2%}", f"{macs / total['macs_executed']:.3f}"]
            table.append([job.network, job.method, job.aim, str(job.recipe.seed), *numbers])
    return table


def main() -> None:
    parser = list_parser(__doc__, list(SECONDS_PER_EPOCH), [0, 1, 2], jobs=4)
    parser.add_argument("--items", nargs="+", choices=list(ITEMS), default=[name for name in ITEMS if name != "gpu"])
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=(), help="sizes of the item `points`: 1.9 2.1 2.6 2.67"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all numbers of epochs")
    parser.add_argument("--rates", action="store_true", help="time the finished networks at the end")
    chosen = parser.parse_args()
    plan = Plan(tuple(chosen.networks), tuple(chosen.seeds), chosen.scale, tuple(chosen.changes), tuple(chosen.sizes))
    items = {name: [job for job in ITEMS[name](plan) if job.network in chosen.networks] for name in chosen.items}
    jobs = without_repeats(job for item in items.values() for job in item)
    if chosen.plan or chosen.brief:
        show("to do, in order", plan_rows(jobs, SECONDS_PER_EPOCH, items), words=1)
        return
    publisher = Publisher(chosen.publish)
    left = in_parallel(jobs, chosen.seconds, chosen.jobs, publisher, mps=not chosen.no_mps)
    show("CIFAR-10", rows(jobs), words=3)
    print("\n".join(f"not yet: {line}" for line in left))
    if chosen.pack is not None:
        print("\n".join(pack_jobs(jobs, chosen.pack, publisher)))
    images_per_second = {}
    for network in chosen.networks if chosen.rates else ():
        small = [job for job in jobs if job.network == network and job.record and job.recipe.prune and job.is_row]
        images_per_second[network] = rates(small, (256, 3, 32, 32), chosen.device)
        for name, rate in images_per_second[network].items():
            times = rate / images_per_second[network]["dense"]
            print(f"{network}: {name}: {times:.2f} × the dense one's images per second")
    table = rows(jobs)
    record = {"machine": machine(chosen.device), "titles": table[0], "rows": table[1:]}
    write(chosen.out, record | {"rates": images_per_second, "left": left})


if __name__ == "__main__":
    main()
