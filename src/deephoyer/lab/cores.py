"""How many processor cores this process may use: in containers often fewer than there are.

Needs no torch, which counts the machine's cores when it is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

THREADS = "OMP_NUM_THREADS"


def usable_cores(process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that it may run on, or as many as its container's share of their time comes to, if that is fewer."""
    return max(1, math.ceil(min([_present_cores(), *_quotas(process, groups)])))


def limit_threads() -> None:
    """Within a container's share, before torch is loaded: more threads would wait for each other most of the time."""
    if usable_cores() < _present_cores():
        os.environ.setdefault(THREADS, str(usable_cores()))


def threads_asked_for() -> bool:
    """Whether the user set a number of threads that is not simply that of the cores."""
    return os.environ.get(THREADS) not in (None, str(usable_cores()))


def _present_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(process: Path, groups: Path) -> Iterator[float]:
    """The cores that each of Linux's control groups around this process grants it, in either version of their files."""
    for line in _text(process).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = groups / controllers / path.lstrip("/")
        for group in (own, *own.parents):
            words = _text(group / "cpu.max").split() or [_text(group / f"cpu.cfs_{x}_us") for x in ("quota", "period")]
            if len(words) == 2 and all(word.strip().isdigit() for word in words):  # no quota is `max`, or -1
                yield int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
