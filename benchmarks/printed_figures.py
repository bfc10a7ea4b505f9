"""Figures that others printed, run again with their own settings: `report/own_settings.py` has them, this the order.

    python benchmarks/printed_figures.py --plan
    python benchmarks/printed_figures.py --items appendix --seconds 540 --jobs 20 --publish results --pack home

Runs lie in `runs/` and are ordinary ones; seeds that have a record already are left out. When `--seconds` are
over they are stopped, and the same command goes on with them: on another machine after `cat home/runs-* | tar xz`. With
`--jobs 0` it only publishes and packs what is there. Items, in order:

appendix  the paper's MNIST tables with the settings of its appendix, five seeds each; LeNet-5, which is slowest, first
scripts   the same with the settings of the released scripts
methods   what sparse variational dropout, SNIP and l0 printed, with their own settings
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from deephoyer.lab.report import own_settings
from deephoyer.lab.report.own_settings import Figure
from measuring import machine, show, write
from runs_in_time import Job, Records, at_once, list_words, once, pack_jobs, plan_rows

PACE = {"lenet-300-100": 0.035, "lenet-5": 0.055}
"""Seconds an epoch on an H200 ÷ runs at once."""
APPENDIX = ", by the appendix"


def figures(item: str) -> list[Figure]:
    """Those of an item, the largest network first."""
    chosen = {
        "appendix": [figure for figure in own_settings.PAPER if figure.title.endswith(APPENDIX)],
        "scripts": [figure for figure in own_settings.PAPER if not figure.title.endswith(APPENDIX)],
        "methods": own_settings.OWN,
    }[item]
    return sorted(chosen, key=lambda figure: "lenet-5" not in figure.words)


def jobs(item: str, seeds: Sequence[int], changes: Sequence[str] = ()) -> Iterator[Job]:
    """Every figure with every seed; the title of its row is what the figure's own title says besides the network."""
    tags = ("own-settings" if item == "methods" else "paper-settings",)
    for figure in figures(item):
        base, *overrides = shlex.split(figure.words)
        network = "lenet-5" if "lenet-5" in base else "lenet-300-100"
        named = [part for part in figure.title.split(", ") if not part.startswith(("LeNet", "MACs"))]
        row = ", ".join(named).removesuffix(APPENDIX)
        for seed in seeds:
            first = seed == seeds[0]
            yield Job(network, row, "", base, (*overrides, f"seed={seed}", *changes), tags=tags, keep_weights=first)


ITEMS = ("appendix", "scripts", "methods")


def rows(done: Sequence[Job]) -> list[list[str]]:
    """Of each finished run the accuracy and what is left."""
    table = [["network", "row", "seed", "accuracy", "nonzeros", "MACs"]]
    for job in done:
        if job.record:
            total = job.record["sparse"]["total"]
            accuracy = next(reversed(job.record["accuracy"].values()))
            numbers = [f"{accuracy:.2%}", f"{total['nonzeros']:,}", f"{total['macs_paper']:,}"]
            table.append([job.network, job.method, str(job.recipe.seed), *numbers])
    return table


def main() -> None:
    parser = list_words(__doc__, list(PACE), [0, 1, 2, 3, 4], jobs=24)
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=ITEMS)
    chosen = parser.parse_args()
    records = Records(chosen.publish)
    known = Records(chosen.publish or Path("results")).there()
    items = {
        item: [
            job
            for job in jobs(item, chosen.seeds, chosen.changes)
            if job.network in chosen.networks and job.identity not in known
        ]
        for item in chosen.items
    }
    every = once(job for own in items.values() for job in own)
    if chosen.plan or chosen.brief:
        show("to do, in order", plan_rows(every, PACE, items), words=1)
        return
    left = at_once(every, chosen.seconds, chosen.jobs, records, mps=not chosen.no_mps)
    table = rows(every)
    show("printed figures", table, words=2)
    print("\n".join(f"not yet: {one}" for one in left))
    if chosen.pack is not None:
        print("\n".join(pack_jobs(every, chosen.pack, records)))
    write(chosen.out, {"machine": machine(chosen.device), "titles": table[0], "rows": table[1:], "left": left})


if __name__ == "__main__":
    main()
