"""What a regularizer costs: autograd loops, torch-pruning's regularizer, our backends, and the memory floor.

    python benchmarks/regularizer.py --device cuda --check --out results/bench/regularizer-cuda.json
    python benchmarks/regularizer.py --device cpu --out results/bench/regularizer-cpu.json

Hoyer-Square, value and gradient, for the tensors of six networks. The floor is the minimum number of bytes that two
passes move (weights read twice, gradients read and written once) divided by the bandwidth of a large copy (bytes read
plus written).
"""

from __future__ import annotations

import copy
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import deephoyer as dh
from deephoyer.errors import unknown
from measuring import copy_bandwidth, machine, make_parser, milliseconds, replayed, show, write

STRENGTH = 1e-12  # so that thousands of calls leave the gradients as they are
TRACEABLE = ("lenet-300-100", "resnet-56", "resnet-50")  # torch-pruning traces a network that runs


# The networks. Only the shapes of their weights matter: they are sequences of layers that are never run


def lenet_300_100() -> Iterator[nn.Module]:
    yield from (linear(784, 300), linear(300, 100), linear(100, 10))


def resnet_56() -> Iterator[nn.Module]:
    yield conv(3, 16, 3)
    width = 16
    for out in (16, 32, 64):
        for _ in range(18):
            yield conv(width, out, 3)
            width = out
    yield linear(64, 10)


def resnet_50() -> Iterator[nn.Module]:
    yield conv(3, 64, 7)
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from (conv(width, inner, 1), conv(inner, inner, 3), conv(inner, 4 * inner, 1))
            if block == 0:
                yield conv(width, 4 * inner, 1)
            width = 4 * inner
    yield linear(2048, 1000)


def alexnet() -> Iterator[nn.Module]:
    yield from (conv(3, 96, 11), conv(96, 256, 5, 2), conv(256, 384, 3), conv(384, 384, 3, 2), conv(384, 256, 3, 2))
    yield from (linear(9216, 4096), linear(4096, 4096), linear(4096, 1000))


def vit_large() -> Iterator[nn.Module]:
    yield conv(3, 1024, 16)
    for _ in range(24):
        yield from (linear(1024, 3072), linear(1024, 1024), linear(1024, 4096), linear(4096, 1024))
    yield linear(1024, 1000)


def decoder_1b() -> Iterator[nn.Module]:
    for _ in range(22):
        yield from (linear(2048, 2048), linear(2048, 256), linear(2048, 256), linear(2048, 2048))
        yield from (linear(2048, 5632), linear(2048, 5632), linear(5632, 2048))
    yield linear(2048, 32000)


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, groups=groups, bias=False)


NETWORKS: dict[str, Callable[[], Iterator[nn.Module]]] = {
    "lenet-300-100": lenet_300_100,
    "resnet-56": resnet_56,
    "resnet-50": resnet_50,
    "alexnet": alexnet,
    "vit-l": vit_large,
    "decoder-1b": decoder_1b,
}
LARGE = ("vit-l", "decoder-1b")


def tensors_of(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*NETWORKS[name]())
    model = model.to(dtype).to_empty(device=device)
    for p in model.parameters():
        p.data.normal_(std=0.02)
        p.grad = torch.randn_like(p)
    return model


# The sides of the comparison


def has_torch_pruning() -> bool:
    return importlib.util.find_spec("torch_pruning") is not None


def hoyer_square(r: Tensor) -> Tensor:
    return r.sum() ** 2 / (r**2).sum()


def group_hoyer_square(w: Tensor) -> Tensor:
    over = list(range(w.dim()))
    rows, columns = ((w**2).sum([d for d in over if d != keep]).sqrt() for keep in (0, 1))
    return hoyer_square(rows) + hoyer_square(columns)


def autograd_loop(model: nn.Module, groups: str, synchronizes: bool) -> Callable[[], None]:
    """The penalty as it is usually written; `synchronizes` as in the paper's scripts, which ask for each tensor
    whether it is all zero."""
    penalty = hoyer_square if groups == "elements" else group_hoyer_square
    weights = list(model.parameters())

    def call() -> None:
        total: Any = 0
        for w in weights:
            if synchronizes and not w.abs().sum() > 0:
                continue
            total = total + penalty(w.abs() if groups == "elements" else w)
        (STRENGTH * total).backward()

    return call


