"""Checkpoints by themselves: how many are kept, what an optimizer's state may be, weights from torch files."""

import os
import pickle

import pytest
import torch
from torch import nn

import deephoyer as dh
from deephoyer.export import manifest
from deephoyer.lab.runs import checkpoint


def test_the_last_two_checkpoints_are_kept_and_the_newest_is_read(tmp_path):
    for number in range(5):
        checkpoint.save(tmp_path, {"x": torch.tensor([float(number)])}, {"number": number})
    assert checkpoint.numbers(tmp_path) == [4, 5]
    tensors, state, troubles = checkpoint.newest(tmp_path)
    assert tensors["x"].item() == 4 and state == {"number": 4} and troubles == []


@pytest.mark.parametrize("name", ["x.step", "99.step", "0.", "2.step"])
def test_state_that_no_parameter_of_the_optimizer_has_is_refused(name):
    net = nn.Linear(3, 2)
    with pytest.raises(dh.UserError, match="which this run's optimizer does not have"):
        checkpoint.refill(torch.optim.Adam(net.parameters()), {name: torch.ones(())}, {})


@pytest.mark.parametrize("before", ["", "module.", "module._orig_mod.", "model."])
@pytest.mark.parametrize(
    "around",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "optimizer": {"state": {0: {"step": torch.ones(())}}, "lr": 0.1}},
        lambda s: {"model": s, "model_ema": {k: 0 * v for k, v in s.items()}},
        lambda s: {"net": s, "epoch": 3},
    ],
)
def test_a_torch_file_of_weights_fills_a_model(tmp_path, around, before):
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(around({f"{before}{k}": v for k, v in net.state_dict().items()}), tmp_path / "net.pth.tar")
    assert checkpoint.fill(other, tmp_path / "net.pth.tar", "start") == []
    assert torch.equal(other.weight, net.weight)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut off"])
def test_a_torch_file_that_is_damaged_is_told(tmp_path, content):
    (tmp_path / "net.pth").write_bytes(content)
    with pytest.raises(dh.UserError, match=r"start: .*net.pth (can't be read|holds more than tensors)"):
        checkpoint.fill(nn.Linear(3, 2), tmp_path / "net.pth", "start")


def test_weights_of_another_network_are_told_in_a_line_or_two(tmp_path):
    torch.save(nn.Sequential(*(nn.Linear(3, 3) for _ in range(99))).state_dict(), tmp_path / "net.pth")
    with pytest.raises(dh.UserError, match="does not fit the model") as told:
        checkpoint.fill(nn.Linear(3, 2), tmp_path / "net.pth", "start")
    assert len(str(told.value)) < 700


class Runs:
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


def test_a_torch_file_that_wants_to_run_something_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Runs()}, "net.pt")
    with pytest.raises(dh.UserError, match="contains more than tensors and is not opened"):
        checkpoint.fill(nn.Linear(3, 2), tmp_path / "net.pt", "start")
    assert not (tmp_path / "it-ran").exists()


def test_only_a_classifier_of_other_classes_may_differ_and_only_where_that_is_said(tmp_path):
    def net(classes, width=4):
        return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, classes))

    given, wanted = net(5), net(7)
    torch.save(given.state_dict(), tmp_path / "net.pt")
    with pytest.raises(dh.UserError, match="does not fit the model"):
        checkpoint.fill(wanted, tmp_path / "net.pt", "start")
    assert checkpoint.fill(wanted, tmp_path / "net.pt", "start", classes_may_differ=True) == ["2.weight", "2.bias"]
    assert torch.equal(wanted[0].weight, given[0].weight)
    with pytest.raises(dh.UserError, match="does not fit the model"):
        checkpoint.fill(net(7, width=6), tmp_path / "net.pt", "start", classes_may_differ=True)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol_are_known_for_what_they_are(tmp_path, protocol):
    (tmp_path / "net.safetensors").write_bytes(pickle.dumps({"a": [1, 2, 3]}, protocol))
    with pytest.raises(dh.UserError, match="is a pickle"):
        dh.load(tmp_path / "net.safetensors", model=nn.Linear(3, 2))


@pytest.mark.parametrize(
    "tensor, why",
    [
        (torch.ones(3, dtype=torch.complex64), "complex64.*can't be saved"),
        (torch.eye(3).to_sparse(), "stored sparse.*make it dense first"),
        (torch.ones(3, device="meta"), "on the meta device and has no values yet"),
    ],
    ids=["complex", "sparse", "meta"],
)
def test_tensors_that_files_cannot_hold_are_refused(tmp_path, tensor, why):
    net = nn.Linear(3, 2)
    net.register_buffer("extra", tensor)
    with pytest.raises(dh.UserError, match=f"extra is .*{why}"):
        dh.save(net, tmp_path / "net.safetensors")


def test_an_old_checkpoint_that_is_gone_already_is_no_trouble(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "numbers", lambda folder: [1, 2, 3])
    assert checkpoint.save(tmp_path, {"x": torch.ones(1)}, {}).name == "000004.safetensors"


def test_a_name_with_a_colon_is_refused(tmp_path):
    net = nn.Linear(3, 2)
    net.register_buffer("odd:", torch.ones(2))
    with pytest.raises(dh.UserError, match="'odd:' has a colon in it"):
        dh.save(net, tmp_path / "net.safetensors")


@pytest.mark.parametrize(("kind", "told"), [("DTensor", "gather the model's state first"), ("Int8", "is quantized")])
def test_of_a_tensor_that_is_more_than_one_it_is_told_what_to_do(tmp_path, kind, told):
    net = nn.Linear(3, 2)
    net.register_buffer("odd", torch.ones(2).as_subclass(type(kind, (torch.Tensor,), {})))
    with pytest.raises(dh.UserError, match=f"odd is a {kind}, which files can't hold: .*{told}"):
        dh.save(net, tmp_path / "net.safetensors")


@pytest.mark.parametrize("version", [-1, 2**31, True, "1"])
def test_a_modules_version_is_a_whole_number(version):
    with pytest.raises(ValueError, match="not a version"):
        manifest._version("versions.fc", version)


def test_no_packed_tensor_is_larger_than_an_address_can_say():
    manifest._packed("packed.w", {"shape": [2**62 - 1], "form": "bitmap"})
    with pytest.raises(ValueError, match="not a list of up to 16 sizes"):
        manifest._packed("packed.w", {"shape": [2**62], "form": "bitmap"})
