"""Data that does not fit into memory: images read, decoded and augmented by worker processes while the network trains.

What a random crop of an image looks like depends on the seed of the epoch and on the image, and on nothing else: not on
the number of workers, of processes, or on where an epoch was taken up again. Bytes travel to the device; they become
floats there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils.data
from PIL import Image
from torch import Tensor

from deephoyer.errors import UserError
from deephoyer.files import kept_in, path_on_disk
from deephoyer.lab.cores import usable_cores
from deephoyer.lab.data.image_files import Files, find, fingerprint, passed_over, read_image
from deephoyer.lab.data.small_images import SmallImages
from deephoyer.lab.data.source import UNREADABLE, Images, Source, Split, seed_of

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_WORKERS = 16
FEW = 4
"""So many images are read by the process itself: workers would take longer to start."""


@dataclass(frozen=True)
class Request:
    """A batch for a worker to read: images of a split, augmented where there is a seed."""

    split: Split
    index: Sequence[int]
    seed: int | None = None


class Streaming(Source):
    """Image files in class folders; `folder`, `imagenet` and `tiny-imagenet` make it."""

    in_memory: ClassVar[bool] = False
    crops: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        files: tuple[Files | None, Files],
        size: int,
        resize: int,
        crop: float,
        flip: bool,
        normalize: bool,
        workers: int | None,
        skip_at_most: int,
    ):
        self.name, self.size = name, size
        self.mean, self.std = (IMAGENET_MEAN, IMAGENET_STD) if normalize else ((0.0,), (1.0,))
        self.files: dict[Split, Files | None] = dict(zip(("train", "test"), files, strict=True))
        self.classes = len(files[1].classes)
        self.workers = default_workers() if workers is None else workers
        self.skip_at_most = skip_at_most
        self.unreadable = {}
        self.passed_over = passed_over(self.files.values())
        self.fingerprint = fingerprint(self.files.values())
        self.device = torch.device("cpu")
        self._reader = _Reader(self.files, size, *_transforms(size, resize, crop, flip))
        self._queue = _Queue()
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 3, self.size, self.size

    def count(self, split: Split) -> int:
        files = self.files[split]
        if files is None:
            raise UserError(f"data {self.name}: it has no folder train, so it can only be evaluated on.")
        return len(files)

    def to(self, device: torch.device | str) -> Streaming:
        moved = copy.copy(self)
        moved.device, moved._loader = torch.device(device), None
        moved._queue, moved.unreadable = _Queue(), {}
        return moved

    def held(self, crop: float, flip: bool) -> SmallImages:
        """The same images in memory."""
        present, readers = self._reader.present, max(1, self.workers)
        return SmallImages(
            self.name, self.files, self.size, crop, flip, present, self.mean, self.std, readers, self.skip_at_most
        )

    def shown(self, images: Images, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        index = torch.arange(self.count(images.split)) if images.index is None else images.index
        requests = [Request(images.split, part.tolist()) for part in index.split(batch) if len(part)]
        few = len(index) <= FEW
        stream = self._sent(requests, map(self._reader.__getitem__, requests)) if few else self.stream(requests)
        for x, y in stream:
            yield self.floats(x), y

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches asked for, in that order, as bytes and labels on the device; read ahead of their use.

        An image that can't be read is black and has the label `UNREADABLE`; too many of them end the run.
        """
        self._queue.requests = requests
        if self._loader is None:
            self._loader = torch.utils.data.DataLoader(
                self._reader,
                batch_size=None,
                sampler=self._queue,
                num_workers=self.workers,
                persistent_workers=self.workers > 0,
                pin_memory=self.device.type == "cuda",
                generator=torch.Generator(),  # or it would draw from that of dropout
            )
        return self._sent(requests, self._loader)

    def _sent(
        self, requests: Sequence[Request], batches: Iterable[tuple[Tensor, Tensor, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for request, (x, y, bad) in zip(requests, batches, strict=True):
            if len(bad):
                self._note(request.split, bad.tolist())
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _note(self, split: Split, bad: Sequence[int]) -> None:
        files = self.files[split]
        assert files is not None
        self.unreadable |= {(split, i): files.name(i) for i in bad}
        if len(self.unreadable) > self.skip_at_most:
            self.refuse(list(self.unreadable.values()))


class _Queue(torch.utils.data.Sampler[Request]):
    """What the workers are to read next: filled anew for every epoch, while the workers live on."""

    def __init__(self) -> None:
        self.requests: Sequence[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


class _Reader(torch.utils.data.Dataset[Any]):
    """Reads a request's images: what a worker process does."""

    def __init__(self, files: dict[Split, Files | None], size: int, augment: Any, present: Any):
        self.files, self.size, self.augment, self.present = files, size, augment, present

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor, Tensor]:
        files = self.files[request.split]
        assert files is not None
        images = [self._image(files, i, request.seed) for i in request.index]
        bad = [i for i, image in zip(request.index, images, strict=True) if image is None]
        labels = torch.from_numpy(files.labels[list(request.index)])
        if bad:
            labels[torch.tensor([image is None for image in images])] = UNREADABLE
        black = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
        x = torch.stack([black if image is None else image for image in images])
        return x, labels, torch.tensor(bad, dtype=torch.int64)

    def _image(self, files: Files, i: int, seed: int | None) -> Tensor | None:
        image = read_image(files.path(i))
        if image is None:
            return None
        if seed is None:
            presented: Tensor = self.present(image)
            return presented
        with torch.random.fork_rng(devices=[]):  # dropout draws from the same generator where there are no workers
            torch.default_generator.manual_seed(seed_of(seed, i))
            augmented: Tensor = self.augment(image)
        return augmented


def _transforms(size: int, resize: int, crop: float, flip: bool) -> tuple[Any, Any]:
    """What is done to images for training, and for evaluation."""
    from torchvision.transforms import v2

    present = v2.Compose([v2.PILToTensor(), v2.Resize(resize, antialias=True), v2.CenterCrop(size)])
    augment = present if crop >= 1 else _RandomResizedCrop(size, crop)
    return v2.Compose([augment, v2.RandomHorizontalFlip()] if flip else [augment]), present


class _RandomResizedCrop:
    """What v2.RandomResizedCrop does to a tensor, in less time: what is cut away is not made into one first."""

    def __init__(self, size: int, crop: float):
        from torchvision.transforms import v2

        self.size, self.chosen = size, v2.RandomResizedCrop(size, scale=(crop, 1.0), antialias=True)

    def __call__(self, image: Image.Image) -> Tensor:
        from torchvision.transforms.v2 import functional as F

        at = self.chosen.make_params([image])
        cut = image.crop((at["left"], at["top"], at["left"] + at["width"], at["top"] + at["height"]))
        resized: Tensor = F.resize(F.pil_to_tensor(cut), [self.size, self.size], antialias=True)
        return resized


def default_workers() -> int:
    """As many as there are cores for each process of this machine, sixteen at most."""
    return max(1, min(MOST_WORKERS, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def folder(
    path: str | None = None,
    size: int = 224,
    resize: int | None = None,
    crop: float = 0.08,
    flip: bool = True,
    normalize: bool = True,
    workers: int | None = None,
    skip_at_most: int = 100,
    title: str = "folder",
    memory: bool = False,
    val_split: float | None = None,
) -> Streaming | SmallImages:
    """your own images: `path` has train/<class>/ and val/<class>/; read from the disk as they are needed

    Training sees random crops of at least `crop` of an image's area at `size` pixels, mirrored or not; evaluation the
    centre of the image after its shorter side is `resize` (an eighth more than `size` unless said). Without a `path`
    it is looked for as `title` in $DEEPHOYER_DATA. Up to `skip_at_most` images that can't be read are left out.
    With `memory`, images that are small and all of one size are decoded once, and cropped and resized on the device.
    Without a folder val, `val_split` is the share of each class's images that takes its place.
    """
    whole = {"size": size, "skip_at_most": skip_at_most}
    whole |= {k: v for k, v in (("resize", resize), ("workers", workers)) if v is not None}
    for key, value in whole.items():
        least = 0 if key in ("workers", "skip_at_most") else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"data: {key} is {value!r}; it must be a whole number of at least {least}.")
    for key, said in (("flip", flip), ("normalize", normalize), ("memory", memory)):
        if not isinstance(said, bool):
            raise UserError(f"data: {key} is {said!r}; it must be true or false.")
    if isinstance(crop, bool) or not isinstance(crop, int | float) or not 0 < crop <= 1:
        raise UserError(f"data: crop is {crop!r}; it must be a share of an image's area, above 0 and at most 1.")
    if val_split is not None and (not isinstance(val_split, float) or not 0 < val_split < 1):
        raise UserError(f"data: val_split is {val_split!r}; it must be a share of the images, between 0 and 1.")
    if resize is not None and resize < size:
        raise UserError(f"data: resize is {resize}, but size is {size}: images would get black borders.")
    for key, text in (("path", path), ("title", title)):
        if not isinstance(text, str | None):
            raise UserError(f"data: {key} is {text!r}; it must be text.")
    needs_torchvision(title)
    root = kept_in(title) if path is None else path_on_disk(path)
    if path is None and not root.is_dir():
        raise UserError(f"data {title}: where is it? Give data.path=FOLDER, or put it at {root} ($DEEPHOYER_DATA).")
    files = find(root, f"data {title}", val_split)
    source = Streaming(title, files, size, resize or size * 8 // 7, crop, flip, normalize, workers, skip_at_most)
    return source.held(crop, flip) if memory else source


def imagenet(
    path: str | None = None, size: int = 224, resize: int = 256, workers: int | None = None, skip_at_most: int = 100
) -> Streaming:
    """ImageNet (ILSVRC 2012), 1,000 classes: `path` has train/n01440764/… and val/n01440764/…; not fetched

    Without a `path` it is looked for as `imagenet` in $DEEPHOYER_DATA.
    """
    source = folder(path, size, resize, workers=workers, skip_at_most=skip_at_most, title="imagenet")
    assert isinstance(source, Streaming)
    if source.classes != 1000:
        raise UserError(f"data imagenet: {source.classes} class folders were found, ImageNet has 1,000.")
    return source


def tiny_imagenet(
    path: str | None = None,
    size: int = 64,
    resize: int | None = None,
    crop: float = 0.25,
    workers: int | None = None,
    skip_at_most: int = 100,
    memory: bool = False,
) -> Streaming | SmallImages:
    """Tiny-ImageNet, 200 classes of 64 × 64 images or some of them, in its own layout or class folders; not fetched

    `size` may be larger than 64: images are then enlarged, with `memory` on the device. Without a `path` it is looked
    for in $DEEPHOYER_DATA.
    """
    resize = size if resize is None else resize
    return folder(path, size, resize, crop, True, True, workers, skip_at_most, "tiny-imagenet", memory)


def needs_torchvision(what: str) -> None:
    try:
        import torchvision  # noqa: F401
    except ImportError as why:
        raise UserError(
            f"data {what}: images are read by torchvision, which can't be imported ({why}). "
            "`pip install 'deephoyer[lab]'` installs it."
        ) from None
