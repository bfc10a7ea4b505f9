"""In and out of other libraries: Hugging Face folders, versioned state, meta models, adapters, few-bit optimizers."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import deephoyer as dh
from deephoyer.weights import find_weights


def llama(**more):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)
    return transformers.LlamaForCausalLM(config).eval()


def ids():
    return {"input_ids": torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(1))}


def halved(model, inputs):
    groups = dh.Coupled(model, inputs)
    dh.prune(model, dh.Density(0.5), groups=groups)
    return dh.compact(model, inputs, groups=groups)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def compacted(request):
    model = llama(tie_word_embeddings=request.param)
    return model, halved(model, ids())


def test_a_compacted_hugging_face_model_comes_back_from_its_own_folder(compacted, tmp_path):
    _, small = compacted
    small.save_pretrained(tmp_path)
    again = dh.from_pretrained(tmp_path)
    assert type(again) is type(small) and not again.training
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in small.parameters())
    with torch.no_grad():
        assert torch.equal(again(**ids()).logits, small(**ids()).logits)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(dh.from_pretrained(tmp_path / "again").lm_head.weight, small.lm_head.weight)


def hugging_face(kind, **settings):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, kind)
    torch.manual_seed(0)
    return model(model.config_class(vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)).eval()


WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = WIDE | {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def zero_the_first(unit, count):
    gone = torch.arange(unit.count) < count
    for tensor, c in zip(unit.tensors, unit.spread(gone.float()), strict=True):
        tensor.detach().mul_(c.expand(tensor.shape) == 0)


@pytest.mark.parametrize(
    "kind, settings, grouping, said",
    [
        ("Qwen2ForCausalLM", GQA, dh.Coupled, {"num_key_value_heads": 1, "hidden_size": 16}),
        ("Phi3ForCausalLM", GQA, dh.Heads, {"num_attention_heads": 2}),
        ("T5ForConditionalGeneration", T5, dh.Coupled, {"num_heads": 2, "d_ff": 24}),
        ("BertModel", WIDE, dh.Neurons, {"intermediate_size": 24}),
        ("GPT2LMHeadModel", GPT2, dh.Neurons, {"n_inner": 64}),
    ],
)
def test_the_plain_class_loads_what_lost_the_same_in_all_layers(kind, settings, grouping, said, tmp_path):
    model = hugging_face(kind, **settings)
    inputs = ids() | ({"decoder_input_ids": ids()["input_ids"]} if kind.startswith("T5") else {})
    groups = grouping(model, inputs)
    for unit in groups.units():
        zero_the_first(unit, unit.count // 2)
    small = dh.compact(model, inputs, groups=groups)
    assert {key: getattr(small.config, key) for key in said} == said and model.config.vocab_size == 40
    assert all(getattr(model.config, key) != value for key, value in said.items())
    small.save_pretrained(tmp_path)
    for loaded in (type(model).from_pretrained(tmp_path).eval(), dh.from_pretrained(tmp_path)):
        with torch.no_grad():
            assert torch.equal(loaded(**inputs)[0], small(**inputs)[0])


def test_what_lost_more_in_one_layer_is_refused_by_the_plain_class_and_loaded_by_ours(tmp_path):
    model = hugging_face("BertModel", **WIDE)
    groups = dh.Neurons(model, ids())
    zero_the_first(groups.units()[0], 24)
    small = dh.compact(model, ids(), groups=groups)
    assert small.config.intermediate_size == 48
    small.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)
    assert torch.equal(dh.from_pretrained(tmp_path)(**ids())[0], small(**ids())[0])


@pytest.mark.parametrize(
    "kind, settings",
    [("GPTNeoXForCausalLM", WIDE), ("BartForConditionalGeneration", BART)],
    ids=["tensors that its library renames", "embeddings of its own class, tied three times"],
)
def test_a_compacted_model_comes_back_where_files_and_model_name_tensors_differently(kind, settings, tmp_path):
    small = halved(hugging_face(kind, **settings), ids())
    small.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(dh.from_pretrained(tmp_path)(**ids()).logits, small(**ids()).logits)


def test_a_compacted_hugging_face_model_inside_of_somebodys_own_comes_back_from_its_own_folder(tmp_path):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = hugging_face("BertModel", **WIDE), nn.Linear(32, 3)

        def forward(self, input_ids):
            return self.head(self.backbone(input_ids).pooler_output)

    small = halved(Classifier().eval(), ids())
    small.backbone.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(dh.from_pretrained(tmp_path)(**ids())[0], small.backbone(**ids())[0])


def test_a_model_with_torchs_attention_in_it_comes_back(tmp_path):
    """SigLIP pools with `nn.MultiheadAttention`, which its library initialises while it loads."""
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    model = hugging_face("SiglipVisionModel", **WIDE, image_size=16, patch_size=8)
    small = halved(model, pixels)
    assert small.head.attention.num_heads < model.head.attention.num_heads
    small.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(dh.from_pretrained(tmp_path)(**pixels).pooler_output, small(**pixels).pooler_output)


def test_a_compacted_hugging_face_model_with_joints_comes_back(tmp_path):
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:5] = 0
    small = dh.compact(model, ids(), joints="gather")
    small.save_pretrained(tmp_path)
    again = dh.from_pretrained(tmp_path)
    assert again.model.layers[0].mlp.down_proj.place.tolist() == list(range(5, 32))
    with torch.no_grad():
        assert torch.equal(again(**ids()).logits, small(**ids()).logits)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "10kB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("joints", ["none", "gather"])
def test_the_plain_class_refuses_a_folder_in_which_a_layer_is_gone_or_has_a_joint(joints, shards, tmp_path):
    """It would draw random weights for what it finds nothing of, and only warn."""
    model = llama()
    with torch.no_grad():
        if joints == "none":
            model.model.layers[0].mlp.down_proj.weight.zero_()
        else:
            model.model.layers[0].mlp.up_proj.weight[:, :4] = 0
    small = dh.compact(model, ids(), joints=joints)
    report = small.compact_report
    assert report.dropped if joints == "none" else report.joints
    small.save_pretrained(tmp_path, **shards)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)
    again = dh.load(str(_saved(small, tmp_path)), llama())
    with torch.no_grad():
        for loaded in (dh.from_pretrained(tmp_path), again):
            assert torch.equal(loaded(**ids()).logits, small(**ids()).logits)


def _saved(model, folder):
    dh.save(model, folder / "small.st")
    return folder / "small.st"


@pytest.mark.parametrize(
    "kind, settings",
    [("LlamaForCausalLM", WIDE), ("T5ForConditionalGeneration", T5), ("BartForConditionalGeneration", BART)],
)
@pytest.mark.parametrize("rows", [56, 33])
def test_a_compacted_model_comes_back_after_its_vocabulary_was_resized(kind, settings, rows, tmp_path):
    inputs = ids() | ({} if kind.startswith("Llama") else {"decoder_input_ids": ids()["input_ids"]})
    small = halved(hugging_face(kind, **settings), inputs)
    small.resize_token_embeddings(rows)
    small.save_pretrained(tmp_path)
    again, inputs = dh.from_pretrained(tmp_path), {name: tokens.clamp(max=32) for name, tokens in inputs.items()}
    with torch.no_grad():
        assert again.config.vocab_size == rows and torch.equal(again(**inputs).logits, small(**inputs).logits)
    again.save_pretrained(tmp_path / "again")
    assert sum(p.numel() for p in dh.from_pretrained(tmp_path / "again").parameters()) == small.num_parameters()


def test_a_part_of_a_compacted_model_comes_back_by_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = halved(llama(), ids())
    small.model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(dh.from_pretrained(tmp_path)(**ids())[0], small.model(**ids())[0])
    both = ids() | {"decoder_input_ids": ids()["input_ids"]}
    small = halved(hugging_face("T5ForConditionalGeneration", **T5), both)
    small.encoder.save_pretrained(tmp_path)  # which has a configuration of its own
    encoder = transformers.models.t5.modeling_t5.T5Stack
    with torch.no_grad():
        again = dh.from_pretrained(tmp_path, model_class=encoder)
        assert torch.equal(again(**ids())[0], small.encoder(**ids())[0])


def test_a_file_that_lacks_a_tensor_or_has_one_too_many_is_refused(tmp_path):
    small = halved(llama(), ids())
    small.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    norm = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(dh.UserError, match=r"lack 'model\.norm\.weight'"):
        dh.from_pretrained(tmp_path)
    save_file(state | {"model.norm.weight": norm, "other": norm + 0}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(dh.UserError, match="other"):
        dh.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(dh.UserError, match="can't be loaded"):
        dh.from_pretrained(tmp_path)


def test_generation_is_token_identical_after_compaction(compacted):
    model, small = compacted
    tokens = [m.generate(**ids(), max_new_tokens=12, do_sample=False) for m in (model, small)]
    assert torch.equal(*tokens)


def test_a_folder_that_does_not_fit_is_refused_in_a_line(tmp_path):
    with pytest.raises(dh.UserError, match="not a path"):
        dh.from_pretrained(None)
    with pytest.raises(dh.UserError, match=r"no config\.json"):
        dh.from_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    with pytest.raises(dh.UserError, match="no shape of a compacted model"):
        dh.from_pretrained(tmp_path)
    small = halved(llama(), ids())
    small.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(dh.UserError, match="no safetensors"):
        dh.from_pretrained(tmp_path)


def test_only_the_matrices_of_an_adapter_are_meant_and_the_frozen_ones_are_named():
    peft = pytest.importorskip("peft")
    pytest.importorskip(
        "torchao", minversion="0.16", reason="peft refuses an older torchao, all that goes with torch 2.9"
    )
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    reg = dh.Regularizer(model)
    names = [term.unit.name for term in reg.terms]
    assert len(names) == 8 and all("lora_" in name for name in names)
    assert reg.left_out["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] == "frozen"
    assert "lora_A" in repr(reg) and "frozen" in repr(reg)


class Versioned(nn.Module):
    """Says that the meaning of its state has changed, and what it is told when a state is loaded."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.told = None

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        self.told = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_module_learns_which_version_of_its_state_the_file_has(tmp_path):
    dh.save(Versioned(), tmp_path / "old.safetensors")
    assert dh.load(tmp_path / "old.safetensors", Versioned()).told == 3
    newer = Versioned()
    newer._version = 4
    assert dh.load(tmp_path / "old.safetensors", newer).told == 3


