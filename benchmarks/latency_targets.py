"""Times as targets: what was asked for, what was measured, and the score kept beside a plain MAC target of equal time.

    python benchmarks/latency_targets.py --networks resnet-56 resnet-50 convnext-tiny --shares 0.7 0.5

Weights are random (each channel's scaled by a random factor, so that scores differ): only shapes matter to time. Each
network is cut to the share of its time; the share of the score (squared magnitude over each set's own scale) that is
kept stands beside that of a network cut to a share of its MACs at which it takes as long, found by bisection on
measured times. A time is the fastest of calls in which dense and small take turns, in this one run.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from deephoyer.cutting import Cut, Cutter
from deephoyer.lab.models import make
from deephoyer.targets import Target


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name.startswith("resnet-") and name != "resnet-50":
        model, example = make(name), torch.randn(1, 3, 32, 32)
    else:
        builder = {"resnet-50": "resnet50", "convnext-tiny": "convnext_tiny", "vit-b": "vit_b_16"}[name]
        model, example = getattr(torchvision.models, builder)(weights=None), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand(len(parameter)).add(0.2).view(-1, *[1] * (parameter.dim() - 1)))
    return model.eval(), example


def kept(cutter: Cutter, cut: Cut) -> float:
    """The share of the score that stays, mean over the coupled sets."""
    _, scores = cutter.scores()
    worth = [s.score.double().square() for s in scores]
    shares = [float((w * k).sum() / w.sum()) for w, k in zip(worth, cut.keeps, strict=True)]
    return sum(shares) / len(shares)


def timed(cutter: Cutter, of: Cutter, cut: Cut) -> float:
    model = copy.deepcopy(cutter.model.state_dict())
    cutter.apply(cut)
    small = cutter.compacted()
    cutter.model.load_state_dict(model)
    return of.time_of(small)


def by_macs(cutter: Cutter, times: Cutter, share: float) -> tuple[Cut, float]:
    """The MAC target whose network takes this share of the time."""
    low, high = 0.02, 1.0
    for _ in range(6):
        middle = (low * high) ** 0.5
        cut = cutter.plan(middle)
        found = timed(cutter, times, cut)
        low, high = (middle, high) if found < share else (low, middle)
        if abs(found - share) < 0.02 * share:
            break
    return cut, found


def line(name: str, share: float, args: argparse.Namespace) -> dict[str, Any]:
    model, example = network(name)
    if args.device == "cuda":
        model, example = model.cuda(), example.cuda()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = Target(latency=share, batch=args.batch, mode=args.mode, dtype=dtype)
    began = time.perf_counter()
    cutter = Cutter(model, example, target)
    cut = cutter.aim(share)
    seconds = time.perf_counter() - began
    again = timed(cutter, cutter, cut)
    macs = Cutter(model, example, Target(macs=0.5), groups=cutter.coupled)
    other, other_time = by_macs(macs, cutter, again)
    return {
        "network": name,
        "asked": share,
        "measured": again,
        "kept": kept(cutter, cut),
        "macs_kept": kept(macs, other),
        "macs_time": other_time,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet-56", "resnet-50", "convnext-tiny"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--brief", action="store_true", help="one small network, once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.brief:
        args.networks, args.shares = ["resnet-20"], [0.7]
    print(f"{args.device}, batch {args.batch}, {args.mode}, {torch.get_num_threads()} threads")
    print(
        f"{'network':<14} {'asked':>6} {'measured':>9} {'score kept':>11} {'by MACs':>8} {'at time':>8} {'seconds':>8}"
    )
    lines = []
    for name in args.networks:
        for share in args.shares:
            lines.append(found := line(name, share, args))
            print(
                f"{name:<14} {share:6.2f} {found['measured']:9.3f} {found['kept']:11.3f} {found['macs_kept']:8.3f} "
                f"{found['macs_time']:8.3f} {found['seconds']:8.0f}",
                flush=True,
            )
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        args.out.write_text(json.dumps({"settings": settings, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
