"""Which parameters are found in a model, under which names, whatever the model is wrapped in."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import deephoyer as dh
from deephoyer.weights import find_weights

X = torch.randn(2, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 3, groups=2)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2).unflatten(2, (5, 5))
        return self.head(self.up(self.norm(self.conv(x)).relu()).mean((2, 3)))


def names(*args, **kwargs):
    return [w.name for w in find_weights(*args, **kwargs)]


def test_linear_and_convolution_weights_are_found_by_default():
    assert names(Net()) == ["conv.weight", "up.weight", "head.weight"]


def test_patterns_choose_and_a_mark_takes_out():
    assert names(Net(), "conv*") == ["conv.weight", "conv.bias"]
    assert names(Net(), ["*", "!*bias", "!norm*"]) == ["embed.weight", "conv.weight", "up.weight", "head.weight"]
    assert names(Net(), (p for p in ("head*", "!head.bias"))) == ["head.weight"]


def test_patterns_that_only_take_out_take_out_of_the_default():
    assert names(Net(), "!head*") == ["conv.weight", "up.weight"]


def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is():
    with pytest.raises(dh.UserError, match=r"no parameter matches 'fc\*'.*embed.weight, conv.weight"):
        find_weights(Net(), ["conv*", "fc*"])


def test_frozen_parameters_are_left_alone_unless_asked_for():
    net = Net()
    net.conv.requires_grad_(False)
    assert names(net) == ["up.weight", "head.weight"]
    assert names(net, frozen=True) == ["conv.weight", "up.weight", "head.weight"]
    with pytest.raises(dh.UserError, match=r"parameters: 'conv\*' leaves no trainable"):
        find_weights(net, "conv*")
    with pytest.raises(dh.UserError, match="no trainable linear, convolution or recurrent"):
        find_weights(net.requires_grad_(False))


def test_tied_parameters_are_found_once():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(4, 5))
    net[1].weight = net[2].weight = net[0].weight
    assert names(net) == ["1.weight"]
    assert names(net, "*weight") == ["0.weight"]


@pytest.mark.parametrize("select", ["second.weight", "raw", "*weight"])
def test_a_layer_known_by_another_name_keeps_its_dimensions(select):
    net = nn.Module()
    net.first = net.second = nn.ConvTranspose2d(4, 6, 3, groups=2)
    net.raw = net.first.weight
    (weight,) = find_weights(net, select)
    assert (weight.out_dim, weight.in_dim, weight.groups) == (1, 0, 2)


def test_empty_parameters_are_passed_over():
    with pytest.warns(UserWarning, match="zero-element"):
        net = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2))
    assert names(net) == ["1.weight"]


def test_a_lazy_layer_has_to_see_a_batch_first():
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(dh.UserError, match=r"0\.weight has no shape yet"):
        dh.Regularizer(net)
    net(torch.ones(1, 7))
    assert names(net) == ["0.weight", "1.weight"]


def old_prune(layer):
    return prune.l1_unstructured(layer, "weight", amount=1)


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm, old_prune],
)
def test_a_weight_computed_from_others_is_not_left_out_in_silence(wrap):
    net = nn.Sequential(wrap(nn.Linear(3, 3)), nn.Linear(3, 2))
    assert names(net) == ["1.weight"]
    told = {name for name, kind in dh.Regularizer(net).left_out.items() if kind == "what a weight is computed from"}
    assert told and all(name.startswith("0.") for name in told)
    with pytest.raises(dh.UserError, match=r"0\.weight is computed"):
        find_weights(net[:1])


def places(model):
    return {w.name: (w.out_dim, w.in_dim) for w in find_weights(model)}


def test_attention_and_recurrent_layers_are_found_by_what_they_do():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    attention = ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]
    assert list(places(layer)) == [*attention, "linear1.weight", "linear2.weight"]
    assert list(places(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))) == [
        *("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
    ]
    assert list(places(nn.LSTM(4, 6, proj_size=3))) == ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"]
    assert list(places(nn.GRUCell(4, 6))) == ["weight_ih", "weight_hh"]


class Transposed(nn.Module):
    """A linear layer that keeps its matrix the other way round, as Hugging Face's Conv1D does."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))

    def forward(self, x):
        return x @ self.weight


def test_groups_of_a_transposed_matrix_are_those_of_the_linear_layer_it_is():
    mine, plain = Transposed(5, 3), nn.Linear(3, 5)
    with torch.no_grad():
        plain.weight.copy_(mine.weight.T)
    for groups in ("filters", "channels"):
        a, b = dh.Regularizer(mine, groups=groups), dh.Regularizer(plain, groups=groups)
        torch.testing.assert_close(a.loss(), b.loss())
        a.add_grad_(), b.add_grad_()
        torch.testing.assert_close(mine.weight.grad.T, plain.weight.grad)
        mine.weight.grad = plain.weight.grad = None


