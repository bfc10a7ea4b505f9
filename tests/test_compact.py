"""Compaction: a smaller network with the same outputs, for networks of every make; or a refusal that says why."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.lab.models import make
from deephoyer.structure import Coupled, Differs, compact, compact_report
from deephoyer.structure.equality import error
from deephoyer.structure.joints import ConstantLayer
from test_coupled import Attention

torchvision = pytest.importorskip("torchvision")
M = torchvision.models


def tiny_vit() -> nn.Module:
    vit = M.VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48)
    nn.init.normal_(vit.heads.head.weight, std=0.1)
    return vit


def tiny_convnext() -> nn.Module:
    blocks = [M.convnext.CNBlockConfig(16, 32, 2), M.convnext.CNBlockConfig(32, None, 1)]
    return M.ConvNeXt(blocks, layer_scale=0.5, num_classes=10)


def vgg11_features() -> nn.Module:
    """Without the classifier, whose hundred million weights take longer to draw than the rest of a test."""
    return M.vgg.make_layers(M.vgg.cfgs["A"], batch_norm=True)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet-300-100": (lambda: make("lenet-300-100"), (1, 28, 28)),
    "lenet-5": (lambda: make("lenet-5"), (1, 28, 28)),
    "resnet-20": (lambda: make("resnet-20"), (3, 32, 32)),
    "resnet-20, projected": (lambda: make("resnet-20", shortcut="conv"), (3, 32, 32)),
    "resnet-56": (lambda: make("resnet-56"), (3, 32, 32)),
    "alexnet, grouped": (lambda: make("alexnet", classes=10), (3, 227, 227)),
    "resnet18": (lambda: M.resnet18(num_classes=10), (3, 32, 32)),
    "resnet50": (lambda: M.resnet50(num_classes=10), (3, 32, 32)),
    "squeezenet": (lambda: M.squeezenet1_1(num_classes=10), (3, 64, 64)),
    "densenet": (lambda: M.DenseNet(8, (3, 3), 16, num_classes=10), (3, 64, 64)),
    "mobilenet_v2": (lambda: M.mobilenet_v2(num_classes=10), (3, 64, 64)),
    "mobilenet_v3": (lambda: M.mobilenet_v3_small(num_classes=10), (3, 64, 64)),
    "efficientnet": (lambda: M.efficientnet_b0(num_classes=10), (3, 64, 64)),
    "shufflenet": (lambda: M.shufflenet_v2_x0_5(num_classes=10), (3, 64, 64)),
    "regnet": (lambda: M.regnet_y_400mf(num_classes=10), (3, 64, 64)),
    "mnasnet": (lambda: M.mnasnet0_5(num_classes=10), (3, 64, 64)),
    "googlenet": (lambda: M.googlenet(num_classes=10, aux_logits=False, init_weights=False), (3, 64, 64)),
    "vgg11_bn": (lambda: nn.Sequential(vgg11_features(), nn.Flatten(), nn.Linear(2048, 10)), (3, 64, 64)),
    "attention heads": (lambda: Attention(fused=True), (5, 32)),
    "vit": (tiny_vit, (3, 32, 32)),
    "swin": (lambda: M.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=10), (3, 32, 32)),
    "convnext": (tiny_convnext, (3, 64, 64)),
}


def network(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network with batch norms drawn at random, and two inputs for it."""
    torch.manual_seed(seed)
    maker, shape = NETWORKS[name]
    model = maker().to(dtype).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model, torch.randn(2, *shape, dtype=dtype)


