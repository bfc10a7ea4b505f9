"""A character GPT of nanoGPT's size with half or a quarter of its heads' and neurons' channels, trained.

    python benchmarks/character_gpt.py shakespeare.txt --out runs/gpt --device cuda --compile --seeds 0 1 2 --together
    python benchmarks/character_gpt.py shakespeare.txt --out runs/gpt --device cuda --speeds --seeds 0 1 2
    python benchmarks/character_gpt.py --out results/bench/character-gpt --table
    python benchmarks/character_gpt.py --out results/bench/character-gpt --page docs/transformers.md

The data are a text file of yours; the last tenth of it is for validation, on which strengths are chosen, too. The
stages are in `trained_transformers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import trained_transformers
from trained_fronts import Shown
from zoo_own import CharacterGPT


@dataclass(frozen=True)
class Sizes(trained_transformers.Sizes):
    """nanoGPT's for single characters."""

    length: int = 256
    check_batches: int = 40


class Characters(trained_transformers.Task):
    """The next character at each position of a window of text."""

    sizes_type = Sizes
    brief = Sizes(3, 2, 16, 8, 0.1, 1e-3, 5e-4, 6, 4, 4, 1, 4, length=8, check_batches=2)
    data_help = "a text file"
    strengths: ClassVar[dict[str, tuple[float, ...]]] = {
        "group-hs": (1e-3, 3e-4, 3e-3),
        "group-lasso": (3e-4, 1e-4, 1e-3),
    }
    weight_decay, betas = 0.1, (0.9, 0.99)
    shown = Shown("character-gpt", "A character GPT", "validation loss", "tokens", min, "{:.3f}".format)

    def __init__(self, data: Path | None, sizes: Sizes, device: str, brief: bool = False):
        if data is None and not brief:
            raise SystemExit("Give a text file.")
        text = "to be or not to be, that is the question: " * 60 if data is None else data.read_text()
        self.sizes, self.device = sizes, device
        self.characters = sorted(set(text))
        number = {c: i for i, c in enumerate(self.characters)}
        numbers = torch.tensor([number[c] for c in text], dtype=torch.long, device=device)
        cut = int(0.9 * len(numbers))
        self.train, self.validation = numbers[:cut], numbers[cut:]

    def fresh(self) -> nn.Module:
        s = self.sizes
        return CharacterGPT(len(self.characters), s.width, s.heads, s.layers, s.length, s.dropout).to(self.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        return self._windows(self.train, seed)

    def _windows(self, part: Tensor, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """At random places."""
        generator = torch.Generator().manual_seed(seed)
        size = (100, self.sizes.batch, 1)
        window = torch.arange(self.sizes.length + 1, device=part.device)
        while True:
            for starts in torch.randint(len(part) - self.sizes.length, size, generator=generator).to(part):
                yield (part[starts + window],)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (windows,) = batch
        with self.autocast():
            logits = model(windows[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        """The mean loss on windows that are the same every time."""
        batches = self._windows(self.validation, seed=12345)
        losses = [self.loss(model, next(batches)) for _ in range(self.sizes.check_batches)]
        return {"score": torch.stack(losses).mean().item()}

    def inputs(self, count: int) -> Tensor:
        return self.train[: count * self.sizes.length].view(count, -1)


if __name__ == "__main__":
    trained_transformers.main(Characters, __doc__)
