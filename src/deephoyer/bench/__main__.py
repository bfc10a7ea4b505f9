"""A member of the benchmark's sweep: `python -m deephoyer.bench run RECIPE [key=value ...] --out FOLDER`.

Like `deephoyer run`, but it knows the data set `noise`, and ends with the training: what follows needs no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deephoyer.bench.noise  # noqa: F401
from deephoyer.lab import recipe
from deephoyer.lab.train.run import Run

if __name__ == "__main__":
    _, _, name, *overrides, _, folder = sys.argv
    Run(recipe.read(name, overrides), Path(folder)).execute()
