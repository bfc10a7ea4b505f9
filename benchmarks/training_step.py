"""What the penalty costs: a LeNet-300-100 step with none, with ours, with a plain autograd loop; and an epoch.

    python benchmarks/training_step.py [--json FILE]

The same as `deephoyer bench step`.
"""

import argparse
from pathlib import Path

from deephoyer.bench import step
from deephoyer.bench.tables import show, write


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--json", type=Path, help="write the numbers to this file")
    chosen = words.parse_args()
    record = step.measured()
    show(step.rows(record))
    write(chosen.json, record)


if __name__ == "__main__":
    main()
