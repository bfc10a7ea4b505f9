"""What compaction gains: the speed-up and the MAC reduction of ResNet-56, by us and by torch-pruning; and joints.

    python benchmarks/compaction.py --out results/bench/compaction-cpu.json

Half of the coupled channels of a ResNet-56 are zeroed, then removed twice: by `deephoyer.compact`, which finds the dead
channels itself, and by torch-pruning, which is given their indices. Weights are random, as only shapes matter to time;
batch norms have random statistics, so that a wrongly removed channel changes the outputs. In a second network, filters
and input channels are dead layer by layer, as per-layer Group-HS leaves them. The networks of a table are timed in
turns, call by call. Other programs would disturb two threads that wait for each other: while these use more than
--others of the processors, a table is measured again, up to twelve times.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import platform
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deephoyer as dh
from deephoyer.counting import count
from deephoyer.lab.models import input_shape, make
from deephoyer.lab.models.pad_shortcut import PadShortcut
from deephoyer.latency import Latency, measure
from measuring import make_parser, show, write

MODEL = "resnet-56"
BATCHES = (64, 1)
THEIRS = {name: version(name) for name in ("torch-pruning",) if importlib.util.find_spec("torch_pruning")}
"""Its version, if it is installed; otherwise its side is left out."""


def network(shortcut: str) -> nn.Module:
    """A ResNet-56 with random weights, whose batch norms shift and scale."""
    torch.manual_seed(0)
    model = make(MODEL, shortcut=shortcut).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model


def dead_filters(model: nn.Module) -> dict[str, list[int]]:
    """The indices of each convolution's all-zero filters."""
    convolutions = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    return {n: torch.nonzero(~m.weight.flatten(1).any(1)).flatten().tolist() for n, m in convolutions.items()}


def by_torch_pruning(model: nn.Module, x: Tensor, explained: bool) -> nn.Module:
    """The network without its dead channels, by torch-pruning's graph, with the padded shortcut explained or not."""
    import torch_pruning as tp

    class PadPruner(tp.BasePruningFunc):
        """Tells torch-pruning what the parameter-free shortcut does: its two sides are not coupled."""

        def prune_in_channels(self, layer: PadShortcut, idxs: list[int]) -> nn.Module:
            layer.keep_inputs([i for i in range(layer.in_channels) if i not in set(idxs)])
            return layer

        def prune_out_channels(self, layer: PadShortcut, idxs: list[int]) -> nn.Module:
            layer.keep_outputs([i for i in range(layer.out_channels) if i not in set(idxs)])
            return layer

        def get_in_channels(self, layer: PadShortcut) -> int:
            return layer.in_channels

        def get_out_channels(self, layer: PadShortcut) -> int:
            return layer.out_channels

    dead = dead_filters(model)
    small = copy.deepcopy(model)
    pruners = {PadShortcut: PadPruner()} if explained else {}
    graph = tp.DependencyGraph().build_dependency(small, x, customized_pruners=pruners)
    # One convolution of each coupled set: the stem and the first of each later stage, and every inner one.
    first = ["conv1", "layer2.0.conv2", "layer3.0.conv2", *(n for n in dead if n.endswith(".conv1"))]
    for name in first:
        layer = small.get_submodule(name)
        graph.get_pruning_group(layer, tp.prune_conv_out_channels, idxs=dead[name]).prune()
    return small


