"""Networks of the libraries that people use, by name, from small configurations in float64.

Half of what may go is taken out; outputs are compared, executed operations counted by torch too, the result saved,
loaded, trained on. A library that isn't there skips its networks by name; one of each kind is in `make test`, all are
in `make test-all`, where they are exported as well.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import deephoyer as dh
from deephoyer.inference import batch_of, call
from deephoyer.structure import compact_report
from deephoyer.structure.equality import error
from deephoyer.structure.inputs import outputs_in

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from zoo_networks import build

Made = tuple[nn.Module, Any]
IDS = torch.arange(18).view(2, 9) * 5 % 97


def pixels(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def hf(kind: str, config: str, **settings: Any) -> Made:
    library = pytest.importorskip("transformers")
    small = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = getattr(library, kind)(getattr(library, config)(**{**small, **wide, **settings}))
    return made, {"input_ids": IDS}


def gpt2() -> Made:
    library = pytest.importorskip("transformers")
    config = library.GPT2Config(
        vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return library.GPT2LMHeadModel(config), {"input_ids": IDS}


def t5() -> Made:
    library = pytest.importorskip("transformers")
    config = library.T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    return library.T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS}


def zoo(family: str, name: str) -> Callable[[], Made]:
    """One of the networks of `benchmarks/zoo.txt`."""

    def make() -> Made:
        pytest.importorskip({"tv": "torchvision", "hf": "transformers"}.get(family, family))
        return build(family, name)

    return make


def tv_vit() -> Made:
    library = pytest.importorskip("torchvision")
    vit = library.models.VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48)
    nn.init.normal_(vit.heads.head.weight, std=0.1)
    return vit, pixels()


def tv_swin() -> Made:
    library = pytest.importorskip("torchvision")
    return library.models.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=10), pixels()


def timm_net(name: str, size: int = 64, **settings: Any) -> Made:
    library = pytest.importorskip("timm")
    return library.create_model(name, num_classes=10, **settings), pixels(size)


def unet() -> Made:
    library = pytest.importorskip("diffusers")
    made = library.UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return made, {"sample": pixels(16), "timestep": torch.tensor([1, 5])}


GQA = {"num_key_value_heads": 2}
# Name: how it is made, the share of parameters that may be left, and the error that may be: Hugging Face's norms by
# the mean square compute in float32 whatever they are given.
NETWORKS: dict[str, tuple[Callable[[], Made], float, float]] = {
    "llama": (lambda: hf("LlamaForCausalLM", "LlamaConfig", **GQA), 0.35, 1e-6),
    "bert": (lambda: hf("BertModel", "BertConfig"), 0.8, 1e-9),
    "gpt2": (gpt2, 0.6, 1e-9),
    "t5": (t5, 0.6, 1e-9),
    "vit, torchvision": (tv_vit, 0.9, 1e-9),
    "vit, timm": (lambda: timm_net("test_vit", 160), 0.7, 1e-9),
    "swin, torchvision": (tv_swin, 0.7, 1e-9),
    "efficientnet, timm": (lambda: timm_net("test_efficientnet"), 0.4, 1e-9),
    "convnext, timm": (lambda: timm_net("test_convnext"), 0.7, 1e-9),
    "unet, diffusers": (unet, 0.5, 1e-9),
}
SLOW: dict[str, tuple[Callable[[], Made], float, float]] = {
    "mistral": (lambda: hf("MistralForCausalLM", "MistralConfig", **GQA), 0.35, 1e-6),
    "qwen2": (lambda: hf("Qwen2ForCausalLM", "Qwen2Config", **GQA), 0.35, 1e-6),
    "qwen3": (zoo("hf", "qwen3"), 0.35, 1e-6),
    "phi3": (lambda: hf("Phi3ForCausalLM", "Phi3Config", **GQA), 0.35, 1e-6),
    "llama, tied": (lambda: hf("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True), 0.35, 1e-6),
    "llama, written out": (lambda: hf("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager"), 0.35, 1e-6),
    "t5, gated": (zoo("hf", "t5-gated"), 0.6, 1e-9),
    "vit, hugging face": (zoo("hf", "vit"), 0.8, 1e-9),
    "swin, hugging face": (zoo("hf", "swin"), 0.7, 1e-9),
    "swin, timm": (zoo("timm", "swin_tiny_patch4_window7_224"), 0.7, 1e-9),
    "convnext, hugging face": (zoo("hf", "convnext"), 0.7, 1e-9),
    "convnext, torchvision": (zoo("tv", "convnext_tiny"), 0.7, 1e-9),
    "convnext v2, timm": (zoo("timm", "convnextv2_atto"), 0.7, 1e-9),
    "efficientnet, torchvision": (zoo("tv", "efficientnet_b0"), 0.4, 1e-9),
    "efficientnet b0, timm": (zoo("timm", "efficientnet_b0"), 0.4, 1e-9),
    "regnet, torchvision": (zoo("tv", "regnet_y_400mf"), 0.4, 1e-9),
    "regnet, timm": (zoo("timm", "regnety_002"), 0.4, 1e-9),
    "resnet, timm": (zoo("timm", "seresnet50"), 0.4, 1e-9),
}
EVERY = [*NETWORKS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
# torch.export fails on T5, dense or not.
NO_EXPORT = {"t5", "t5, gated"}


def made(name: str) -> tuple[nn.Module, Any, float, float]:
    torch.manual_seed(0)
    make, left, rounding = {**NETWORKS, **SLOW}[name]
    model, inputs = make()
    return model.double().eval(), inputs, left, rounding


def halve(model: nn.Module, groups: dh.Coupled) -> None:
    """Zeroes the second half of each set of groups."""
    with torch.no_grad():
        for unit in groups.units():
            gone = torch.arange(unit.count) < unit.count // 2
            for tensor, c in zip(unit.tensors, unit.spread(gone.double()), strict=True):
                tensor.mul_(c.expand(tensor.shape) == 0)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def gap(a: nn.Module, b: nn.Module, inputs: Any) -> float:
    with torch.no_grad():
        pairs = zip(outputs_in(call(a, inputs)), outputs_in(call(b, inputs)), strict=True)
        return max(error(x, y) for x, y in pairs)


def by_torch(model: nn.Module, inputs: Any) -> int:
    """Multiply-accumulates by torch's own counter, which does not look into torch's fused layers."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops()) // 2


