"""What training and serving have around a network: wrappers, files, autocast, states, dicts and objects."""

import functools
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import deephoyer as dh
from deephoyer.export import load_masks
from deephoyer.inference import not_compiled, plain_attention
from deephoyer.structure import compact_report
from deephoyer.structure.equality import same
from deephoyer.widths import sides_of
from small_networks import Net, half_of, largest_gap, linears, numbers


def test_neurons_of_torchs_encoder_go_where_padded_tokens_are_left_out():
    """It makes nested tensors of them, which have no shape."""
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double().eval()
    padded = torch.tensor([[False] * 3, [False, True, True]])
    x = {"src": torch.randn(2, 3, 8, dtype=torch.float64), "src_key_padding_mask": padded}
    neurons = dh.Neurons(net, x)
    assert [unit.count for unit in neurons.units()] == [16, 16]
    net.layers[0].linear1.weight.data[:4] = 0
    net.layers[0].linear1.bias.data[:4] = 0
    small = dh.compact(net, x, groups=neurons)
    assert [layer.linear1.out_features for layer in small.layers] == [12, 16]
    assert same(net, small, x) < 1e-12


def test_outputs_in_which_no_tensor_is_found_are_refused():
    class Answer:
        __slots__ = ("logits",)

        def __init__(self, logits):
            self.logits = logits

    net = Net(lambda net, x: Answer(net.a(x)), **linears(a=(8, 4)))
    with pytest.raises(dh.UserError, match="Answer in which no tensor"):
        dh.compact(net, numbers(2, 8))


def test_a_network_of_nan_is_refused():
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data.fill_(float("nan"))
    with pytest.raises(dh.UserError, match="nothing but NaN"):
        dh.compact(net, torch.randn(3, 8))


def test_what_a_network_notes_of_its_inputs_is_not_changed_by_compaction():
    def forward(net, x):
        h = F.relu(net.a(x))
        net.peak.copy_(torch.maximum(net.peak, h.max()))
        net.last = h
        return net.o(h)

    net, x = Net(forward, **linears(a=(5, 16), o=(16, 3))), numbers(4, 5)
    net.register_buffer("peak", torch.zeros(()).double())
    net.a.weight.data[::2], net.a.bias.data[::2] = 0, 0.3
    small = dh.compact(net, x)
    assert compact_report(small).folded == {"o": 8} and small.peak == 0 and not hasattr(small, "last")


def test_a_network_with_a_state_of_its_own_is_compared_from_the_same_state():
    def forward(net, x):
        net.state.mul_(0.9).add_(net.b(F.relu(net.a(x))).mean(0))
        return net.state

    net, x = Net(forward, **linears(a=(5, 16), b=(16, 3))), numbers(4, 5)
    net.register_buffer("state", torch.zeros(3).double())
    small = half_of(net, x)
    assert small.a.out_features == 8 and not small.state.any() and largest_gap(net(x), small(x)) < 1e-12


def test_a_network_that_would_fail_on_torchs_fast_path_is_refused():
    net, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    net.linear1.weight.data[:, :4] = 0
    with pytest.raises(dh.UserError, match="fails in"):
        dh.compact(net, x, joints="gather")
    with torch.no_grad():
        assert largest_gap(net(x), dh.compact(net, x)(x)) < 1e-4


def compiles():
    """Whether torch.compile has an effect in this process."""
    graphs = []
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(graph) or graph)(torch.zeros(3))
    return bool(graphs)


@pytest.mark.parametrize(
    "switched, is_on",
    [(plain_attention, torch.backends.mha.get_fastpath_enabled), (not_compiled, compiles)],
    ids=["attention", "compile"],
)
def test_threads_that_analyse_at_the_same_time_leave_what_they_switch_off_as_it_was(switched, is_on):
    both = threading.Barrier(2)

    def first():
        with switched:
            both.wait()  # the other is inside, too
        both.wait()  # and goes out after this one

    other = threading.Thread(target=first)
    other.start()
    with switched:
        both.wait()
        both.wait()
        assert not is_on()
    other.join()
    assert is_on()


def test_a_buffer_outside_the_state_dict_is_cut_and_stored(tmp_path):
    def fresh():
        torch.manual_seed(0)
        net = Net(
            lambda net, x: net.b(F.relu(net.a(x)) * net.scale), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)
        ).double()
        net.register_buffer("scale", torch.arange(1.0, 9).double().view(1, 8, 1, 1), persistent=False)
        return net

    net, x = fresh(), numbers(2, 3, 8, 8)
    net.a.weight.data[0::2], net.a.bias.data[0::2] = 0, 0
    small = dh.compact(net, x)
    dh.save(small, tmp_path / "c.safetensors")
    loaded = dh.load(tmp_path / "c.safetensors", model=fresh())
    assert loaded.scale.flatten().tolist() == [2, 4, 6, 8] and torch.equal(small(x), loaded(x))
    assert "scale" not in net.state_dict()