def test_gpt2_is_found_with_its_transposed_matrices():
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    reg = dh.Regularizer(model, groups="filters")
    block = [f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert [unit.name for unit in (term.unit for term in reg.terms)] == [*block, "lm_head.weight"]
    assert [len(term.magnitudes()) for term in reg.terms] == [24, 8, 32, 8, 11]
    assert reg.left_out["transformer.wpe.weight"] == "embedding"


class Loose(nn.Module):
    """No layers: matrices that the forward multiplies by itself, either way round."""

    def __init__(self):
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(8, 32) / 3), nn.Parameter(torch.zeros(32))
        self.second = nn.Parameter(torch.randn(4, 32) / 3)
        self.norm = nn.LayerNorm((2, 2))

    def forward(self, x):
        return self.norm(F.linear((x @ self.first + self.bias).relu(), self.second).unflatten(-1, (2, 2)))


def test_without_any_layer_the_matrices_themselves_are_the_weights():
    model = Loose()
    assert names(model) == ["first", "second"] == names(model, ["!bias"])
    reg = dh.Regularizer(model)
    reg.add_grad_()
    assert model.first.grad.any() and reg.left_out == dict.fromkeys(
        ("bias", "norm.weight", "norm.bias"), "bias or norm"
    )
    assert dh.prune(model, dh.Density(0.25)).density == 0.25
    total = dh.summary(model, X, latency=False).total
    assert (total.weights, total.nonzeros, total.macs_executed) == (384, 96, 384)


@pytest.mark.parametrize("target", [{"macs": 0.5}, {"parameters": 0.5}, {"density": 0.5}])
def test_a_network_without_any_layer_is_taken_to_its_target(target):
    torch.manual_seed(0)
    model = Loose()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dh.Plan(model, X, optimizer, dh.Target(**target), 2, rounds=1)
    for _ in range(2):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        plan.epoch()
    small = plan.finish()
    assert plan.report.reached == pytest.approx(0.5, rel=0.05)
    assert "density" in target or (len(small.second.T) == small.first.shape[1] == len(small.bias) == 16)
    torch.testing.assert_close(small(X), model(X))


def test_a_model_without_trainable_weights_is_told_what_there_is_and_how_it_is_named():
    net = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    with pytest.raises(
        dh.UserError, match=r"Trainable are 0\.weight \(5×4\), 1\.weight \(4\), 1\.bias \(4\): .*parameters="
    ):
        find_weights(net)
    with pytest.raises(dh.UserError, match="recurrent weights, and nothing else that is trainable"):
        find_weights(net.requires_grad_(False))


