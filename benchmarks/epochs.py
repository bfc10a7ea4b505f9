"""Seconds an epoch through `deephoyer run`: LeNet-300-100, LeNet-5 and ResNet-56, with and without the regularizer.

    python benchmarks/epochs.py --device cuda --out results/bench/epochs-cuda.json
    python benchmarks/epochs.py --device cuda --cases none --together 4

The same as `deephoyer bench epochs`. With --together N, a sweep of N strengths of ResNet-56 is timed against one
run, by their steady epochs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from deephoyer.bench import epochs, together
from deephoyer.bench.clock import machine
from deephoyer.bench.tables import show, write


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    words.add_argument("--cases", help="comma-separated, or none; by default all, on a CPU the LeNets")
    words.add_argument("--epochs", type=int, help="a stage; by default 12 for the LeNets, 4 for the ResNets")
    words.add_argument("--together", type=int, default=0)
    words.add_argument("--no-mps", action="store_true", help="with --together: let the processes take turns")
    words.add_argument("--out", type=Path)
    chosen = words.parse_args()
    record: dict[str, Any] = {"machine": machine(chosen.device)}
    cases = chosen.cases.split(",") if chosen.cases else epochs.usual(chosen.device)
    for case in cases if cases != ["none"] else []:
        record[case] = epochs.times(case, chosen.device, chosen.epochs or epochs.EPOCHS[case])
        write(chosen.out, record)
        print(case, record[case], flush=True)
    if len(record) > 1:
        show(epochs.rows(record))
    if chosen.together:
        count = chosen.epochs or epochs.EPOCHS["resnet-56"]
        record["together"] = found = together.together(chosen.together, chosen.device, count, mps=not chosen.no_mps)
        show(together.rows(found), found["notes"])
    write(chosen.out, record)


if __name__ == "__main__":
    main()