def kill_half(model: nn.Module, coupled: Coupled, seed: int = 0) -> int:
    """Zeroes a random half of each set of removable channels; how many parameters are left by the arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    alive = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for unit in coupled.units([]):
        dead = torch.rand(unit.count, generator=generator).argsort() < unit.count // 2
        for name, mask in zip(unit.names, unit.spread(dead.double()), strict=True):
            alive[name] &= mask == 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(alive[name])
    return sum(int(mask.sum()) for mask in alive.values())


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)


SLOW = {"resnet-56": "resnet-20", "resnet50": "regnet", "mnasnet": "mobilenet_v2", "efficientnet": "mobilenet_v3"}
"""Networks for the slow tests, each with a smaller one that is built of the same kind of blocks."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NETWORKS])
def test_half_of_the_channels_go_and_the_outputs_stay(name):
    model, x = network(name)
    coupled = Coupled(model, x)
    left = kill_half(model, coupled)
    small = compact(model, x, groups=coupled)
    assert sum(p.numel() for p in small.parameters()) == left < sum(p.numel() for p in model.parameters())
    fresh = torch.randn_like(x)
    with torch.no_grad():
        assert error(model(fresh), small(fresh)) < 1e-10
        assert error(model.float()(fresh.float()), small.float()(fresh.float())) < 1e-4


@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5", "resnet-20", "resnet18", "mobilenet_v3", "densenet"])
@pytest.mark.parametrize("joints", ["none", "gather"])
def test_zeros_anywhere_make_a_smaller_network_with_the_same_outputs(name, joints):
    model, x = network(name)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                rows, columns = torch.rand(module.weight.shape[0]) < 0.4, torch.rand(module.weight.shape[1]) < 0.4
                module.weight.mul_(torch.rand_like(module.weight) < 0.5)[rows] = 0
                if len(columns) > 3:
                    module.weight[:, columns] = 0
    small = compact(model, x, joints=joints)
    fresh = torch.randn_like(x)
    with torch.no_grad():
        assert error(model(fresh), small(fresh)) < 1e-10
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())


def test_the_result_keeps_mode_type_and_what_is_trained_and_the_model_stays_as_it_was():
    model, x = network("resnet-20", torch.float32)
    coupled = Coupled(model, x)
    kill_half(model, coupled)
    model.train()
    model.layer1.eval()
    model.layer2[0].conv1.weight.requires_grad_(False)
    before, identities = snapshot(model), [id(p) for p in model.parameters()]
    small = compact(model, x)
    assert unchanged(model, before) and identities == [id(p) for p in model.parameters()]
    modes = {n: m.training for n, m in model.named_modules()}
    assert modes == {n: m.training for n, m in small.named_modules()} and modes["layer2"] and not modes["layer1"]
    assert not small.layer2[0].conv1.weight.requires_grad and small.layer2[0].conv2.weight.requires_grad
    assert not any(a is b for a in model.parameters() for b in small.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for n in (model, small) for m in n.modules())


def test_gradients_flow_and_the_result_trains_copies_compiles_and_exports():
    model, x = network("resnet-20", torch.float32)
    kill_half(model, Coupled(model, x))
    small = compact(model, x, joints="gather").train()
    F.cross_entropy(small(x), torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    small.eval()
    twin = copy.deepcopy(small)
    exported = torch.export.export(small, (x,)).module()
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    with torch.no_grad():
        for other in (twin, exported, compiled):
            assert torch.allclose(other(x), small(x), atol=1e-5)


def test_a_dead_neuron_with_a_bias_is_folded_into_the_next_linear_layer():
    net = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2, bias=False)).double()
    net[0].weight.data[1] = 0
    small = compact(net, torch.randn(5, 4).double())
    assert small[0].out_features == 2 and small[2].bias is not None
    assert compact_report(small).folded == {"2": 1}


def test_a_constant_goes_through_an_unpadded_convolution_and_one_stays_before_zero_padding():
    def net(padding: int, mode: str = "zeros") -> nn.Module:
        layers = nn.Sequential(
            nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=padding, padding_mode=mode)
        ).double()
        layers[0].weight.data[:3] = 0
        layers[0].bias.data[:3] = torch.tensor([0.5, 1.5, 1.0])
        return layers

    x = torch.randn(2, 2, 6, 6).double()
    assert compact(net(0), x)[0].out_channels == 3
    assert compact(net(1, "reflect"), x)[0].out_channels == 3
    padded = compact(net(1), x)
    assert padded[0].out_channels == 4  # three constants, of which one stands for all
    assert compact_report(padded).kept == {"2": (1, "zero padding")}
    assert compact_report(padded).folded == {"2": 2}


