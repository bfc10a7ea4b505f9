"""Joints: layers of their own width, and the shape of a compacted network as data that may come from anywhere."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.lab.models import make
from deephoyer.structure import BadShape, check_joints, compact, compact_report, describe, reshape_
from deephoyer.structure.joints import ConstantLayer, Gather, gather


def sparse(name: str = "resnet-20", seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network as per-layer Group-HS leaves it: filters and input channels dead in each layer by itself."""
    torch.manual_seed(seed)
    model = make(name).double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
            if isinstance(module, nn.Conv2d | nn.Linear):
                weight = module.weight
                weight[torch.rand(weight.shape[0]) < (0.4 if weight.shape[0] > 10 else 0)] = 0
                weight[:, torch.rand(weight.shape[1]) < (0.4 if weight.shape[1] > 3 else 0)] = 0
    shape = (2, 3, 32, 32) if "resnet" in name else (2, 1, 28, 28)
    return model, torch.randn(shape).double()


def executed(model: nn.Module, x: Tensor) -> int:
    """Multiply-accumulates that convolutions and linear layers do for one input."""
    total = 0

    def count(module: nn.Module, args, output: Tensor) -> None:
        nonlocal total
        total += output[0].numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    model(x)
    for hook in hooks:
        hook.remove()
    return total


def as_the_paper_counts(model: nn.Module, x: Tensor) -> int:
    """Multiply-accumulates with each layer's dead filters and dead input channels left out."""
    total = 0

    def count(module: nn.Module, args, output: Tensor) -> None:
        nonlocal total
        live = (module.weight != 0).flatten(2).any(2) if module.weight.dim() > 2 else module.weight != 0
        places, kernel = output[0, 0].numel(), module.weight[0, 0].numel()
        total += int(live.any(1).sum()) * int(live.any(0).sum()) * places * kernel

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    model(x)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", ["resnet-20", "lenet-5", "lenet-300-100"])
def test_with_joints_no_more_is_executed_than_the_paper_counts(name):
    model, x = sparse(name)
    plain, jointed = compact(model, x), compact(model, x, joints="gather")
    assert torch.allclose(model(x), jointed(x), rtol=1e-10, atol=1e-10)
    assert executed(jointed, x) <= as_the_paper_counts(model, x)
    assert executed(jointed, x) <= executed(plain, x) < executed(model, x)


def test_joints_are_reported_with_what_each_layer_keeps():
    model, x = sparse()
    joints = compact_report(compact(model, x, joints="gather")).joints
    assert joints and all(0 < left < of for sides in joints.values() for left, of in sides.values())


def test_a_layer_without_dead_rows_and_columns_gets_no_joint():
    assert gather(nn.Linear(3, 2)) is None
    layer = nn.Conv2d(4, 4, 3, padding=1)
    layer.weight.data[1] = 0
    x = torch.randn(1, 4, 5, 5)
    expected = layer(x)
    joint = gather(layer)
    assert joint.read is None and joint.layer.out_channels == 3
    assert torch.allclose(joint(x), expected, atol=1e-6)


def test_grouped_convolutions_keep_as_many_channels_in_each_group_as_the_fullest_needs():
    layer = nn.Conv2d(8, 6, 3, groups=2, padding=1).double()
    layer.weight.data[[0, 3, 4]] = 0
    layer.weight.data[:3, [1, 2]] = 0
    layer.weight.data[3:, [0]] = 0
    x = torch.randn(1, 8, 5, 5).double()
    expected = layer(x)
    joint = gather(layer)
    assert (joint.layer.in_channels, joint.layer.out_channels, joint.layer.groups) == (6, 4, 2)
    assert torch.allclose(joint(x), expected)


@pytest.mark.parametrize("name", ["resnet-20", "lenet-5", "lenet-300-100"])
@pytest.mark.parametrize("joints", ["none", "gather"])
def test_a_fresh_network_takes_the_described_shape_and_the_same_values(name, joints):
    model, x = sparse(name)
    small = compact(model, x, joints=joints)
    description = json.loads(json.dumps(describe(small)))
    fresh = make(name).double().eval()
    reshape_(fresh, description)
    fresh.load_state_dict(small.state_dict(), strict=True)
    check_joints(fresh)
    assert torch.equal(fresh(x), small(x))
    assert describe(fresh) == description


def test_dropped_branches_and_new_biases_are_described_too():
    def net() -> nn.Module:
        return (
            nn.Sequential(
                nn.Conv2d(3, 4, 1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, 5, 3, bias=False),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(80, 2),
            )
            .double()
            .eval()
        )

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6).double()
    model = net()
    model[0].weight.data[1], model[0].bias.data[1] = 0, 1
    small = compact(model, x)
    assert small[3].bias is not None
    still = net()
    still[3].weight.data.zero_()
    for kept in (small, compact(still, x)):
        fresh = net()
        reshape_(fresh, describe(kept))
        fresh.load_state_dict(kept.state_dict())
        assert torch.equal(fresh(x), kept(x))
    assert isinstance(fresh[0], ConstantLayer)


def test_shared_layers_take_the_shape_together():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(torch.relu(self.a(x)) * self.b(x))

    net, x = Tied(), torch.randn(4, 3)
    net.c.weight.data[:, :2] = 0
    small, fresh = compact(net, x), Tied()
    reshape_(fresh, describe(small))
    assert fresh.a.weight is fresh.b.weight and fresh.a.weight.shape == (4, 3)


