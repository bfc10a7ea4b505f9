"""The networks of `zoo.txt`, built from configurations, each with example inputs; nothing is downloaded.

Weights are random, and so are the scales, shifts and statistics of norms; nothing is left at zero, so that a wrong
removal shows in the outputs. What is done with the networks is in `zoo.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LIST = Path(__file__).parent / "zoo.txt"
IMAGE, LARGE_IMAGE = 64, 224
DOUBLE_UP_TO = 40_000_000
"""Parameters up to which a network is computed in float64."""

Built = tuple[nn.Module, Any]


class NotBuilt(Exception):
    """A network that could not be built, and why."""


def names() -> dict[str, list[str]]:
    """Families and the names in each, as the list has them."""
    families: dict[str, list[str]] = {}
    for line in LIST.read_text().splitlines():
        family, colon, rest = line.partition(":")
        if colon and not line.startswith("#"):
            families[family] = rest.split()
    return families


def build(family: str, name: str) -> Built:
    """A network in eval mode, with example inputs that it has been run on."""
    torch.manual_seed(0)
    try:
        model, inputs = FAMILIES[family](name)
    except NotBuilt:
        raise
    except Exception as why:
        raise NotBuilt(f"{type(why).__name__}: {why}") from why
    model = wake(model.eval())
    detector = family == "tv-det"  # which boxes are kept, and how masks are laid out, depends on rounding
    if detector or sum(p.numel() for p in model.parameters()) <= DOUBLE_UP_TO:
        try:
            return _readable(model.double(), [_doubled(inputs)])
        except Exception:
            model.float()  # its code creates float32 tensors, which don't fit
    return model, inputs


@torch.no_grad()
def wake(model: nn.Module) -> nn.Module:
    """Gives norms random scales, shifts and statistics, and parameters that are (nearly) all zero random values."""
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.running_mean.normal_(std=0.3)  # type: ignore[operator, union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[operator, union-attr]
    for parameter in model.parameters():
        if not parameter.is_floating_point() or isinstance(parameter, nn.parameter.UninitializedParameter):
            continue
        if parameter.dim() <= 1:
            parameter.add_(0.2 * torch.rand_like(parameter))
        elif parameter.abs().max() < 1e-3:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _doubled(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: _doubled(value) for key, value in inputs.items()}
    return type(inputs)(_doubled(v) for v in inputs) if isinstance(inputs, tuple | list) else inputs


def _readable(model: nn.Module, candidates: list[Any]) -> Built:
    """The model with the first of these inputs that it can read."""
    model.eval()
    for i, inputs in enumerate(candidates):
        try:
            with torch.no_grad():
                if isinstance(inputs, dict):
                    model(**inputs)
                else:
                    model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        except Exception:
            if i == len(candidates) - 1:
                raise
        else:
            return model, inputs
    raise AssertionError("no candidates")


def _image(size: int, channels: int = 3) -> Tensor:
    return torch.randn(1, channels, size, size)


# torchvision


def _torchvision(name: str) -> Built:
    from torchvision.models import get_model

    settings: dict[str, Any] = {"num_classes": 10}
    if name in ("googlenet", "inception_v3"):
        settings |= {"init_weights": False}
    return _readable(get_model(name, weights=None, **settings), [_image(IMAGE), _image(LARGE_IMAGE)])


def _segmentation(name: str) -> Built:
    from torchvision.models import get_model

    return get_model(name, weights=None, weights_backbone=None, num_classes=10), _image(IMAGE)


def _video(name: str) -> Built:
    from torchvision.models import get_model

    model = get_model(name, weights=None, num_classes=10)
    return _readable(model, [torch.randn(1, 3, 16, s, s) for s in (IMAGE, LARGE_IMAGE)])


def _detector(name: str) -> nn.Module:
    from torchvision.models import get_model

    return get_model(name, weights=None, weights_backbone=None, num_classes=10)


def _detection(name: str) -> Built:
    model: Any = _detector(name)
    for part in (model, getattr(model, "roi_heads", None)):
        if hasattr(part, "score_thresh"):
            part.score_thresh = 0.0  # or random weights find nothing that could be compared
    if model.transform.fixed_size is None:
        model.transform.min_size = (LARGE_IMAGE,)  # instead of 800, which takes minutes
    return model, ([torch.randn(3, LARGE_IMAGE, LARGE_IMAGE)],)


def _backbone(name: str) -> Built:
    return _readable(_detector(name).backbone, [_image(IMAGE), _image(LARGE_IMAGE), _image(300)])  # type: ignore[arg-type]


def _flow(name: str) -> Built:
    from torchvision.models import get_model

    return get_model(name, weights=None), (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128))


def _timm(name: str) -> Built:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10)
    size = model.default_cfg["input_size"][-1]  # type: ignore[index, union-attr]
    return _readable(model, [_image(IMAGE), _image(LARGE_IMAGE), _image(size)])


# transformers


def _ids(vocabulary: int = 100, length: int = 12) -> Tensor:
    return torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


def _hf(name: str) -> Built:
    import transformers as t

    encoder = {
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    }
    text = {"input_ids": _ids()}
    decoder = {**encoder, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    llama = t.LlamaForCausalLM
    speech = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "conv_dim": (32, 32),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "vocab_size": 32,
    }

    def t5(**more: Any) -> Any:
        return t.T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, **more)

    def llama_of(**more: Any) -> Built:
        return llama(t.LlamaConfig(**{**decoder, **more})), text

    made: dict[str, Callable[[], Built]] = {
        "bert": lambda: (t.BertForSequenceClassification(t.BertConfig(**encoder)), text),
        "bert-mlm-tied": lambda: (t.BertForMaskedLM(t.BertConfig(**encoder, tie_word_embeddings=True)), text),
        "bert-eager-attn": lambda: (
            t.BertForSequenceClassification(t.BertConfig(**encoder, attn_implementation="eager")),
            text,
        ),
        "deberta-v2": lambda: (
            t.DebertaV2ForSequenceClassification(
                t.DebertaV2Config(**encoder, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=16)
            ),
            text,
        ),
        "mobilebert": lambda: (
            t.MobileBertForSequenceClassification(
                t.MobileBertConfig(
                    **encoder,
                    embedding_size=32,
                    intra_bottleneck_size=32,
                    true_hidden_size=32,
                    num_feedforward_networks=2,
                )
            ),
            text,
        ),
        "gpt2": lambda: (
            t.GPT2LMHeadModel(t.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=64)),
            text,
        ),
        "llama-mha": lambda: llama_of(num_key_value_heads=4),
        "llama-gqa": lambda: llama_of(),
        "llama-gqa-nocache": lambda: llama_of(use_cache=False),
        "llama-mha-nocache": lambda: llama_of(num_key_value_heads=4, use_cache=False),
        "llama-mha-nocache-eager": lambda: llama_of(
            num_key_value_heads=4, use_cache=False, attn_implementation="eager"
        ),
        "llama-tied": lambda: llama_of(tie_word_embeddings=True),
        "mistral": lambda: (t.MistralForCausalLM(t.MistralConfig(**decoder)), text),
        "qwen2": lambda: (t.Qwen2ForCausalLM(t.Qwen2Config(**decoder)), text),
        "qwen3": lambda: (t.Qwen3ForCausalLM(t.Qwen3Config(**decoder, head_dim=16)), text),
        "phi3-fused-qkv": lambda: (t.Phi3ForCausalLM(t.Phi3Config(**decoder)), text),
        "mixtral-moe": lambda: (
            t.MixtralForCausalLM(t.MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2)),
            text,
        ),
        "t5": lambda: (t.T5ForConditionalGeneration(t5()), {**text, "decoder_input_ids": _ids(length=6)}),
        "t5-encoder": lambda: (t.T5EncoderModel(t5()), text),
        "t5-gated": lambda: (
            t.T5ForConditionalGeneration(t5(feed_forward_proj="gated-gelu")),
            {**text, "decoder_input_ids": _ids(length=6)},
        ),
        "vit": lambda: (
            t.ViTForImageClassification(
                t.ViTConfig(
                    hidden_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    intermediate_size=128,
                    image_size=32,
                    patch_size=8,
                )
            ),
            _image(32),
        ),
        "swin": lambda: (
            t.SwinForImageClassification(
                t.SwinConfig(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
            ),
            _image(32),
        ),
        "segformer": lambda: (
            t.SegformerForSemanticSegmentation(
                t.SegformerConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 64], decoder_hidden_size=64)
            ),
            _image(IMAGE),
        ),
        "convnext": lambda: (
            t.ConvNextForImageClassification(t.ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1])),
            _image(IMAGE),
        ),
        "resnet": lambda: (
            t.ResNetForImageClassification(
                t.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 64, 128], depths=[1, 1, 1, 1])
            ),
            _image(IMAGE),
        ),
        "mobilevit": lambda: (
            t.MobileViTForImageClassification(
                t.MobileViTConfig(
                    hidden_sizes=[32, 48, 64],
                    neck_hidden_sizes=[16, 16, 32, 32, 48, 48, 64],
                    num_attention_heads=4,
                    image_size=IMAGE,
                )
            ),
            _image(IMAGE),
        ),
        "wav2vec2": lambda: (t.Wav2Vec2ForCTC(t.Wav2Vec2Config(**speech)), torch.randn(1, 400)),
        "hubert": lambda: (t.HubertForCTC(t.HubertConfig(**speech)), torch.randn(1, 400)),
        "rwkv": lambda: (
            t.RwkvForCausalLM(t.RwkvConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, context_length=32)),
            text,
        ),
    }
    return made[name]()


def _diffusers(name: str) -> Built:
    import diffusers as d

    step = torch.tensor([3])
    blocks = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    if name == "unet2d":
        kinds = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        model = d.UNet2DModel(in_channels=3, out_channels=3, attention_head_dim=8, **blocks, **kinds)
        return model, (_image(16), step)
    if name == "unet2d-condition":
        kinds = {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        }
        model = d.UNet2DConditionModel(cross_attention_dim=32, attention_head_dim=8, **blocks, **kinds)
        return model, (_image(16, 4), step, torch.randn(1, 7, 32))
    if name == "vae":
        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        blocks["sample_size"] = 32
        return d.AutoencoderKL(latent_channels=4, **blocks, **kinds), _image(32)
    if name == "dit":
        model = d.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8
        )
        return model, {"hidden_states": _image(8, 4), "timestep": step, "class_labels": torch.tensor([1])}
    raise NotBuilt(f"{name} is not known here")


def _smp(name: str) -> Built:
    import segmentation_models_pytorch as smp

    decoder, _, encoder = name.partition("-")
    model = getattr(smp, decoder)(encoder_name=encoder, encoder_weights=None, classes=3)
    return _readable(model, [_image(IMAGE), _image(LARGE_IMAGE)])


def _yolo(name: str) -> Built:
    raise NotBuilt("its library is under the AGPL, which this project does not install: tried by hand")


def _pyg(name: str) -> Built:
    from torch_geometric.nn import models

    edges = torch.randint(0, 20, (2, 60), generator=torch.Generator().manual_seed(0))
    return getattr(models, name)(16, 64, num_layers=3, out_channels=4), (torch.randn(20, 16), edges)


def _own(name: str) -> Built:
    from zoo_own import NETWORKS

    return NETWORKS[name]()


FAMILIES: dict[str, Callable[[str], Built]] = {
    "tv": _torchvision,
    "tv-seg": _segmentation,
    "tv-video": _video,
    "tv-det": _detection,
    "tv-det-backbone": _backbone,
    "tv-flow": _flow,
    "timm": _timm,
    "hf": _hf,
    "diffusers": _diffusers,
    "smp": _smp,
    "yolo": _yolo,
    "pyg": _pyg,
    "own": _own,
}
