"""The networks are the published ones, layer by layer, and can be cut where the graph says."""

import sys

import pytest
import torch

from deephoyer.errors import UserError
from deephoyer.lab import models
from deephoyer.lab.models import MODELS, make
from deephoyer.lab.models.pad_shortcut import PadShortcut


def weights(model):
    return {n.removesuffix(".weight"): p.numel() for n, p in model.named_parameters() if p.dim() > 1}


def test_lenet_300_100_has_the_papers_weights():
    assert weights(make("lenet-300-100")) == {"fc1": 235200, "fc2": 30000, "fc3": 1000}


def test_lenet_5_has_the_papers_weights():
    assert weights(make("lenet-5")) == {"conv1": 500, "conv2": 25000, "fc1": 400000, "fc2": 5000}


def test_alexnet_has_the_papers_weights():
    assert list(weights(make("alexnet")).values()) == [
        34848, 307200, 884736, 663552, 442368, 37748736, 16777216, 4096000,
    ]  # fmt: skip


def test_cifar_resnets_have_as_many_layers_as_their_names_say():
    for depth in (20, 32, 44, 56, 110):
        assert len(weights(make(f"resnet-{depth}"))) == depth


def test_a_projected_shortcut_adds_two_convolutions():
    assert len(weights(make("resnet-20", shortcut="conv"))) == 22


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("alexnet", "resnet-50", "resnet-110")])
def test_every_network_takes_its_input_shape_and_gives_a_number_a_class(name):
    x = torch.randn(2, *models.input_shape(name))
    assert make(name, classes=7).eval()(x).shape == (2, 7)


def test_the_large_networks_take_their_input_shapes_too():
    pytest.importorskip("torchvision")
    for name in ("alexnet", "resnet-50"):
        with torch.device("meta"):
            assert make(name)(torch.empty(1, *models.input_shape(name))).shape == (1, 1000)


def test_the_first_resnet_50_halves_the_image_in_its_first_convolution():
    pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = make("resnet-50", stride="conv1")
    assert model.layer2[0].conv1.stride == (2, 2) and model.layer2[0].conv2.stride == (1, 1)


def test_every_network_has_a_line_of_description():
    assert all(line for _, line in MODELS.describe())


def test_bad_names_and_settings_are_refused():
    for name, settings, match in [
        ("lenet5", {}, "Did you mean 'lenet-5'"),
        ("lenet-5", {"classes": 0}, "model 'lenet-5': classes is 0"),
        ("lenet-5", {"depth": 3}, "its settings: classes"),
        ("resnet-20", {"shortcut": "padd"}, "Did you mean 'pad'"),
        ("alexnet", {"dropout": 1.0}, "dropout is 1.0"),
        ("lenet-300-100", {"dropout": -0.1}, "dropout is -0.1"),
        ("lenet-300-100", {"input_dropout": 1.0}, "input_dropout is 1.0"),
        ("resnet-50", {"stride": "conv3"}, "not a stride"),
    ]:
        with pytest.raises(UserError, match=match):
            make(name, **settings)


def test_without_torchvision_resnet_50_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UserError, match=r"pip install 'deephoyer\[lab\]'"):
        make("resnet-50")


def test_the_pad_shortcut_is_a_convolution_with_fixed_zeros_and_ones():
    torch.manual_seed(0)
    for source in ([-1, 0, 1, 2, -1], [2, -1, 0, 0], [-1, -1], [1], [0, 1, 2]):
        shortcut = PadShortcut(3, len(source), source=source)
        kernel = torch.zeros(len(source), 3, 1, 1)
        for j, i in enumerate(source):
            if i >= 0:
                kernel[j, i] = 1
        x = torch.randn(2, 3, 8, 8)
        assert torch.equal(shortcut(x), torch.nn.functional.conv2d(x, kernel, stride=2))


def test_cutting_the_pad_shortcut_is_cutting_its_inputs_and_outputs():
    shortcut, x = PadShortcut(4, 8), torch.randn(1, 4, 4, 4)
    x[:, [1, 3]] = 0
    whole = shortcut(x)
    shortcut.keep_outputs([0, 2, 3, 5])
    shortcut.keep_inputs([0, 2])
    assert (shortcut.in_channels, shortcut.out_channels) == (2, 4)
    assert torch.equal(shortcut(x[:, [0, 2]]), whole[:, [0, 2, 3, 5]])


def test_a_source_outside_the_inputs_is_refused():
    with pytest.raises(UserError, match="sources must lie"):
        PadShortcut(2, 3, source=[0, 1, 2])


def test_each_stage_of_a_padded_resnet_can_be_cut_alone_through_the_dependency_graph():
    tp = pytest.importorskip("torch_pruning")

    class PadPruner(tp.BasePruningFunc):
        # as the docstring of pad_shortcut.py says
        def prune_in_channels(self, layer, idxs):
            layer.keep_inputs([i for i in range(layer.in_channels) if i not in set(idxs)])

        def prune_out_channels(self, layer, idxs):
            layer.keep_outputs([i for i in range(layer.out_channels) if i not in set(idxs)])

        def get_in_channels(self, layer):
            return layer.in_channels

        def get_out_channels(self, layer):
            return layer.out_channels

    model, x = make("resnet-20").eval(), torch.randn(2, 3, 32, 32)
    graph = tp.DependencyGraph().build_dependency(model, x, customized_pruners={PadShortcut: PadPruner()})
    for stage, width in (("layer1", 16), ("layer2", 32), ("layer3", 64)):
        conv = getattr(model, stage)[1].conv2
        graph.get_pruning_group(conv, tp.prune_conv_out_channels, [0, 9, width - 1]).prune()
        assert model(x).shape == (2, 10) and conv.out_channels == width - 3
    assert model.layer2[0].shortcut.in_channels == 13 and model.layer3[0].shortcut.in_channels == 29
