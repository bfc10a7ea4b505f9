"""The accuracy of a network on images: top-1 and top-5.

In runs between epochs and at the end of stages, and for networks in files (`deephoyer evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, first_line, unknown
from deephoyer.lab import data as datasets
from deephoyer.lab.choices import Choice, named, what_data
from deephoyer.lab.data.source import TEST, UNREADABLE, Images, Source
from deephoyer.lab.open_network import file_of, open_network
from deephoyer.lab.runs import find
from deephoyer.lab.runs.folder import RunFolder

MANY_CLASSES = 10
"""With more classes than this, top-5 accuracy is measured as well."""


@dataclass(frozen=True)
class Correct:
    """Counts over images; those that could not be read are not among them."""

    right: int
    right5: int | None
    images: int

    @property
    def accuracy(self) -> float:
        return self.right / self.images

    @property
    def top5(self) -> float | None:
        return None if self.right5 is None else self.right5 / self.images

    @classmethod
    def read(cls, counts: Tensor, source: Source) -> Correct:
        """From the tensor that `count_correct` returns; waits for the device."""
        right, right5, images = (int(n) for n in counts.tolist())
        if not images:
            bad = list(source.unreadable.values()) if source.crops else []
            why = f": {len(bad)} can't be read ({', '.join(bad[:3])})" if bad else ""
            raise UserError(f"data {source.name}: there is no image to evaluate on{why}.")
        return cls(right, right5 if source.classes > MANY_CLASSES else None, images)


@torch.inference_mode()
def count_correct(forward: Callable[[Tensor], Tensor], source: Source, images: Images, batch: int) -> Tensor:
    """The number of images correct, correct within five guesses, and in total; a tensor that stays on the device."""
    total: Tensor | None = None
    for x, y in source.shown(images, batch):
        guesses = forward(x).topk(min(5, source.classes) if source.classes > MANY_CLASSES else 1, 1).indices
        hits = guesses == y.unsqueeze(1)
        counts = torch.stack([hits[:, 0].sum(), hits.sum(), (y != UNREADABLE).sum()])
        total = counts if total is None else total + counts
    return torch.zeros(3, dtype=torch.int64) if total is None else total


@torch.no_grad()
def count_outputs(network: nn.Module, image: Tensor, name: str) -> int:
    """How many classes a network has outputs for; `name` says in errors which one can't read the image."""
    try:
        outputs = network(image)
    except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as why:  # each library has its own
        shape = "×".join(map(str, image.shape[1:]))
        raise UserError(f"{name} can't read images of {shape}: {first_line(why).rstrip('.!')}.") from None
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        kind = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"
        raise UserError(f"{name} has outputs of {kind}; it must have one number for each image and class.")
    return outputs.shape[1]


def evaluate_file(
    path: Path, words: Mapping[str, Any], device: torch.device, batch: int = 100
) -> tuple[Correct, Source]:
    """The score of a stored network on a test set, in float32.

    `words` may have the `data`, where the file does not say on which it was trained, and the `model`.
    """
    unknown_keys = [key for key in words if key not in ("data", "model")]
    if unknown_keys:
        raise unknown("setting of an evaluation", unknown_keys[0], ("data", "model"))
    network, _ = open_network(path, words.get("model"))
    source = datasets.load(_data_for(path, words.get("data"))).to(device)
    network = network.float().to(device).to(memory_format=torch.channels_last)
    outputs = count_outputs(network, source.example(1), str(path))
    if outputs != source.classes:
        raise UserError(f"{path} has {outputs} outputs, but the data has {source.classes} classes.")
    return Correct.read(count_correct(network, source, TEST, batch), source), source


def _data_for(path: Path, said: Choice | None) -> Choice:
    """The data that is said, or the file's own; settings without a name (data.path=…) change those of its own."""
    if said is None or (isinstance(said, Mapping) and "name" not in said):
        name, settings = named(_own_data(file_of(path)))
        return {"name": name, **settings, **(said or {})}
    return said


def _own_data(path: Path) -> str | dict[str, Any]:
    data = find.recipe_of(path).get("data")
    if not isinstance(data, str | dict):
        raise UserError(f"{path} does not say what data it is for; give it with data=NAME or data={{name: …}}.")
    with suppress(UserError):
        run = RunFolder(path.parent).recipe()  # which knows where they lie
        if run is not None and what_data(run.data) == what_data(data):
            return run.data
    return data
