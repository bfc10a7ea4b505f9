"""What importing costs, in seconds of CPU time: torch, all public names after it, and commands that need no torch.

    python benchmarks/imports.py

Each number is the minimum of several fresh processes, with bytecode on disk as after `pip install`. The line after our
names is the time that they take without bytecode, when all files have to be compiled.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from measuring import machine, make_parser, show, write

TIMED = """
import sys, time
sys.dont_write_bytecode = False
begin = time.process_time()
{first}
middle = time.process_time()
{second}
print(middle - begin, time.process_time() - middle, file=sys.stderr)
"""
TOUCH = "import deephoyer as dh; [getattr(dh, name) for name in dh.__all__]"
NO_BYTECODE = "sys.dont_write_bytecode, sys.pycache_prefix = True, '/nowhere'"


def seconds(first: str, second: str, times: int) -> tuple[float, float]:
    """CPU seconds of two pieces of code, one after the other in a fresh process."""
    pairs = []
    for _ in range(times + 1):  # the first one writes the bytecode; with --brief it is the only one
        code = TIMED.format(first=first, second=second)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        a, b = done.stderr.strip().splitlines()[-1].split()
        pairs.append((float(a), float(b)))
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def command(*words: str) -> str:
    return f"""
sys.argv = ["deephoyer", *{words!r}]
try:
    import deephoyer.__main__ as command
    command.main()
except SystemExit:
    pass
"""


def measured(times: int) -> dict[str, Any]:
    torch, names = seconds("import torch", TOUCH, times)
    record: dict[str, Any] = {"import torch": torch, "all public names, after that": names}
    record["the same without bytecode"] = seconds("import torch", f"{NO_BYTECODE}; {TOUCH}", times)[1]
    record["import deephoyer"] = seconds("import deephoyer", "", times)[0]
    for line in ("--help", "--version", "list"):
        record[f"deephoyer {line}"] = seconds(command(line), "", times)[0]
    return record


def main() -> None:
    chosen = make_parser(__doc__, device=False).parse_args()
    record = measured(0 if chosen.brief else 5)
    lines = [[what, f"{value:.3f} s", f"{value / record['import torch']:.3f}"] for what, value in record.items()]
    show("CPU time of importing", [["", "takes", "÷ import torch"], *lines])
    write(chosen.out, {"machine": machine(), **record})


if __name__ == "__main__":
    main()
