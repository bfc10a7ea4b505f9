"""Several processes on one GPU: with NVIDIA's MPS they run concurrently, without it they take turns.

Where `nvidia-cuda-mps-control` is installed and none runs yet, a sweep starts a private one for its time. It is never
needed: whatever goes wrong with it, the sweep goes on without.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from deephoyer.lab.cores import THREADS, threads_asked_for

CONTROL = "nvidia-cuda-mps-control"
BESIDE_THE_DRIVER = "/usr/local/nvidia/bin"
"""The folder of the driver's programs in containers, which is often not on the PATH."""
PART = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def runs_per_gpu(devices: list[str], jobs: int) -> int:
    """The largest number of parallel runs on one GPU."""
    if not torch.cuda.is_available():
        return 0
    places = Counter("cuda:0" if d in ("auto", "cuda") else d for d in devices)
    return min(jobs, max((n for place, n in places.items() if place.startswith("cuda")), default=0))


def one_thread() -> dict[str, str]:
    """One CPU thread for processes that work on a GPU: the threads of many processes would compete."""
    return {} if threads_asked_for() else {THREADS: "1"}


def part(processes: int) -> dict[str, str]:
    """The share of the GPU that each of several processes may use: each multiprocessor is available to two of them.

    A process that may fill it all makes the others wait for its largest kernels; one that may only have its fair
    share leaves units idle between its own. A user's setting stays.

    >>> part(4)
    {'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE': '50'}
    """
    return {} if PART in os.environ else {PART: str(min(100, math.ceil(200 / processes)))}


@contextmanager
def mps(say: Callable[[str], None], processes: int) -> Iterator[dict[str, str]]:
    """The environment variables with which processes share a GPU through MPS, within this context; {} without MPS."""
    if _control() is None:
        yield {}
        return
    if _command("get_server_list", os.environ) is not None:
        yield part(processes)  # one runs already, and is found without our help
        return
    folder = tempfile.mkdtemp(prefix="mps-")  # a short path: sockets have no room for more
    added = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    environment = {**os.environ, **added}
    try:
        trouble = _start(environment)
        if trouble:
            say(f"NVIDIA's MPS did not start ({trouble}); the runs take turns on the GPU.")
        yield {} if trouble else added | part(processes)
    finally:
        _command("quit", environment)
        shutil.rmtree(folder, ignore_errors=True)


def _control() -> str | None:
    return shutil.which(CONTROL) or shutil.which(CONTROL, path=BESIDE_THE_DRIVER)


def _start(environment: Mapping[str, str]) -> str | None:
    """Starts MPS and tests it with a process; returns what went wrong, or None."""
    status = _exit_status([_control() or CONTROL, "-d"], environment)
    if status:
        return f"exit status {status}"
    if _exit_status([sys.executable, "-c", _CLIENT], environment):
        return "a process can't use it"
    return None


def _exit_status(words: list[str], environment: Mapping[str, str]) -> int:
    """The exit status of a command. Without pipes, which a daemon would keep open."""
    none = subprocess.DEVNULL
    try:
        return subprocess.run(words, env=environment, timeout=60, stdin=none, stdout=none, stderr=none).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


# The least that makes a process a client: a context on the first device.
_CLIENT = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit(0)
device, context = ctypes.c_int(), ctypes.c_void_p()
error = (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
sys.exit(error != 0)
"""


def _command(command: str, environment: Mapping[str, str]) -> str | None:
    """The answer of a running MPS to a command; None if none is running."""
    try:
        done = subprocess.run(
            [_control() or CONTROL], input=command + "\n", env=environment, timeout=30, capture_output=True, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
