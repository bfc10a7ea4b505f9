"""ResNet-56 and -110 on CIFAR-10: points of the front and their seeds, an ablation, the paper's schedules; in order.

    DEEPHOYER_DATA=… python benchmarks/cifar_fronts.py --plan
    DEEPHOYER_DATA=… python benchmarks/cifar_fronts.py --items points --networks resnet-56 --seconds 540 --jobs 4 \\
        --publish results --pack home

Runs lie in `runs/` and are ordinary ones. When `--seconds` are over they are stopped, and the same command goes on with
them: on the same machine as it is, on another one after `cat home/runs-* | tar xz`. `--publish` writes records of
finished runs, weights of one seed a row, and times them on this CPU: with `--jobs 0`, afterwards, where it is quiet.
`--rates` times 256 images on the GPU, compiled, at the end. `--scale 0.5` halves all epochs. Items, in order:

points    1.9, 2.1 and 2.6 times fewer MACs, each seed from its own dense network, which had as many epochs and the same
          teacher; one regularized network a seed for all three
ablation  Group-HS, group lasso, magnitude and random, with a teacher and without, 2.6 times, ResNet-56
seeds     more seeds of the points at 3.5 to 5.9 times, from dense networks of their own
held-out  the same chain once with a tenth of the training images held out
paper     the paper's schedules and strengths, ResNet-56
cpu       channels chosen by the time that 64 images take on this CPU, half as fast again
gpu       and by that of 256 on this GPU, a fifth faster (alone, with --jobs 1: others would be in the way of the clock)

The methods under one protocol are `deephoyer compare resnet-56`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from measuring import machine, show, write
from runs_in_time import Job, Records, at_once, list_words, once, pack_jobs, plan_rows, rates, scaled

PACE = {"resnet-56": 1.1, "resnet-110": 2.2}
"""Seconds an epoch on an H200, of four at once one after the other."""
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
    """The runs of each item, those that others start from first."""

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
        given = scaled(base, (*overrides, f"seed={seed}", *self.changes), self.scale)
        return Job(network, method, aim, base, given, row, tags, keep_weights=seed == self.seeds[0])

    def points(self) -> Iterator[Job]:
        for network in self.networks:
            for seed in self.seeds:
                dense, regularized = self._regularized(network, seed)
                yield from (dense, regularized)
                for aim, macs in SIZES[network].items():
                    if not self.sizes or float(aim.rstrip("×")) in self.sizes:
                        yield self._cut(regularized, "coupled Group-HS", aim, macs, ("best",))

    def _regularized(self, network: str, seed: int, *changes: str) -> tuple[Job, Job]:
        """A dense network that learned from the teacher, and what becomes of it under the penalty."""
        dense = self.job(network, "dense, taught", "", seed, TAUGHT, *_model(network), tags=("dense",))
        words = (*_model(network), *changes, "prune=null", "finetune=null", dense.start())
        return dense, self.job(network, "coupled Group-HS", "", seed, HALF, *words, row=False)

    def _cut(self, of: Job, method: str, aim: str, macs: float, tags: tuple[str, ...], *changes: str) -> Job:
        given = (*_model(of.network), "regularize=null", f"prune.target.macs={macs}", of.start(), *changes)
        return self.job(of.network, method, aim, of.recipe.seed, HALF, *given, tags=tags)

    def ablation(self) -> Iterator[Job]:
        """Equal epochs for all: what is not regularized is finetuned for as much longer."""
        name, aim, macs, tags = "resnet-56", "2.6×", SIZES["resnet-56"]["2.6×"], ("ablation",)
        longer = "finetune.epochs=162"
        for seed in self.seeds[:2]:
            for teacher, said in (((), "taught"), (("distill=null",), "no teacher")):
                dense = self.job(name, f"dense, {said}", "", seed, TAUGHT, *teacher, tags=("dense",))
                yield dense
                own = (*teacher, dense.start())
                for method, penalty in (("Group-HS", ()), ("group lasso", ("regularize.penalty=l1",))):
                    only = ("prune=null", "finetune=null")
                    regularized = self.job(name, method, "", seed, HALF, *penalty, *own, *only, row=False)
                    cut = f"coupled {method}" + (f", {said}" if penalty or teacher else "")
                    yield regularized
                    yield self._cut(regularized, cut, aim, macs, tags, *teacher)
                for method, score in (("magnitude", ()), ("random", ("prune.score=random",))):
                    given = ("regularize=null", f"prune.target.macs={macs}", longer, *score, *own)
                    yield self.job(name, f"{method}, {said}", aim, seed, HALF, *given, tags=tags)

    def more_seeds(self) -> Iterator[Job]:
        for seed in self.seeds[1:]:
            yield from self._chains(seed)

    def held_out(self) -> Iterator[Job]:
        yield from self._chains(self.seeds[0], HELD_OUT)

    def _chains(self, seed: int, *protocol: str) -> Iterator[Job]:
        """The published rows at 3.5 to 5.9 times fewer MACs again, from a dense network of this seed.

        Held-out runs have teachers that never saw the held-out images either.
        """
        teachers = [
            self.job(name, "dense", "", seed, f"parts/{name}-dense", *protocol, tags=("dense",))
            for name in ("resnet-56", "resnet-110")
        ]
        small, large = teachers
        if protocol:
            yield from teachers

        def taught(*by: Job) -> tuple[str, ...]:
            return (f"distill.teachers={[one.words for one in by]}", *protocol) if protocol else ()

        if "resnet-56" in self.networks:
            name, one = "resnet-56", "distill.teachers=[parts/resnet-56-dense]"
            sized = ("finetune.epochs=153", "prune.target.macs=0.284", "regularize.effective_density=0.48")
            first = taught(small) or (one,)
            yield small
            base = f"small/{name}-gather"
            start = self.job(name, "Group-HS per layer", "", seed, base, *first, *sized, small.start(), tags=("front",))
            yield start
            again = (*taught(large), start.start())
            titles = (f"{base}-finetuned-twice", f"{base}-pruned-twice")
            yield self.job(name, "Group-HS per layer, finetuned twice", "", seed, titles[0], *again, tags=("best",))
            smaller = self.job(name, "Group-HS per layer, pruned twice", "", seed, titles[1], *again, tags=("best",))
            yield smaller
            harder = ("finetune.epochs=115", "prune.target.macs=0.1775", "regularize.effective_density=0.4")
            harder += ("regularize.epochs=12", "regularize.lr=0.1", "regularize.strength=0.0001", *taught(large))
            title = "Group-HS per layer, pruned three times"
            yield self.job(name, title, "", seed, titles[1], *harder, smaller.start(), tags=("best",))
        if "resnet-110" in self.networks:
            name, base = "resnet-110", "small/resnet-110-gather"
            yield large
            own = (*taught(small, large), large.start())
            start = self.job(name, "Group-HS per layer", "", seed, base, *own, tags=("front",))
            yield start
            again, base = (*taught(large), start.start()), f"{base}-pruned-twice"
            kept = ("finetune.epochs=120", "prune.groups=elements", "prune.rule=absolute", "prune.target=null")
            kept += ("prune.value=0", "regularize=null")
            yield self.job(name, "Group-HS per layer, finetuned twice", "", seed, base, *kept, *again, tags=("best",))
            for sized in ((), ("prune.target.macs=0.1705", "regularize.effective_density=0.36")):
                yield self.job(name, "Group-HS per layer, pruned twice", "", seed, base, *sized, *again, tags=("best",))

    def paper(self) -> Iterator[Job]:
        """One dense network a seed for four strengths."""
        name, base = "resnet-56", "paper/resnet-56"
        for seed in self.seeds[:2]:
            only = ("regularize=null", "prune=null", "finetune=null")
            dense = self.job(name, "dense, the paper's schedule", "", seed, base, *only, tags=("dense",))
            yield dense
            for strength in ("2e-4", "2.5e-4", "3e-4", "5e-4"):
                given = ("pretrain=null", f"regularize.strength={strength}", dense.start())
                yield self.job(name, f"Group-HS {strength}", "", seed, base, *given, tags=("paper-settings",))

    def for_cpus(self) -> Iterator[Job]:
        """From the regularized networks of `points`; channels are chosen by a run of their own on the CPU."""
        seed = self.seeds[0]
        for network in self.networks:
            dense, regularized = self._regularized(network, seed)
            own = (*_model(network), "regularize=null")
            there = ("distill=null", "finetune=null", "device=cpu", f"prune.target={FOR_CPU}", regularized.start())
            cut = self.job(network, "channels for CPUs", "", seed, HALF, *own, *there, row=False)
            yield from (dense, regularized, cut)
            kept = ("prune.rule=absolute", "prune.value=0", "prune.groups=elements", "prune.target=null", cut.start())
            yield self.job(network, "coupled Group-HS for CPUs", "", seed, HALF, *own, *kept, tags=("best",))

    def for_the_gpu(self) -> Iterator[Job]:
        for network in self.networks:
            dense, regularized = self._regularized(network, self.seeds[0])
            here = (*_model(network), "regularize=null", f"prune.target={FOR_GPU}", regularized.start())
            yield from (dense, regularized)
            yield self.job(network, "coupled Group-HS for an H200", "", self.seeds[0], HALF, *here, tags=("best",))


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
    """Of each finished run the accuracy it ended with, and the best of any epoch on test images."""
    table = [["network", "method", "size", "seed", "start", "accuracy", "MACs left"]]
    for job in jobs:
        if job.record and job.is_row:
            accuracy, total = list(job.record["accuracy"].values()), job.record["sparse"]["total"]
            macs = job.record.get("compact", {}).get("total", total)["macs_executed"]
            numbers = [f"{accuracy[0]:.2%}", f"{accuracy[-1]:.2%}", f"{macs / total['macs_executed']:.3f}"]
            table.append([job.network, job.method, job.aim, str(job.recipe.seed), *numbers])
    return table


def main() -> None:
    parser = list_words(__doc__, list(PACE), [0, 1, 2], jobs=4)
    parser.add_argument("--items", nargs="+", choices=list(ITEMS), default=[name for name in ITEMS if name != "gpu"])
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=(), help="sizes of the item `points`: 1.9 2.1 2.6 2.67"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all numbers of epochs")
    parser.add_argument("--rates", action="store_true", help="time the finished networks at the end")
    chosen = parser.parse_args()
    plan = Plan(tuple(chosen.networks), tuple(chosen.seeds), chosen.scale, tuple(chosen.changes), tuple(chosen.sizes))
    items = {name: list(ITEMS[name](plan)) for name in chosen.items}
    jobs = once(job for own in items.values() for job in own if job.network in chosen.networks)
    if chosen.plan or chosen.brief:
        own = {name: [job for job in found if job.network in chosen.networks] for name, found in items.items()}
        show("to do, in order", plan_rows(jobs, PACE, own), words=1)
        return
    records = Records(chosen.publish)
    left = at_once(jobs, chosen.seconds, chosen.jobs, records, mps=not chosen.no_mps)
    show("CIFAR-10", rows(jobs), words=3)
    print("\n".join(f"not yet: {one}" for one in left))
    if chosen.pack is not None:
        print("\n".join(pack_jobs(jobs, chosen.pack, records)))
    found = {}
    for network in chosen.networks if chosen.rates else ():
        small = [job for job in jobs if job.network == network and job.record and job.recipe.prune and job.is_row]
        found[network] = rates(small, (256, 3, 32, 32), chosen.device)
        for name, rate in found[network].items():
            print(f"{network}: {name}: {rate / found[network]['dense']:.2f} × the dense one's images a second")
    table = rows(jobs)
    record = {"machine": machine(chosen.device), "titles": table[0], "rows": table[1:], "rates": found, "left": left}
    write(chosen.out, record)


if __name__ == "__main__":
    main()