def executed(model: nn.Module, inputs: Any) -> int:
    return dh.summary(model, inputs, latency=False).total.macs_executed * batch_of(inputs)


def halved(name: str) -> tuple[nn.Module, nn.Module, nn.Module, Any]:
    """A network as it was, with half of its groups zero, and the smaller one."""
    model, inputs, left, rounding = made(name)
    fresh = copy.deepcopy(model)
    groups = dh.Coupled(model, inputs)
    halve(model, groups)
    small = dh.compact(model, inputs, groups=groups)
    assert count(small) < left * count(model)
    assert gap(model, small, inputs) < rounding
    return fresh, model, small, inputs


@pytest.mark.parametrize("name", EVERY)
def test_half_goes_the_outputs_stay_and_the_result_is_counted_saved_loaded_and_trained(name, tmp_path):
    fresh, model, small, inputs = halved(name)
    assert executed(model, inputs) == by_torch(model, inputs)
    assert executed(small, inputs) == by_torch(small, inputs) < by_torch(model, inputs)
    dh.save(small, tmp_path / "small.safetensors")
    loaded = dh.load(tmp_path / "small.safetensors", model=fresh).eval()
    assert gap(small, loaded, inputs) < 1e-12
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1e-3)
    sum(t.square().mean() for t in outputs_in(call(loaded, inputs)) if t.is_floating_point()).backward()
    optimizer.step()
    assert gap(small, loaded, inputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*NETWORKS, *SLOW) if name not in NO_EXPORT])
def test_what_is_left_is_exported(name, tmp_path):
    *_, small, inputs = halved(name)
    if hasattr(small, "config") and hasattr(small.config, "use_cache"):
        small.config.use_cache = False  # what it remembers is no output that ONNX knows
    single = pytree.tree_map(lambda t: t.float() if t.is_floating_point() else t, inputs)
    dh.export(small.float(), single, tmp_path / "small.onnx")


@pytest.mark.parametrize(("kind", "sizes"), [(dh.Heads, [4, 4]), (dh.Neurons, [96, 96])])
def test_heads_and_neurons_are_groups_for_any_penalty(kind, sizes):
    model, inputs, *_ = made("bert")
    groups = kind(model, inputs)
    assert [unit.count for unit in groups.units()] == sizes
    regularizer = dh.Regularizer(model, penalty="l1", groups=groups, strength=1.0)
    regularizer.add_grad_()
    assert model.encoder.layer[0].output.dense.weight.grad is not None or kind is dh.Heads


def test_half_of_the_heads_alone_leave_the_neurons_whole():
    model, inputs, *_ = made("bert")
    heads = dh.Heads(model, inputs)
    halve(model, heads)
    small = dh.compact(model, inputs, groups=heads)
    layer = small.encoder.layer[0]
    assert layer.attention.self.query.out_features == 32 and layer.intermediate.dense.out_features == 96
    assert gap(model, small, inputs) < 1e-12


def test_a_tokenizers_output_with_its_mask_is_an_example():
    model, inputs, *_ = made("bert")
    padded = {**inputs, "attention_mask": torch.ones_like(IDS)}
    groups = dh.Coupled(model, padded)
    halve(model, groups)
    small = dh.compact(model, padded, groups=groups)
    padded["attention_mask"][:, 5:] = 0
    assert gap(model, small, padded) < 1e-12


def test_a_transformers_width_goes_only_where_another_function_is_allowed():
    model, inputs, *_ = made("vit, torchvision")
    with pytest.raises(dh.UserError, match="exact"):
        dh.compact(model, inputs, groups=dh.Coupled(model, inputs), exact=False)
    groups = dh.Coupled(model, inputs, exact=False)
    halve(model, groups)
    small = dh.compact(model, inputs, groups=groups, exact=False)
    report = compact_report(small)
    assert count(small) < 0.5 * count(model) and not report.exact and 0 < report.error < 1
    assert small(inputs).shape == model(inputs).shape


def test_torchs_attention_with_fewer_heads_takes_masks_and_gives_weights():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return self.attention(x, x, x, key_padding_mask=hidden, attn_mask=causal)[0]

    model, x = Net().double().eval(), torch.randn(2, 5, 16).double()
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    groups = dh.Heads(model, (x, hidden))
    halve(model, groups)
    small = dh.compact(model, (x, hidden), groups=groups)
    assert small.attention.num_heads == 2 and gap(model, small, (x, hidden)) < 1e-12
