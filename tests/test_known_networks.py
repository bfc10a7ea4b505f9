"""Networks that people have, by name, from configurations, in float64: halved, compared, saved, loaded, trained on.

A few in every run, all of them in `make test-all`. A host that is not installed skips its
networks by name.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import deephoyer as dh

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from zoo import called, difference, tensors_of, tolerance
from zoo_networks import build

HOSTS = {"tv": "torchvision", "timm": "timm", "hf": "transformers", "diffusers": "diffusers"}
FEW = ["hf llama-gqa", "hf gpt2", "timm test_efficientnet"]
REST = [
    *(
        "hf llama-mha",
        "hf llama-tied",
        "hf mistral",
        "hf qwen2",
        "hf qwen3",
        "hf phi3-fused-qkv",
        "hf bert",
        "hf t5-gated",
    ),
    *("hf vit", "hf swin", "hf convnext", "hf resnet", "tv vit_b_32", "tv swin_t", "tv convnext_tiny"),
    *(
        "tv efficientnet_b0",
        "tv regnet_x_400mf",
        "tv regnet_y_400mf",
        "timm vit_tiny_patch16_224",
        "timm swin_tiny_patch4_window7_224",
    ),
    *("timm convnext_atto", "timm efficientnet_b0", "timm regnetx_002", "timm regnety_002", "diffusers unet2d"),
]
NETWORKS = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]


def by_torch(model, inputs):
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not look into torch's fused layers
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            called(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return counter.get_total_flops() // 2


def executed(model, inputs):
    first = (
        inputs
        if isinstance(inputs, torch.Tensor)
        else next(iter(inputs.values() if isinstance(inputs, dict) else inputs))
    )
    return dh.summary(model, inputs, latency=False).total.macs_executed * len(first)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_halved_exactly_counted_saved_loaded_and_trained_on(name, tmp_path):
    family, name = name.split()
    pytest.importorskip(HOSTS[family])
    model, inputs = build(family, name)
    fresh = copy.deepcopy(model)
    groups = dh.Coupled(model, inputs)
    dh.prune(model, dh.Density(0.5), groups=groups)
    small = dh.compact(model, inputs, groups=groups)
    assert difference(model, small, inputs) < tolerance(model, inputs)  # 1e-9, or float32's where it is used inside
    assert executed(model, inputs) == by_torch(model, inputs)
    assert executed(small, inputs) == by_torch(small, inputs) < by_torch(model, inputs)
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", fresh).eval()
    assert difference(small, again, inputs) == 0
    before = [p.detach().clone() for p in again.parameters()]
    optimizer = torch.optim.SGD(again.train().parameters(), lr=1e-3)
    sum(t.square().mean() for t in tensors_of(called(again, inputs)) if t.requires_grad).backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))