def hostile(description: dict) -> dict[str, object]:
    """Descriptions that lie, each in one way."""

    def edited(path: list, value: object) -> dict:
        changed = copy.deepcopy(description)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        return changed

    missing = copy.deepcopy(description)
    del missing["modules"]["linear"]
    return {
        "not a mapping": [1, 2],
        "no version": {k: v for k, v in description.items() if k != "version"},
        "other version": edited(["version"], 99),
        "modules a list": edited(["modules"], []),
        "missing layer": missing,
        "unknown layer": edited(["modules", "layer9.conv"], {"kind": "linear", "out": 1, "in": 1, "bias": True}),
        "attribute path": edited(["modules", "__class__"], {"kind": "linear", "out": 1, "in": 1, "bias": True}),
        "unknown kind": edited(["modules", "linear", "kind"], "os.system"),
        "wrong kind": edited(["modules", "linear", "kind"], "conv"),
        "kind a list": edited(["modules", "linear", "kind"], ["linear"]),
        "entry a string": edited(["modules", "linear"], "linear"),
        "too wide": edited(["modules", "linear", "in"], 10**9),
        "no channels": edited(["modules", "linear", "in"], 0),
        "negative": edited(["modules", "linear", "in"], -3),
        "a fraction": edited(["modules", "linear", "in"], 3.5),
        "a boolean": edited(["modules", "linear", "in"], True),
        "a string": edited(["modules", "linear", "in"], "3"),
        "lost bias": edited(["modules", "linear", "bias"], False),
        "more keys": edited(["modules", "linear", "code"], "import os"),
        "groups": edited(["modules", "conv1", "groups"], 7),
        "source outside": edited(["modules", "layer2.0.shortcut", "source"], [999]),
        "source a string": edited(["modules", "layer2.0.shortcut", "source"], "0"),
        "huge source": edited(["modules", "layer2.0.shortcut", "source"], [0] * 10**5),
        "joint on a norm": edited(
            ["modules", "bn1"],
            {"kind": "gather", "read": 1, "write": None, "fill": False, "layer": {"kind": "norm", "out": 16}},
        ),
        "joint in a joint": edited(
            ["modules", "conv1"],
            {"kind": "gather", "read": 1, "write": None, "fill": False, "layer": {"kind": "gather"}},
        ),
        "huge joint": edited(
            ["modules", "linear"],
            {
                "kind": "gather",
                "read": None,
                "write": 10**9,
                "fill": False,
                "layer": {"kind": "linear", "out": 1, "in": 1, "bias": True},
            },
        ),
        "constant of another kind": edited(
            ["modules", "linear"], {"kind": "constant", "of": "norm", "out": 1, "trained": True}
        ),
        "loose tensors": edited(["tensors"], {"linear.weight": [1, 1]}),
    }


@pytest.mark.parametrize("lie", hostile(describe(make("resnet-20"))).keys())
def test_a_description_that_lies_is_refused_and_changes_nothing(lie):
    fresh = make("resnet-20")
    description = describe(fresh)
    with pytest.raises(BadShape):
        reshape_(fresh, hostile(description)[lie])
    assert describe(fresh) == description


def test_a_joint_that_points_outside_is_refused():
    model, x = sparse("lenet-5")
    small = compact(model, x, joints="gather")
    joint = next(m for m in small.modules() if isinstance(m, Gather) and m.read is not None)
    joint.read[0] = joint.width
    with pytest.raises(UserError, match="points outside"):
        check_joints(small)


def test_joints_export_and_keep_up_with_other_batch_sizes():
    model, x = sparse("lenet-5")
    small = compact(model, x, joints="gather")
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(small, (x,), dynamic_shapes=({0: batch},)).module()
    more = torch.randn(5, 1, 28, 28).double()
    assert torch.allclose(exported(more), small(more))


@pytest.mark.parametrize("make_layer", [lambda: torch.nn.Linear(5, 4), lambda: torch.nn.Conv2d(5, 4, 3)])
@pytest.mark.parametrize("filled", [False, True])
def test_copying_into_places_gives_what_picking_does(make_layer, filled):
    write = torch.tensor([4, 2, 0, 4, 3, 1, 4])  # seven channels of four outputs, in another order
    joint = Gather(make_layer().double(), None, write, torch.randn(7).double() if filled else None, 5)
    x = (torch.randn(3, 5) if joint.dim == -1 else torch.randn(3, 5, 6, 6)).double()
    assert joint.place.tolist() == [2, 5, 1, 4]
    copied = joint(x)
    slopes = torch.autograd.grad(copied.square().sum(), list(joint.parameters()))
    joint.place = None
    picked = joint(x)
    assert torch.equal(copied, picked)
    for one, other in zip(slopes, torch.autograd.grad(picked.square().sum(), list(joint.parameters())), strict=True):
        assert torch.allclose(one, other)


def test_outputs_that_go_nowhere_or_to_several_places_are_picked_and_a_loaded_joint_finds_its_places():
    x = torch.randn(2, 3)
    for write in ([0, 0, 1], [1, 2, 2]):
        joint = Gather(torch.nn.Linear(3, 2), None, torch.tensor(write), None, 3)
        assert joint.place is None
        assert torch.equal(joint(x), torch.nn.functional.pad(joint.layer(x), [0, 1])[:, write])
    other = Gather(torch.nn.Linear(3, 2), None, torch.tensor([1, 2, 0]), None, 3)
    joint.load_state_dict(other.state_dict())
    assert joint.place.tolist() == [2, 0] and torch.equal(joint(x), other(x))
