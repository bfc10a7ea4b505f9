"""Networks that people prune: half of their coupled channels zeroed and removed, by us and by Torch-Pruning.

    python benchmarks/zoo.py --out zoo.jsonl                        # all of zoo.txt; goes on where it stopped
    python benchmarks/zoo.py --out zoo.jsonl --families hf own --jobs 2 --limit 60 --side
    python benchmarks/zoo.py --out zoo.jsonl --render docs/zoo.md   # the table, nothing is run

One process for each network, with a time limit. Each network is pruned to a density of 0.5 with `Coupled` and
compacted, and its outputs are compared on inputs that compaction has not seen. With `--side` Torch-Pruning's magnitude
pruner gets the same network and the same share; it does not keep the function, so it counts as working if the network
still runs, with outputs of the same shape. One line of JSON for each network. The library of yolo is never imported.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import deephoyer as dh
from deephoyer.executed import executed
from deephoyer.inference import batch_of
from deephoyer.structure.compact import compact_report
from deephoyer.structure.equality import but_for_ties
from deephoyer.weights import all_weights
from zoo_networks import NotBuilt, build, names
from zoo_table import render

DENSITY = 0.5
GONE = 0.4
"""The share of parameters that must be removed for a network to count as smaller."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
SIDE_LIMIT = 30
"""CPU seconds for Torch-Pruning, which does not terminate on some networks."""
INNER_TOLERANCE = 1e-5
"""For a network in float64 that computes something in float32, as Hugging Face's RMSNorms do."""


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def fresh(inputs: Any) -> Any:
    """Inputs with other random numbers; integers (tokens, edges, steps) stay the same."""
    if isinstance(inputs, Tensor):
        return torch.randn_like(inputs) if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: fresh(value) for key, value in inputs.items()}
    return type(inputs)(fresh(v) for v in inputs) if isinstance(inputs, tuple | list) else inputs


