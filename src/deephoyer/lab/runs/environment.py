"""Where a run took place: versions, device, threads, the state of the source tree."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

import deephoyer
from deephoyer.errors import UserError
from deephoyer.lab.schema import known_device


def describe(device: torch.device) -> dict[str, Any]:
    """What is needed to understand why a number came out as it did."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "deephoyer": deephoyer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.system(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "git": git_state(Path(deephoyer.__file__).parent),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the source tree and whether it was changed since; None when it is not a checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def tuned(precision: str) -> Iterator[None]:
    """Inside, float32 matrix products use TF32 where a recipe says so (cuDNN's convolutions do in any case, as PyTorch
    has it), and cuDNN tries which algorithm is fastest."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]


def pick_device(choice: str) -> torch.device:
    """`auto` is the first GPU where there is one."""
    if known_device(choice) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(choice)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {choice} does not exist; torch sees {torch.cuda.device_count()} CUDA devices.")
    return device
