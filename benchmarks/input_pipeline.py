"""Images per second from JPEG files to a trained network, compared with training on images already on the device.

    python benchmarks/input_pipeline.py --device cuda --workers 16 --out results/bench/input-cuda.json

The files are generated: 500 × 375 pixels, about 110 kB, like most of ImageNet's; a few dozen different ones under many
names, so that they come from memory and not from the disk. Four rates: one core that decodes, crops and flips; reading
alone (all workers, with the transfer); training alone (always the same batch, on the device); and training on what is
read. If the last is far below the third, the first two say whether reading limits it, and whether more cores would
help. It ends within `--seconds`, without compiling, and prints each rate as soon as it is known.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from deephoyer.lab import models
from deephoyer.lab.data.streaming import Request, Streaming, default_workers, folder
from deephoyer.lab.schema import Recipe
from deephoyer.lab.train.batches import Batch, Streamed
from deephoyer.lab.train.objective import Objective
from deephoyer.lab.train.optim import make_optimizer
from deephoyer.lab.train.step import PlainStep
from measuring import machine, make_parser, show, write

CLASSES, DIFFERENT, QUALITY = 10, 40, 87
STEPS = 2000
"""The length of an epoch: more steps than usually fit into the time."""
SHARES = {"one core": 0.05, "reading alone": 0.2, "training alone": 0.15, "training on what is read": 0.25}
"""Shares of the total time; the rest is for making files, starting workers and warming up."""


def make_files(root: Path, count: int) -> int:
    """Training images in class folders, most of them another name of the same file; returns their mean size."""
    random = np.random.default_rng(0)
    different: list[Path] = []
    for i in range(count):
        place = root / "train" / f"{i % CLASSES:04d}" / f"{i:06d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        if len(different) < DIFFERENT:
            coarse = Image.fromarray(random.integers(0, 255, (94, 125, 3), dtype=np.uint8)).resize((500, 375))
            pixels = np.asarray(coarse).astype(int) + random.integers(-25, 25, (375, 500, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place, quality=QUALITY)
            different.append(place)
        else:
            os.link(different[i % DIFFERENT], place)
    for name in range(CLASSES):
        place = root / "val" / f"{name:04d}"
        place.mkdir(parents=True)
        os.link(different[name % len(different)], place / "0.jpg")
    return sum(path.stat().st_size for path in different) // len(different)


def recipe(model: str, device: str, batch: int, compiled: bool) -> Recipe:
    fast = {"precision": "bfloat16", "channels_last": True} if device == "cuda" else {}
    stage = {"epochs": 1, "optimizer": "sgd", "lr": 0.01, "weight_decay": 1e-4}
    content = {"model": {"name": model, "classes": CLASSES}, "data": "folder", "batch_size": batch, "pretrain": stage}
    return Recipe.model_validate(content | fast | {"compile": "blocks" if compiled else "off"})


def endless(source: Streaming, batch: int) -> Iterator[Batch]:
    """Batches of one long epoch, as ImageNet has: at the start of each, the workers have nothing ready."""
    count = source.count("train")
    drawn = Streamed(source, torch.arange(count).repeat(math.ceil(STEPS * batch / count)), batch, seed=0)
    while True:
        yield from drawn.steps(range(len(drawn)))


def rate(call: Any, batch: int, device: torch.device, seconds: float, warm_up: int) -> float:
    """Images a second of calls that take a batch each, after some to warm up."""
    for _ in range(warm_up):
        call()
    _wait(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or done < 2:
        call()
        done += 1
        if done % 10 == 0:
            _wait(device)
    _wait(device)
    return done * batch / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(model: str, size: int, batch: int, workers: int, device: str, seconds: float, images: int, compiled: bool):
    """The four rates, in images a second."""
    place = torch.device(device)
    with tempfile.TemporaryDirectory() as root:
        file_size = make_files(Path(root), images)
        images_on_disk = folder(root, size, workers=workers)
        assert isinstance(images_on_disk, Streaming)
        source = images_on_disk.to(place)
        job = recipe(model, device, batch, compiled)
        network = models.of(job.model).to(place)
        if job.channels_last:
            network = network.to(memory_format=torch.channels_last)
        assert job.pretrain is not None
        step = PlainStep(
            Objective(network, source, job), make_optimizer(job.pretrain, network.parameters()), None, place
        )
        reading = endless(source, batch)
        ready = next(reading)
        warm_up = 10 if device == "cuda" else 1
        cropped = itertools.cycle(Request("train", range(i, i + 8), seed=0) for i in range(0, images - 8, 8))
        read = source._reader.__getitem__
        threads = torch.get_num_threads()
        rates: dict[str, float] = {}

        def timed(name: str, call: Any, images: int, where: torch.device, warm_up: int) -> None:
            rates[name] = rate(call, images, where, SHARES[name] * seconds, warm_up)
            print(f"{name}: {rates[name]:,.0f} images per second", flush=True)

        torch.set_num_threads(1)  # as in a worker
        timed("one core", lambda: read(next(cropped)), 8, torch.device("cpu"), 1)
        torch.set_num_threads(threads)
        timed("training alone", lambda: step._step(ready), batch, place, warm_up)
        timed("reading alone", lambda: next(reading), batch, place, workers)
        timed("training on what is read", lambda: step._step(next(reading)), batch, place, workers)
        reading.close()
    return rates, file_size


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="resnet-50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--images", type=int, default=4_000, help="number of image files to create")
    parser.add_argument("--seconds", type=float, default=55.0, help="total time")
    parser.add_argument("--compile", action="store_true", help="compile the network's repeated blocks")
    chosen = parser.parse_args()
    if chosen.brief:
        chosen.images, chosen.batch = min(chosen.images, 64), min(chosen.batch, 4)
        chosen.size, chosen.seconds = min(chosen.size, 64), 1.0
    settings = [getattr(chosen, key) for key in ("model", "size", "batch", "workers", "device", "seconds", "images")]
    rates, file_size = measured(*settings, compiled=chosen.compile)
    alone, both = rates["training alone"], rates["training on what is read"]
    cores = min(chosen.workers or 1, len(os.sched_getaffinity(0)))
    most = rates["one core"] * cores
    reading = f"reading: {cores} cores × {rates['one core']:,.0f} JPEGs per second are {most:,.0f} at most"
    bound = reading if rates["reading alone"] < 1.1 * alone else "neither reading nor training alone"
    notes = [
        f"training on what is read reaches {both / alone:.0%} of training alone"
        + f"; bounded by {'training' if both >= 0.85 * alone else bound}",
        f"{chosen.model}, {chosen.size} px, batch {chosen.batch}, {chosen.workers} workers, "
        f"files of {file_size:,} bytes",
    ]
    titles = ["", "images per second", "÷ training alone"]
    table = [titles, *([name, f"{value:,.0f}", f"{value / alone:.2f}"] for name, value in rates.items())]
    show("from files to a trained network", table, notes)
    write(
        chosen.out,
        {
            "machine": machine(chosen.device),
            "rates": rates,
            "ratio": both / alone,
            "settings": {k: v for k, v in vars(chosen).items() if k != "out"},
        },
    )


if __name__ == "__main__":
    main()
