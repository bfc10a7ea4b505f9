"""Streamed images: the same crops whoever reads them, runs cut off in the middle of an epoch, folders with mistakes."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from torchvision.transforms import v2

import deephoyer as dh
import image_folders
from deephoyer.lab import data, models, recipe
from deephoyer.lab.data import Images
from deephoyer.lab.data.image_files import read_image
from deephoyer.lab.data.streaming import Request, _RandomResizedCrop
from deephoyer.lab.open_network import open_network
from deephoyer.lab.runs import checkpoint, find
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train import batches
from deephoyer.lab.train.result import finish, tables
from deephoyer.lab.train.run import Run


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folders.make(tmp_path_factory.mktemp("photos"))


@pytest.fixture(autouse=True)
def saves_every_step(monkeypatch):
    for name, value in (("SAVE_SECONDS", 0.0), ("SAVE_WITHIN", 0.0), ("SAVE_SHARE", 1e9)):
        monkeypatch.setattr(f"deephoyer.lab.train.resume.{name}", value)


def made(tmp_path, photos, *changes):
    return recipe.read(str(image_folders.recipe_file(tmp_path, photos)), ["data.workers=0", *changes])


def weights(run):
    return {name: t.clone() for name, t in run.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def metrics(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


# Reading


def test_a_crop_depends_on_the_seed_and_the_image_alone(photos):
    def read(workers, index, seed):
        source = data.load("folder", path=str(photos), size=28, workers=workers)
        return torch.cat([x for x, _ in source.stream([Request("train", part, seed) for part in index])])

    whole = read(0, [[3, 14, 15], [9, 2]], seed=6)
    assert torch.equal(read(2, [[3, 14, 15], [9, 2]], seed=6), whole)
    assert torch.equal(read(1, [[2], [15, 9], [14, 3]], seed=6), whole[[4, 2, 3, 1, 0]])
    assert not torch.equal(read(0, [[3, 14, 15], [9, 2]], seed=7), whole)


def test_reading_an_image_leaves_the_random_numbers_of_dropout_alone(photos):
    source = data.load("folder", path=str(photos), size=28, workers=0)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(source.stream([Request("train", [0, 1], 5)]))
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_sees_the_centre_of_the_image_after_its_shorter_side_is_resized(photos):
    source = data.load("folder", path=str(photos), size=24, resize=32, normalize=False, workers=0)
    ((x, y),) = source.shown(Images("test", torch.tensor([7, 8])), 2)
    original = v2.functional.pil_to_tensor(read_image(photos / "val" / "class001" / "001.jpg")) / 255
    assert torch.equal(x[0], original[:, 4:28, 8:32]) and y.tolist() == [1, 1]


@given(st.integers(0, 999), st.sampled_from([8, 24, 50]))
def test_crops_are_those_of_torchvision(photos, seed, size):
    image = read_image(photos / "train" / "class000" / "000.jpg")
    torch.manual_seed(seed)
    ours = _RandomResizedCrop(size, 0.08)(image)
    torch.manual_seed(seed)
    assert torch.equal(ours, v2.RandomResizedCrop(size, antialias=True)(v2.functional.pil_to_tensor(image)))


def test_an_epoch_has_the_images_of_the_same_epoch_in_memory(photos):
    source = data.load("folder", path=str(photos), size=28, workers=0)
    pool = torch.arange(3, 60)
    streamed, drawn = batches.Streamed(source, pool, 12, seed=4), batches.draw(pool, 12, 0, False, seed=4)
    assert torch.equal(streamed.index, drawn.index)
    labels = [batch.y for batch in streamed.steps(range(2, 4))]
    assert torch.equal(torch.stack(labels), drawn.index[2:4] // 15)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_each_image_of_a_batch_is_with_one_of_the_processes(count, per, seed):
    drawn = batches.draw(torch.arange(3 * count * per + 1), count * per, 1, True, seed)
    shares = [drawn.share(rank, count) for rank in range(count)]
    for part, pieces in zip(drawn.parts(), zip(*(s.parts() for s in shares), strict=True), strict=True):
        assert part is None or torch.equal(torch.cat(pieces, 1), part)


@given(st.integers(1, 7), st.integers(0, 30))
def test_each_image_of_an_evaluation_is_with_one_of_the_processes(count, images):
    digits = data.load("mnist", limit=20)
    shares = [Images("test", torch.arange(images)).share(digits, rank, count) for rank in range(count)]
    assert sorted(torch.cat([s.index for s in shares]).tolist()) == list(range(images))


def test_a_batch_that_can_not_be_divided_is_told_with_what_would_do(tmp_path, photos):
    with pytest.raises(dh.UserError, match=r"batch_size: 12 images.*5 parts.*multiple of 5"):
        Run(made(tmp_path, photos, "accumulate=5"), tmp_path / "run").execute()


# Folders with mistakes


def copied(photos, folder):
    for path in photos.rglob("*.jpg"):
        target = folder / path.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


def test_images_that_can_not_be_read_are_named_counted_and_left_out(tmp_path, photos):
    broken = copied(photos, tmp_path / "broken")
    (broken / "train" / "class001" / "003.jpg").write_bytes(b"no image")
    (broken / "val" / "class000" / "001.jpg").write_bytes((photos / "val/class000/001.jpg").read_bytes()[:300])
    notes = []
    job = Run(made(tmp_path, broken), tmp_path / "run")
    job.progress.note = notes.append
    job.execute()
    assert any("train/class001/003.jpg" in note for note in notes)
    assert metrics(tmp_path / "run")[-1]["unreadable"] == 2 and any("val/class000/001.jpg" in note for note in notes)
    assert (job.state.accuracy["finetuned"] * 23) % 1 < 1e-6 or (1 - job.state.accuracy["finetuned"] * 23 % 1) < 1e-6
    with pytest.raises(dh.UserError, match=r"2 images can't be read .*skip_at_most is 1"):
        Run(made(tmp_path, broken, "data.skip_at_most=1", "epoch_selection=test-best"), tmp_path / "strict").execute()


def test_an_image_that_can_not_be_read_has_no_part_in_the_gradient(tmp_path, photos):
    broken = copied(photos, tmp_path / "broken")
    (broken / "train" / "class000" / "000.jpg").write_bytes(b"")
    source = data.load("folder", path=str(broken), size=28, workers=0)
    ((x, y),) = source.stream([Request("train", [0, 1], 5)])
    assert y.tolist() == [-100, 0] and not x[0].any() and x[1].any()
    assert source.unreadable == {("train", 0): "train/class000/000.jpg"}


def test_class_folders_that_differ_between_train_and_val_are_told(tmp_path, photos):
    wrong = copied(photos, tmp_path / "wrong")
    (wrong / "val" / "class003").rename(wrong / "val" / "class004")
    with pytest.raises(dh.UserError, match="class003 only in train, class004 only in val"):
        data.load("folder", path=str(wrong))


@pytest.mark.parametrize(
    "folders, said",
    [
        ((), "there is no folder"),
        (("train/a", "val/a"), "no images in train/a; a class needs images"),
        (("train", "val"), "train has no class folders"),
        (("val/a",), "no images in val/a"),
        (("x",), "no folder val"),
        (("train/a", "valid/a"), "no folder val.*Rename valid to val"),
        (("training/a", "test/a"), "Rename training to train and test to val"),
        (("Train/a", "val/a"), "no folder train. Rename Train to train"),
        (("flowers/train/a", "flowers/val/a"), "empty/flowers has one: is that the folder"),
    ],
)
def test_a_folder_without_images_is_told(tmp_path, folders, said):
    root = tmp_path / "empty"
    for folder in folders:
        (root / folder).mkdir(parents=True)
    with pytest.raises(dh.UserError, match=said):
        data.load("folder", path=str(root))


@pytest.mark.parametrize("inner", ["train", "."])
def test_without_val_a_share_of_each_class_takes_its_place_the_same_in_every_run(tmp_path, photos, inner):
    (tmp_path / "flowers" / inner).parent.mkdir(exist_ok=True)
    alone = copied(photos / "train", tmp_path / "flowers" / inner)
    source = data.load("folder", path=str(tmp_path / "flowers"), size=28, val_split=0.2)
    names = {split: [files.name(i) for i in range(len(files))] for split, files in source.files.items()}
    assert np.bincount(source.files["test"].labels).tolist() == [3] * 4
    assert len(names["train"]) == 48 and not set(names["train"]) & set(names["test"])
    (alone / "class000" / "new.jpg").write_bytes((alone / "class000" / "000.jpg").read_bytes())
    again = data.load("folder", path=str(tmp_path / "flowers"), size=28, val_split=0.2).files["test"]
    assert {again.name(i) for i in range(len(again))} - set(names["test"]) <= {f"{alone.name}/class000/new.jpg"}


def test_a_split_that_can_not_be_is_told(tmp_path, photos):
    def told(match, path, **settings):
        with pytest.raises(dh.UserError, match=match):
            data.load("folder", path=str(path), **settings)

    told("has a folder val, so .* leave out data.val_split", photos, val_split=0.2)
    told("no folder val.*data.val_split=0.2", photos / "train")
    told("val_split is 1; it must be a share", photos, val_split=1)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"")
    told("class a has a single image", tmp_path, val_split=0.5)


def test_an_archive_in_place_of_a_folder_is_told(tmp_path):
    (tmp_path / "flowers.zip").write_bytes(b"PK")
    with pytest.raises(dh.UserError, match=r"flowers.zip is a file, not a folder: unpack it first"):
        data.load("folder", path=str(tmp_path / "flowers.zip"))


def test_a_path_may_have_a_variable_of_the_environment_in_it(photos, monkeypatch):
    monkeypatch.setenv("PHOTOS", str(photos.parent))
    assert data.load("folder", path=f"$PHOTOS/{photos.name}", size=28).classes == 4


def test_hidden_files_and_folders_are_no_data(tmp_path, photos):
    mixed = copied(photos, tmp_path / "mixed")
    count = data.load("folder", path=str(mixed)).count("train")
    for place in ("train", "val", "train/class000"):
        (mixed / place / ".ipynb_checkpoints").mkdir()
        (mixed / place / ".DS_Store").write_bytes(b"x")
    (mixed / "train/class000/.ipynb_checkpoints/000.jpg").write_bytes((mixed / "train/class000/000.jpg").read_bytes())
    (mixed / "train/class000/._000.jpg").write_bytes(b"what macOS keeps beside a file")
    source = data.load("folder", path=str(mixed))
    assert source.classes == 4 and source.count("train") == count and source.passed_over is None


def test_files_that_are_no_images_are_counted_and_told(tmp_path, photos):
    mixed, notes = copied(photos, tmp_path / "mixed"), []
    for name in ("a.heic", "b.HEIC", "labels.csv"):
        (mixed / "train/class000" / name).write_bytes(b"x")
    job = Run(made(tmp_path, mixed, "held_out=0.001"), tmp_path / "run")
    job.progress.note = notes.append
    with pytest.raises(dh.UserError, match="held_out"):
        job.execute()
    assert notes == ["files passed over, for their names are not those of images: 2 .heic, 1 .csv"]


def test_a_class_with_files_of_another_kind_alone_is_told_which(tmp_path, photos):
    mixed = copied(photos, tmp_path / "mixed")
    for path in list((mixed / "train/class001").iterdir()):
        path.rename(path.with_suffix(".heic"))
    with pytest.raises(dh.UserError, match=r"no images in train/class001 \(class001 has only .heic\)"):
        data.load("folder", path=str(mixed))


def test_a_link_that_leads_back_up_is_not_followed_for_ever(tmp_path, photos):
    looped = copied(photos, tmp_path / "looped")
    count = data.load("folder", path=str(looped)).count("train")
    (looped / "train/class000/again").symlink_to(looped / "train")
    (looped / "train/class001").rename(tmp_path / "elsewhere")
    (looped / "train/class001").symlink_to(tmp_path / "elsewhere")
    with_links = [path.decode() for path in data.load("folder", path=str(looped)).files["train"].paths]
    assert len(with_links) == len(set(with_links)) and sum("again" not in path for path in with_links) == count


def test_names_that_are_no_utf8_are_read_and_can_be_told(tmp_path, photos):
    odd = copied(photos, tmp_path / "odd")
    folder = os.fsencode(odd / "train/class000")
    os.rename(folder + b"/000.jpg", folder + b"/caf\xe9.jpg")
    Path(os.fsdecode(folder + b"/bad\xff.jpg")).write_bytes(b"no image")
    source = data.load("folder", path=str(odd), size=28, workers=0)
    read = sum(int((y >= 0).sum()) for _, y in source.shown(data.Images("train"), 20))
    assert read == source.count("train") - 1
    assert list(source.unreadable.values()) == ["train/class000/bad\ufffd.jpg"]


@pytest.mark.parametrize("mode, suffix", [("L", "jpg"), ("CMYK", "jpg"), ("P", "png"), ("LA", "png"), ("P", "gif")])
def test_an_image_is_read_in_colours_whatever_its_mode(tmp_path, mode, suffix, recwarn):
    transparent = {"transparency": bytes(200)} if (mode, suffix) == ("P", "png") else {}
    Image.new("RGB", (6, 4), (102, 102, 102)).convert(mode).save(tmp_path / f"a.{suffix}", **transparent)
    image = read_image(tmp_path / f"a.{suffix}")
    assert image.mode == "RGB" and abs(image.getpixel((2, 2))[0] - 102) <= 2 and not recwarn


def test_sixteen_bits_a_pixel_become_eight(tmp_path):
    Image.fromarray(np.array([[0, 256 * 100, 65535]], dtype=np.uint16)).save(tmp_path / "deep.png")
    assert [read_image(tmp_path / "deep.png").getpixel((i, 0)) for i in range(3)] == [(v,) * 3 for v in (0, 100, 255)]


def test_held_out_images_that_come_to_none_are_told_before_training(tmp_path, photos):
    with pytest.raises(dh.UserError, match=r"held_out: 0\.001 of 60 images is none to select epochs by"):
        Run(made(tmp_path, photos, "held_out=0.001"), tmp_path / "run").execute()


def test_a_process_without_a_share_of_the_images_sees_none(photos):
    source = data.load("folder", path=str(photos), size=28, workers=0)
    assert list(source.shown(data.Images("train", torch.tensor([], dtype=torch.int64)), 10)) == []


def test_validation_images_without_class_folders_are_told_what_to_do(tmp_path, photos):
    flat = copied(photos, tmp_path / "flat")
    images = list((flat / "val").rglob("*.jpg"))
    for i, path in enumerate(images):
        path.rename(flat / "val" / f"ILSVRC2012_val_{i:08d}.JPEG")
    for folder in (flat / "val").iterdir():
        if folder.is_dir():
            folder.rmdir()
    with pytest.raises(dh.UserError, match=r"no class folders.*move each image into the folder of its class"):
        data.load("folder", path=str(flat))


def test_a_model_with_another_number_of_classes_is_told_what_to_write(tmp_path, photos):
    with pytest.raises(dh.UserError, match=r"7 outputs.*4 classes; write model: {name: plain, classes: 4}"):
        Run(made(tmp_path, photos, "model.classes=7"), tmp_path / "run").execute()


@pytest.mark.parametrize("change", ["size=0", "crop=1.5", "flip=3", "workers=-1", "resize=x"])
def test_settings_that_make_no_sense_are_refused(tmp_path, photos, change):
    with pytest.raises(dh.UserError, match=f"data: {change.split('=')[0]} is"):
        Run(made(tmp_path, photos, f"data.{change}"), tmp_path / "run").execute()


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        (lambda y: torch._assert(False, "Wrong image height!"), "can't read images of 3×28×28: Wrong image height."),
        (
            lambda y: y.expand(1, 2, 4),
            "has outputs of shape (1, 2, 4); it must have one number for each image and class",
        ),
        (lambda y: {"out": y}, "has outputs of type dict; it must have"),
    ],
)
def test_a_model_that_is_not_for_such_images_is_told_in_a_line(tmp_path, photos, monkeypatch, outputs, told):
    monkeypatch.setattr(image_folders.Plain, "forward", lambda model, x: outputs(torch.zeros(len(x), 4)))
    with pytest.raises(dh.UserError) as why:
        Run(made(tmp_path, photos), tmp_path / "run").execute()
    assert f"model: plain {told}" in str(why.value)


def test_shifts_are_for_images_that_are_not_cropped(tmp_path, photos):
    with pytest.raises(dh.UserError, match="shift and flip are for images that are not cropped"):
        Run(made(tmp_path, photos, "shift=2"), tmp_path / "run").execute()


# Layouts and places


def test_tiny_imagenet_is_read_in_its_own_layout(tmp_path, photos):
    root = tmp_path / "tiny"
    lines = []
    for path in photos.rglob("*.jpg"):
        split, name = path.relative_to(photos).parts[0], path.parent.name
        if split == "train":
            target = root / "train" / name / "images" / f"{name}_{path.name}"
        else:
            target = root / "val" / "images" / f"val_{name}_{path.name}"
            lines.append(f"{target.name}\t{name}\t0\t0\t62\t62")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    own = data.load("tiny-imagenet", path=str(root), size=28)
    plain = data.load("folder", path=str(photos), size=28, resize=28)
    assert own.classes == 4 and own.count("train") == 60 and own.count("test") == 24
    for images in (Images("train", torch.tensor([0, 20, 59])), Images("test", torch.tensor([0, 13, 23]))):
        ((a, b), (c, d)) = next(own.shown(images, 3)), next(plain.shown(images, 3))
        assert torch.equal(a, c) and torch.equal(b, d)


def test_where_the_data_lies_is_no_part_of_what_a_run_is(tmp_path, photos, monkeypatch):
    here = made(tmp_path, photos, "pretrain.epochs=1", "regularize=null", "prune=null", "finetune=null")
    elsewhere = copied(photos, tmp_path / "data" / "folder")
    there = made(tmp_path, elsewhere, "pretrain.epochs=1", "regularize=null", "prune=null", "finetune=null")
    assert here.digest() == there.digest() != made(tmp_path, photos, "data.size=32").digest()
    first = Run(here, tmp_path / "run").execute()
    monkeypatch.setenv("DEEPHOYER_DATA", str(tmp_path / "data"))
    moved = there.model_copy(update={"data": {"name": "folder", "size": 28, "workers": 0}})
    assert same(weights(Run(moved, tmp_path / "run").execute()), weights(first))
    assert same(weights(Run(moved, tmp_path / "new").execute()), weights(first))


def test_a_run_is_neither_shown_nor_resumed_nor_started_from_with_other_images(tmp_path, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ("pretrain.epochs=1", "regularize=null", "prune=null", "finetune=null")
    other, moved = image_folders.make(tmp_path / "other", size=(44, 32)), copied(photos, tmp_path / "moved")
    run = RunFolder("runs/one")
    here, elsewhere, after = (made(tmp_path, place, *short) for place in (photos, other, moved))
    Run(here, run.path).execute()
    run.write_json("summary.json", {})
    assert run.has_result_of(here) and not run.has_result_of(elsewhere)
    with pytest.raises(dh.UserError, match=f"was made with other images .data.path was {photos}"):
        Run(elsewhere, run.path).execute()
    Run(after, run.path).execute()
    kept = {name: (run / name).read_bytes() for name in ("command.json", "recipe.yaml")}
    for name in kept:
        (run / name).unlink()
    Run(here, run.path).execute()  # whose checkpoints are enough
    for name, content in kept.items():
        (run / name).write_bytes(content)
    start = f"{tmp_path}/recipe.yaml {' '.join(short)} data.path="
    assert find.network(f"{start}{moved}", "start").path == run / "dense.safetensors"
    with pytest.raises(find.NetworkMissing):
        find.network(f"{start}{other}", "start")


def test_a_folder_in_which_nothing_was_trained_may_have_another_recipe(tmp_path, photos):
    short = ("pretrain.epochs=1", "regularize=null", "prune=null", "finetune=null")
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_command(None, made(tmp_path, photos, *short))
    Run(made(tmp_path, photos, *short, "batch_size=6"), tmp_path / "run").execute()
    with pytest.raises(dh.UserError, match="batch_size was 6, now 12"):
        Run(made(tmp_path, photos, *short), tmp_path / "run").execute()


# Runs


def test_a_run_goes_through_all_stages_to_a_smaller_network(tmp_path, photos):
    run = Run(made(tmp_path, photos, "pretrain.epochs=8"), tmp_path / "run").execute()
    result = finish(run)
    assert run.masks.density == pytest.approx(0.5, abs=1e-3)
    assert result["changed_predictions"] == 0 and "top5" not in result
    assert len(run.held_out) == 12 and not set(run.held_out.tolist()) & set(run.pool.tolist())
    assert run.state.accuracy["dense"] > 0.5


def test_with_more_than_ten_classes_five_guesses_are_counted_too(tmp_path):
    photos = image_folders.make(tmp_path / "many", classes=12, train=3, val=2)
    run = Run(made(tmp_path, photos, "model.classes=12", "pretrain.epochs=1"), tmp_path / "run").execute()
    result = finish(run)
    assert set(result["top5"]) == {"dense", "regularized", "pruned", "finetuned"}
    said = Console(width=200, record=True, file=io.StringIO())
    for table in tables(result, 200):
        said.print(table)
    assert f"top-5: {run.state.top5['dense']:.2%}".replace("%", " %") in said.export_text()
    assert all(run.state.top5[k] >= run.state.accuracy[k] for k in run.state.top5)
    assert all(line["held_out_top5"] >= line["held_out"] for line in metrics(tmp_path / "run"))


class Stop(Exception):
    pass


def cut_after(run, stage, steps):
    """Runs it as far as so many steps of a stage, and no further."""
    plain, done = run.checkpoints.due, []

    def stopping(seconds):
        if run.state.stage == stage:
            done.append(seconds)
            if len(done) > steps:
                raise Stop
        return plain(seconds)

    run.checkpoints.due = stopping
    with pytest.raises(Stop):
        run.execute()


@pytest.mark.parametrize(
    "stage, steps, changes",
    [
        ("pretrain", 2, ["seed=0"]),
        ("regularize", 5, ["regularize.warmup={kind: linear, epochs: 2}"]),
        ("regularize", 2, ["regularize.effective_density=0.4"]),
        ("finetune", 6, ["model={name: resnet-20, classes: 4}", "pretrain.epochs=1", "regularize.epochs=1"]),
    ],
)
def test_a_run_stopped_within_an_epoch_goes_on_with_the_images_not_yet_seen(tmp_path, photos, stage, steps, changes):
    job = made(tmp_path, photos, *changes)
    whole = Run(job, tmp_path / "whole").execute()
    cut_after(Run(job, tmp_path / "cut"), stage, steps)
    _, state, _ = checkpoint.newest(tmp_path / "cut" / "checkpoints")
    assert state["stage"] == stage and 0 < state["step"] < 4
    resumed = Run(job, tmp_path / "cut").execute()
    assert same(weights(resumed), weights(whole))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_gradients_accumulated_over_parts_of_a_batch_are_those_of_the_batch(tmp_path, photos):
    short = ["regularize=null", "prune=null", "finetune=null", "pretrain.optimizer=sgd", "pretrain.lr=0.05"]
    whole, parts = (
        weights(Run(made(tmp_path, photos, *short, f"accumulate={n}"), tmp_path / str(n)).execute()) for n in (1, 3)
    )
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-6)


def start(folder, job, *changes):
    words = [sys.executable, image_folders.__file__, "run", str(job), "--out", str(folder), *changes]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_streaming_run_killed_at_random_moments_ends_with_the_same_weights_bit_for_bit(tmp_path, photos, monkeypatch):
    job, longer = image_folders.recipe_file(tmp_path, photos), ["pretrain.epochs=9", "regularize.epochs=6"]
    whole = Run(recipe.read(str(job), [*longer, "data.workers=1"]), tmp_path / "whole").execute()
    monkeypatch.setenv("TEST_PAUSE", "0.03")
    moments, kills, place = random.Random(0), 0, tmp_path / "killed" / "checkpoints"
    for _ in range(2):
        victim = start(tmp_path / "killed", job, *longer)
        began = checkpoint.numbers(place)
        while checkpoint.numbers(place) == began and victim.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        kills += victim.returncode == -signal.SIGKILL
    assert kills == 2, "the run was too short to be killed"
    resumed = Run(recipe.read(str(job), longer), tmp_path / "killed").execute()
    assert same(weights(resumed), weights(whole))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def saved(path, size):
    net = models.make("resnet-20", classes=4)
    dh.save(net, path, provenance={"recipe": {"model": {"name": "resnet-20", "classes": 4}, "data": data_of(size)}})
    return path


def data_of(size):
    return {"name": "folder", "path": "elsewhere", "size": size}


def test_a_stored_network_is_counted_at_the_size_it_was_trained_at(tmp_path):
    assert open_network(saved(tmp_path / "a.safetensors", 16))[1].shape == (2, 3, 16, 16)
    with pytest.raises(dh.UserError, match="at most 4,096 pixels"):
        open_network(saved(tmp_path / "b.safetensors", 10**9))


def test_a_place_alone_says_where_the_data_of_a_stored_network_lie(tmp_path, photos, command):
    file = saved(tmp_path / "a.safetensors", 28)
    status, said, _ = command("evaluate", file, f"data.path={photos}", "--device", "cpu")
    assert status == 0 and "of 24 images" in said
    assert command("evaluate", file, "--device", "cpu")[0] == 2


def test_the_model_of_plain_weights_may_have_settings(tmp_path, command):
    torch.save(models.make("resnet-20", classes=4).state_dict(), tmp_path / "a.pth")
    status, said, _ = command("explain", tmp_path / "a.pth", "--model", "{name: resnet-20, classes: 4}")
    assert status == 0 and "can be removed" in said


def test_evaluate_counts_what_a_stored_network_gets_right(tmp_path, photos, command):
    run = Run(made(tmp_path, photos), tmp_path / "run").execute()
    finish(run)
    right = round(run.state.accuracy["finetuned"] * 24)
    status, said, _ = command("evaluate", tmp_path / "run", "--device", "cpu")
    assert status == 0 and f"({right} of 24 images correct)" in said and "top-5" not in said
    torch.save(run.model.state_dict(), tmp_path / "plain.pt")
    choice = f"data={{name: folder, path: {photos}, size: 28, workers: 0}}"
    assert command("evaluate", tmp_path / "plain.pt", "model=plain", choice, "--device", "cpu")[1].endswith(
        f"({right} of 24 images correct)\n"
    )
    status, _, said = command("evaluate", tmp_path / "plain.pt", "model=plain")
    assert status == 2 and "does not say what data it is for" in said