def test_a_norm_scaled_by_zero_makes_a_constant():
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).double().eval()
    net[1].weight.data[:2], net[1].bias.data[:2] = 0, torch.tensor([2.0, -1.0])
    small = compact(net, torch.randn(2, 2, 5, 5).double())
    assert small[0].out_channels == 2 and small[1].num_features == 2


def test_a_neuron_that_nothing_reads_goes_with_all_that_led_to_it_alone():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    net[4].weight.data[:, :3] = 0
    net[2].weight.data[3:, 0] = 0  # neuron 0 of the first layer is read by dead neurons only
    small = compact(net, torch.randn(3, 4).double())
    assert (small[0].out_features, small[2].out_features) == (4, 3)


def test_unread_inputs_are_passed_over():
    model, x = network("lenet-300-100")
    weight = next(m for m in model.modules() if isinstance(m, nn.Linear)).weight
    weight.data[:, torch.randperm(784)[:431]] = 0
    small = compact(model, x)
    (joint,) = compact_report(small).joints.values()
    assert joint == {"in": (353, 784)}
    assert sum(p.numel() for p in small.parameters()) == sum(p.numel() for p in model.parameters()) - 431 * 300


def test_a_residual_branch_with_nothing_left_is_dropped():
    model, x = network("resnet-20")
    block = model.layer2[1]
    block.conv2.weight.data.zero_()
    small = compact(model, x)
    for name in ("conv1", "bn1", "conv2", "bn2"):
        assert isinstance(getattr(small.layer2[1], name), ConstantLayer), name
    assert set(compact_report(small).dropped) == {f"layer2.1.{n}" for n in ("conv1", "bn1", "conv2", "bn2")}


def test_a_network_of_zeros_is_still_a_network():
    model, x = network("resnet18")
    for parameter in model.parameters():
        parameter.data.zero_()
    small = compact(model, x)
    assert torch.equal(small(x), model(x)) and sum(p.numel() for p in small.parameters()) < 300


def test_a_model_that_is_one_layer_stays_that_layer():
    layer = nn.Linear(4, 3)
    layer.weight.data[:, 1] = 0
    assert compact(layer, torch.randn(2, 4)).weight.shape == (3, 4)


def test_nothing_dead_changes_nothing():
    model, x = network("resnet-20")
    small = compact(model, x)
    assert snapshot(small).keys() == snapshot(model).keys() and unchanged(small, snapshot(model))
    assert compact_report(small).removed == 0


def test_compacting_twice_is_compacting_once():
    model, x = network("mobilenet_v3")
    kill_half(model, Coupled(model, x))
    once = compact(model, x)
    twice = compact(once, x)
    assert {n: t.shape for n, t in twice.state_dict().items()} == {n: t.shape for n, t in once.state_dict().items()}
    jointed = compact(compact(network("resnet-20")[0], x := torch.randn(1, 3, 32, 32).double(), joints="gather"), x)
    assert isinstance(jointed, nn.Module)


def test_several_inputs_and_nested_outputs_are_compared():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, left, right):
            hidden = torch.relu(self.a(left) + self.b(right))
            return {"out": self.c(hidden), "more": [hidden.amax(1), (left,)]}

    net = Two().double()
    with pytest.raises(UserError, match="no channel"):
        Coupled(net, (torch.randn(2, 3).double(), torch.randn(2, 4).double())).units([])
    given = {"left": torch.randn(2, 3).double(), "right": torch.randn(2, 4).double()}
    assert compact_report(compact(net, given)).error == 0


def test_token_embeddings_lose_dead_dimensions():
    net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    tokens = torch.randint(0, 20, (3, 5))
    kill_half(net, Coupled(net, tokens))
    small = compact(net, tokens)
    assert small[0].embedding_dim == 4 and small[1].out_features == 3
    assert error(net(tokens), small(tokens)) < 1e-12