def test_a_table_that_grows_while_the_network_runs_is_made_again_by_the_loaded_one(tmp_path):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.length = nn.Linear(5, 8), nn.Linear(8, 2), 0
            self.register_buffer("table", torch.zeros(0), persistent=False)

        def forward(self, x):
            if x.shape[1] > self.length:
                self.length, self.table = x.shape[1], torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
            return self.b(F.relu(self.a(x)) * self.table[: x.shape[1]])

    net, x = Grows().double(), numbers(2, 4, 5)
    net.a.weight.data[1::2], net.a.bias.data[1::2] = 0, 0.3  # constants, but for the table
    net.a.weight.data[:1], net.a.bias.data[:1] = 0, 0
    small = dh.compact(net, x)
    assert small.a.out_features < 8 and small.length == 0
    for tokens in (2, 7):
        others = numbers(3, tokens, 5)
        assert largest_gap(net(others), small(others)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    again = dh.load(tmp_path / "small.safetensors", model=Grows().double())
    assert torch.equal(again(others), small(others))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_a_wrapped_network_is_grouped_compacted_and_stored_like_the_one_inside(wrap, tmp_path):
    def fresh():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    net, x = fresh(), torch.randn(4, 8)
    wrapped = wrap(net)
    masks = dh.prune(wrapped, dh.Density(0.5), dh.Coupled(wrapped, x))
    dh.save(wrapped, tmp_path / "whole.safetensors", masks=masks)
    assert torch.equal(dh.load(tmp_path / "whole.safetensors", model=wrap(fresh()))(x), net(x))
    assert load_masks(tmp_path / "whole.safetensors", model=net).density == masks.density
    small = dh.compact(wrapped, x, groups=dh.Coupled(wrapped, x))
    assert type(small) is nn.Sequential and small[0].out_features == 4
    with pytest.raises(dh.UserError, match="must be a `Coupled`"):
        dh.compact(net, x, groups="coupled")


class Result:
    """Neither a tuple nor a data class."""

    def __init__(self, **values):
        vars(self).update(values)


def test_tensors_in_an_object_of_any_class_are_outputs_of_the_network():
    def forward(net, x):
        h = net.a(x).relu()
        return Result(aux=Result(map=[net.c(h)])), net.b(h)

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2), c=(8, 12))), numbers(3, 6)
    small = half_of(net, x)
    assert small.c.out_features == 12 and small.a.out_features < 8
    assert torch.allclose(net(x)[0].aux.map[0], small(x)[0].aux.map[0])


def test_a_state_in_a_plain_dict_is_an_output_like_any_other():
    def forward(net, x):
        h = net.a(x).relu()
        return {"state": net.b(h), "reward": net.c(net.b(h))}

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 8), c=(8, 1))), numbers(3, 6)
    small = half_of(net, x)
    assert small.a.out_features < 8
    assert torch.allclose(net(x)["state"], small(x)["state"])


def test_compaction_within_autocast_compares_in_full_precision():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        small = half_of(net, x)
    assert small[0].out_features < 64 and compact_report(small).error < 1e-5


def test_a_network_that_keeps_what_it_computed_last_is_compacted():
    def forward(net, x):
        net.seen = {"hidden": [net.a(x)]}
        return net.b(net.seen["hidden"][0].relu())

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), numbers(3, 6)
    net(x)  # with gradients, which copy.deepcopy refuses
    assert half_of(net, x).a.out_features < 8


@dataclass
class Layered:
    """A configuration that does not say what differs from layer to layer, as some of Hugging Face's."""

    width: int = 8

    def __getattribute__(self, name):
        if name == "width":
            raise ValueError("width may vary across layers")
        return super().__getattribute__(name)


def test_a_network_is_compacted_whose_configuration_refuses_to_say_something():
    net, x = Net(lambda net, x: net.b(F.relu(net.a(x))), **linears(a=(4, 8), b=(8, 2))), numbers(3, 4)
    net.config = Layered()
    assert half_of(net, x).a.out_features == 4


def test_examples_may_lie_in_a_dict_that_is_one_argument():
    def forward(net, batch):
        return {"logits": net.b(net.a(batch["table"]).relu())}

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), ({"table": numbers(4, 6), "names": ["a", "b"]},)
    small = half_of(net, x)
    total = dh.summary(small, x, baseline=net, seconds=0.01).total
    assert total.macs_executed == small.a.weight.numel() + small.b.weight.numel()


