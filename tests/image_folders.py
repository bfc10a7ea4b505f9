"""Small image folders and a small network for tests; also the program that tests start in other processes.

`python image_folders.py run …` is `deephoyer run …` with this network known, and a checkpoint after every step.
"""

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import nn

from deephoyer.lab import models


class Plain(nn.Module):
    """a convolution and two linear layers, with neither batch norm nor dropout"""

    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 5, stride=3)
        self.fc1 = nn.Linear(8 * 8 * 8, 24)
        self.fc2 = nn.Linear(24, classes)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(F.relu(self.conv(x)).flatten(1))))


models.register("plain", Plain, (3, 28, 28))


def make(root, classes=4, train=15, val=6, size=(40, 32), seed=0):
    """Images of noise, with a brighter stripe and colour for each class."""
    random = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        for c in range(classes):
            folder = root / split / f"class{c:03d}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 120, (size[1], size[0], 3))
                pixels[..., c % 3] += 60
                pixels[:, (c * 7) % size[0] : (c * 7) % size[0] + 6] += 70
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:03d}.jpg")
    return root


RECIPE = """
model: plain
data: {name: folder, path: PATH, size: 28, workers: 2}
device: cpu
batch_size: 12
held_out: 0.2
pretrain: {epochs: 3, lr: 3e-3}
regularize: {epochs: 2, lr: 1e-3, optimizer: sgd, penalty: hoyer-square, groups: elements, strength: 1e-3}
prune: {rule: density, value: 0.5}
finetune: {epochs: 2, lr: 1e-3}
"""


def recipe_file(folder, data):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("PATH", str(data)))
    return path


if __name__ == "__main__":
    import os
    import time
    from pathlib import Path

    import torch

    from deephoyer.lab import cli
    from deephoyer.lab.train import resume
    from deephoyer.lab.train.step import PlainStep

    torch.set_num_threads(1)  # as in the tests' own process: two threads round otherwise
    resume.SAVE_SECONDS = resume.SAVE_WITHIN = 0.0
    resume.SAVE_SHARE = 1.0
    if "TEST_PIDS" in os.environ:
        Path(os.environ["TEST_PIDS"], os.environ["RANK"]).write_text(str(os.getpid()))
    pause = float(os.environ.get("TEST_PAUSE", 0))
    once = PlainStep._step

    def slowly(self, draw):
        time.sleep(pause)
        once(self, draw)

    PlainStep._step = slowly
    cli.main()
