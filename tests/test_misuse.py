"""The API speaks up: what is used wrongly is told in a line or two, and nothing is silently left undone."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import deephoyer as dh
from deephoyer.strength import Cosine, Linear, Listed
from deephoyer.structure import tidy


def net():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def step(model, optimizer):
    model(torch.ones(3, 6)).square().sum().backward()
    optimizer.step()


def refused(call, *words):
    with pytest.raises(dh.UserError) as caught:
        call()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert text.count("\n") <= 1 and len(text) < 400


# Parameters that are replaced


@pytest.mark.parametrize("how", ["assign", "new parameter"])
@pytest.mark.parametrize("what", ["hold", "attach"])
def test_a_parameter_replaced_behind_a_hook_is_noticed(how, what):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "hold":
        dh.prune(model, dh.Density(0.5)).hold(optimizer)
    else:
        dh.Regularizer(model).attach(optimizer)
    step(model, optimizer)
    if how == "assign":
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    else:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    refused(lambda: step(model, optimizer), "weight", "was replaced", f"after {what}()")


@pytest.mark.parametrize("how", ["replaced", "taken out"])
@pytest.mark.parametrize("what", ["hold", "attach"])
def test_a_layer_replaced_behind_a_hook_is_noticed_and_one_taken_out_is_not_missed(how, what):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks, reg = dh.prune(model, dh.Density(0.5)), dh.Regularizer(model)
    masks.hold(optimizer) if what == "hold" else reg.attach(optimizer)
    if how == "replaced":
        model[2] = nn.Linear(4, 2)
        refused(lambda: step(model, optimizer), "2.weight", "was replaced", f"after {what}()")
    else:
        model.pop(2)
        step(model, optimizer)


def test_a_parameter_that_only_moved_to_another_name_is_not_replaced():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold = dh.prune(model, dh.Density(0.5)).hold(optimizer)
    dh.Regularizer(model).attach(optimizer)
    torch_prune.l1_unstructured(model[0], "weight", 2)
    step(model, optimizer)
    hold.release()


def test_loading_into_the_same_parameters_is_no_replacement():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = dh.prune(model, dh.Density(0.5))
    masks.hold(optimizer)
    model.load_state_dict(net().state_dict())
    model.double().float()
    step(model, optimizer)
    assert not model[0].weight[~masks["0.weight"]].any()


def test_masks_are_not_applied_to_what_has_no_values():
    masks = dh.prune(net(), dh.Density(0.5))
    refused(lambda: masks.apply(net().to("meta")), "meta device")


# What would count twice, or not at all


def test_a_loss_with_the_penalty_of_an_attached_regularizer_is_told_to_count_twice():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = dh.Regularizer(model).attach(optimizer)
    with pytest.warns(UserWarning, match="counts twice"):
        (model(torch.ones(1, 6)).sum() + reg.loss()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reg.loss().item()  # to look at it is no mistake
        reg.detach()
        reg.loss().backward()


def test_frozen_layers_that_prune_skips_are_named():
    model = net()
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="what is frozen keeps all of its weights: 0.weight"):
        masks = dh.prune(model, dh.Density(0.5))
    assert set(masks) == {"2.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dh.prune(model, dh.Density(0.5), parameters="2.weight")


# Models that can't be worked on


def sparse():
    model = nn.Linear(6, 4)
    model.weight = nn.Parameter(model.weight.detach().to_sparse())
    return model


MODELS = {
    "meta": (lambda: nn.Linear(6, 4, device="meta"), ["meta device", "weight"]),
    "sparse": (sparse, ["stored sparse", "to_dense()"]),
    "complex": (lambda: nn.Linear(6, 4, dtype=torch.complex64), ["complex"]),
    "lazy": (lambda: nn.LazyLinear(4), ["lazy", "run one batch"]),
    "quantized": (lambda: torch.ao.nn.quantized.Linear(6, 4), ["no parameters to work on"]),
    "a class": (lambda: nn.Linear, ["is not a model"]),
    "a list": (lambda: [nn.Linear(6, 4)], ["is not a model", "list"]),
    "parameters": (lambda: net().parameters(), ["is not a model", "generator"]),
    "nothing": (lambda: None, ["is not a model", "NoneType"]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_be_worked_on_are_refused_in_a_line(kind):
    make, words = MODELS[kind]
    model = make()
    refused(lambda: dh.Regularizer(model), *words)
    refused(lambda: dh.prune(model, dh.Density(0.5)), *words)


def scripted():
    return torch.jit.script(net())


UNSOUND = {"meta": MODELS["meta"], "sparse": MODELS["sparse"], "a list": MODELS["a list"], "nothing": MODELS["nothing"]}
UNSOUND |= {"scripted": (scripted, ["TorchScript"])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNSOUND)
def test_what_goes_through_a_network_refuses_models_without_layers_or_values(kind, tmp_path):
    make, words = UNSOUND[kind]
    model, x, file = make(), torch.ones(2, 6), tmp_path / "net.onnx"
    calls = [dh.compact, dh.Coupled, dh.explain, dh.summary, lambda m, x: dh.export(m, x, file)]
    for call in (*calls, lambda m, x: dh.shrink(m, x, dh.Target(macs=0.5))):
        refused(lambda call=call: call(model, x), *words)
    if kind != "meta":
        refused(lambda: dh.load(saved(tmp_path), model=model), *words)


def saved(folder):
    dh.save(nn.Linear(6, 4), folder / "net.safetensors")
    return folder / "net.safetensors"


def test_examples_that_a_model_cannot_read_are_told_in_the_same_words_everywhere(tmp_path):
    wrong = torch.ones(2, 7)
    for call in (dh.compact, dh.Coupled, dh.summary, lambda m, x: dh.export(m, x, tmp_path / "net.onnx")):
        refused(lambda call=call: call(net(), wrong), "the model can't be run on the example inputs", "2x7 and 6x4")


def test_examples_that_prove_nothing_are_refused():
    for call in (dh.compact, dh.Coupled):
        refused(lambda call=call: call(net(), torch.ones(0, 6)), "there is no number in them")
        refused(lambda call=call: call(net(), "x"), "example inputs: a tensor, a tuple or a dict of tensors is wanted")


def test_batches_that_can_be_read_only_once_are_refused_where_they_are_read_again():
    model, x = net(), torch.ones(2, 6)
    settings = {"score": "taylor", "loss": lambda m, batch: m(batch).sum(), "batches": iter([x])}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(lambda: dh.Plan(model, x, optimizer, dh.Target(macs=0.5), 9, **settings), "can be read only once")


def test_compaction_removes_as_much_in_inference_mode():
    def half_dead():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
        with torch.no_grad():
            model[0].weight[:5], model[0].bias[:5], model[2].weight[:4], model[2].bias[:4] = 0, 0.3, 0, 0
        return model, torch.randn(2, 3, 8, 8)

    def parameters(model):
        return sum(p.numel() for p in model.parameters())

    plain = parameters(dh.compact(*half_dead()))
    model, x = half_dead()
    with torch.inference_mode():
        assert parameters(dh.compact(model, x)) == plain < parameters(model)
        made_there = half_dead()
        assert parameters(dh.compact(*made_there)) == parameters(tidied(*made_there)) == plain
    assert parameters(dh.compact(*made_there)) == plain


def tidied(model, x):
    return dh.compact(tidy(model, x), x)


# Values


NO_SIZES = [10**400, 10**5000, -1, float("nan"), True, "1", None, [1, 2], 1j, np.ones(3), object(), torch.ones(2)]


@pytest.mark.parametrize("value", NO_SIZES, ids=lambda value: type(value).__name__)
def test_what_is_no_strength_is_refused(value):
    refused(lambda: dh.Regularizer(net(), strength=value), "strength is", "0 or more")
    refused(lambda: dh.StdRatio(value), "std-ratio", "0 or more")
    refused(lambda: dh.SCAD(lam=value), "scad: lam", "0 or more")


SCALARS = [
    np.float32(0.25),
    np.float64(0.25),
    np.array(0.25),
    np.float16(0.25),
    torch.tensor(0.25),
    torch.tensor([0.25]),
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_strengths_and_thresholds_may_be_numpy_or_torch_scalars(value):
    reg = dh.Regularizer(net(), strength=value)
    assert reg.strength_now() == {"elements": 0.25}
    reg.strengthen(value)
    assert reg.strength_now() == {"elements": 0.0625}
    assert dh.Regularizer(net(), strength=lambda step: value).strength_now() == {"elements": 0.25}
    assert Linear(value, steps=np.int64(4))(2) == 0.125 and Cosine(value, steps=2)(2) == 0.25
    assert Listed((value, 1), steps=np.int32(1))(0) == 0.25
    assert dh.Density(value) == dh.Density(0.25) and dh.TransformedL1(value).a == 0.25


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert dh.Regularizer(net(), strength=np.int64(2)).strength_now() == {"elements": 2.0}
    dh.prune(net(), dh.Density(0.5), "filters", multiple=np.int64(2))
    refused(lambda: dh.prune(net(), dh.Density(0.5), "filters", multiple=1.5), "multiple is 1.5", "1 or more")


@pytest.mark.parametrize("value", [3, [3], [None], b"weight", {1: 2}])
def test_what_is_no_pattern_of_parameters_is_refused(value):
    refused(lambda: dh.Regularizer(net(), parameters=value), "parameters:", "neither a glob pattern")
    refused(lambda: dh.prune(net(), dh.Density(0.5), parameters=value), "parameters:", "neither a glob pattern")


@pytest.mark.parametrize("path", [3, None, b"a", ["a"], object()])
def test_what_is_no_path_is_refused(path):
    refused(lambda: dh.save(net(), path), "is not a path")
    refused(lambda: dh.load(path, model=net()), "is not a path")


def test_other_things_of_the_wrong_kind_are_told():
    state = {"steps": 1, "strength": {"elements": 5}}
    refused(lambda: dh.Regularizer(net()).load_state_dict(state), "is not a schedule")
    refused(lambda: dh.Masks(3), "masks: 3 is no mapping")
    refused(lambda: dh.PerLayer(3), "per-layer: 3 is no mapping")
    refused(lambda: dh.IndexGroups([[1]]), "is no mapping")
    refused(lambda: dh.Regularizer(net(), groups=3), "neither a grouping")
    refused(lambda: dh.Regularizer(net()).load_state_dict(3), "is not what a regularizer's state_dict() gives")
    refused(lambda: dh.Regularizer(net()).load_state_dict({"steps": 1}), "state_dict()")
    constant = {"steps": 1, "strength": {"elements": {"kind": "constant"}}}
    refused(lambda: dh.Regularizer(net()).load_state_dict(constant), "is not the state of a schedule")
    refused(
        lambda: dh.Regularizer(net()).load_state_dict({"steps": "x", "strength": {"elements": None}}), "the steps of"
    )
    refused(lambda: dh.Regularizer(net()).attach(3), "int is not a PyTorch optimizer")
    refused(lambda: dh.save(3, "a.safetensors"), "is not a model")
    refused(lambda: dh.load("a.safetensors", model=3), "a.safetensors")
