"""Small images held in memory: the crops of torchvision made by matrix products, and runs on them to the end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import deephoyer as dh
import image_folders
from deephoyer.lab import data, recipe
from deephoyer.lab.data import Images
from deephoyer.lab.data.small_images import random_boxes, resized_crops
from deephoyer.lab.train import batches
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folders.make(tmp_path_factory.mktemp("small"))


def held(photos, **settings):
    return data.load("folder", path=str(photos), **{"size": 28, "memory": True} | settings)


def made(tmp_path, photos, *changes):
    return recipe.read(str(image_folders.recipe_file(tmp_path, photos)), ["data.memory=true", *changes])


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 7, 24, 61]), st.booleans(), st.data())
def test_crops_by_matrix_products_are_those_of_torchvision(height, width, size, flip, numbers):
    top, left = numbers.draw(st.integers(0, 40 - height)), numbers.draw(st.integers(0, 40 - width))
    x = torch.randint(0, 256, (1, 3, 40, 40), generator=torch.Generator().manual_seed(height * width)).float()
    plain = F.resized_crop(x, top, left, height, width, [size, size], antialias=True)
    box = torch.tensor([[top, left, height, width]]).float()
    found = resized_crops(x.to(torch.uint8), box, torch.tensor([flip]), size)
    torch.testing.assert_close(found, plain.flip(3) if flip else plain, rtol=0, atol=5e-3)


@given(st.integers(1, 99), st.integers(1, 99), st.floats(0.01, 0.99), st.integers(0, 99))
def test_boxes_lie_in_the_image_and_have_the_area_and_shape_that_were_asked_for(height, width, crop, seed):
    boxes = random_boxes(50, height, width, crop, torch.Generator().manual_seed(seed))
    top, left, rows, columns = boxes.unbind(1)
    assert (boxes == boxes.round()).all() and (rows >= 1).all() and (columns >= 1).all()
    assert (top >= 0).all() and (left >= 0).all() and (top + rows <= height).all() and (left + columns <= width).all()
    rounding = (rows + columns) / 2 + 1
    if 3 / 4 < width / height < 4 / 3:
        assert ((rows * columns + rounding) >= crop * height * width).all()


def test_boxes_are_distributed_like_those_of_torchvision():
    torch.manual_seed(0)
    theirs = v2.RandomResizedCrop(8, scale=(0.25, 1.0))
    image = torch.zeros(3, 64, 64)
    drawn = [theirs.make_params([image]) for _ in range(4000)]
    expected = torch.tensor([[float(d[k]) for k in ("top", "left", "height", "width")] for d in drawn])
    found = random_boxes(40_000, 64, 64, 0.25, torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.mean(0), expected.mean(0), rtol=0, atol=0.8)
    torch.testing.assert_close(found.std(0), expected.std(0), rtol=0, atol=0.8)


def test_a_crop_depends_on_the_seed_and_the_image_alone(photos):
    source = held(photos)
    whole, part = (
        batches.cropped(source, pool, size, 6) for pool, size in ((torch.arange(60), 10), (torch.arange(9), 2))
    )
    place = {int(i): at for at, i in enumerate(whole.index.flatten())}
    at = torch.tensor([place[int(i)] for i in part.index.flatten()])
    assert torch.equal(part.box.flatten(0, 1), whole.box.flatten(0, 1)[at])
    assert torch.equal(part.flip.flatten(), whole.flip.flatten()[at])
    assert not torch.equal(batches.cropped(source, torch.arange(60), 10, 7).box, whole.box)
    assert torch.equal(whole.index, batches.draw(torch.arange(60), 10, 0, False, 6).index)


@pytest.mark.parametrize("settings", [{}, {"size": 50}, {"size": 20, "resize": 20, "normalize": False}])
def test_evaluation_sees_the_same_images_as_when_they_are_streamed(photos, settings):
    streamed = data.load("folder", path=str(photos), workers=0, **{"size": 28} | settings)
    for images in (Images("train", torch.tensor([0, 20, 59])), Images("test")):
        pairs = zip(held(photos, **settings).shown(images, 10), streamed.shown(images, 10), strict=True)
        for (x, y), (expected, labels) in pairs:
            assert torch.equal(x, expected) and torch.equal(y, labels)


def test_without_crops_training_sees_what_evaluation_sees(photos):
    source = held(photos, crop=1, flip=False)
    step = batches.cropped(source, torch.arange(60), 10, 3).step(2)
    x, y = batches.images(source, step, 0)
    ((expected, labels),) = source.shown(Images("train", step.numbers), 10)
    assert step.box is None and torch.equal(x, expected) and torch.equal(y, labels)


def test_images_that_differ_in_size_are_told_to_be_streamed(tmp_path):
    photos = image_folders.make(tmp_path / "photos", classes=2, train=2, val=1)
    wide = image_folders.make(tmp_path / "wide", classes=2, train=2, val=1, size=(48, 32))
    (wide / "train" / "class001" / "001.jpg").rename(photos / "train" / "class001" / "001.jpg")
    with pytest.raises(dh.UserError, match=r"class001/001.jpg is 48×32 and others are 40×32; leave it out"):
        held(photos)


@pytest.mark.parametrize("count", [15, 77])
def test_several_processes_decode_the_same_pixels_as_one(tmp_path, count):
    photos = image_folders.make(tmp_path / "photos", classes=3, train=count, val=2)
    (photos / "train" / "class001" / "003.jpg").write_bytes(b"no image")
    one, several = held(photos, workers=0), held(photos, workers=3)
    assert all(torch.equal(a, b) for a, b in zip(one.split("train"), several.split("train"), strict=True))
    assert one.unreadable == several.unreadable == {("train", count + 3): "train/class001/003.jpg"}
    plain = Image.open(photos / "train" / "class002" / "014.jpg")
    assert torch.equal(several.split("train")[0][2 * count + 14], F.pil_to_tensor(plain))


def test_an_image_that_can_not_be_read_is_named_and_of_no_class(tmp_path):
    photos = image_folders.make(tmp_path / "photos", classes=2, train=3, val=1)
    (photos / "train" / "class000" / "000.jpg").write_bytes(b"no image")
    source = held(photos)
    assert source.split("train")[1].tolist() == [-100, 0, 0, 1, 1, 1]
    assert source.unreadable == {("train", 0): "train/class000/000.jpg"}
    with pytest.raises(dh.UserError, match=r"1 image can't be read .*skip_at_most is 0"):
        held(photos, skip_at_most=0)


def test_a_run_on_images_in_memory_goes_through_all_stages_and_resumes(tmp_path, photos, monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.resume.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("deephoyer.lab.train.resume.SAVE_SHARE", 1e9)
    job = made(tmp_path, photos, "pretrain.epochs=8", "pretrain.lr=1e-2")
    whole = Run(job, tmp_path / "whole").execute()
    cut = Run(job, tmp_path / "cut")
    monkeypatch.setattr(cut, "prune", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cut.execute()
    resumed = Run(job, tmp_path / "cut").execute()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)
    result = finish(whole)
    assert result["changed_predictions"] == 0 and whole.masks.density == pytest.approx(0.5, abs=1e-3)
    assert whole.state.accuracy["dense"] > 0.5 and job.digest() != made(tmp_path, photos, "data.memory=false").digest()


@pytest.mark.parametrize("held_in_memory", [False, True])
def test_bfloat16_channels_last_compiled_blocks_and_accumulation_go_together(
    tmp_path, photos, held_in_memory, monkeypatch
):
    """Whether images are streamed or lie in memory; the compiler's own code is replaced, for it takes a minute."""
    monkeypatch.setattr("deephoyer.lab.train.compiling.BACKEND", "aot_eager")
    changes = ["precision=bfloat16", "channels_last=true", "compile=blocks", "accumulate=3", "pretrain.epochs=1"]
    changes += ["regularize.epochs=1", "finetune.epochs=1", "model={name: resnet-20, classes: 4}"]
    job = made(tmp_path, photos, *changes, f"data.memory={str(held_in_memory).lower()}", "data.workers=0")
    run = Run(job, tmp_path / "run").execute()
    assert set(run.state.accuracy) == {"dense", "regularized", "pruned", "finetuned"}
    assert run.masks.density == pytest.approx(0.5, abs=0.05)