def difference(model: nn.Module, small: nn.Module) -> float:
    """The largest difference of the outputs for 64 inputs that neither has seen, as a share of their scale."""
    x = torch.randn(64, *input_shape(MODEL), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, got = model(x).double(), small(x).double()
    return float((expected - got).abs().max() / expected.abs().max())


class Others:
    """Measures the share of the processors' time that other programs use; 0 if the system does not say."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float:
        (busy, whole, own), (busy0, whole0, own0) = self._now(), self.start
        return max(0.0, (busy - busy0) - (own - own0)) / max(1e-9, whole - whole0)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        used = os.times()
        try:
            ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except OSError:
            return 0.0, 0.0, 0.0
        idle, second = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK")
        return (sum(ticks) - idle) / second, sum(ticks) / second, used.user + used.system


def timed(models: list[nn.Module], x: Tensor, seconds: float, most: float) -> tuple[list[list[Latency]], float]:
    """Latencies, and the share of other programs: of the first try in which it is small, or the best of twelve."""
    tries = []
    for _ in range(12):
        others = Others()
        tries.append((measure(models, x, BATCHES, seconds), others.share()))
        if tries[-1][1] <= most:
            break
        time.sleep(seconds)
    return min(tries, key=lambda attempt: attempt[1])


def compare(networks: dict[str, nn.Module], x: Tensor, seconds: float, most: float) -> tuple[dict[str, Any], float]:
    """Counts, outputs and times of networks, each compared with the first one."""
    whole, *_ = networks.values()
    latencies, others = timed(list(networks.values()), x, seconds, most)
    record: dict[str, Any] = {}
    for (name, model), times in zip(networks.items(), latencies, strict=True):
        _, total = count(model, x)
        _, before = count(whole, x)
        assert total.macs_executed and before.macs_executed
        record[name] = {
            "parameters": total.parameters,
            "macs": total.macs_executed,
            "fewer_macs": before.macs_executed / total.macs_executed,
            "difference": difference(whole, model),
            "latency": [asdict(t) for t in times],
            "faster": {str(t.batch): b.median_ms / t.median_ms for b, t in zip(latencies[0], times, strict=True)},
        }
    return record, others


def coupled(shortcut: str, x: Tensor, seconds: float, most: float) -> dict[str, Any]:
    """Half of the coupled channels removed, by us and by torch-pruning."""
    model = network(shortcut)
    groups = dh.Coupled(model, x)
    dh.prune(model, dh.Density(0.5), groups=groups)
    networks = {"masked": model, "deephoyer": dh.compact(model, x, groups=groups)}
    if THEIRS:
        networks["torch-pruning"] = by_torch_pruning(model, x, explained=True)
    compared, others = compare(networks, x, seconds, most)
    record: dict[str, Any] = {"networks": compared, "other_programs": others}
    if shortcut == "pad" and THEIRS:
        record["untold"] = untold(model, x)
    return record


def untold(model: nn.Module, x: Tensor) -> str:
    """What torch-pruning does if the padded shortcut is not explained to it."""
    try:
        small = by_torch_pruning(model, x, explained=False)
        return f"outputs differ by {difference(model, small):.1e} of their scale"
    except Exception as why:
        return f"fails: {type(why).__name__}: {why}"


def joints(x: Tensor, seconds: float, most: float) -> dict[str, Any]:
    """Filters and channels that are dead in one layer only: what is executed without joints and with them."""
    model = network("pad")
    dh.prune(model, dh.Density(0.7), groups="filters+channels", parameters="layer*.conv*")
    networks = {"masked": model}
    networks |= {f"joints {kind}": dh.compact(model, x, joints=kind) for kind in ("none", "gather")}
    compared, others = compare(networks, x, seconds, most)
    paper = count(model, x)[1].macs_paper
    record: dict[str, Any] = {"macs_paper": paper, "networks": compared, "other_programs": others}
    plain, gathered = (record["networks"][f"joints {kind}"] for kind in ("none", "gather"))
    record["gather_saves"] = {
        "macs": 1 - gathered["macs"] / plain["macs"],
        "time": {size: 1 - plain["faster"][size] / gathered["faster"][size] for size in plain["faster"]},
    }
    return record


def rows(networks: dict[str, Any]) -> list[list[str]]:
    times = [f"ms, batch {n}" for n in BATCHES]
    faster = [f"faster, batch {n}" for n in BATCHES]
    table = [["network", "parameters", "MACs", "fewer MACs", *times, *faster, "outputs differ by"]]
    for name, r in networks.items():
        ms = [f"{t['median_ms']:.2f} ({t['low_ms']:.2f}–{t['high_ms']:.2f})" for t in r["latency"]]
        ratios = [f"{ratio:.2f}×" for ratio in r["faster"].values()]
        counts = [f"{r['parameters']:,}", f"{r['macs']:,}", f"{r['fewer_macs']:.2f}×"]
        table.append([name, *counts, *ms, *ratios, f"{r['difference']:.1e}"])
    return table


def main() -> None:
    parser = make_parser(__doc__, device=False)
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each table and batch size")
    parser.add_argument("--others", type=float, default=0.03, help="largest CPU load of other processes, as a share")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.brief:
        chosen.seconds, chosen.others = 0.2, 1.0
    torch.set_num_threads(chosen.threads)
    x = torch.randn(2, *input_shape(MODEL), generator=torch.Generator().manual_seed(1))
    record: dict[str, Any] = {
        "machine": f"{platform.machine()}, {chosen.threads} threads",
        "versions": {"deephoyer": dh.__version__, "torch": torch.__version__} | THEIRS,
    }
    for shortcut in ("pad", "conv"):
        record[f"coupled, {shortcut}"] = result = coupled(shortcut, x, chosen.seconds, chosen.others)
        notes = [f"other programs took {result['other_programs']:.1%} of the processors"]
        if not THEIRS:
            notes.append("torch-pruning is not installed; its side is left out")
        if outcome := result.get("untold"):
            notes.append(f"torch-pruning without an explanation of the padded shortcut: {outcome}")
        show(f"{MODEL}, shortcut {shortcut}: half of the coupled channels removed", rows(result["networks"]), notes)
    record["joints"] = result = joints(x, chosen.seconds, chosen.others)
    saves = result["gather_saves"]
    shares = ", ".join(f"{share:.1%} of the time at batch {size}" for size, share in saves["time"].items())
    notes = [
        f"other programs took {result['other_programs']:.1%} of the processors",
        f"MACs as the paper counts them: {result['macs_paper']:,}",
        f"gathering saves {saves['macs']:.1%} of the MACs and {shares}",
    ]
    show(f"{MODEL}: 70 % of filters and of channels kept, layer by layer", rows(result["networks"]), notes)
    write(chosen.out, record)


if __name__ == "__main__":
    main()
