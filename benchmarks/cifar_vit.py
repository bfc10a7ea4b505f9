"""A small vision transformer on CIFAR-10 with half or a quarter of its heads' and neurons' channels, trained.

    python benchmarks/cifar_vit.py cifar10 --out runs/vit --device cuda --compile --seeds 0 1 --together
    python benchmarks/cifar_vit.py cifar10 --out runs/vit --device cuda --speeds --seeds 0 1
    python benchmarks/cifar_vit.py --out results/bench/cifar-vit --table
    python benchmarks/cifar_vit.py --out results/bench/cifar-vit --page docs/transformers.md

The data are the folder with CIFAR-10's six binary files, by default where `deephoyer data cifar10` puts them. Strengths
are chosen on 5,000 held-out training images; scores are test accuracies. The stages are in `trained_transformers.py`.
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
from deephoyer.lab import data as datasets
from plan import augmented
from trained_fronts import Shown
from zoo_own import TransformerBlock

HELD_OUT = 5000


@dataclass(frozen=True)
class Sizes(trained_transformers.Sizes):
    """1.8M parameters; 40 epochs dense, 11 with a penalty, 18 of finetuning: 15 PFLOP for a seed with all its tries."""

    width: int = 192
    batch: int = 512
    dropout: float = 0.1
    dense_steps: int = 3500
    penalty_steps: int = 1000
    finetune_steps: int = 1600
    warmup: int = 200
    patch: int = 4
    ratio: int = 2  # neurons of an MLP to the width
    smoothing: float = 0.1


class ViT(nn.Module):
    """Patches with learned positions, blocks, the mean over positions, a classifier."""

    def __init__(self, sizes: Sizes, side: int = 32, classes: int = 10):
        super().__init__()
        s = sizes
        self.patches = nn.Conv2d(3, s.width, s.patch, s.patch)
        self.places = nn.Parameter(torch.empty((side // s.patch) ** 2, s.width))
        blocks = (TransformerBlock(s.width, s.heads, s.dropout, False, s.ratio) for _ in range(s.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, classes)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2).contiguous() + self.places
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y).mean(1))


class Photographs(trained_transformers.Task):
    """All of CIFAR-10 on the device; a batch says which images, how far each is shifted, and whether it is flipped."""

    sizes_type = Sizes
    brief = Sizes(3, 2, 16, 8, 0.1, 1e-3, 5e-4, 6, 4, 4, 1, 4, patch=8)
    data_help = "the folder with CIFAR-10's binary files"
    strengths: ClassVar[dict[str, tuple[float, ...]]] = {
        "group-hs": (1e-3, 3e-4, 3e-3),
        "group-lasso": (1e-3, 3e-4, 3e-3),
    }
    weight_decay, betas = 0.05, (0.9, 0.999)
    shown = Shown(
        "cifar-vit", "A small ViT on CIFAR-10", "test accuracy (%)", "images", max, lambda x: f"{100 * x:.2f}"
    )

    def __init__(self, data: Path | None, sizes: Sizes, device: str, brief: bool = False):
        self.sizes, self.device = sizes, device
        if brief:
            self.data, held_out = _noise(), 32
        else:
            self.data = datasets.load("cifar10", **({"folder": str(data)} if data else {}))
            held_out = HELD_OUT
        self.data = self.data.to(device)
        order = torch.randperm(len(self.data.train_y), generator=torch.Generator().manual_seed(0))
        self.pool, held = order[held_out:], order[:held_out].to(device)
        self.held_out = self.data.train_x[held], self.data.train_y[held]

    def fresh(self) -> nn.Module:
        return ViT(self.sizes).to(self.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = self.pool[torch.randperm(len(self.pool), generator=generator)]
            moves = [torch.randint(most, (len(order),), generator=generator) for most in (9, 9, 2)]
            for batch in torch.stack([order, *moves]).to(self.device).split(self.sizes.batch, 1):
                if batch.shape[1] == self.sizes.batch:
                    yield (batch,)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        index, *moves = batch[0].unbind()
        x = augmented(self.data.floats(self.data.train_x[index]), *moves)
        with self.autocast():
            logits = model(x)
        smoothing = self.sizes.smoothing
        return functional.cross_entropy(logits.float(), self.data.train_y[index], label_smoothing=smoothing)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        test = self._accuracy(model, self.data.test_x, self.data.test_y)
        return {"score": test, "held_out": self._accuracy(model, *self.held_out)}

    def _accuracy(self, model: nn.Module, x: Tensor, y: Tensor) -> float:
        parts = zip(x.split(1000), y.split(1000), strict=True)
        with self.autocast():
            right = [(model(self.data.floats(images)).argmax(1) == labels).sum() for images, labels in parts]
        return torch.stack(right).sum().item() / len(y)

    def inputs(self, count: int) -> Tensor:
        return self.data.floats(self.data.test_x[:count])


def _noise() -> datasets.Dataset:
    """Random images in CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (96, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(10, (96,), generator=generator)
    return datasets.Dataset("noise", x, y, x[:32], y[:32], 10)


if __name__ == "__main__":
    trained_transformers.main(Photographs, __doc__)
