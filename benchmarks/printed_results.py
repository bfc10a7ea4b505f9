"""Runs that repeat what others printed, with their own settings; the list is in `report/printed_results.py`.

    python benchmarks/printed_results.py --plan
    python benchmarks/printed_results.py --items appendix --seconds 540 --jobs 20 --publish results --pack home

Runs are ordinary ones in `runs/`; seeds that have a record already are left out. When `--seconds` are over they are
stopped, and the same command resumes them: on another machine after `cat home/runs-* | tar xz`. With `--jobs 0` it only
publishes and packs finished runs. Items, in order:

appendix  the paper's MNIST tables with the settings of its appendix, five seeds each; LeNet-5, which is slowest, first
scripts   the same with the settings of the released scripts
methods   sparse variational dropout, SNIP and l0, each with the settings of its own paper
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from deephoyer.lab.report.printed_results import METHODS, PAPER, PrintedResult
from measuring import machine, show, write
from pack_runs import pack_jobs
from run_list import Job, Publisher, in_parallel, list_parser, plan_rows, without_repeats

SECONDS_PER_EPOCH = {"lenet-300-100": 0.035, "lenet-5": 0.055}
"""On an H200, divided by the number of runs at a time."""
APPENDIX = ", by the appendix"


def results(item: str) -> list[PrintedResult]:
    """The printed results of an item, those of the largest network first."""
    chosen = {
        "appendix": [result for result in PAPER if result.title.endswith(APPENDIX)],
        "scripts": [result for result in PAPER if not result.title.endswith(APPENDIX)],
        "methods": METHODS,
    }[item]
    return sorted(chosen, key=lambda result: "lenet-5" not in result.words)


def jobs(item: str, seeds: Sequence[int], changes: Sequence[str] = ()) -> Iterator[Job]:
    """Every result with every seed; the title of its row is what the result's title says besides the network."""
    tags = ("own-settings" if item == "methods" else "paper-settings",)
    for result in results(item):
        base, *overrides = shlex.split(result.words)
        network = "lenet-5" if "lenet-5" in base else "lenet-300-100"
        parts = [part for part in result.title.split(", ") if not part.startswith(("LeNet", "MACs"))]
        row = ", ".join(parts).removesuffix(APPENDIX)
        for seed in seeds:
            first = seed == seeds[0]
            yield Job(network, row, "", base, (*overrides, f"seed={seed}", *changes), tags=tags, keep_weights=first)


ITEMS = ("appendix", "scripts", "methods")


def rows(jobs: Sequence[Job]) -> list[list[str]]:
    """Of each finished run the accuracy and the size."""
    table = [["network", "row", "seed", "accuracy", "nonzeros", "MACs"]]
    for job in jobs:
        if job.record:
            total = job.record["sparse"]["total"]
            accuracy = next(reversed(job.record["accuracy"].values()))
            numbers = [f"{accuracy:.2%}", f"{total['nonzeros']:,}", f"{total['macs_paper']:,}"]
            table.append([job.network, job.method, str(job.recipe.seed), *numbers])
    return table


def main() -> None:
    parser = list_parser(__doc__, list(SECONDS_PER_EPOCH), [0, 1, 2, 3, 4], jobs=24)
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=ITEMS)
    chosen = parser.parse_args()
    publisher = Publisher(chosen.publish)
    published = Publisher(chosen.publish or Path("results")).published()
    items = {
        item: [
            job
            for job in jobs(item, chosen.seeds, chosen.changes)
            if job.network in chosen.networks and job.identity not in published
        ]
        for item in chosen.items
    }
    runs = without_repeats(job for item in items.values() for job in item)
    if chosen.plan or chosen.brief:
        show("to do, in order", plan_rows(runs, SECONDS_PER_EPOCH, items), words=1)
        return
    left = in_parallel(runs, chosen.seconds, chosen.jobs, publisher, mps=not chosen.no_mps)
    table = rows(runs)
    show("printed results, repeated", table, words=2)
    print("\n".join(f"not yet: {line}" for line in left))
    if chosen.pack is not None:
        print("\n".join(pack_jobs(runs, chosen.pack, publisher)))
    write(chosen.out, {"machine": machine(chosen.device), "titles": table[0], "rows": table[1:], "left": left})


if __name__ == "__main__":
    main()
