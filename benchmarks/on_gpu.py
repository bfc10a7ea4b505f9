"""`make test-gpu`: every test marked `cuda`, then each benchmark the README quotes, briefly; one last line for all.

With the Python at hand; no environment is made. Exit status 1 if anything failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
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


def run(*words: str) -> tuple[int, str]:
    """The exit status and the output, which is shown as it comes."""
    print("$", " ".join(words), flush=True)
    source = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": source}
    seen = []
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
            print(line, end="", flush=True)
            seen.append(line)
    return process.returncode, "".join(seen)


def files_with_cuda_tests() -> list[str]:
    """These alone are collected: what the others import need not be installed where the GPU is."""
    tests = sorted((HERE.parent / "tests").glob("test_*.py"))
    return [str(file) for file in tests if "mark.cuda" in file.read_text(encoding="utf-8")]


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("test-gpu: torch sees no GPU here")
    began = time.monotonic()
    status, said = run("-m", "pytest", "-m", "cuda", *files_with_cuda_tests())
    tests = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", said)}
    bad = [name for name in BENCHMARKS if run(*f"benchmarks/{name} --brief".split())[0] != 0]
    counted = ", ".join(f"{n} {word}" for word, n in tests.items()) or "no tests ran"
    failed = f"; failed: {', '.join(bad)}" if bad else ""
    print(
        f"test-gpu: CUDA tests: {counted}; benchmarks: {len(BENCHMARKS) - len(bad)} of {len(BENCHMARKS)} ran{failed}; "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.monotonic() - began:.0f} s"
    )
    raise SystemExit(1 if status or bad else 0)


if __name__ == "__main__":
    main()
