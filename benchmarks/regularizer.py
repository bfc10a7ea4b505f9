"""What a regularizer costs: autograd loops, torch-pruning's, our backends and the memory floor, side by side.

    python benchmarks/regularizer.py --device cuda --check --out results/bench/regularizer-cuda.json
    python benchmarks/regularizer.py --device cpu --out results/bench/regularizer-cpu.json

Hoyer-Square, value and gradient, for the tensors of six networks; only their shapes matter. All
sides of a ratio are measured in this one run. The floor is the fewest bytes two passes can move (weights read
twice, gradients read and written once) over the bandwidth of a large copy (bytes read plus written).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deephoyer as dh

STRENGTH = 1e-12  # so that thousands of calls leave the gradients as they are

# The tensors


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
REAL_MODELS = ("lenet-300-100", "resnet-56", "resnet-50")  # torch-pruning traces a network that runs


def tensors_of(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*NETWORKS[name]())
    model = model.to(dtype).to_empty(device=device)
    for p in model.parameters():
        p.data.normal_(std=0.02)
        p.grad = torch.randn_like(p)
    return model


# The sides


def hoyer_square(r: Tensor) -> Tensor:
    return r.sum() ** 2 / (r**2).sum()


def group_hoyer_square(w: Tensor) -> Tensor:
    over = list(range(w.dim()))
    rows, columns = ((w**2).sum([d for d in over if d != keep]).sqrt() for keep in (0, 1))
    return hoyer_square(rows) + hoyer_square(columns)


def autograd_loop(model: nn.Module, groups: str, asks_host: bool) -> Callable[[], None]:
    """The penalty as it is usually written; `asks_host` as in the paper's scripts: is this tensor all zero?"""
    penalty = hoyer_square if groups == "elements" else group_hoyer_square
    weights = list(model.parameters())

    def call() -> None:
        total: Any = 0
        for w in weights:
            if asks_host and not w.abs().sum() > 0:
                continue
            total = total + penalty(w.abs() if groups == "elements" else w)
        (STRENGTH * total).backward()

    return call


def ours(model: nn.Module, groups: str, backend: str) -> Callable[[], None]:
    return dh.Regularizer(model, "hoyer-square", groups, STRENGTH, backend=backend).add_grad_


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    """The call captured in a CUDA graph: what the device does, without the host's part."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def torch_pruning(name: str, device: str) -> Callable[[], None]:
    """Its group norm penalty, on the same network with its batch norms: another formula, the same purpose."""
    import torch_pruning as tp

    from deephoyer import models

    model = models.make(name).to(device)
    example = torch.randn(1, *models.input_shape(name), device=device)
    importance = tp.importance.GroupMagnitudeImportance(p=2)
    pruner = tp.pruner.GroupNormPruner(model, example, importance=importance, reg=STRENGTH)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    pruner.update_regularizer()
    return lambda: pruner.regularize(model)


# Time


def milliseconds(call: Callable[[], None], device: str, budget: float) -> float:
    """The median over rounds of calls in a row, after warming up; as many as the budget (seconds) allows."""
    call()
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    once = max(time.perf_counter() - begin, 1e-6)
    burst = int(min(max(0.01 / once, 1), 200))
    rounds = int(min(max(budget / (once * burst), 3), 50))
    for _ in range(min(burst, 3)):
        call()
    return statistics.median(_round(call, burst, device) for _ in range(rounds))


def _round(call: Callable[[], None], burst: int, device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(burst):
            call()
        return (time.perf_counter() - begin) * 1e3 / burst
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(burst):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / burst


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str, budget: float) -> float:
    """Bytes per second of a copy much larger than any cache, read plus written."""
    size = 2**32 if device == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / (milliseconds(lambda: target.copy_(source), device, budget) * 1e-3)


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


# Whether it is right


def checks(model: nn.Module, groups: str, backend: str, device: str) -> dict[str, Any]:
    """Against float64 autograd, tensor by tensor; the same bits twice; waits for the device; memory taken."""
    regularizer = dh.Regularizer(model, "hoyer-square", groups, 1.0, backend=backend)
    weights = list(model.parameters())
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
        "relative error": max(_error(p, groups) for p in weights),
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


def _error(p: Tensor, groups: str) -> float:
    exact = p.detach().double().requires_grad_()
    if groups == "elements":
        hoyer_square(exact.abs()).backward()
    else:
        layer = dh.Regularizer(_holding(exact, p), "hoyer-square", groups, 1.0)
        layer.loss().backward()
    gradient = exact.grad
    assert gradient is not None and p.grad is not None
    return ((p.grad.double() - gradient).norm() / gradient.norm()).item()


def _holding(exact: Tensor, p: Tensor) -> nn.Module:
    """A layer like p's that holds `exact`, so that grouped convolutions are cut as they should be."""
    maker = OWNER[id(p)]
    groups = getattr(maker, "groups", 1)
    with torch.device("meta"):
        layer = linear(1, 1) if p.dim() == 2 else conv(p.shape[1] * groups, p.shape[0], p.shape[2], groups)
    del layer.weight
    layer.weight = nn.Parameter(exact)
    exact.grad = None
    layer.weight.register_post_accumulate_grad_hook(lambda w: setattr(exact, "grad", w.grad))
    return nn.Sequential(layer)


