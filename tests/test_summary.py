"""The summary counts what the paper counts, what is there, and what is stored, and says which is which."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deephoyer.errors import UserError
from deephoyer.lab.models import input_shape, make
from deephoyer.latency import Latency
from deephoyer.structure.compact import compact
from deephoyer.summary import Summary, summary


def counted(name, **settings):
    return summary(make(name, **settings), torch.zeros(1, *input_shape(name)), latency=False)


def macs(name, **settings):
    total = counted(name, **settings).total
    assert total.macs_paper == total.macs_executed  # nothing is zero in a fresh network
    return total.macs_executed


def test_macs_of_the_lenets_are_the_papers():
    assert macs("lenet-300-100") == 266_200
    assert [r.macs_executed for r in counted("lenet-5").rows] == [288_000, 1_600_000, 400_000, 5_000]


def test_macs_of_the_resnets_are_the_published_ones_to_the_printed_digit():
    pytest.importorskip("torchvision")
    assert 125 <= round(macs("resnet-56") / 1e6) <= 127
    assert 253 <= round(macs("resnet-110") / 1e6) <= 256
    assert 253 <= macs("resnet-110", shortcut="conv") / 1e6 <= 256
    assert 4.09 <= round(macs("resnet-50") / 1e9, 2) <= 4.13


def test_weights_of_alexnet_are_the_papers_layer_by_layer():
    s = summary(make("alexnet"), latency=False)
    assert [r.weights for r in s.rows] == [
        34_848, 307_200, 884_736, 663_552, 442_368, 37_748_736, 16_777_216, 4_096_000,
    ]  # fmt: skip
    assert s.total.weights == 60_954_656 and s.total.macs_executed is None


def keep(layer, filters, channels):
    """Leaves exactly so many filters and channels alive."""
    with torch.no_grad():
        layer.weight[filters:] = 0
        layer.weight[:, channels:] = 0


def test_group_sparse_lenet_300_100_reads_as_in_the_paper():
    model = make("lenet-300-100")
    keep(model.fc1, 45, 353)
    keep(model.fc2, 11, 45)
    keep(model.fc3, 10, 11)
    s = summary(model, torch.zeros(1, 784), latency=False)
    assert s.layer_widths == "353-45-11"
    assert s.total.macs_paper == 353 * 45 + 45 * 11 + 11 * 10  # the paper's 16.5k
    assert s.total.macs_executed == 266_200


def test_group_sparse_lenet_5_reads_as_in_the_paper():
    model = make("lenet-5")
    keep(model.conv1, 5, 1)
    keep(model.conv2, 12, 5)
    keep(model.fc1, 13, 139)
    keep(model.fc2, 10, 13)
    s = summary(model, torch.zeros(1, 1, 28, 28), latency=False)
    assert s.layer_widths == "5-12-139-13"
    assert s.total.macs_paper == 169_937  # the paper's 169.9k


@settings(max_examples=30, deadline=None)
@given(groups=st.sampled_from([1, 2, 4]), transposed=st.booleans(), density=st.floats(0, 1), seed=st.integers(0, 999))
def test_the_papers_macs_lie_between_the_nonzero_products_and_the_dense_ones(groups, transposed, density, seed):
    torch.manual_seed(seed)
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 8, 3, groups=groups)
    with torch.no_grad():
        layer.weight.mul_(torch.rand_like(layer.weight) < density)
    x = torch.zeros(3, 4, 6, 6)
    row = summary(layer, x, latency=False).rows[0]
    places = 36 if transposed else 16
    assert row.macs_executed == places * layer.weight.numel()
    assert places * row.nonzeros <= row.macs_paper <= row.macs_executed


def test_a_dead_filter_of_a_grouped_convolution_saves_only_its_own_groups_work():
    layer = nn.Conv2d(4, 4, 1, groups=2)
    with torch.no_grad():
        layer.weight[0] = 0
    row = summary(layer, torch.zeros(1, 4, 1, 1), latency=False).rows[0]
    assert (row.macs_executed, row.macs_paper, row.live_filters) == (8, 6, 3)


@pytest.mark.parametrize("joints", ["none", "gather"])
def test_a_compacted_network_has_fewer_macs_executed_and_joints_leave_only_the_papers(joints):
    torch.manual_seed(0)
    model, x = make("resnet-20").eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for conv in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
            conv.weight[torch.rand(conv.out_channels) < 0.5] = 0
    s = summary(compact(model, x, joints=joints), x, model, latency=False)
    before, after = s.baseline.total, s.total
    assert after.macs_executed < before.macs_executed and after.parameters < before.parameters
    assert after.macs_paper <= before.macs_paper and after.nonzeros <= before.nonzeros
    if joints == "gather":
        assert after.macs_executed <= before.macs_paper


def test_a_layer_used_twice_counts_twice_in_macs_and_once_in_weights():
    layer = nn.Linear(5, 5)
    s = summary(nn.Sequential(layer, layer), torch.zeros(2, 5), latency=False)
    assert (s.total.weights, s.total.macs_executed) == (25, 50)


def test_tied_weights_count_once():
    a, b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
    b.weight = a.weight
    s = summary(nn.Sequential(a, b), torch.zeros(2, 5), latency=False)
    assert (s.total.weights, s.total.parameters, s.total.macs_executed) == (25, 25, 50)
    assert s.total.bytes_stored == 100


def test_positions_of_a_sequence_count():
    assert summary(nn.Linear(3, 2), torch.zeros(4, 7, 3), latency=False).total.macs_executed == 42


def test_sparse_weights_take_fewer_bytes_and_dense_ones_no_more():
    model = make("lenet-300-100")
    dense = summary(model, latency=False).total
    assert dense.bytes_stored == dense.bytes_dense == 4 * 266_610
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand_like(p) < 0.02)  # makes −0.0 too
    assert summary(model, latency=False).total.bytes_stored < 30_000


def test_the_summary_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train()
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    summary(model, torch.randn(2, 1, 5, 5), batch_sizes=(1,), seconds=0.01)
    assert model.training and not model[1].training and not model[0]._forward_hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_latency_is_measured_in_turns_with_its_spread():
    small, large = nn.Linear(8, 8), nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    large.insert(0, nn.Linear(8, 512))
    s = summary(small, torch.randn(4, 8), large, batch_sizes=(1, 3), seconds=0.05)
    assert [t.batch for t in s.latency] == [1, 3] and s.baseline is not None
    for own, other in zip(s.latency, s.baseline.latency, strict=True):
        assert own.runs == other.runs >= 5
        assert own.low_ms <= own.median_ms <= own.high_ms
        assert own.median_ms < other.median_ms


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((2.0, 1.9, 2.1), (1.0, 0.9, 1.1), "2.00×"),
        ((1.01, 1.0, 1.02), (1.0, 0.99, 1.01), "1.01×"),  # that they take as long is known well
        ((1.1, 1.0, 1.2), (1.0, 0.9, 1.1), "~1.10×"),  # faster or slower?
        ((0.3, 0.2, 2.5), (2.0, 0.3, 3.5), "~0.15×"),
        ((9.0, 8.0, 20.0), (1.0, 0.9, 1.1), "~9.00×"),  # faster, but by how much?
    ],
)
def test_a_ratio_of_times_that_vary_too_much_is_marked(before, after, told):
    total = summary(nn.Linear(2, 2), torch.zeros(1, 2), latency=False)
    dense, small = (dataclasses.replace(total, latency=[Latency(1, *ms, runs=9)]) for ms in (before, after))
    compared = dataclasses.replace(small, baseline=dense)
    wide, narrow = (next(line for line in compared.comparison(width).splitlines() if "ms per" in line)
                    for width in (130, 80))  # fmt: skip
    assert wide.endswith(f"  {told}{' (noisy)' if '~' in told else ''}") and len(wide) <= 130
    assert narrow.endswith(f"  {told}") and ("batch of 1, noisy" in narrow) == ("~" in told) and len(narrow) <= 80
    assert compared.to_json()["latency"][0]["median_ms"] == after[0]


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_batch_size_that_is_none_is_refused(size):
    with pytest.raises(UserError, match="batch size"):
        summary(nn.Linear(2, 2), torch.zeros(1, 2), batch_sizes=(size,))


def test_example_inputs_of_the_wrong_kind_are_refused():
    with pytest.raises(UserError, match="example inputs"):
        summary(nn.Linear(2, 2), "picture", latency=False)  # type: ignore[arg-type]


def test_examples_that_the_model_can_not_read_are_told_in_a_line():
    with pytest.raises(UserError, match="can't be run on the example inputs"):
        summary(nn.Linear(3, 2), torch.zeros(4, 5), latency=False)


def test_inputs_may_be_several_or_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, a, b):
            return self.fc(a + b)

    x = torch.zeros(2, 3)
    for examples in ((x, x), [x, x], {"a": x, "b": x}):
        assert summary(Two(), examples, batch_sizes=(3,), seconds=0.01).total.macs_executed == 6


def test_the_titles_say_which_way_of_counting_is_meant():
    s = summary(make("lenet-5"), torch.zeros(1, 1, 28, 28), make("lenet-5"), latency=False, accuracy={"dense": 0.99})
    text = str(s)
    for words in ("zero filters", "MACs executed", "nonzeros", "parameters", "bytes stored", "20-50-800-500"):
        assert words in text
    assert "99.00%" in text and "\x1b" not in text


def test_a_summary_survives_json():
    s = summary(make("lenet-5"), torch.zeros(1, 1, 28, 28), make("lenet-5"), batch_sizes=(1,), seconds=0.01)
    assert Summary.from_json(json.loads(json.dumps(s.to_json()))) == s


def test_json_that_is_no_summary_is_refused():
    for data in ({}, {"rows": [1]}, {"rows": [], "total": {"weights": 1}}):
        with pytest.raises(UserError, match="not a summary"):
            Summary.from_json(data)
