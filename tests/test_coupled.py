"""Coupled groups: which slices belong to one channel, which channels may not go, and what uses them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from deephoyer.errors import UserError
from deephoyer.groups import SliceUnit
from deephoyer.inference import plain_attention
from deephoyer.lab.models import make
from deephoyer.masks import prune
from deephoyer.rules import Density
from deephoyer.structure import CannotFollow, Coupled, compact
from deephoyer.structure.asked_sizes import Asking
from deephoyer.structure.channel_ids import Labels
from deephoyer.structure.follow import Follower
from deephoyer.structure.operations import meet
from deephoyer.weights import find_weights

torchvision = pytest.importorskip("torchvision")


def units(model: nn.Module, x: Tensor) -> dict[str, SliceUnit]:
    return {u.name: u for u in Coupled(model, x).units([])}


def groups_of(unit: SliceUnit, name: str) -> list[int]:
    """The group of each slice of a parameter, along its first part in the unit."""
    part = next(p for p in unit.parts if p.name == name)
    return part.group.tolist()


def reasons(model: nn.Module, x: Tensor) -> dict[str, str]:
    return {s.name: s.reason for s in Coupled(model, x).sets if s.reason}


class Net(nn.Module):
    """Layers by name, and a forward given as a function."""

    def __init__(self, forward, **layers: nn.Module):
        super().__init__()
        self.steps = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.steps(self, x)


def test_a_channel_holds_filter_bias_norm_and_the_readers_inputs():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    (unit,) = units(net, torch.randn(1, 3, 8, 8)).values()
    assert unit.names == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight"]
    expected = sum(
        t.detach().square().sum()
        for t in (net[0].weight[2], net[0].bias[2], net[1].weight[2], net[1].bias[2], net[3].weight[:, 2])
    ).sqrt()
    assert torch.allclose(unit.magnitudes()[2], expected)
    assert unit.sizes().tolist() == [27 + 1 + 1 + 1 + 18] * 4


def test_flattening_gives_a_channel_several_columns():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5))
    unit = units(net, torch.randn(1, 1, 6, 6))["0"]
    assert groups_of(unit, "3.weight") == [0] * 4 + [1] * 4 + [2] * 4


def test_concatenation_gives_each_producer_its_range_of_the_reader():
    net = Net(
        lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)),
        a=nn.Conv2d(3, 2, 1),
        b=nn.Conv2d(3, 3, 1),
        c=nn.Conv2d(5, 4, 1),
    )
    found = units(net, torch.randn(1, 3, 4, 4))
    assert groups_of(found["a"], "c.weight") == [0, 1, -1, -1, -1]
    assert groups_of(found["b"], "c.weight") == [-1, -1, 0, 1, 2]


def test_a_residual_sum_ties_all_that_write_into_it():
    net = Net(
        lambda m, x: m.c(m.a(x) + m.b(F.relu(m.a(x)))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(4, 2, 1)
    )
    (unit,) = units(net, torch.randn(1, 3, 4, 4)).values()
    assert set(unit.names) == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
        "c.weight",
    }
    assert unit.count == 4


def test_depthwise_channels_go_one_by_one_and_groups_of_two_in_pairs():
    depthwise = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1))
    (unit,) = units(depthwise, torch.randn(1, 3, 6, 6)).values()
    assert unit.count == 4 and "1.weight" in unit.names
    paired = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3, groups=2), nn.Conv2d(6, 2, 1))
    found = units(paired, torch.randn(1, 3, 6, 6))
    assert groups_of(found["0"], "0.weight") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert groups_of(found["1"], "1.weight") == [0, 1, 2, 0, 1, 2]


def test_shuffled_channels_keep_their_identity():
    def shuffle(m, x):
        y = m.a(x)
        y = y.view(1, 2, y.shape[1] // 2, 4, 4).transpose(1, 2).reshape(1, -1, 4, 4)
        return m.b(y)

    net = Net(shuffle, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 2, 1))
    unit = units(net, torch.randn(1, 3, 4, 4))["a"]
    assert groups_of(unit, "a.weight") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert groups_of(unit, "b.weight") == [0, 0, 1, 1, 2, 2, 3, 3]


class Attention(nn.Module):
    """Self-attention whose number of heads follows from its layers; fused, or written out."""

    def __init__(self, fused: bool, heads: int = 4, width: int = 8):
        super().__init__()
        self.fused, self.width = fused, width
        self.q, self.k, self.v, self.out = (nn.Linear(heads * width, heads * width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(heads * width), nn.Linear(heads * width, 3)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) / self.width**0.5).softmax(-1) @ v
        return self.head(self.norm(x + self.out(y.transpose(1, 2).flatten(2))))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_heads_go_whole_where_their_number_is_not_written_down(fused):
    torch.manual_seed(0)
    net = Attention(fused).double().eval()
    (unit,) = units(net, torch.randn(2, 5, 32).double()).values()
    assert unit.count == 4
    assert set(unit.names) == {"q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "out.weight"}
    assert groups_of(unit, "q.weight") == [h for h in range(4) for _ in range(8)]


def test_parameters_outside_layers_belong_to_their_channels():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.PReLU(4)
            self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))

        def forward(self, x):
            return self.b(self.act(self.a(x) * self.scale))

    (unit,) = units(Scaled(), torch.randn(1, 3, 4, 4)).values()
    assert {"scale", "act.weight"} <= set(unit.names)


def test_inputs_and_outputs_stay_and_so_does_what_a_layer_norm_mixes():
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    why = reasons(net, torch.randn(2, 6))
    assert why["4"] == "network output" and "'1' (LayerNorm)" in why["0"] and "input" in str(why)
    assert list(units(net, torch.randn(2, 6))) == ["2"]


def test_whole_groups_of_a_group_norm_go_and_instance_norms_lose_single_channels():
    grouped = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(3, 6), nn.Conv2d(6, 2, 1))
    unit = units(grouped, torch.randn(1, 3, 4, 4))["0"]
    assert groups_of(unit, "0.weight") == [0, 0, 1, 1, 2, 2] and "1.weight" in unit.names
    alone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 1))
    assert units(alone, torch.randn(1, 3, 4, 4))["0"].count == 4


def test_operations_that_mix_channels_fix_them_with_a_reason():
    sorted_ = Net(lambda m, x: m.b(m.a(x).sort(1).values), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert "sort" in reasons(sorted_, torch.randn(1, 3))["a"]


def test_sizes_written_into_a_forward_are_found_by_trial_and_the_forward_is_told():
    net = Net(lambda m, x: m.c(F.relu(m.b(m.a(x).view(-1, 64)))), a=nn.Conv2d(3, 4, 1), b=nn.Linear(64, 6))
    net.c = nn.Linear(6, 2)
    net, x = net.double(), torch.randn(1, 3, 4, 4).double()
    coupled = Coupled(net, x)
    assert [unit.name for unit in coupled.units()] == ["a", "b"]
    prune(net, Density(0.5), coupled)
    small = compact(net, x, groups=coupled)
    more = torch.randn(5, 3, 4, 4).double()
    assert small.b.in_features == 32 and torch.allclose(small(more), net(more), atol=1e-12)


def test_a_scale_that_depends_on_the_number_of_channels_is_found_by_trial():
    net = Net(lambda m, x: m.b(m.a(x) / m.a(x).shape[1]), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert "written into it" in reasons(net, torch.randn(2, 3))["a"]


def test_what_a_module_that_branches_on_values_sees_stays_and_the_rest_can_go():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    net = nn.Sequential(nn.Linear(3, 4), Branch(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    assert list(units(net, torch.randn(2, 3))) == ["2"]
    assert "module '1' (Branch)" in reasons(net, torch.randn(2, 3))["0"]


def test_of_a_model_that_branches_on_values_itself_what_lies_within_its_modules_can_go():
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    net = Net(lambda m, x: m.b(m.a(x)) if x.sum() > 0 else -m.c(m.a(x)), a=nn.Linear(3, 4), b=inner, c=nn.Linear(4, 4))
    x = torch.ones(2, 3)
    assert list(units(net, x)) == ["b.0"]
    assert "the model itself (Net) decides by the values" in reasons(net, x)["a"]
    net.b[2].weight.data[:, :2], net.a.weight.data[0], net.a.bias.data[0] = 0, 0, 0
    small = compact(net, x)
    assert small.b[0].out_features == 4 and small.a.out_features == 4
    assert_close(small(-x), net(-x))
    flat = Net(lambda m, x: m.b(m.a(x)) if x.sum() > 0 else -m.a(x), a=nn.Linear(3, 4), b=nn.Linear(4, 4))
    with pytest.raises(UserError, match=r"because the model itself \(Net\) decides by the values of a tensor"):
        Coupled(flat, x).units()


def test_a_head_to_which_nothing_comes_for_the_examples_stays_whole():
    head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    net = Net(lambda m, x: (m.c(m.a(x)), m.b(m.a(x)[x[:, 0] > 9])), a=nn.Linear(3, 4), b=head, c=nn.Linear(4, 1))
    assert "nothing comes to module 'b.2' (Linear) for these examples" in reasons(net, torch.randn(2, 3)).values()
    assert not any(
        name.startswith("b.")
        for unit in Coupled(net, torch.randn(2, 3)).sets
        if not unit.reason
        for name in unit.layers
    )


def test_a_model_that_does_not_fit_its_inputs_names_the_module():
    with pytest.raises(CannotFollow, match="module '1'"):
        Coupled(nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)), torch.randn(2, 3))


def test_sets_with_frozen_parameters_are_left_out_of_the_units():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    net[0].weight.requires_grad_(False)
    coupled = Coupled(net, torch.randn(2, 3))
    assert [u.name for u in coupled.units([])] == ["2"]
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UserError, match="no channel"):
        coupled.units([])


def test_layers_that_share_a_weight_lose_the_same_channels():
    net = Net(lambda m, x: m.c(m.a(x)) + m.c(m.b(x)), a=nn.Linear(3, 4), b=nn.Linear(3, 4), c=nn.Linear(4, 2))
    net.b.weight = net.a.weight
    (unit,) = units(net, torch.randn(2, 3)).values()
    assert sorted(unit.names) == ["a.bias", "a.weight", "b.bias", "c.weight"]


def test_a_parameter_free_shortcut_passes_its_channels_on_to_the_next_stage():
    found = units(make("resnet-20"), torch.randn(1, 3, 32, 32))
    assert [u.count for n, u in found.items() if n.startswith("conv1")] == [16]
    assert {"layer1.0.conv2.weight", "layer2.0.conv2.weight", "layer3.0.conv2.weight"} <= set(found["conv1"].names)
    assert groups_of(found["conv1"], "layer2.0.conv2.weight") == [-1] * 8 + list(range(16)) + [-1] * 8
    assert sorted(u.count for u in found.values()) == [16] * 5 + [32] * 4 + [64] * 3


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "mobilenet_v2", "densenet121"])
def test_groups_agree_with_torch_prunings_graph_where_it_can_follow(name):
    tp = pytest.importorskip("torch_pruning")
    model = getattr(torchvision.models, name)(weights=None, num_classes=10).eval()
    x = torch.randn(1, 3, 32 if name != "densenet121" else 64, 32 if name != "densenet121" else 64)
    ours = Coupled(model, x)
    names = {module: n for n, module in model.named_modules()}
    graph = tp.DependencyGraph().build_dependency(model, x)
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 10]
    layers = nn.Conv2d | nn.Linear
    theirs = {
        frozenset(names[d.target.module] for d, _ in group if isinstance(d.target.module, layers))
        for group in graph.get_all_groups(ignored_layers=heads)
    }
    mine = {
        frozenset(n for n in s.layers if isinstance(model.get_submodule(n), layers))
        for s in ours.sets
        if s.reason is None
    }
    assert mine == theirs


@pytest.mark.parametrize(("depth", "blocks"), [(56, 9), (110, 18)])
def test_coupled_groups_of_a_cifar_resnet_are_the_blocks_channels_and_the_residual_streams(depth, blocks):
    model = make(f"resnet-{depth}")
    found = Coupled(model, torch.randn(1, 3, 32, 32)).units()
    streams = [unit for unit in found if "linear.weight" in unit.names]
    inner = [unit for unit in found if unit not in streams]
    # A padded shortcut passes 16 channels on to 32, and 32 to 64: those that begin in a stage are a set.
    assert [unit.count for unit in streams] == [16, 16, 32]
    assert [unit.count for unit in inner] == [16] * blocks + [32] * blocks + [64] * blocks
    covered = {name for unit in found for name in unit.names}
    assert covered == {name for name, _ in model.named_parameters()} - {"linear.bias"}


def test_channels_that_run_through_a_layer_left_alone_stay():
    """So a recipe can press the blocks of a ResNet and leave its residual streams whole."""
    model = make("resnet-20")
    coupled = Coupled(model, torch.randn(1, 3, 32, 32))
    blocks = coupled.units(find_weights(model, "!linear.weight"))
    assert len(blocks) == 9 and all(len(unit.names) == 4 for unit in blocks)
    assert len(coupled.units(find_weights(model))) == len(coupled.units()) == 12
    masks = prune(model, Density(0.5), coupled, parameters="!linear.weight")
    assert masks["layer1.0.conv1.weight"].any((1, 2, 3)).sum() == 8 and "linear.weight" not in masks
    with pytest.raises(UserError, match="must be among them"):
        coupled.units(find_weights(model, "linear.weight"))


@pytest.mark.parametrize("depth", [1, 6])
def test_a_tensor_never_has_more_axes_than_dimensions_however_deep_the_network(depth):
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    follower = Follower(net := nn.TransformerEncoder(layer, depth).eval(), True)
    x = torch.randn(1, 5, 8)
    with torch.no_grad(), plain_attention, Asking(follower.asks), follower:
        y = net(x) * torch.sigmoid(net(x).mean(1, keepdim=True))
    assert follower.n.known(y)
    assert all(len(axes) <= max(1, tensor.dim()) for tensor, axes in follower.n._of.values())


def test_what_meets_again_and_again_stays_as_few_axes():
    labels = Labels(nn.Identity())
    rows, columns = labels.joined.new(3).view(3, 1), labels.joined.new(4).view(1, 4)
    parts = [((3, 4), [rows, columns, labels.joined.new(1).view(1, 1)]) for _ in range(9)]
    assert len(meet(labels, parts, "a test")) == 2


def test_a_deep_network_with_most_of_its_channels_dead_is_followed_and_compacted():
    """What wakes zeros in a trial must not blow up over a hundred layers whose running variances are tiny."""
    torch.manual_seed(0)
    model, x = make("resnet-110").double().eval(), torch.randn(2, 3, 32, 32).double()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                dead = torch.rand(module.num_features) < 0.8
                module.weight[dead] = module.bias[dead] = 0
                module.running_var[dead], module.running_mean[dead] = 1e-12, 0
                if torch.rand(()) < 0.4 and "bn2" in name:
                    module.weight.zero_()
                    module.bias.zero_()
            elif isinstance(module, nn.Conv2d):
                module.weight[torch.rand(len(module.weight)) < 0.8] = 0
    small = compact(model, x)
    assert sum(p.numel() for p in small.parameters()) < 0.2 * sum(p.numel() for p in model.parameters())
    assert torch.allclose(small(x), model(x), rtol=1e-9, atol=1e-12)


def test_a_network_is_run_three_times_and_a_copy_of_which_nothing_went_not_at_all():
    """Once to follow its channels, and once with them and without them; what has no zeros in it is only copied.

    More examples than one are tried once more, with them and without them.
    """

    class Counted(nn.Sequential):
        runs = 0

        def forward(self, x):
            Counted.runs += 1
            return super().forward(x)

    net, x = Counted(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(1, 3, 7, 7)
    groups = Coupled(net, x)
    assert Counted.runs == 3 and [unit.count for unit in groups.units()] == [8]
    small = compact(net, x, groups=groups)
    assert Counted.runs == 3 and torch.equal(small.eval()(x), net.eval()(x))
    assert small[0].weight is not net[0].weight
    Coupled(net, torch.cat([x, x]))
    assert Counted.runs == 3 + 1 + 1 + 5


class ByItsWidth(nn.Module):
    """Adds a little that depends on how many channels there are: less than half precision keeps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.made, self.out = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        h = self.made(self.read(x).relu())
        return self.out((h + 1e-5 * h.shape[-1]).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_term_by_the_width_is_found_in_half_precision_too(dtype):
    groups = Coupled(ByItsWidth().to(dtype).eval(), torch.randn(4, 8, dtype=dtype))
    free = [one.name for one in groups.sets if one.reason is None]
    assert free == ["read"]


class AsksForItsType(nn.Module):
    """Runs in nothing but the type of its weights, and writes into a buffer of that type."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 4)
        self.register_buffer("memory", torch.zeros(3, 6))

    def forward(self, x):
        if x.dtype != self.a.weight.dtype:
            raise TypeError(x.dtype)
        self.memory[1:] = self.a(x)[:2]
        return self.b(self.memory + self.a(x).relu()[:1])


def test_a_network_that_runs_in_half_precision_only_is_proven_in_that():
    net = AsksForItsType().bfloat16().eval()
    groups = Coupled(net, torch.randn(4, 8, dtype=torch.bfloat16))
    assert [one.name for one in groups.sets if one.reason is None] == ["a"]


class MeanSquare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


class ByItsSetting(nn.Module):
    """Names its width, and has a norm whose scale changes with that."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width, self.table, self.norm = 16, nn.Embedding(9, 16), MeanSquare(16)
        self.a, self.b = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, tokens):
        return self.b(self.a(self.norm(self.table(tokens)).reshape(-1, self.width)).relu())


def test_as_much_can_be_removed_in_half_precision_as_in_full():
    tokens = torch.arange(5)[None]
    sets = [Coupled(ByItsSetting().to(dtype).eval(), tokens).sets for dtype in (torch.float32, torch.bfloat16)]
    names = [[one.name for one in its if one.reason is None] for its in sets]
    assert names[0] == names[1] == ["table", "a"]