def ours(model: nn.Module, groups: str, backend: str) -> Callable[[], None]:
    return dh.Regularizer(model, "hoyer-square", groups, STRENGTH, backend=backend).add_grad_


def torch_pruning(name: str, device: str) -> Callable[[], None]:
    """Its group norm penalty on the same network with batch norms: another formula for the same purpose."""
    import torch_pruning as tp

    from deephoyer.lab import models

    model = models.make(name).to(device)
    example = torch.randn(1, *models.input_shape(name), device=device)
    importance = tp.importance.GroupMagnitudeImportance(p=2)
    pruner = tp.pruner.GroupNormPruner(model, example, importance=importance, reg=STRENGTH)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    pruner.update_regularizer()
    return lambda: pruner.regularize(model)


def bare_step(device: str) -> Callable[[], None]:
    """A training step of LeNet-300-100 without any regularizer: batch 100, Adam."""
    layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = torch.rand(100, 784, device=device), torch.randint(10, (100,), device=device)

    def call() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return call


# Whether the fast backends are right


def checks(model: nn.Module, groups: str, backend: str, device: str) -> dict[str, Any]:
    """The error against float64 autograd; whether results repeat bit for bit; synchronization; memory."""
    regularizer = dh.Regularizer(model, "hoyer-square", groups, 1.0, backend=backend)
    layers = {layer.weight: layer for layer in model.children()}
    weights: list[Any] = list(layers)
    regularizer.add_grad_()  # builds tables and compiles, which may wait
    runs = []
    for _ in range(2):
        for p in weights:
            p.grad.zero_()
        runs.append(_watched(regularizer.add_grad_, device))
        if len(runs) == 1:
            first = [p.grad.clone() for p in weights]
    same = all(torch.equal(p.grad, g) for p, g in zip(weights, first, strict=True))
    size = sum(p.numel() * p.element_size() for p in weights)
    return {
        "relative error": max(_error(p, layer, groups) for p, layer in layers.items()),
        "repeats": same,
        "waits": runs[-1]["waits"],
        "extra memory / weights": None if runs[-1]["extra"] is None else runs[-1]["extra"] / size,
    }


