"""What it costs to work out a network's channels and to take half of them out: processor seconds and memory.

    python benchmarks/channel_graph.py resnet50 vit_b_16 swin_v2_t maxvit_t llama-4 llama-32
    python benchmarks/channel_graph.py llama-8-2048      # alone, for its memory: the peak is that of the process

`Coupled` (followed, and proven by a trial), then `compact` with it, compared on its examples; Torch-Pruning's graph and
pruning beside it, which proves nothing and need not keep the function. `llama-N` is a Llama of width 512 with N layers,
`llama-N-W` one of width W with a vocabulary of 32,000.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
from typing import Any

import torch
import torch_pruning as tp
from torch import nn

import deephoyer as dh

NAMES = ("resnet50", "vit_b_16", "swin_v2_t", "maxvit_t", "llama-4", "llama-32")


def network(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name.startswith("llama"):
        import transformers

        layers, *wide = map(int, name.split("-")[1:])
        width = wide[0] if wide else 512
        config = transformers.LlamaConfig(
            vocab_size=32000 if wide else 1000,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 128,
        )
        return transformers.LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(0, 1000, (1, 16))}
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=10).eval()
    for parameter in model.parameters():  # a head of zeros, as ViT has it, would hide everything
        if not parameter.any() and parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model, torch.randn(1, 3, 224, 224)


def halve(groups: dh.Coupled) -> None:
    with torch.no_grad():
        for unit in groups.units():
            gone = (torch.arange(unit.count) < unit.count // 2).float()
            for tensor, c in zip(unit.tensors, unit.spread(gone), strict=True):
                tensor.mul_(c.expand(tensor.shape) == 0)


def by_torch_pruning(model: nn.Module, x: Any) -> str:
    start = time.process_time()
    try:
        heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in (10, 1000)]
        tp.pruner.MagnitudePruner(model, x, tp.importance.RandomImportance(), 0.5, ignored_layers=heads).step()
    except Exception as why:
        return f"fails ({type(why).__name__})"
    return f"{time.process_time() - start:.1f} s"


def size(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--alone", action="store_true", help="without Torch-Pruning, which may not terminate")
    chosen = parser.parse_args()
    for name in chosen.names:
        model, x = network(name)
        start = time.process_time()
        groups = dh.Coupled(model, x)
        graph = time.process_time() - start
        halve(groups)
        start = time.process_time()
        small = dh.compact(model, x, groups=groups)
        compact = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / size(model)
        theirs = "" if chosen.alone else f"Torch-Pruning {by_torch_pruning(copy.deepcopy(model), x)}"
        print(
            f"{name:12} {size(model) / 2**20:7.0f} MiB  Coupled {graph:5.1f} s  compact {compact:5.1f} s  "
            f"left {size(small) / size(model):.2f}  peak {peak:4.1f} × its weights  {theirs}",
            flush=True,
        )


if __name__ == "__main__":
    main()
