"""What the benchmarks share: their options, a clock, a table, a record. Only ratios measured in one run count."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import deephoyer as dh
from deephoyer.files import folder_at, write_atomically
from deephoyer.text_table import text_table


def make_parser(about: str | None, device: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: the device, a file for the record, and to be brief."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--brief", action="store_true", help="a few seconds, only to show that it runs")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    return parser


def milliseconds(call: Callable[[], Any], device: str, budget: float) -> float:
    """Milliseconds of one call: the median over rounds of several, as many as the budget (seconds) allows."""
    call()
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    once = max(time.perf_counter() - begin, 1e-6)
    burst = int(min(max(0.01 / once, 1), 200))
    rounds = int(min(max(budget / (once * burst), 3), 50))
    for _ in range(min(burst, 3)):
        call()
    return statistics.median(_round(call, burst, device) for _ in range(rounds))


def _round(call: Callable[[], Any], burst: int, device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(burst):
            call()
        return (time.perf_counter() - begin) * 1e3 / burst
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(burst):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / burst


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str, budget: float) -> float:
    """Bytes per second of a copy much larger than any cache, read plus written."""
    size = 2**32 if device == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / (milliseconds(lambda: target.copy_(source), device, budget) * 1e-3)


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    """The call captured in a CUDA graph: what the device does, without the host's part."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the times were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "deephoyer": dh.__version__}


def show(title: str, rows: Sequence[Sequence[str]], notes: Sequence[str] = (), words: int = 1) -> None:
    """Prints the rows, of which the first has the titles."""
    print("\n".join([text_table(title, rows[0], rows[1:], words=words), *notes]), flush=True)


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Writes the record, if there is a file to write it to."""
    if path is not None:
        folder_at(path.parent)
        write_atomically(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def put(page: Path, name: str, text: str) -> None:
    """Writes the text where the page has its two marks of that name."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, mark, rest = page.read_text(encoding="utf-8").partition(start)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise SystemExit(f"{page} has no lines {start.strip()} and {end} for the table.")
    write_atomically(page, (before + mark + text + other + after).encode())
