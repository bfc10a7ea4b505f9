"""Networks that others pruned and published, measured by us: accuracy on CIFAR-10's test images, and MACs.

    DEEPHOYER_DATA=… python benchmarks/public_networks.py "cifar10_resnet56_ocspruner_flops_47%.pth" …

For CIFAR ResNets with 1 × 1 convolutions as shortcuts, saved whole (a pickled module) or as a state dict. No code of a
file is executed: its pickle may only rebuild tensors, every class in it becomes an empty stand-in, and the network is
ours, as wide as the tensors say. `fewer` compares with the dense network of that kind. Images are normalised by
`--mean` and `--std`, by default with the values that most public CIFAR-10 code uses.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deephoyer as dh
from deephoyer.errors import UserError
from deephoyer.lab import data, models
from deephoyer.lab.data import Dataset
from measuring import machine, make_parser, show, write

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
RENAMED = {"downsample": "shortcut", "fc": "linear"}
"""Parts that have another name in the public code than in ours."""
BATCH = 500


class StandIn:
    """An object of a class that is not loaded: it has its attributes, and none of its code."""

    def __new__(cls, *_: object) -> StandIn:
        return super().__new__(cls)

    def __call__(self, *_: object) -> StandIn:
        return StandIn()


STORAGES = {"FloatStorage": torch.float32, "HalfStorage": torch.float16, "LongStorage": torch.int64}


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    return storage.as_strided(size, stride, offset)


def _parameter(tensor: Tensor, *_: object) -> Tensor:
    return tensor


class TensorsOnly(pickle.Unpickler):
    """Rebuilds tensors from a torch file's archive; all other classes and functions are stand-ins."""

    def __init__(self, archive: zipfile.ZipFile):
        (index,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        self.archive, self.folder = archive, index.removesuffix("data.pkl")
        super().__init__(io.BytesIO(archive.read(index)))

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        return known.get((module, name), StandIn)

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        content = bytearray(self.archive.read(f"{self.folder}data/{int(key)}"))
        return torch.frombuffer(content, dtype=dtype)


def state_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled module, or of a state dict, by their names."""
    try:
        with zipfile.ZipFile(path) as archive:
            content = TensorsOnly(archive).load()
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, pickle.UnpicklingError) as why:
        raise UserError(f"{path}: is not a file that torch.save wrote, or not one of tensors: {why}") from None
    state = dict(_tensors(content))
    if not state:
        raise UserError(f"{path}: no network was found in it.")
    return state


def _tensors(part: Any, before: str = "") -> Iterator[tuple[str, Tensor]]:
    inside = part if isinstance(part, dict) else getattr(part, "__dict__", {})
    for key, value in inside.items():
        if isinstance(value, Tensor):
            yield f"{before}{key}", value
        elif key in ("_parameters", "_buffers", "_modules", "state_dict", "model"):
            yield from _tensors(value, before)
        elif isinstance(value, StandIn):
            yield from _tensors(value, f"{before}{key}.")


def network(state: dict[str, Tensor]) -> nn.Module:
    """Our CIFAR ResNet with the same number of blocks, each layer as wide as its tensors."""
    state = {".".join(RENAMED.get(part, part) for part in name.split(".")): t for name, t in state.items()}
    blocks = {name.split(".")[1] for name in state if name.startswith("layer1.")}
    model = models.make(f"resnet-{6 * len(blocks) + 2}", shortcut="conv")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            outputs, inputs = state[f"{name}.weight"].shape[:2]
            layer.weight = nn.Parameter(torch.empty(outputs, inputs, *layer.kernel_size))
            layer.out_channels, layer.in_channels = outputs, inputs
        elif isinstance(layer, nn.BatchNorm2d):
            layer.num_features = len(state[f"{name}.weight"])
            for key in ("weight", "bias"):
                setattr(layer, key, nn.Parameter(torch.empty(layer.num_features)))
            layer.running_mean, layer.running_var = (torch.empty(layer.num_features) for _ in range(2))
        elif isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = state[f"{name}.weight"].shape
            layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features))
    try:
        model.load_state_dict(state)
    except RuntimeError as why:
        raise UserError(f"the tensors are not those of a CIFAR ResNet: {str(why).splitlines()[-1].strip()}") from None
    return model.eval()


@torch.inference_mode()
def right(model: nn.Module, images: Dataset, device: str) -> int:
    model = model.to(device)
    parts = zip(images.test_x.split(BATCH), images.test_y.split(BATCH), strict=True)
    return sum(int((model(images.floats(x.to(device))).argmax(1).cpu() == y.cpu()).sum()) for x, y in parts)


def measured(path: Path, images: Dataset, device: str) -> dict[str, Any]:
    model = network(state_of(path))
    blocks = len(model.layer1)  # type: ignore[arg-type]
    dense = models.make(f"resnet-{6 * blocks + 2}", shortcut="conv")
    example = torch.zeros(1, 3, 32, 32)
    macs, before = (dh.summary(net, example, latency=False).total.macs_executed for net in (model, dense))
    return {
        "file": path.name,
        "network": f"resnet-{6 * blocks + 2}",
        "right": right(model, images, device),
        "images": len(images.test_y),
        "macs": macs,
        "fewer": before / macs,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def rows(networks: list[dict[str, Any]]) -> list[list[str]]:
    table = [["file", "network", "accuracy", "MACs", "fewer", "parameters"]]
    for n in networks:
        numbers = [f"{n['right'] / n['images']:.2%}", f"{n['macs']:,}", f"{n['fewer']:.2f}×", f"{n['parameters']:,}"]
        table.append([n["file"], n["network"], *numbers])
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--mean", type=float, nargs=3, default=MEAN)
    parser.add_argument("--std", type=float, nargs=3, default=STD)
    chosen = parser.parse_args()
    images = data.load("cifar10")
    assert isinstance(images, Dataset)
    limit = 100 if chosen.brief else len(images.test_y)
    x, y = images.test_x[:limit], images.test_y[:limit]
    shown = Dataset("cifar10", x[:1], y[:1], x, y, images.classes, tuple(chosen.mean), tuple(chosen.std))
    try:
        networks = [measured(path, shown, chosen.device) for path in chosen.files]
    except UserError as why:
        sys.exit(f"deephoyer: {why}")
    show("others' networks, measured by us", rows(networks), words=2)
    write(chosen.out, {"machine": machine(chosen.device), "networks": networks})


if __name__ == "__main__":
    main()
