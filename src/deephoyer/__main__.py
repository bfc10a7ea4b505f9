"""The command `deephoyer`, or `python -m deephoyer`: what must come before torch is loaded, then the lab.

Threads that spin while they wait make a small network's epoch fifty times as long when another process
wants a core; threads that sleep cost nothing that can be measured.
"""

from __future__ import annotations

import os
import sys

LAB = ("typer", "rich", "pydantic", "yaml", "matplotlib", "jinja2", "optuna", "bokeh", "torchvision")


def main() -> None:
    """Runs the command line, or says in a line what it lacks."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from deephoyer.lab.cli import main as run
    except KeyboardInterrupt:  # torch takes seconds to load
        raise SystemExit(130) from None
    except ModuleNotFoundError as why:
        if (why.name or "").split(".")[0] not in LAB:
            raise
        print(f"deephoyer: the commands need {why.name}: pip install 'deephoyer[lab]'", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