def test_what_a_mask_decides_is_no_constant():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mask, self.out = nn.Embedding(9, 4), nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, tokens, mask):
            return self.out(self.words(tokens).mean(1) + self.mask(mask.to(self.mask.weight.dtype)))

    net, tokens = Masked().double(), torch.randint(0, 9, (3, 5))
    net.words.weight.data[:, :2] = 0
    small = compact(net, (tokens, torch.ones(3, 5, dtype=torch.bool)))
    other = torch.rand(3, 5) < 0.5
    assert error(net(tokens, other), small(tokens, other)) < 1e-12


def test_tied_layers_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(torch.relu(self.a(x)) * self.b(x))

    net = Tied().double()
    x = torch.randn(4, 3).double()
    kill_half(net, Coupled(net, x))
    small = compact(net, x)
    assert small.a.weight is small.b.weight and small.a.weight.shape == (3, 3)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_branch_on_values_gives_is_never_taken_for_a_constant(seed):
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.mean() > 0 else torch.zeros_like(x)

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Branch()), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    net[2].weight.data[:3], net[2].bias.data[:3] = 0, 0.5
    before = snapshot(net)
    small = compact(net, torch.randn(2, 3).double())
    for scale in (-5.0, 5.0):
        x = scale * torch.randn(6, 3).double()
        assert error(net(x), small(x)) < 1e-12
    assert unchanged(net, before) and net.training


def test_a_network_that_never_gives_the_same_twice_is_refused_by_name():
    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return x * Counted.calls

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), Counted())
    with pytest.raises(UserError, match="3"):
        compact(net, torch.randn(2, 3))


def test_a_difference_raises_and_says_where_it_began():
    class Fickle(nn.Module):
        def forward(self, x):
            return x if x.shape[1] > 2 else 2 * x

    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), Fickle(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data[2:], net[0].bias.data[2:], net[3].weight.data[:, 2:] = 0, 0, 0
    before = snapshot(net)
    with pytest.raises(Differs, match="began at 3"):
        compact(net, torch.randn(5, 3))
    assert unchanged(net, before)


def test_groups_of_another_model_and_unknown_joints_are_refused():
    model, x = network("lenet-5")
    other, y = network("resnet-20")
    with pytest.raises(UserError, match="another model"):
        compact(model, x, groups=Coupled(other, y))
    with pytest.raises(UserError, match="gather"):
        compact(model, x, joints="gathered")


def test_half_precision_networks_are_compacted_too():
    model, x = network("resnet18", torch.bfloat16)
    kill_half(model, Coupled(model, x))
    small = compact(model, x)
    assert small.conv1.weight.dtype == torch.bfloat16 and compact_report(small).removed > 0


def test_weights_that_lie_channels_last_still_do():
    """Otherwise the smaller network runs in the slower layout."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3)).to(memory_format=torch.channels_last)
    with torch.no_grad():
        net[0].weight[2:5] = 0
        net[0].bias[2:5] = 0
    small = compact(net, torch.randn(1, 3, 9, 9))
    assert small[0].weight.shape[0] == 5
    for layer in (small[0], small[2]):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last) and not layer.weight.is_contiguous()


def test_the_report_prints_as_a_table_with_what_stayed_and_why():
    class WithAuxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.auxiliary = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            h = self.a(x).relu()
            return (self.b(h), self.auxiliary(h)) if self.training else self.b(h)

    model = WithAuxiliary()
    with torch.no_grad():
        model.a.weight[:2], model.a.bias[:2] = 0, 0
    text = str(compact_report(compact(model, torch.randn(3, 4))))
    assert "coupled set" in text and "network output" in text and "72 → 56 (77.8% left)" in text
    assert "may no longer fit in training: auxiliary" in text and "\n\n" not in text


def test_a_report_of_single_zeros_says_what_would_be_removed():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[2].weight[::2, ::2], model[2].weight[1::2, 1::2] = 0, 0
    small = compact(model, torch.randn(3, 4))
    assert "nothing was removed: a channel goes when all its weights are zero" in str(compact_report(small))