def _watched(call: Callable[[], None], device: str) -> dict[str, Any]:
    if device == "cpu":
        call()
        return {"waits": None, "extra": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    waits: Any = False
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as why:
        waits = str(why)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {"waits": waits, "extra": torch.cuda.max_memory_allocated() - before}


def _error(p: Any, layer: nn.Module, groups: str) -> float:
    exact = p.detach().double().requires_grad_()
    if groups == "elements":
        hoyer_square(exact.abs()).backward()
    else:
        dh.Regularizer(_holding(exact, layer), "hoyer-square", groups, 1.0).loss().backward()
    gradient = exact.grad
    assert gradient is not None and p.grad is not None
    return ((p.grad.double() - gradient).norm() / gradient.norm()).item()


def _holding(exact: Tensor, like: nn.Module) -> nn.Module:
    """A layer that is cut into groups as the other is, but holds `exact`."""
    layer = copy.copy(like)
    weight = nn.Parameter(exact)
    layer._parameters = {"weight": weight}
    exact.grad = None
    weight.register_post_accumulate_grad_hook(lambda w: setattr(exact, "grad", w.grad))
    return nn.Sequential(layer)


# Measuring


def attempt(record: dict[str, Any], key: str, what: Callable[[], Any]) -> None:
    """Notes a failure in the record, and goes on with the rest."""
    try:
        record[key] = what()
    except Exception as why:
        record[key] = None
        record.setdefault("errors", {})[key] = f"{type(why).__name__}: {why}"[:500]
        traceback.print_exc(limit=-4)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Options:
    """What is measured, and for how long (`budget`: seconds for each measurement)."""

    device: str = "cpu"
    networks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("elements", "filters+channels")
    backends: tuple[str, ...] = ()
    dtype: str = "float32"
    budget: float = 0.25
    check: bool = False

    def filled(self) -> Options:
        """With the defaults of the device where nothing was chosen."""
        cuda = self.device == "cuda"
        backends = self.backends or (("plain", "foreach", "triton") if cuda else ("plain", "foreach"))
        networks = self.networks or tuple(n for n in NETWORKS if cuda or n not in LARGE)
        for name in networks:
            if name not in NETWORKS:
                raise unknown("network of this benchmark", name, NETWORKS)
        return replace(self, backends=backends, networks=networks)


def measured(options: Options) -> Iterator[dict[str, Any]]:
    """The record so far, after every case, so that an interrupted benchmark has results."""
    options = options.filled()
    bandwidth = copy_bandwidth(options.device, options.budget)
    record: dict[str, Any] = {"machine": machine(options.device), "cases": [], "copy GB/s": bandwidth / 1e9}
    record["floor"] = "weights read twice, gradients read and written once, over the bandwidth of a copy"
    if not has_torch_pruning():
        record["notes"] = ["torch-pruning is not installed; its side is left out."]
    attempt(
        record,
        "lenet-300-100 step ms",
        lambda: milliseconds(bare_step(options.device), options.device, options.budget),
    )
    for name in options.networks:
        for groups in options.groups:
            result: dict[str, Any] = {}
            attempt(result, "case", partial(case, name, groups, options, bandwidth))
            if result["case"] is None:
                record.setdefault("errors", {})[f"{name} {groups}"] = result["errors"]["case"]
            else:
                record["cases"].append(result["case"])
            record["ratios"] = ratios(record)
            yield record


def case(name: str, groups: str, args: Options, bandwidth: float) -> dict[str, Any]:
    """All sides, for the tensors of one network."""
    dtype = getattr(torch, args.dtype)
    model = tensors_of(name, args.device, dtype)
    count = sum(p.numel() for p in model.parameters())
    floor = 4 * count * dtype.itemsize / bandwidth * 1e3
    record: dict[str, Any] = {"network": name, "groups": groups, "dtype": args.dtype, "weights": count}
    record["tensors"], record["ms"] = len(list(model.parameters())), {"floor": floor}
    ms = record["ms"]

    def timed(side: str, make: Callable[[], Callable[[], None]]) -> None:
        attempt(ms, side, lambda: milliseconds(make(), args.device, args.budget))

    timed("autograd, asks host", lambda: autograd_loop(model, groups, synchronizes=True))
    timed("autograd", lambda: autograd_loop(model, groups, synchronizes=False))
    if groups != "elements" and name in TRACEABLE and args.dtype == "float32" and has_torch_pruning():
        timed("torch-pruning", lambda: torch_pruning(name, args.device))
    for backend in args.backends:
        timed(backend, partial(ours, model, groups, backend))
        if backend == "triton" and args.device == "cuda":
            timed("triton, captured", lambda: replayed(ours(model, groups, "triton")))
    if args.check:
        attempt(record, "checks", lambda: {b: checks(model, groups, b, args.device) for b in args.backends})
    return record


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """The ratios by which the kernels are judged."""
    ms = {(c["network"], c["groups"]): c["ms"] for c in result["cases"]}
    ratios: dict[str, float] = {}
    for (name, groups), sides in ms.items():
        ours_ms = fastest(sides)
        if not ours_ms:
            continue
        ratios[f"{name} {groups}: ours / floor"] = ours_ms / sides["floor"]
        for loop in ("autograd, asks host", "autograd", "torch-pruning"):
            if sides.get(loop):
                ratios[f"{name} {groups}: {loop} / ours"] = sides[loop] / ours_ms
        elements_ms = fastest(ms.get((name, "elements"), {}))
        if groups != "elements" and elements_ms:
            ratios[f"{name}: {groups} / elements"] = ours_ms / elements_ms
    lenet_ms = fastest(ms.get(("lenet-300-100", "elements"), {}))
    if result["lenet-300-100 step ms"] and lenet_ms:
        ratios["lenet-300-100: ours / bare step"] = lenet_ms / result["lenet-300-100 step ms"]
    return {key: round(value, 3) for key, value in ratios.items()}


def fastest(ms: dict[str, float]) -> float | None:
    """Milliseconds of our backend for the device: Triton's, or that of several tensors at once."""
    return ms.get("triton") or ms.get("foreach")


def rows(record: dict[str, Any]) -> list[list[str]]:
    """A short table: our time, and how the others compare with it."""
    table: list[list[str]] = [["network", "groups", "ours", "÷ floor", *(f"{t} ÷ ours" for t in OTHERS.values())]]
    for case in record["cases"]:
        ms = case["ms"]
        ours_ms = fastest(ms)
        others = [f"{ms[side] / ours_ms:.1f}" if ours_ms and ms.get(side) else "–" for side in OTHERS]
        ours = (f"{ours_ms:.3f} ms", f"{ours_ms / ms['floor']:.2f}") if ours_ms else ("failed", "–")
        table.append([case["network"], case["groups"], *ours, *others])
    return table


def notes(record: dict[str, Any]) -> list[str]:
    """What is missing, and the results of the checks."""
    lines = list(record.get("notes", ()))
    checked = [check for case in record["cases"] for check in (case.get("checks") or {}).values()]
    if checked:
        worst = max(check["relative error"] for check in checked)
        repeat = "repeat" if all(check["repeats"] for check in checked) else "don't repeat"
        waits = sum(bool(check["waits"]) for check in checked)
        lines.append(
            f"error against float64 autograd at most {worst:.1e}; results {repeat}; {waits} wait for the device"
        )
    return lines


OTHERS = {"autograd, asks host": "autograd loop", "autograd": "loop without waits", "torch-pruning": "torch-pruning"}


def tune(names: list[str], budget: float) -> None:
    """Prints device milliseconds for launch shapes, to set the constants in `deephoyer/kernels`."""
    from deephoyer.kernels import launch_tables as tables
    from deephoyer.kernels import triton

    def device_ms(model: nn.Module, groups: str, shown: dict[str, Any]) -> None:
        attempt(shown, "ms", lambda: milliseconds(replayed(ours(model, groups, "triton")), "cuda", budget))
        print(groups, shown)

    for name in names:
        model = tensors_of(name, "cuda", torch.float32)
        print(name)
        for warps, block, chunk in CHUNK_SHAPES:
            triton.LARGE["num_warps"], triton.BLOCK, tables.CHUNKS = warps, block, (chunk,) * 3
            device_ms(model, "elements", {"warps": warps, "block": block, "chunk": chunk})
        for warps, height, width, tall in TILE_SHAPES:
            triton.LARGE["num_warps"], triton.HEIGHT, triton.WIDTH, tables.TALLS = warps, height, width, (tall,) * 3
            shape = {"warps": warps, "height": height, "width": width, "tall": tall}
            device_ms(model, "filters+channels", shape)


CHUNK_SHAPES = [(4, 1024, 4096), (4, 2048, 4096), (8, 2048, 8192), (8, 4096, 4096)]
CHUNK_SHAPES += [(8, 4096, 8192), (8, 4096, 16384), (8, 4096, 32768), (16, 8192, 16384)]
TILE_SHAPES = [(8, 32, 128, 64), (8, 32, 128, 128), (8, 32, 128, 256), (8, 32, 128, 512)]
TILE_SHAPES += [(4, 16, 128, 128), (8, 16, 256, 128), (8, 16, 256, 256), (4, 8, 256, 128)]


def listed(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--networks", help="comma-separated; default: all, on a CPU without the two largest")
    parser.add_argument("--groups", default="elements,filters+channels")
    parser.add_argument("--backends", help="comma-separated; default: plain, foreach and, on CUDA, triton")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    parser.add_argument(
        "--check", action="store_true", help="compare with float64 autograd, check synchronization and memory"
    )
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for each measurement")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    parser.add_argument("--tune", action="store_true", help="only try launch shapes of the Triton kernels (CUDA)")
    args = parser.parse_args()
    if args.brief:
        args.budget, args.networks = 0.01, args.networks or "lenet-300-100,resnet-56"
    if args.tune:
        tune(list(listed(args.networks)) or ["resnet-50", "decoder-1b"], args.budget)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    options = Options(
        args.device, listed(args.networks), listed(args.groups), listed(args.backends),
        args.dtype, args.budget, args.check,
    )  # fmt: skip
    record: dict[str, Any] = {}
    for record in measured(options):
        write(args.out, record)
    bandwidth = f"copy {record['copy GB/s']:.0f} GB/s, bare step {record['lenet-300-100 step ms']:.3f} ms"
    show(f"Hoyer-Square on {record['machine']['device']}, {bandwidth}", rows(record), notes(record), words=2)
    for failed, why in record.get("errors", {}).items():
        print(f"{failed}: {why}")


if __name__ == "__main__":
    main()