def test_teachers_are_asked_about_each_crop(tmp_path, photos):
    Run(made(tmp_path, photos, "regularize=null", "prune=null", "finetune=null"), tmp_path / "teacher").execute()
    file = tmp_path / "teacher" / "dense.safetensors"
    taught = [f"distill={{teachers: [{{file: {file}, model: plain}}]}}", "pretrain=null", "regularize.epochs=1"]
    run = Run(made(tmp_path, photos, *taught, "finetune.epochs=1"), tmp_path / "run").execute()
    assert run.teachers.table is None and 0 < run.state.accuracy["finetuned"] <= 1
    with pytest.raises(dh.UserError, match="cropped anew each time"):
        Run(made(tmp_path, photos, *taught, "distill.keep=true"), tmp_path / "kept").execute()


@pytest.mark.cuda
def test_captured_steps_on_images_in_memory_are_the_plain_ones_and_crops_those_of_the_processor(tmp_path, photos):
    source = held(photos)
    step = batches.cropped(source, torch.arange(60), 10, 3).step(0)
    there = batches.Draw(*(None if t is None else t.cuda() for t in step))
    found, expected = batches.images(source.to("cuda"), there, 0), batches.images(source, step, 0)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=0, atol=1e-4)
    changes = ["device=cuda", "regularize=null", "prune=null", "finetune=null", "pretrain.optimizer=sgd"]
    captured, plain = (
        Run(made(tmp_path, photos, *changes, f"capture={c}"), tmp_path / c).execute() for c in ("auto", "off")
    )
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