OWNER: dict[int, nn.Module] = {}

# The run


def attempt(record: dict[str, Any], key: str, what: Callable[[], Any]) -> None:
    """One failure must not lose the rest."""
    try:
        record[key] = what()
    except Exception as why:
        record[key] = None
        record.setdefault("errors", {})[key] = f"{type(why).__name__}: {why}"[:500]
        traceback.print_exc(limit=-4)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def case(name: str, groups: str, args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    model = tensors_of(name, args.device, dtype)
    OWNER.clear()
    OWNER.update({id(layer.weight): layer for layer in model})
    count = sum(p.numel() for p in model.parameters())
    floor = 4 * count * dtype.itemsize / bandwidth * 1e3
    record: dict[str, Any] = {"network": name, "groups": groups, "dtype": args.dtype, "weights": count}
    record["tensors"], record["ms"] = len(list(model.parameters())), {"floor": floor}
    ms = record["ms"]

    def timed(side: str, make: Callable[[], Callable[[], None]]) -> None:
        attempt(ms, side, lambda: milliseconds(make(), args.device, args.budget))

    timed("autograd, asks host", lambda: autograd_loop(model, groups, asks_host=True))
    timed("autograd", lambda: autograd_loop(model, groups, asks_host=False))
    if groups != "elements" and name in REAL_MODELS and args.dtype == "float32":
        timed("torch-pruning", lambda: torch_pruning(name, args.device))
    for backend in args.backends:
        timed(backend, lambda b=backend: ours(model, groups, b))
        if backend == "triton" and args.device == "cuda":
            timed("triton, captured", lambda: replayed(ours(model, groups, "triton")))
    if args.profile:
        attempt(record, "kernels", lambda: kernels(ours(model, groups, args.backends[-1])))
    if args.check:
        attempt(record, "checks", lambda: {b: checks(model, groups, b, args.device) for b in args.backends})
    return record


def kernels(call: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each kernel on the device."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    return {e.key[:60]: round(e.self_device_time_total / 10, 2) for e in events}


def show(record: dict[str, Any]) -> None:
    ms = record["ms"]
    best = next((s for s in ("triton", "foreach", "plain") if ms.get(s)), None)
    print(f"\n{record['network']}, {record['groups']}, {record['dtype']}: {record['weights'] / 1e6:.2f}M weights")
    for side, time_ in ms.items():
        if side == "errors":
            continue
        if time_ is None:
            print(f"  {side:22} failed: {ms['errors'][side]}")
            continue
        ratio = f"{time_ / ms[best]:8.2f} × {best}" if best else ""
        print(f"  {side:22} {time_:10.4f} ms  {time_ / ms['floor']:8.2f} × floor  {ratio}")
    for key in ("checks", "kernels"):
        for side, found in (record.get(key) or {}).items():
            print(f"  {key}: {side} {found}")


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """The figures by which the kernels are judged."""
    ms = {(c["network"], c["groups"]): c["ms"] for c in result["cases"]}
    found: dict[str, float] = {}
    for (name, groups), sides in ms.items():
        best = sides.get("triton") or sides.get("foreach")
        if not best:
            continue
        found[f"{name} {groups}: ours / floor"] = best / sides["floor"]
        for loop in ("autograd, asks host", "autograd", "torch-pruning"):
            if sides.get(loop):
                found[f"{name} {groups}: {loop} / ours"] = sides[loop] / best
        elements = ms.get((name, "elements"), {})
        if groups != "elements" and (elements.get("triton") or elements.get("foreach")):
            found[f"{name}: {groups} / elements"] = best / (elements.get("triton") or elements["foreach"])
    lenet = ms.get(("lenet-300-100", "elements"), {})
    if result["lenet-300-100 step ms"] and (lenet.get("triton") or lenet.get("foreach")):
        ours_ms = lenet.get("triton") or lenet["foreach"]
        found["lenet-300-100: ours / bare step"] = ours_ms / result["lenet-300-100 step ms"]
    return {key: round(value, 3) for key, value in found.items()}


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "deephoyer": dh.__version__}


def tune(names: list[str], budget: float) -> None:
    """Device milliseconds for launch shapes; the constants in `kernels/triton.py` and `kernels/tables.py` are such."""
    from deephoyer.kernels import tables, triton

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", help="comma-separated; by default all, on a CPU without the two largest")
    parser.add_argument("--groups", default="elements,filters+channels")
    parser.add_argument("--backends", help="comma-separated; by default plain, foreach and, on CUDA, triton")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    parser.add_argument("--check", action="store_true", help="compare with float64 autograd, look for waits and memory")
    parser.add_argument("--profile", action="store_true", help="time of each kernel of the last backend (CUDA)")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for each measurement")
    parser.add_argument("--out", type=Path, help="a JSON record, written after every case")
    parser.add_argument("--threads", type=int, help="on a CPU; by default as many as PyTorch takes")
    parser.add_argument("--tune", action="store_true", help="only try launch shapes of the Triton kernels (CUDA)")
    args = parser.parse_args()
    if args.tune:
        tune(args.networks.split(",") if args.networks else ["resnet-50", "decoder-1b"], args.budget)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    args.backends = (args.backends or ("plain,foreach,triton" if args.device == "cuda" else "plain,foreach")).split(",")
    chosen = args.networks.split(",") if args.networks else [
        n for n in NETWORKS if args.device == "cuda" or n not in LARGE
    ]  # fmt: skip
    result: dict[str, Any] = {"machine": machine(args.device), "cases": []}
    bandwidth = copy_bandwidth(args.device, args.budget)
    result["copy GB/s"] = bandwidth / 1e9
    result["floor"] = "weights read twice, gradients read and written once, over the bandwidth of a copy"
    attempt(result, "lenet-300-100 step ms", lambda: milliseconds(bare_step(args.device), args.device, args.budget))
    print(f"{result['machine']}\ncopy {bandwidth / 1e9:.0f} GB/s; bare step {result['lenet-300-100 step ms']} ms")
    for name in chosen:
        for groups in args.groups.split(","):
            attempt(result, "last", lambda n=name, g=groups: case(n, g, args, bandwidth))
            if result["last"] is not None:
                result["cases"].append(result["last"])
                show(result["last"])
            result["ratios"] = ratios(result)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({k: v for k, v in result.items() if k != "last"}, indent=1) + "\n")
    print("\n" + "\n".join(f"{value:9.2f}  {key}" for key, value in result["ratios"].items()))


if __name__ == "__main__":
    main()
