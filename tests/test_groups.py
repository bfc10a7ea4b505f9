"""The groupings, against what the layers do: which weights make an output, which read an input."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import deephoyer as dh
from deephoyer.groups import GROUPINGS, Grouping, Slices, SliceUnit, groupings
from deephoyer.weights import find_weights
from test_penalties import FORMULAS, slack

CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


@st.composite
def layers(draw):
    """A linear or convolution layer in float64, grouped or not, its weights from 1e-6 to 1e6 and some of them 0."""
    kind = draw(st.sampled_from([nn.Linear, *CONVOLUTIONS]))
    groups, inputs, outputs, kernel = (draw(st.integers(1, 3)) for _ in range(4))
    settings = {"bias": False, "dtype": torch.float64}
    if kind is nn.Linear:
        layer = kind(inputs, outputs, **settings)
    else:
        layer = kind(groups * inputs, groups * outputs, kernel, groups=groups, **settings)
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    w = torch.randn(layer.weight.shape, generator=random, dtype=torch.float64) * 10.0 ** draw(st.floats(-6, 6))
    w[torch.rand(w.shape, generator=random) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))] = 0
    layer.weight.data.copy_(w)
    if w.dim() == 4 and draw(st.booleans()):
        layer = layer.to(memory_format=torch.channels_last)
    return layer


def image(layer):
    """An input of positive numbers that every weight of the layer meets."""
    if isinstance(layer, nn.Linear):
        return torch.rand(2, layer.in_features).double() + 0.5
    return torch.rand(2, layer.in_channels, *layer.kernel_size).double() + 0.5


def touched(layer, x, outputs=slice(None)):
    """Which weights have a part in these outputs for this input."""
    (gradient,) = torch.autograd.grad(layer(x)[:, outputs].sum(), layer.weight)
    return gradient != 0


def filters(layer):
    x = image(layer)
    return [touched(layer, x, o) for o in range(layer(x).shape[1])]


def channels(layer):
    x = image(layer)
    masks = []
    for c in range(x.shape[1]):
        only = torch.zeros_like(x)
        only[:, c] = x[:, c]
        masks.append(touched(layer, only))
    return masks


def elements(layer):
    n = layer.weight.numel()
    return list(torch.eye(n, dtype=torch.bool).view(n, *layer.weight.shape))


KINDS = {"elements": elements, "filters": filters, "channels": channels}


def norms(weight, masks):
    """The l2 norm of the weights under each mask, differentiable even where all of them are 0."""
    squares = (weight**2 * torch.stack(masks)).flatten(1).sum(1)
    alive = squares > 0
    return torch.zeros_like(squares).masked_scatter(alive, squares[alive].sqrt())


def unit_of(layer, grouping):
    (unit,) = groupings(grouping)[0].units(find_weights(layer))
    return unit


@pytest.mark.parametrize("kind", KINDS)
@given(layer=layers())
def test_groups_are_the_weights_that_make_an_output_or_read_an_input(kind, layer):
    masks, unit = KINDS[kind](layer), unit_of(layer, kind)
    assert_close(unit.magnitudes(), norms(layer.weight, masks), rtol=1e-12, atol=0)
    assert unit.sizes().tolist() == [m.sum() for m in masks]
    for g, mask in enumerate(masks):
        one = torch.zeros(len(masks), dtype=torch.float64)
        one[g] = 1
        (spread,) = unit.spread(one)
        assert (spread.expand(layer.weight.shape) != 0).equal(mask)


@st.composite
def cut_layers(draw):
    """A layer, a way to cut it (perhaps into overlapping lists, perhaps several ways at once), the masks for each."""
    layer = draw(layers())
    n = layer.weight.numel()
    lists = draw(st.lists(st.lists(st.integers(0, n - 1), min_size=1, unique=True), min_size=1, max_size=5))
    kinds = draw(st.lists(st.sampled_from([*KINDS, "index"]), min_size=1, max_size=3, unique=True))
    masks = [[under(layer.weight, flat) for flat in lists] if k == "index" else KINDS[k](layer) for k in kinds]
    groups = [dh.IndexGroups({"weight": lists}) if k == "index" else k for k in kinds]
    return layer, groups, masks


def under(weight, flat):
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[flat] = True
    return mask.view(weight.shape)


def tied_at_the_cut(r, keep=0.05):
    """Whether trimmed l1 has to choose among equals, so that its gradient is not one."""
    free, r = int(len(r) * keep), r.sort(descending=True).values
    return 0 < free < len(r) and r[free - 1] == r[free] > 0


@pytest.mark.parametrize("name", FORMULAS)
@given(cut_layers(), st.floats(1e-6, 1e3), st.sampled_from(["plain", "auto"]))
def test_every_penalty_on_every_grouping_is_its_formula(name, cut, strength, backend):
    layer, groups, masks = cut
    r = [norms(layer.weight, m) for m in masks]
    assume(not (name == "trimmed-l1" and any(tied_at_the_cut(x) for x in r)))
    alive = [x for x in r if x.any()]
    value = strength * sum((FORMULAS[name](x) for x in alive), torch.zeros(()).double() * layer.weight.sum())
    (gradient,) = torch.autograd.grad(value, layer.weight)
    atol = 1e-9 * gradient.abs().max().item() + strength * sum(slack(name, x.detach()) for x in alive)

    reg = dh.Regularizer(layer, name, groups, strength=strength, backend=backend)
    loss = reg.loss()
    assert_close(loss, value, rtol=1e-9, atol=0)
    loss.backward()
    assert_close(layer.weight.grad, gradient, rtol=1e-9, atol=atol)
    layer.weight.grad = None
    reg.add_grad_()
    assert_close(layer.weight.grad, gradient, rtol=1e-9, atol=atol)


def test_slices_of_several_tensors_vanish_together():
    a, b = torch.randn(3, 2).double(), torch.randn(4, 3).double()
    part = [Slices.along("a", a, 0), Slices.along("b", b, 1, group=torch.tensor([0, -1, 1]))]
    unit = SliceUnit("both", part, count=3)
    squares = a.square().sum(1)
    squares[0] += b[:, 0].square().sum()
    squares[1] += b[:, 2].square().sum()
    assert_close(unit.magnitudes(), squares.sqrt())
    assert unit.sizes().tolist() == [6, 6, 2]
    in_a, in_b = unit.spread(torch.tensor([1.0, 10.0, 100.0]).double())
    assert in_a.flatten().tolist() == [1, 10, 100]
    assert in_b.flatten().tolist() == [1, 0, 10]


def test_a_dead_group_of_several_tensors_has_gradient_zero():
    a, b = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
    a.data[0] = 1
    r = SliceUnit("both", [Slices.along("a", a, 0), Slices.along("b", b, 0)]).magnitudes()
    r.sum().backward()
    assert_close(r, torch.tensor([2.0, 0.0]).sqrt())
    assert a.grad.isfinite().all() and b.grad.eq(0).all()


def test_biases_have_filters_but_no_channels():
    layer = nn.Linear(3, 2)
    dh.Regularizer(layer, groups="filters", parameters="*")
    with pytest.raises(dh.UserError, match="bias"):
        dh.Regularizer(layer, groups="channels", parameters="*")


def test_a_single_number_has_neither():
    layer = nn.Linear(3, 2)
    layer.gain = nn.Parameter(torch.tensor(2.0))
    dh.Regularizer(layer, groups="elements", parameters="*").add_grad_()
    for groups in ("filters", "channels"):
        with pytest.raises(dh.UserError, match="gain"):
            dh.Regularizer(layer, groups=groups, parameters="gain")


@pytest.mark.parametrize(
    "lists", [[], [[]], [[0], []], [[6]], [[-1]], [[0.5, 1.0]], [[True, False, True, False, True, False]]]
)
def test_lists_that_are_no_indices_are_refused(lists):
    with pytest.raises(dh.UserError, match="weight"):
        dh.Regularizer(nn.Linear(3, 2), groups=dh.IndexGroups({"weight": lists}))


def test_lists_for_a_parameter_that_is_not_there_are_refused():
    with pytest.raises(dh.UserError, match=r"'wieght' is not among .*weight"):
        dh.Regularizer(nn.Linear(3, 2), groups=dh.IndexGroups({"wieght": [[0]]}))
    with pytest.raises(dh.UserError, match="no group"):
        dh.Regularizer(nn.Linear(3, 2), groups=dh.IndexGroups({}))


@pytest.mark.parametrize(
    "choice", ["filter", "filters+", "", "filters+filters", [], 3, None, dh.Filters, ["filters", 3]]
)
def test_what_is_no_grouping_is_refused(choice):
    with pytest.raises(dh.UserError, match="group"):
        dh.Regularizer(nn.Linear(3, 2), groups=choice)


class Blocks(Grouping):
    """so many neighbouring columns of a linear layer's input"""

    def __init__(self, size=2):
        self.name, self.size = f"blocks of {size}", size

    def units(self, weights):
        bins = [torch.arange(w.tensor.shape[1]) // self.size for w in weights]
        return [
            SliceUnit(w.name, [Slices.along(w.name, w.tensor, 1, 1, at)], count=int(at.max()) + 1)
            for w, at in zip(weights, bins, strict=True)
        ]


@pytest.fixture
def blocks():
    GROUPINGS.add("blocks", Blocks)
    yield
    del GROUPINGS._makers["blocks"]


def test_a_grouping_takes_settings_with_its_name(blocks):
    model = nn.Linear(6, 2)
    reg = dh.Regularizer(model, groups={"name": "blocks", "size": 3}, strength=1.0)
    (term,) = reg.terms
    assert_close(term.magnitudes(), torch.stack([model.weight[:, :3].norm(), model.weight[:, 3:].norm()]))
    both = groupings([{"name": "blocks", "size": 3}, "filters"])
    assert [g.name for g in both] == ["blocks of 3", "filters"]
    with pytest.raises(dh.UserError, match="group 'blocks': got an unexpected keyword argument 'sizes'"):
        groupings({"name": "blocks", "sizes": 3})
    with pytest.raises(dh.UserError, match="need a name"):
        groupings({"size": 3})


def test_a_grouping_that_needs_the_graph_says_what_to_pass():
    with pytest.raises(dh.UserError, match=r"pass Coupled\(model, example_inputs\) instead"):
        dh.prune(nn.Linear(3, 2), dh.Density(0.5), "coupled")
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    (made,) = groupings("coupled", net, torch.zeros(1, 4))
    assert isinstance(made, dh.Coupled)


def test_a_grouping_may_be_added_as_a_function_that_says_nothing_of_a_graph():
    GROUPINGS.add("mine", lambda: dh.Filters())
    try:
        assert [g.name for g in groupings("mine")] == ["filters"]
    finally:
        GROUPINGS._makers.pop("mine")
