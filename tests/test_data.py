"""MNIST comes with the package, whole and checked; a data set is bytes and the way to floats."""

import shutil

import pytest
import torch

from deephoyer import data
from deephoyer.data import mnist as mnist_file
from deephoyer.data.mnist import DIGESTS, FOLDER, _checked
from deephoyer.errors import UserError


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