def test_mnasnet_is_saved_and_loaded(tmp_path):
    models = pytest.importorskip("torchvision.models")
    net = models.mnasnet0_5(num_classes=4).eval()
    dh.save(net, tmp_path / "net.safetensors")
    again = dh.load(tmp_path / "net.safetensors", models.mnasnet0_5(num_classes=4)).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(net(x), again(x))


def test_a_meta_model_is_filled_and_its_tied_weights_stay_tied(tmp_path):
    def tied():
        net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
        net[3].weight = net[0].weight
        return net

    net = tied()
    dh.save(net, tmp_path / "net.safetensors")
    with torch.device("meta"):
        empty = tied()
    again = dh.load(tmp_path / "net.safetensors", empty)
    assert not any(t.is_meta for t in again.state_dict().values()) and again[3].weight is again[0].weight
    for name, tensor in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    empty.register_buffer("angles", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(dh.UserError, match="meta device, and angles is in no file"):
        dh.load(tmp_path / "net.safetensors", empty)


@pytest.mark.parametrize("bits", ["AdamW8bit", "AdamW4bit"])
def test_zeros_hold_under_optimizers_with_states_of_a_few_bits(bits):
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    net = nn.Linear(128, 64)
    masks = dh.prune(net, dh.Density(0.3))
    optimizer = getattr(optim, bits)(net.parameters(), lr=0.01)
    masks.hold(optimizer)
    dh.Regularizer(net).attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
    assert (net.weight[~masks["weight"]] == 0).all() and (net.weight[masks["weight"]] != 0).any()


def test_an_int8_network_is_counted_in_bytes_and_not_saved():
    pytest.importorskip(
        "torchao", minversion="0.16", reason="older int8 tensors, as with torch 2.9, can't be compared with 0"
    )
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    dense = dh.summary(net, torch.randn(2, 64), latency=False).total
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    small = dh.summary(net, torch.randn(2, 64), latency=False).total
    assert small.macs_executed == dense.macs_executed and small.bytes_dense < 0.4 * dense.bytes_dense
    with pytest.raises(dh.UserError, match="before it is quantized"):
        dh.save(net, "never.safetensors")


@pytest.mark.filterwarnings("ignore")  # deprecated, but much used
def test_a_network_whose_weights_torch_ao_has_packed_is_not_counted():
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    packed = torch.ao.quantization.quantize_dynamic(network, {nn.Linear})
    with pytest.raises(dh.UserError, match="before it is quantized"):
        dh.summary(packed, torch.randn(2, 8), latency=False)


def test_one_optimizer_for_each_parameter_is_held_and_another_models_is_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    masks = dh.prune(net, dh.Density(0.5))
    optimizers = [torch.optim.SGD([p], lr=0.1, weight_decay=0.1) for p in net.parameters()]
    for optimizer in optimizers:
        masks.hold(optimizer)
    net(torch.randn(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all((w.tensor[~masks[w.name]] == 0).all() for w in find_weights(net))
    with pytest.raises(dh.UserError, match="another model's"):
        masks.hold(torch.optim.SGD(copy.deepcopy(net).parameters(), lr=0.1))