def tensors_of(output: Any) -> Iterator[Tensor]:
    """All tensors in an output of any type, without past keys and values."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for key, value in output.items():
            if key not in ("past_key_values", "state"):
                yield from tensors_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(output):
        yield from tensors_of(vars(output))


class _Precision(TorchDispatchMode):
    """Notes whether any operation returns float32 numbers."""

    single = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.single |= isinstance(out, Tensor) and out.dtype == torch.float32 and out.dim() > 1
        return out


@torch.no_grad()
def tolerance(model: nn.Module, inputs: Any) -> float:
    """How far outputs may differ by rounding alone."""
    with _Precision() as precision:
        called(model, inputs)
    dtype = next(model.parameters()).dtype
    return INNER_TOLERANCE if dtype == torch.float64 and precision.single else TOLERANCE.get(dtype, 0.0)


@torch.no_grad()
def difference(model: nn.Module, small: nn.Module, inputs: Any) -> float:
    """The largest difference of the outputs on fresh inputs, as a share of their scale; infinite for other shapes."""
    torch.manual_seed(5)
    inputs = fresh(inputs)
    before, after = (list(tensors_of(called(m, inputs))) for m in (model, small))
    gaps = [0.0]
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            gaps.append(float("inf"))
        elif a.is_floating_point() and a.numel():
            gap = ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()
            gaps.append(gap if gap == gap else float("inf"))
    # Of two boxes with the same score a detector may keep either.
    return max(gaps) if max(gaps) < 1e-3 else min(max(gaps), but_for_ties(model, small, inputs, 1e-9))


def macs_of(model: nn.Module, inputs: Any) -> int:
    """Multiply-accumulates that are executed, recurrent layers and fused attention included."""
    used, other = executed(model, inputs, {w.name: w.tensor for w in all_weights(model)})
    return sum(used.values()) + sum(other.values())


@torch.no_grad()
def macs_by_torch(model: nn.Module, inputs: Any) -> int | None:
    """By torch's flop counter, which counts two operations for each; None if it cannot follow the network."""
    try:
        with FlopCounterMode(display=False) as counter:
            called(model, inputs)
        return counter.get_total_flops() // 2 // batch_of(inputs)
    except Exception:
        return None


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def inner_left(model: nn.Module, small: nn.Module, groups: dh.Coupled) -> float | None:
    """The share of parameters left between embeddings, inputs and outputs: in a transformer's blocks."""
    outer = {
        name
        for coupled in groups.sets
        if coupled.reason in ("network output", "network input")
        for name, side in coupled.places
        if (side == "out") == (coupled.reason == "network output")
    }
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    before: Counter[bool] = Counter()
    after: Counter[bool] = Counter()
    left = dict(small.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        inner = id(parameter) not in tied and name.rpartition(".")[0] not in outer
        before[inner] += parameter.numel()
        after[inner] += left[name].numel() if name in left else 0
    return after[True] / before[True] if before[True] else None


def only_width_stays(groups: dh.Coupled, small: nn.Module) -> bool:
    """Whether half of the channels that can be removed are, and the others are almost only the width that norms hold,
    or at least no heads and no neurons.
    """
    outer = ("normalises over channels", "rows of an embedding", "network input", "network output")
    norms = {name for name, m in groups.model.named_modules() if isinstance(m, nn.LayerNorm)}
    held = [coupled for coupled in groups.sets if coupled.reason and not norms.intersection(coupled.layers)]
    others = sum(len(c.channels) for c in held if not any(words in str(c.reason) for words in outer))
    free = sum(len(c.channels) for c in groups.sets if not c.reason)
    by_norms = any("normalises" in str(c.reason) for c in groups.sets)
    share = others / max(1, sum(len(c.channels) for c in groups.sets))
    inner = [c for c in groups.sets if c.heads or dh.Neurons._meant(groups, c)]  # type: ignore[arg-type]
    inner_free = bool(inner) and not any(c.reason for c in inner)
    return by_norms and (share < 0.03 or inner_free) and compact_report(small).removed >= 0.45 * free


def reasons(groups: dh.Coupled) -> list[tuple[str, float]]:
    """Why channels are kept: the three most frequent reasons, with their shares of all channels."""
    counts: Counter[str] = Counter()
    for coupled in groups.sets:
        counts[coupled.reason or ""] += len(coupled.channels)
    total = sum(counts.values())
    outer = ("", "network input", "network output")
    return [(reason, n / total) for reason, n in counts.most_common() if reason not in outer][:3]


def ours(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Prunes half of the channels, compacts, and compares the outputs."""
    record: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        groups = dh.Coupled(model, inputs)
        record["coupled_seconds"] = round(time.perf_counter() - start, 2)
        record["held"] = reasons(groups)
        dh.prune(model, dh.Density(DENSITY), groups=groups)
        record["macs"] = macs_of(
            model, inputs
        )  # after pruning: with other weights a detector finds another number of boxes
        start = time.perf_counter()
        small = dh.compact(model, inputs, groups=groups)
        record["compact_seconds"] = round(time.perf_counter() - start, 2)
    except dh.UserError as why:
        return record | {"status": "refused", "why": str(why)}
    except Exception as why:
        return record | {"status": "refused", "why": f"{type(why).__name__}: {why}", "crash": True}
    record |= {
        "parameters_left": parameters_of(small),
        "macs_left": macs_of(small, inputs),
        "macs_left_by_torch": macs_by_torch(small, inputs),
        "difference": difference(model, small, inputs),
        "claimed_difference": compact_report(small).error,
        "inner_left": inner_left(model, small, groups),
        "only_width_stays": only_width_stays(groups, small),
    }
    gone = 1 - record["parameters_left"] / parameters_of(model)
    if not record["difference"] <= tolerance(model, inputs):
        status = "wrong"
    elif gone >= GONE:
        status = "smaller"
    elif record["only_width_stays"] or (record["inner_left"] is not None and record["inner_left"] <= 0.55):
        status = "heads and neurons"
    else:
        status = "less"
    return record | {"status": status}


def torch_pruning(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Removes the same share by Torch-Pruning, except from the last layer."""
    import torch_pruning as tp

    before = [t.shape for t in tensors_of(called(model, inputs))]
    whole = parameters_of(model)
    last: list[nn.Module] = []
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    hooks = [
        m.register_forward_hook(lambda module, args, y: last.append(module))
        for m in model.modules()
        if isinstance(m, kinds)
    ]
    called(model, inputs)
    for hook in hooks:
        hook.remove()
    start = time.perf_counter()
    try:
        pruner = tp.pruner.MagnitudePruner(
            model, inputs, tp.importance.MagnitudeImportance(p=2), pruning_ratio=1 - DENSITY, ignored_layers=last[-1:]
        )
        pruner.step()
        with torch.no_grad():
            after = [t.shape for t in tensors_of(called(model, inputs))]
    except Exception as why:
        return {"status": "fails", "why": f"{type(why).__name__}: {why}"[:300]}
    seconds = round(time.perf_counter() - start, 2)
    left = parameters_of(model)
    status = "outputs of another shape" if after != before else "smaller" if 1 - left / whole >= GONE else "less"
    return {"status": status, "parameters_left": left, "macs_left": macs_of(model, inputs), "seconds": seconds}


def examined(family: str, name: str, side: bool) -> Iterator[dict[str, Any]]:
    """The network's record: first without Torch-Pruning's part, which may use up all the time, then with it."""
    record: dict[str, Any] = {"family": family, "name": name}
    try:
        model, inputs = build(family, name)
    except NotBuilt as why:
        yield record | {"status": "not built", "why": str(why)}
        return
    record |= {"parameters": parameters_of(model), "macs": macs_of(model, inputs)}
    record["macs_by_torch"] = macs_by_torch(model, inputs)
    record["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    other = copy.deepcopy(model) if side else None
    record |= ours(model, inputs)
    record["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    yield record if other is None else record | {"torch_pruning": {"status": "timeout"}}
    if other is not None:
        yield record | {"torch_pruning": torch_pruning(other, inputs)}


def _work(send: Connection, family: str, name: str, side: bool, limit: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))
    for record in examined(family, name, side):
        send.send(record)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SIDE_LIMIT, most))


class Child:
    """One network in its own process."""

    def __init__(self, family: str, name: str, side: bool, limit: int):
        # A fork, so that torch and the families' libraries are imported once for all networks.
        context = multiprocessing.get_context("fork")
        self.family, self.name, self.limit = family, name, limit
        self.receive, send = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(send, family, name, side, limit), daemon=True)
        self.latest: dict[str, Any] | None = None
        self.process.start()
        send.close()

    def record(self) -> dict[str, Any] | None:
        """The record of the network; None while it is not finished."""
        if self.receive.poll(0.05):
            try:
                self.latest = self.receive.recv()
            except EOFError:
                self.process.join()
                if self.process.exitcode == -signal.SIGXCPU:
                    return self.latest or self._lost("timeout", f"more than {self.limit} s")
                return self.latest or self._lost("died", f"its process ended with status {self.process.exitcode}")
        return None

    def _lost(self, status: str, why: str) -> dict[str, Any]:
        return {"family": self.family, "name": self.name, "status": status, "why": why}