def test_a_graph_with_its_edges_is_timed_as_it_is():
    def forward(net, x, edges):
        return net.b(net.a(x).relu()[edges[0]])

    net, x = Net(forward, **linears(a=(6, 8), b=(8, 2))), (numbers(4, 6), torch.tensor([[0, 3, 2], [1, 2, 3]]))
    timed = dh.summary(net, x, seconds=0.01).latency
    assert [one.batch for one in timed] == [4]


def test_channels_that_stay_because_parameters_are_frozen_are_told():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].requires_grad_(False)
    with pytest.raises(dh.UserError, match="71% stay because parameters of theirs are frozen"):
        dh.Coupled(net, torch.randn(2, 6)).units()


def test_a_quantized_network_is_refused_in_a_line():
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    with pytest.raises(dh.UserError, match=r"0.weight is a .*: compact the network before it is quantized"):
        dh.compact(net, torch.randn(2, 64))


def test_a_model_whose_forward_holds_on_to_the_model_itself_is_refused():
    """A copy would compute with the original's weights, whatever was taken out of it."""
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double(), numbers(3, 4)
    plain = net.forward
    net.forward = lambda x: 2 * plain(x)
    with pytest.raises(dh.UserError, match=r"still computes with the original's 0\.weight"):
        dh.Coupled(net, x)
    del net.forward
    net[0].forward = functools.partial(lambda layer, x: F.linear(x, 2 * layer.weight), net[0])
    small = half_of(net, x)
    assert small[2].in_features == 4 and largest_gap(net(x), small(x)) < 1e-12


@pytest.mark.parametrize("wrapped", [lambda block: torch.compile(block, backend="eager"), checkpoint_wrapper])
def test_blocks_that_are_compiled_or_checkpointed_lose_channels(wrapped, tmp_path):
    def fresh():
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), wrapped(block), nn.ReLU(), nn.Linear(8, 2)).double()

    net, x = fresh(), numbers(3, 4)
    groups = dh.Coupled(net, x)
    assert [unit.names for unit in groups.units()][1] == ["2.0.weight", "2.0.bias", "2.2.weight"]
    assert {"0.weight", "2.0.weight", "2.2.weight", "4.weight"} <= set(sides_of(groups))
    dh.prune(net, dh.Density(0.5), groups=groups)
    small = dh.compact(net, x, groups=groups)
    assert small[0].out_features == 4 and largest_gap(net(x), small(x)) < 1e-12
    dh.save(small, tmp_path / "small.safetensors")
    assert torch.equal(dh.load(tmp_path / "small.safetensors", model=fresh())(x), small(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_channels_beside_a_scripted_module_go_and_its_own_stay():
    def forward(net, x):
        return net.c(F.relu(net.b(F.relu(net.scripted(net.a(x))))))

    scripted = torch.jit.script(nn.Linear(8, 8).double())
    net, x = Net(forward, scripted=scripted, **linears(a=(4, 8), b=(8, 16), c=(16, 2))), numbers(3, 4)
    assert "module 'scripted' is scripted by torch.jit" in str(dh.explain(net, x))
    small = half_of(net, x)
    assert (small.a.out_features, small.c.in_features) == (8, 8) and largest_gap(net(x), small(x)) < 1e-12
    torch.optim.SGD(small.parameters(), 0.1)  # takes leaves only
    assert all(parameter.requires_grad for parameter in small.parameters())


def test_a_model_that_takes_one_example_but_not_several_is_refused_in_a_line():
    net = Net(lambda net, x: net.b(net.a(x).relu().view(1, 8)), **linears(a=(4, 8), b=(8, 2)))
    with pytest.raises(dh.UserError, match="the model can't be run on the example inputs: shape"):
        dh.Coupled(net, numbers(3, 4))


def masked(net, x):
    net.a.weight.data *= net.mask  # as PixelCNN has it
    return net.b(net.a(x).relu())


def limited(net, x):
    net.a.weight.data = torch.renorm(net.a.weight.data, p=2, dim=0, maxnorm=0.5)  # as EEGNet has it
    return net.b(net.a(x).relu())


@pytest.mark.parametrize("forward", [masked, limited])
def test_a_network_that_changes_its_weights_while_it_runs_is_left_as_it_was(forward):
    net, x = Net(forward, **linears(a=(6, 16), b=(16, 2))), numbers(3, 6)
    net.register_buffer("mask", (numbers(16, 6) > 0).double())
    before = net.a.weight.detach().clone()
    groups = dh.Coupled(net, x)
    assert torch.equal(net.a.weight, before)
    dh.prune(net, dh.Density(0.5), groups=groups)
    before = net.a.weight.detach().clone()
    small = dh.compact(net, x, groups=groups)
    assert torch.equal(net.a.weight, before)
    assert small.a.out_features == 8 and largest_gap(net(x), small(x)) < 1e-12
