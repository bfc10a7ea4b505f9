"""Small images of a folder, decoded once and held in memory as bytes; crops are enlarged where the network trains.

For folders like Tiny-ImageNet's, whose images of 64 pixels a network sees at 128 or 227: decoding and enlarging them in
every epoch would take many processor cores. Here a whole batch is cropped, resized and mirrored by two matrix products,
with the filter of torchvision's `resized_crop`, which is the plain twin. Larger images, and those that differ in size,
are read as they are needed (`streaming.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.lab.data.image_files import Files, fingerprint, passed_over, read_image
from deephoyer.lab.data.source import UNREADABLE, Images, Source, Split, seed_of

TRIES = 10
"""How often torchvision draws a crop anew that does not fit into the image, before it takes the middle."""
LEAST_RATIO, LARGEST_RATIO = 3 / 4, 4 / 3
BLOCK = 100
"""Images that a worker hands over at once."""


class SmallImages(Source):
    """What `folder` and `tiny-imagenet` make with `memory: true`."""

    in_memory: ClassVar[bool] = True
    crops: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        files: dict[Split, Files | None],
        size: int,
        crop: float,
        flip: bool,
        present: Any,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        readers: int,
        skip_at_most: int,
    ):
        self.name, self.size, self.crop, self.flip, self.present = name, size, crop, flip, present
        self.mean, self.std, self.skip_at_most = mean, std, skip_at_most
        test = files["test"]
        assert test is not None
        self.classes = len(test.classes)
        self.unreadable = {}
        self.passed_over = passed_over(files.values())
        self.fingerprint = fingerprint(files.values())
        self._tensors: dict[Split, tuple[Tensor, Tensor]] = {}
        for split, of in files.items():
            if of is not None:
                self._tensors[split] = self._read(split, of, readers)

    def _read(self, split: Split, files: Files, readers: int) -> tuple[Tensor, Tensor]:
        """All images of a split as bytes, and their labels; those that can't be read are black and of no class."""
        first = next((image for image in map(read_image, map(files.path, range(len(files)))) if image), None)
        if first is None:
            raise UserError(f"data {self.name}: no image of {files.root.name} can be read.")
        x = torch.empty(len(files), first.height, first.width, 3, dtype=torch.uint8)
        sizes = torch.empty(len(files), 2, dtype=torch.int64)
        blocks = _Blocks(files, first.size)
        # Processes, for Python decodes one image at a time however many threads there are.
        workers = readers if readers > 1 and len(blocks) > 1 else 0
        loader = torch.utils.data.DataLoader(
            blocks, batch_size=None, num_workers=min(workers, len(blocks)), generator=torch.Generator()
        )
        for block, (pixels, found) in zip(range(0, len(files), BLOCK), loader, strict=True):
            x[block : block + BLOCK], sizes[block : block + BLOCK] = pixels, found
        bad = (sizes == 0).all(1)
        other = ((sizes != torch.tensor(first.size)).any(1) & ~bad).nonzero().flatten().tolist()
        if other:
            raise UserError(
                f"data {self.name}: memory is for images of one size, but {files.name(other[0])} is "
                f"{'×'.join(map(str, sizes[other[0]].tolist()))} and others are {first.width}×{first.height}; "
                "leave it out (data.memory=false)."
            )
        self.unreadable |= {(split, i): files.name(i) for i in bad.nonzero().flatten().tolist()}
        if len(self.unreadable) > self.skip_at_most:
            self.refuse(list(self.unreadable.values()))
        labels = torch.from_numpy(files.labels.copy())
        labels[bad] = UNREADABLE
        return x.permute(0, 3, 1, 2).contiguous(), labels

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 3, self.size, self.size

    def count(self, split: Split) -> int:
        return len(self.split(split)[1])

    def split(self, split: Split) -> tuple[Tensor, Tensor]:
        if split not in self._tensors:
            raise UserError(f"data {self.name}: it has no folder train, so it can only be evaluated on.")
        return self._tensors[split]

    def to(self, device: torch.device | str) -> SmallImages:
        moved = copy.copy(self)
        moved._tensors = {split: (x.to(device), y.to(device)) for split, (x, y) in self._tensors.items()}
        return moved

    def shown(self, images: Images, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.split(images.split)
        index = torch.arange(len(y)) if images.index is None else images.index
        for part in index.to(y.device).split(batch):
            yield self.floats(self.present(x.index_select(0, part))), y.index_select(0, part)

    # Training

    def crops_of(self, seed: int) -> tuple[Tensor | None, Tensor | None]:
        """For every training image of an epoch with this seed its crop (`random_boxes`) and whether it is mirrored."""
        x, _ = self.split("train")
        count, generator = len(x), torch.Generator().manual_seed(seed_of(seed, "crops"))
        boxes = random_boxes(count, x.shape[2], x.shape[3], self.crop, generator) if self.crop < 1 else None
        return boxes, torch.randint(0, 2, (count,), generator=generator).bool() if self.flip else None

    def cropped(self, index: Tensor, box: Tensor | None, flip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Training images as floats, and their labels; without a box as in evaluation."""
        x, y = (t.index_select(0, index) for t in self.split("train"))
        if box is not None:
            return self.floats(resized_crops(x, box, flip, self.size) / 255), y
        x = self.present(x)
        return self.floats(x if flip is None else torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)), y


class _Blocks(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Images by blocks, as bytes, and the width and height of each, 0 where it can't be read: a worker's part.

    Images of another size than the one that is asked for are black.
    """

    def __init__(self, files: Files, size: tuple[int, int]):
        self.files, self.size = files, size

    def __len__(self) -> int:
        return math.ceil(len(self.files) / BLOCK)

    def __getitem__(self, block: int) -> tuple[Tensor, Tensor]:
        if not 0 <= block < len(self):
            raise IndexError(block)
        every = range(len(self.files))[block * BLOCK : (block + 1) * BLOCK]
        x = np.zeros((len(every), self.size[1], self.size[0], 3), np.uint8)
        sizes = torch.zeros(len(every), 2, dtype=torch.int64)
        for place, i in enumerate(every):
            image = read_image(self.files.path(i))
            if image is not None:
                sizes[place] = torch.tensor(image.size)
                if image.size == self.size:
                    x[place] = np.asarray(image)
        return torch.from_numpy(x), sizes


def random_boxes(count: int, height: int, width: int, crop: float, generator: torch.Generator) -> Tensor:
    """Top, left, height and width of crops as torchvision's RandomResizedCrop draws them, one row for each image."""
    share, aspect = torch.rand(2, count, TRIES, generator=generator, dtype=torch.float64)
    area = height * width * (crop + (1 - crop) * share)
    low, high = math.log(LEAST_RATIO), math.log(LARGEST_RATIO)
    ratio = torch.exp(low + (high - low) * aspect)
    size = torch.stack([torch.sqrt(area / ratio), torch.sqrt(area * ratio)], 2).round()
    whole = torch.tensor([height, width], dtype=torch.float64)
    fits = ((size > 0) & (size <= whole)).all(2)
    first = size[torch.arange(count), fits.int().argmax(1)]
    middle = torch.tensor([min(height, round(width / LEAST_RATIO)), min(width, round(height * LARGEST_RATIO))])
    size = torch.where(fits.any(1, keepdim=True), first, middle.to(first))
    place = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    start = torch.where(fits.any(1, keepdim=True), (place * (whole - size + 1)).floor(), ((whole - size) / 2).floor())
    return torch.cat([start, size], 1).float()


def resized_crops(x: Tensor, box: Tensor, flip: Tensor | None, size: int) -> Tensor:
    """Each image's own crop at `size` × `size` pixels, mirrored where `flip` says so; in the scale of `x`, as floats.

    >>> x = torch.arange(4.0).view(1, 1, 1, 4).expand(1, 1, 4, 4)
    >>> resized_crops(x, torch.tensor([[0.0, 1.0, 2.0, 2.0]]), torch.tensor([True]), 2).tolist()
    [[[[2.0, 1.0], [2.0, 1.0]]]]
    """
    rows = _weights(box[:, 0], box[:, 2], x.shape[2], size, None)
    columns = _weights(box[:, 1], box[:, 3], x.shape[3], size, flip)
    # In float32 whatever the precision of training is: this is a hundredth of the work of a step.
    wide = x.to(torch.float32) @ columns.transpose(1, 2).unsqueeze(1)
    return rows.unsqueeze(1) @ wide


def _weights(start: Tensor, length: Tensor, pixels: int, size: int, flip: Tensor | None) -> Tensor:
    """What each of `size` points takes from each pixel of a line: a triangle, wider where a line becomes shorter."""
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    scale = length / size
    point = torch.arange(size, device=start.device).view(1, -1, 1)
    if flip is not None:
        point = torch.where(flip.view(-1, 1, 1), size - 1 - point, point)
    centre = start + (point + 0.5) * scale
    pixel = torch.arange(pixels, device=start.device).view(1, 1, -1) + 0.5
    near = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    near = torch.where((pixel > start) & (pixel < start + length), near, 0.0)
    return near / near.sum(2, keepdim=True)
