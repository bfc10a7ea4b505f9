"""What makes runs short, for tests of many of them, and waiting for what they come to."""

import time

QUICK = [
    "data={name: mnist, limit: 300}",
    "device=cpu",
    "regularize.epochs=1",
    "finetune.epochs=1",
    "pretrain.epochs=1",
]


def until(holds, seconds=60):
    """Waits until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.1)
