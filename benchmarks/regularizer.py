"""What a regularizer costs: autograd loops, torch-pruning's, our backends and the memory floor, side by side.

    python benchmarks/regularizer.py --device cuda --check --out results/bench/regularizer-cuda.json
    python benchmarks/regularizer.py --device cpu --out results/bench/regularizer-cpu.json

The same as `deephoyer bench regularizer`, with more to choose.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from deephoyer.bench import regularizer
from deephoyer.bench.launch_shapes import tune
from deephoyer.bench.tables import show, write


def show_case(case: dict[str, Any]) -> None:
    ms = case["ms"]
    best = next((s for s in ("triton", "foreach", "plain") if ms.get(s)), None)
    print(f"\n{case['network']}, {case['groups']}, {case['dtype']}: {case['weights'] / 1e6:.2f}M weights", flush=True)
    for side, time_ in ms.items():
        if side == "errors":
            continue
        if time_ is None:
            print(f"  {side:22} failed: {ms['errors'][side]}")
            continue
        ratio = f"{time_ / ms[best]:8.2f} × {best}" if best else ""
        print(f"  {side:22} {time_:10.4f} ms  {time_ / ms['floor']:8.2f} × floor  {ratio}")
    for key in ("checks", "kernels"):
        for side, found in (case.get(key) or {}).items():
            print(f"  {key}: {side} {found}")


def listed(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", help="comma-separated; by default all, on a CPU without the two largest")
    parser.add_argument("--groups", default="elements,filters+channels")
    parser.add_argument("--backends", help="comma-separated; by default plain, foreach and, on CUDA, triton")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    parser.add_argument("--check", action="store_true", help="compare with float64 autograd, look for waits and memory")
    parser.add_argument("--profile", action="store_true", help="time of each kernel of the last backend (CUDA)")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for each measurement")
    parser.add_argument("--out", type=Path, help="a JSON record, written after every case")
    parser.add_argument("--threads", type=int, help="on a CPU; by default as many as PyTorch takes")
    parser.add_argument("--tune", action="store_true", help="only try launch shapes of the Triton kernels (CUDA)")
    args = parser.parse_args()
    if args.tune:
        tune(list(listed(args.networks)) or ["resnet-50", "decoder-1b"], args.budget)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    options = regularizer.Options(
        args.device, listed(args.networks), listed(args.groups), listed(args.backends),
        args.dtype, args.budget, args.check, args.profile,
    )  # fmt: skip
    record: dict[str, Any] = {}
    shown = 0
    for record in regularizer.measured(options):
        for case in record["cases"][shown:]:
            show_case(case)
        shown = len(record["cases"])
        write(args.out, record)
    print(f"\n{record['machine']}, copy {record['copy GB/s']:.0f} GB/s, bare step {record['lenet-300-100 step ms']} ms")
    show(regularizer.rows(record), regularizer.notes(record))
    print("\n".join(f"{value:9.2f}  {key}" for key, value in record["ratios"].items()))


if __name__ == "__main__":
    main()