class Experts(nn.Module):
    """As mixtures have them: a stack of matrices for each projection; `x @ w` where the stack is transposed."""

    def __init__(self, transposed):
        super().__init__()
        self.num_experts, self.hidden_size, self.transposed = 3, 4, transposed
        up, down = ((4, 10), (10, 4)) if transposed else ((10, 4), (4, 10))
        self.up, self.down = nn.Parameter(torch.randn(3, *up)), nn.Parameter(torch.randn(3, *down))
        self.up_bias = nn.Parameter(torch.randn(3, 10))

    def forward(self, x):
        up, down = (self.up, self.down) if self.transposed else (self.up.mT, self.down.mT)
        return ((x @ up + self.up_bias[:, None]).relu() @ down).sum(0)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 3, nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_stacked_matrices_of_experts_are_weights_each_with_rows_and_columns_of_its_own(transposed):
    net = nn.ModuleDict({"router": Router(), "experts": Experts(transposed), "head": nn.Linear(4, 2)}).double()
    assert names(net) == ["router.weight", "experts.up", "experts.down", "head.weight"]
    assert dh.Regularizer(net).left_out == {"experts.up_bias": "bias or norm", "head.bias": "bias or norm"}
    up = net.experts.up.mT if transposed else net.experts.up  # outputs before inputs
    filters = dh.Regularizer(net, groups="filters", parameters="experts.up", penalty="l1", strength=1.0)
    channels = dh.Regularizer(net, groups="channels", parameters="experts.up", penalty="l1", strength=1.0)
    torch.testing.assert_close(filters.loss(), up.norm(dim=2).sum())
    torch.testing.assert_close(channels.loss(), up.norm(dim=1).sum())
    filters.add_grad_()
    expected = torch.autograd.grad(up.norm(dim=2).sum(), net.experts.up)[0]
    torch.testing.assert_close(net.experts.up.grad, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_neurons_of_each_expert_are_counted_by_themselves(transposed):
    net = Experts(transposed)
    with torch.no_grad():
        (net.up.mT if transposed else net.up)[0, :4] = 0
    row = next(row for row in dh.summary(net, torch.randn(5, 4)).rows if row.name == "up")
    assert (row.live_filters, row.filters, row.channels, row.nonzeros) == (26, 30, 12, 120 - 16)


@pytest.mark.parametrize("transposed", [False, True])
def test_coupled_groups_of_experts_take_the_fast_path_and_are_left_alone_where_parameters_say_so(transposed):
    net = nn.Sequential(nn.Linear(6, 4), Experts(transposed)).double()
    groups = dh.Coupled(net, torch.randn(5, 6).double())
    up = net[1].up.mT if transposed else net[1].up  # outputs before inputs
    reg = dh.Regularizer(net, "l1", groups, 1.0)
    down = net[1].down.mT if transposed else net[1].down
    parts = (up.square().sum((0, 2)), down.square().sum((0, 1)), net[1].up_bias.square().sum(0))
    neurons = sum(parts).sqrt().sum()
    width = (net[0].weight.square().sum(1) + net[0].bias.square() + up.square().sum((0, 1))).sqrt().sum()
    experts = sum(w.flatten(1).square().sum(1) for w in (up, down, net[1].up_bias)).sqrt().sum()  # which are summed up
    torch.testing.assert_close(reg.loss(), neurons + width + experts)
    reg.add_grad_()
    torch.testing.assert_close(net[1].up.grad, torch.autograd.grad(neurons + width + experts, net[1].up)[0])
    assert set(reg.stats()["backend"]) == {"foreach"}
    with pytest.raises(dh.UserError, match="all layers that a channel runs through must be among them"):
        dh.Regularizer(net, "l1", groups, 1.0, parameters="!1.up")


@pytest.mark.parametrize(
    ("name", "outputs"), [("Mixtral", 1), ("Qwen3Moe", 1), ("GptOss", 2), ("Llama4Text", 2), ("JetMoe", 1)]
)
def test_experts_of_hugging_face_models_are_weights(name, outputs):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    several = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4}
    more = {"moe_intermediate_size": 24, "intermediate_size_mlp": 24, "kv_channels": 8}
    if name == "JetMoe":
        del several["num_attention_heads"]
    config = getattr(transformers, f"{name}Config")(**sizes, **several, **more)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    assert "of unknown use" not in dh.Regularizer(model).left_out.values()
    stacks = [w for w in find_weights(model) if w.tensor.dim() == 3]
    assert stacks and {w.out_dim for w in stacks} == {outputs} and {w.tensor.shape[0] for w in stacks} == {4}


def test_what_is_left_out_is_named_with_what_it_is():
    net = Net()
    net.token = nn.Parameter(torch.randn(1, 4))
    net.head.requires_grad_(False)
    reg, masks = dh.Regularizer(net), dh.prune(net, dh.Density(0.5))
    assert reg.left_out == masks.left_out
    assert reg.left_out["embed.weight"] == "embedding" and reg.left_out["head.weight"] == "frozen"
    assert reg.left_out["token"] == "of unknown use" and reg.left_out["norm.weight"] == "bias or norm"
    assert "1 of unknown use (token), 1 frozen (head.weight)" in repr(reg)
    assert "1 embedding (embed.weight)" in repr(masks)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["compile", "data parallel", "distributed", "compile of distributed", "compile of a part"])
def wrapped(request):
    net = Net()
    if "distributed" in request.param:
        request.getfixturevalue("one_process")
        whole = nn.parallel.DistributedDataParallel(net)
        return net, torch.compile(whole, backend="eager") if "compile" in request.param else whole
    if request.param == "compile of a part":
        net.conv = torch.compile(net.conv, backend="eager")
        return net, net
    if request.param == "compile":
        return net, torch.compile(net, backend="eager")
    if torch.cuda.is_available():
        pytest.skip("DataParallel would move the network, and its numbers with it")
    return net, nn.DataParallel(net)


def test_a_wrapped_model_keeps_its_names(wrapped):
    _, model = wrapped
    assert names(model) == ["conv.weight", "up.weight", "head.weight"]
    assert names(model, "conv.weight") == ["conv.weight"]
    assert [w.groups for w in find_weights(model)] == [2, 2, 1]


def test_a_wrapped_model_trains_with_a_regularizer_and_masks_like_a_plain_one(wrapped):
    net, model = wrapped
    plain = Net()
    plain.load_state_dict({k.replace("_orig_mod.", ""): v for k, v in net.state_dict().items()})
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        dh.Regularizer(m, groups="filters+channels", strength=1e-2).attach(optimizer)
        masks = dh.prune(m, dh.Density(0.5))
        masks.hold(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            m(torch.arange(50).remainder(5).view(2, 25)).square().sum().backward()
            optimizer.step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert masks.from_state_dict(masks.state_dict(), plain).density == masks.density