def line(record: dict[str, Any]) -> str:
    """One line on a network, for the terminal."""
    shown = f"{record['family']:16} {record['name']:34} {record['status']:18}"
    if "parameters_left" in record:
        left = record["parameters_left"] / record["parameters"]
        macs = record["macs_left"] / max(1, record["macs"])
        seconds = record["coupled_seconds"] + record["compact_seconds"]
        shown += f" {left:5.2f} {macs:5.2f} {record['difference']:8.1e} {seconds:6.1f} s"
    if side := record.get("torch_pruning"):
        share = f" {side['parameters_left'] / record['parameters']:.2f}" if "parameters_left" in side else ""
        shown += f"  | tp {side['status']}{share}"
    return shown + (f"  {record['why'][:120]}" if "why" in record else "")


def run(todo: list[tuple[str, str]], out: Path, jobs: int, limit: int, side: bool) -> None:
    children: list[Child] = []
    with out.open("a") as file:
        while todo or children:
            while todo and len(children) < jobs:
                children.append(Child(*todo.pop(0), side, limit))
            for child in list(children):
                record = child.record()
                if record is not None:
                    children.remove(child)
                    child.process.join(5)
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    print(line(record), flush=True)


def records(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest line of each network."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(r["family"], r["name"]): r for r in map(json.loads, lines)}


def imported(families: set[str]) -> None:
    """Imports the libraries of the chosen families once, before processes are forked."""
    modules = {
        "timm": "timm",
        "hf": "transformers.modeling_utils",
        "diffusers": "diffusers.models.unets.unet_2d",
        "pyg": "torch_geometric.nn",
        "smp": "segmentation_models_pytorch",
    }
    for family in families:
        try:
            __import__(modules.get(family, "torchvision"))
        except ImportError as why:
            print(f"{family}: {why}")  # each of its networks then fails for that reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="a file of JSON lines; networks in it are not run again"
    )
    parser.add_argument("--families", nargs="+", choices=list(names()), default=list(names()))
    parser.add_argument("--names", nargs="+", default=["*"], help="glob patterns")
    parser.add_argument("--again", nargs="*", help="run networks with these statuses again; without a status, all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds per network")
    parser.add_argument("--brief", action="store_true", help="the first three networks of each family")
    parser.add_argument("--side", action="store_true", help="also run Torch-Pruning")
    parser.add_argument("--render", type=Path, help="only write the table to this file")
    chosen = parser.parse_args()
    done = records(chosen.out)
    if chosen.render:
        chosen.render.write_text(render(done, names()))
        return
    if chosen.again is not None:
        done = {key: r for key, r in done.items() if chosen.again and r["status"] not in chosen.again}
    todo = [
        (family, name)
        for family in chosen.families
        for name in names()[family][: 3 if chosen.brief else None]
        if (family, name) not in done and any(fnmatchcase(name, pattern) for pattern in chosen.names)
    ]
    imported({family for family, _ in todo})
    run(todo, chosen.out, chosen.jobs, chosen.limit, chosen.side)
    counts = Counter(r["status"] for key, r in records(chosen.out).items())
    print(", ".join(f"{n} {status}" for status, n in counts.most_common()))


if __name__ == "__main__":
    main()
