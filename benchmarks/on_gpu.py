"""`make test-gpu`: every test marked `cuda`, then each benchmark the README quotes, briefly; one last line for all.

With the current Python; no environment is created. Exit status 1 if anything failed.
`make test-gpu JOBS=4` runs four at a time, for a GPU that is rented by the minute.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "regularizer.py --check",
    "training_step.py",
    "epochs.py --together 2",
    "compaction.py",
    "latency_targets.py --modes eager cuda-graph",
    "plan.py --network lenet-5 --optimizer sgd --lr 0.05",
    "imports.py",
    "input_pipeline.py",
)


def run(words: Sequence[str], live: bool) -> tuple[int, str]:
    """The exit status and the output: with `live` printed line by line, otherwise when it is complete."""
    source = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": source}
    began, command = time.monotonic(), f"$ {' '.join(words)}\n"
    output = [] if live else [command]
    if live:
        print(command, end="", flush=True)
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=HERE.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if live:
                print(line, end="", flush=True)
    if not live:
        print(*output, f"  exit status {process.returncode}, {time.monotonic() - began:.0f} s\n", sep="", flush=True)
    return process.returncode, "".join(output)


def files_with_cuda_tests() -> list[str]:
    """Only these are collected: packages that other tests import need not be installed where the GPU is."""
    tests = sorted((HERE.parent / "tests").glob("test_*.py"))
    return [str(file) for file in tests if "mark.cuda" in file.read_text(encoding="utf-8")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="parallel tests; benchmarks are then distorted")
    jobs = parser.parse_args().jobs
    if not torch.cuda.is_available():
        raise SystemExit("test-gpu: torch sees no GPU here")
    began, files = time.monotonic(), files_with_cuda_tests()
    tests = [["-m", "pytest", "-m", "cuda", *some] for some in ([files] if jobs == 1 else [[file] for file in files])]
    benchmarks = [f"benchmarks/{name} --brief".split() for name in BENCHMARKS]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda words: run(words, live=jobs == 1), [*tests, *benchmarks]))
    counts: Counter[str] = Counter()
    for _, output in results[: len(tests)]:
        counts.update({word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", output)})
    statuses = [status for status, _ in results]
    failures = [name for name, status in zip(BENCHMARKS, statuses[len(tests) :], strict=True) if status]
    counted = ", ".join(f"{n} {word}" for word, n in counts.items()) or "no tests ran"
    failed = f"; failed: {', '.join(failures)}" if failures else ""
    print(
        f"test-gpu: CUDA tests: {counted}; benchmarks: {len(BENCHMARKS) - len(failures)} of "
        f"{len(BENCHMARKS)} ran{failed}; "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.monotonic() - began:.0f} s"
    )
    raise SystemExit(any(statuses))


if __name__ == "__main__":
    main()
