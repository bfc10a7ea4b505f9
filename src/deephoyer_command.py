"""The command `deephoyer`: sets how idle threads wait, which must come before torch is loaded, then hands over.

Threads that spin while they wait make a small network's epoch fifty times as long when another process
wants a core; threads that sleep cost nothing that can be measured.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Runs the command line."""
    try:
        from deephoyer.lab.cli import main as run
    except KeyboardInterrupt:  # torch takes seconds to load
        raise SystemExit(130) from None
    run()
