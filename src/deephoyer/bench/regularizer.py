"""What a regularizer costs: autograd loops, torch-pruning's, our backends and the memory floor, side by side.

Hoyer-Square, value and gradient, for the tensors of six networks. The floor is the fewest bytes two passes can
move (weights read twice, gradients read and written once) over the bandwidth of a large copy (bytes read plus written).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deephoyer.bench.checks import checks
from deephoyer.bench.clock import copy_bandwidth, machine, milliseconds, replayed
from deephoyer.bench.networks import LARGE, NETWORKS, tensors_of
from deephoyer.bench.sides import TRACEABLE, autograd_loop, bare_step, has_torch_pruning, ours, torch_pruning
from deephoyer.errors import unknown


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
    profile: bool = False

    def filled(self) -> Options:
        """With what is usual on the device where nothing was chosen."""
        cuda = self.device == "cuda"
        backends = self.backends or (("plain", "foreach", "triton") if cuda else ("plain", "foreach"))
        networks = self.networks or tuple(n for n in NETWORKS if cuda or n not in LARGE)
        for name in networks:
            if name not in NETWORKS:
                raise unknown("network of this benchmark", name, NETWORKS)
        return replace(self, backends=backends, networks=networks)


def measured(options: Options) -> Iterator[dict[str, Any]]:
    """The record, again after every case, so that what is measured is not lost."""
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
            found: dict[str, Any] = {}
            attempt(found, "case", partial(case, name, groups, options, bandwidth))
            if found["case"] is None:
                record.setdefault("errors", {})[f"{name} {groups}"] = found["errors"]["case"]
            else:
                record["cases"].append(found["case"])
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

    timed("autograd, asks host", lambda: autograd_loop(model, groups, asks_host=True))
    timed("autograd", lambda: autograd_loop(model, groups, asks_host=False))
    if groups != "elements" and name in TRACEABLE and args.dtype == "float32" and has_torch_pruning():
        timed("torch-pruning", lambda: torch_pruning(name, args.device))
    for backend in args.backends:
        timed(backend, partial(ours, model, groups, backend))
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


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """A short table: our time, and how the others compare to it."""
    made: list[tuple[str, ...]] = [("network", "groups", "ours", "÷ floor", *(f"{t} ÷ ours" for t in OTHERS.values()))]
    for each in record["cases"]:
        ms = each["ms"]
        ours_ms = ms.get("triton") or ms.get("foreach")
        others = [f"{ms[side] / ours_ms:.1f}" if ours_ms and ms.get(side) else "–" for side in OTHERS]
        mine = (f"{ours_ms:.3f} ms", f"{ours_ms / ms['floor']:.2f}") if ours_ms else ("failed", "–")
        made.append((each["network"], each["groups"], *mine, *others))
    return made


def notes(record: dict[str, Any]) -> list[str]:
    """What else there is to say: a side that is missing, and what the checks came to."""
    said = list(record.get("notes", ()))
    checked = [found for each in record["cases"] for found in (each.get("checks") or {}).values()]
    if checked:
        worst = max(found["relative error"] for found in checked)
        repeat = "repeat" if all(found["repeats"] for found in checked) else "don't repeat"
        waits = sum(bool(found["waits"]) for found in checked)
        said.append(
            f"against float64 autograd at most {worst:.1e} apart; results {repeat}; {waits} wait for the device"
        )
    return said


OTHERS = {"autograd, asks host": "autograd loop", "autograd": "loop without waits", "torch-pruning": "torch-pruning"}
