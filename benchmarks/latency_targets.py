"""Latency targets: the time asked for, the time measured, and the score kept, beside a MAC target of equal time.

    python benchmarks/latency_targets.py
    python benchmarks/latency_targets.py --device cuda --models resnet50 vit_b_16 --batch 256 --dtype bfloat16 \\
        --modes eager cuda-graph
    python benchmarks/latency_targets.py --device cuda --models resnet50 vit_b_16 --batch 256 --dtype bfloat16 \\
        --modes compiled --shares 0.5 --alone
    python benchmarks/latency_targets.py --page results/bench/latency-targets-cuda.json docs/costs.md

Weights are random (each channel's scaled by a random factor, so that scores differ), as only shapes matter to time.
Each network is pruned to a share of its time. Beside the share of the score that it keeps (`kept`) is that of the same
network pruned to a number of MACs at which it takes as long, found by the same search. "measured" is measured once more
at the end, in turns with the dense network.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import measuring
from deephoyer.cutting import Cut, Cutter, search
from deephoyer.lab.models import make
from deephoyer.latency import MODES, Beside
from deephoyer.structure import Coupled
from deephoyer.targets import Target, restored

TITLES = ["network", "mode", "asked", "measured", "±", "score kept", "by MACs", "at time", "dense ms", "seconds"]


def network(name: str, device: str) -> tuple[nn.Module, Tensor]:
    """Ours with images of CIFAR-10's size, or torchvision's with those of ImageNet's; channels last on a GPU."""
    torch.manual_seed(0)
    if "-" in name:
        model, example = make(name), torch.randn(1, 3, 32, 32)
    else:
        model, example = torchvision.models.get_model(name), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                if not parameter.any():  # a vision transformer's head: nothing would reach the outputs
                    nn.init.normal_(parameter, std=0.02)
                parameter.mul_(torch.rand(len(parameter)).add(0.2).view(-1, *[1] * (parameter.dim() - 1)))
    if device == "cuda":
        model, example = (x.to(device, memory_format=torch.channels_last) for x in (model, example))
    return model.eval(), example


def kept(cutter: Cutter, cut: Cut) -> float:
    """The share of the score that is kept: the geometric mean over the coupled sets, weighted by their scores.

    A channel's score is its squared magnitude, in units of its layer's own.
    """
    units, scores = cutter.scores()
    total = logs = 0.0
    for unit, s, keep in zip(units, scores, cut.keeps, strict=True):
        score = (s.score.double() / s.std).square() * cutter.rows[unit.name]
        total += float(score.sum())
        logs += float(score.sum()) * math.log(float(score[keep].sum() / score.sum()))
    return math.exp(logs / total)


def small(cutter: Cutter, cut: Cut) -> nn.Module:
    with restored(cutter.model):
        cutter.apply(cut)
        return cutter.compacted()


def by_macs(cutter: Cutter, beside: Beside, share: float) -> tuple[Cut, float]:
    """The cut by MACs whose network takes this share of the time, and the share that it really takes."""
    cut = search(cutter.plan, lambda chosen: beside.share(small(cutter, chosen)).value, share)
    return cut, cut.share


def measured(
    name: str, model: nn.Module, example: Tensor, groups: Coupled, mode: str, share: float, args: Any
) -> dict[str, Any]:
    began = time.perf_counter()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    cutter = Cutter(model, example, Target(latency=share, batch=args.batch, mode=mode, dtype=dtype), groups)
    cut = cutter.aim(share)
    seconds = time.perf_counter() - began
    beside = cutter.stopwatch()
    again = beside.share(small(cutter, cut))
    line = {"network": name, "mode": mode, "asked": share, "measured": again.value, "error": again.error}
    line |= {"kept": kept(cutter, cut), "dense_ms": beside.whole_ms(), "seconds": seconds}
    if not args.alone:
        macs = Cutter(model, example, Target(macs=0.5), groups)
        other, line["macs_time"] = by_macs(macs, beside, again.value)
        line["macs_kept"] = kept(macs, other)
    return line


def row(line: dict[str, Any]) -> list[str]:
    macs = [f"{line['macs_kept']:.3f}", f"{line['macs_time']:.3f}"] if "macs_kept" in line else ["", ""]
    times = [f"{line['asked']:.2f}", f"{line['measured']:.3f}", f"{line['error']:.3f}", f"{line['kept']:.3f}"]
    return [line["network"], line["mode"], *times, *macs, f"{line['dense_ms']:.2f}", f"{line['seconds']:.0f}"]


NAMES = {
    "resnet-56": "ResNet-56",
    "resnet50": "ResNet-50",
    "convnext_tiny": "ConvNeXt-T",
    "vit_b_16": "ViT-B/16",
}


def table(record: dict[str, Any]) -> str:
    """What a record holds, in Markdown."""
    rows = ["| network | target | measured | score kept | MAC target: score kept at time |", "|---|--:|--:|--:|--:|"]
    for line in record["lines"]:
        name = NAMES.get(line["network"], line["network"])
        time = f"{line['measured']:.3f} ± {line['error']:.3f}"
        macs = f"{line['macs_kept']:.3f} at {line['macs_time']:.3f}" if "macs_kept" in line else ""
        rows.append(f"| {name} | {line['asked']:.2f} | {time} | {line['kept']:.3f} | {macs} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--page", type=Path, nargs=2, help="only write the table of a record into a page: RECORD PAGE")
    parser.add_argument("--models", nargs="+", default=["resnet-56", "resnet50", "convnext_tiny"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the network's own")
    parser.add_argument("--alone", action="store_true", help="without the MAC target of equal time")
    args = parser.parse_args()
    if args.page:
        record, page = args.page
        return measuring.put(page, record.stem, table(json.loads(record.read_text(encoding="utf-8"))))
    if args.brief:
        args.models, args.shares = ["resnet-20"], [0.7]
    lines = []
    for name in args.models:
        model, example = network(name, args.device)
        groups = Coupled(model, example)
        for mode in args.modes:
            for share in args.shares:
                lines.append(measured(name, model, example, groups, mode, share, args))
                cells = zip(TITLES, row(lines[-1]), strict=True)
                print(", ".join(f"{title} {cell}" for title, cell in cells), flush=True)
    machine = measuring.machine(args.device)
    about = f"{machine['device']}, {machine['threads']} threads, batch {args.batch}, {args.dtype or 'float32'}"
    measuring.show(f"latency targets: {about}", [TITLES, *map(row, lines)], words=2)
    measuring.write(args.out, {"machine": machine, "batch": args.batch, "dtype": args.dtype, "lines": lines})


if __name__ == "__main__":
    main()
