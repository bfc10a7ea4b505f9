"""Files and words made to mislead: mutated by a seeded generator, each must be taken or refused in a line or two.

`DEEPHOYER_FUZZ=5000 pytest tests/test_fuzz.py` tries that many of each kind; without it a handful. Nothing may hang
(60 s), take more than a gigabyte beyond what the process has, or end in any other exception than `UserError`.
"""

import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import tarfile
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import deephoyer as dh
from deephoyer.export import container
from deephoyer.lab import models
from deephoyer.lab import recipe as recipes
from deephoyer.lab.data import cifar10_forms as forms
from deephoyer.lab.data.image_files import read_image
from deephoyer.lab.open_network import open_network
from deephoyer.lab.recipe import Command
from deephoyer.lab.report import record as records
from deephoyer.lab.report.verify import contradictions
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train import run as runs
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run

TRIES = int(os.environ.get("DEEPHOYER_FUZZ", 0))
LONGEST_REFUSAL = 1500
GIGABYTE = 2**20  # in the kilobytes that Linux counts


@contextmanager
def bounded():
    """Neither hangs nor takes a lot of memory."""

    def ring(*_):
        raise TimeoutError("it hangs")

    before, _ = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIGABYTE


def taken_or_refused(work):
    """Whether it was taken; a refusal is short."""
    with bounded():
        try:
            work()
        except dh.UserError as why:
            assert len(str(why)) < LONGEST_REFUSAL and str(why).count("\n") < 4, str(why)
            return False
    return True


# Values that nobody means

NASTY = [
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**30, -(10**30), 1e308, "", "x" * 5000, "é\x00", [], [1], {},
    {"name": 1}, {"name": "lenet-5", "self": 1}, {"name": "demo", "folder": [1]}, [[[[]]]], "2026-13-45", "off", "../x",
]  # fmt: skip


def mutated(value, draw, depth=0):
    """The same plain data with one thing in it changed, taken out or put in."""
    if isinstance(value, dict) and value and (depth == 0 or draw.random() < 0.8):
        key = draw.choice(sorted(value, key=str))
        kind = draw.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.3:
            return {**value, draw.choice(["", "x", "name", key.upper() if isinstance(key, str) else "y"]): value[key]}
        return {**value, key: mutated(value[key], draw, depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(value[place], draw, depth + 1), *value[place + 1 :]]
    return draw.choice(NASTY)


# Recipes

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {
    "alias bomb": BOMB + "model: *i\n",
    "alias in itself": "model: &m {name: *m}\n",
    "deep list": "model: " + "[" * 5000 + "]" * 5000,
    "deep mapping": "model: " + "{a: " * 3000 + "1" + "}" * 3000,
    "impossible date": "seed: 2026-99-99\n",
    "no whole number": "seed: !!int abc\n",
    "no float": "seed: !!float abc\n",
    "long number": "seed: " + "9" * 5000,
    "large value": "about: " + "x" * 2_000_000,
    "unhashable key": "? [a, b]\n: 1\n",
    "python tag": "model: !!python/object/apply:os.system [ls]\n",
    "binary": "model: !!binary ====\n",
    "set": "model: !!set {a, b}\n",
    "timestamp": "seed: 2001-12-14t21:59:43.10-05:00\n",
    "merge of nothing": "<<: 3\nmodel: lenet-5\n",
    "null byte": "model: \x00\n",
    "nothing": "",
    "a list": "- 1\n",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_no_recipe_is_refused_in_a_line(kind):
    assert not taken_or_refused(lambda: recipes.parse(TEXTS[kind], "mine.yaml"))


OVERRIDES = [
    "regularize.strength=1e308",
    "model={name: lenet-5, self: 1}",
    "model={name: lenet-5, classes: 1000000000}",
    "data={name: cifar10, folder: [1]}",
    "seed=" + "9" * 5000,
    "about=" + "x" * 2_000_000,
    "seed=[" * 3000,
    "a.b.c.d=1",
    "=",
    "seed",
    "prune.value=nan",
    "regularize.groups={name: coupled, x: 1}",
    "device=cuda:99999999999",
]


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text[:40])
def test_an_override_that_makes_no_sense_is_refused_or_harmless(override):
    taken_or_refused(lambda: recipes.read("demo", [override]))


def test_recipes_with_one_thing_changed_are_taken_or_refused():
    draw = random.Random(1)
    for _ in range(TRIES or 150):
        name = draw.choice(recipes.names())
        content = recipes.read(name).model_dump(mode="json", exclude_none=True)
        for _ in range(draw.randint(1, 3)):
            content = mutated(content, draw)
        text = json.dumps(content)
        taken_or_refused(lambda text=text: recipes.parse(text, "mine.yaml"))


# Network files


def small_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 3))
    with torch.no_grad():
        net[0].weight[:3] = 0
        net[4].weight[:, :12] = 0
    return net


def test_network_files_that_were_changed_are_loaded_or_refused(tmp_path):
    draw = random.Random(2)
    net, path = small_network(), tmp_path / "net.safetensors"
    masks = {"0.weight": net[0].weight != 0}
    dh.save(dh.compact(net, torch.randn(2, 2, 4, 4)), tmp_path / "small.safetensors", provenance={"a": [1, {"b": 2}]})
    dh.save(net, tmp_path / "whole.safetensors", masks=masks)
    sources = [tmp_path / "small.safetensors", tmp_path / "whole.safetensors"]
    for _ in range(TRIES or 200):
        source = draw.choice(sources)
        path.write_bytes(changed_file(source, draw))
        taken_or_refused(lambda: dh.load(path, model=small_network()))


def changed_file(source, draw):
    """Bytes that were cut or flipped; or a manifest, names, shapes or types that were changed and sealed again."""
    data = source.read_bytes()
    kind = draw.random()
    if kind < 0.2:
        return data[: draw.randrange(len(data))]
    if kind < 0.4:
        place = draw.randrange(min(len(data), 2000))
        return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
    tensors, manifest = container.unseal(source)
    if kind < 0.7:
        return container.seal(tensors, plain(mutated(manifest, draw)))
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    tensors[draw.choice([name, name + "x", "y"])] = draw.choice(
        [
            tensor.half(),
            tensor.flatten(),
            tensor[None],
            tensor.to(torch.int64),
            torch.full_like(tensor, 1),
            tensor.flatten()[:0],
        ]
    )
    return container.seal(tensors, manifest)


def plain(value):
    """What JSON can hold of it."""
    return json.loads(json.dumps(value, default=str).replace("NaN", "0").replace("Infinity", "0"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "net.safetensors")
    assert not taken_or_refused(lambda: dh.load(tmp_path / "net.safetensors", model=small_network()))
    assert not taken_or_refused(lambda: dh.load("/dev/zero", model=small_network()))


# Checkpoints and run folders

QUICK = (
    "data={name: mnist, limit: 200}",
    "device=cpu",
    "pretrain.epochs=1",
    "regularize.epochs=1",
    "finetune.epochs=1",
)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """The folder of a run that was stopped while it regularized."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    command = Command("demo", QUICK)
    kept = runs.Run.close_stage

    def stop_after_pretraining(run, began):
        kept(run, began)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs.Run, "close_stage", stop_after_pretraining)
        Run(command.read(), folder, command=command).execute()
    return folder


def test_checkpoints_that_were_changed_and_sealed_again_are_taken_or_refused(halfway, tmp_path):
    draw = random.Random(3)
    command = Command("demo", QUICK)
    for number in range(TRIES or 25):
        folder = shutil.copytree(halfway, tmp_path / f"run{number}")
        newest = folder / "checkpoints" / f"{checkpoint.numbers(folder / 'checkpoints')[-1]:06d}.safetensors"
        newest.write_bytes(changed_checkpoint(newest, draw))
        taken_or_refused(lambda folder=folder: Run(command.read(), folder, command=command).prepare())
        shutil.rmtree(folder)


def changed_checkpoint(path, draw):
    tensors, manifest = container.unseal(path)
    if draw.random() < 0.6:
        manifest = {**manifest, "state": mutated(manifest["state"], draw)}
    else:
        name = draw.choice(sorted(tensors))
        tensor = tensors.pop(name)
        where = draw.choice([name, "strange." + name, name.upper(), ""])
        tensors[where] = draw.choice(
            [tensor.flatten().flip(0)[None], tensor[None], tensor.flatten()[:0], tensor.double()]
        )
    return container.seal(tensors, plain(manifest))


@pytest.mark.parametrize(
    "key, value", [("epoch", -1), ("epoch", 10**30), ("round", -1), ("optimizer", None), ("stage", 3)]
)
def test_a_checkpoint_that_says_what_no_run_comes_to_is_refused(halfway, tmp_path, key, value):
    folder = shutil.copytree(halfway, tmp_path / "run")
    newest = folder / "checkpoints" / f"{checkpoint.numbers(folder / 'checkpoints')[-1]:06d}.safetensors"
    tensors, manifest = container.unseal(newest)
    newest.write_bytes(container.seal(tensors, {**manifest, "state": {**manifest["state"], key: value}}))
    command = Command("demo", QUICK)
    with pytest.raises(dh.UserError, match=key):
        Run(command.read(), folder, command=command).prepare()


def test_temporary_files_of_killed_writers_are_removed_by_the_next_run(halfway, tmp_path):
    folder = shutil.copytree(halfway, tmp_path / "run")
    left = [folder / ".summary.json.abc.tmp", folder / "checkpoints" / ".000003.safetensors.xyz.tmp"]
    for path in left:
        path.write_bytes(b"half")
    command = Command("demo", QUICK)
    job = Run(command.read(), folder, command=command)
    job.folder.open()
    job.folder.close()
    assert not any(path.exists() for path in left)


@pytest.fixture(scope="module")
def finished(halfway, tmp_path_factory):
    """The folder of the same run, gone on to its end."""
    folder = shutil.copytree(halfway, tmp_path_factory.mktemp("finished") / "run")
    command = Command("demo", QUICK)
    finish(Run(command.read(), folder, command=command).execute())
    return folder


DAMAGE = {
    "recipe.yaml": [b"\xff\xfe", b"[" * 5000, b"model: 3"],
    "summary.json": [b"{}", b'{"format": "deephoyer-result-2"}', b"[]", b"\xff", b"{" * 100_000],
    "command.json": [b"[]", b'{"base": 3}', b'{"base": "demo", "overrides": 3}', b"\xff"],
    "metrics.jsonl": [b"{\n", b"[]\n", b"\xff"],
    "environment.json": [b"\xff"],
}


@pytest.mark.parametrize("file, content", [(file, content) for file, each in DAMAGE.items() for content in each])
def test_a_finished_folder_with_a_damaged_file_is_read_or_refused_in_a_line(finished, tmp_path, file, content):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / file).write_bytes(content)
    command = Command("demo", QUICK)
    taken_or_refused(lambda: finish(Run(command.read(), folder, command=command).execute()))
    taken_or_refused(lambda: RunFolder(folder).command())
    taken_or_refused(lambda: RunFolder(folder).metrics())
    taken_or_refused(lambda: RunFolder(folder).recipe())


def test_a_finished_training_without_environment_or_summary_is_completed(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    for name in ("environment.json", "summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    command = Command("demo", QUICK)
    record = finish(Run(command.read(), folder, command=command).execute())
    assert "was lost" in record["environment"]["of"]
    assert (folder / "finetuned.safetensors").read_bytes() == (finished / "finetuned.safetensors").read_bytes()


# Data: archives, sheets of images, labels


def sheets(draw, width=1024, rows=3, mode="RGB"):
    """The npm package's files with made-up images."""
    from PIL import Image

    png = io.BytesIO()
    Image.frombytes(mode, (width, rows), draw.randbytes(width * rows * len(mode))).save(png, "png")
    files = {f"{name}.png": png.getvalue() for name in forms.NAMES}
    labels = {name: json.dumps([draw.randrange(10) for _ in range(rows * 5)]).encode() for name in forms.LABELS}
    return files | labels


def binaries(draw):
    return {f"{name}.bin": draw.randbytes(2 * forms.RECORD) for name in forms.NAMES}


def archive(files, mode="w:gz"):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"inner/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def test_archives_that_were_changed_are_taken_or_refused(tmp_path):
    draw = random.Random(5)
    path = tmp_path / "cifar.tgz"
    for _ in range(TRIES or 60):
        files = draw.choice([sheets, binaries])(draw)
        name = draw.choice(sorted(files))
        kind = draw.random()
        if kind < 0.4:
            files[name] = flipped(files[name], draw, places=draw.choice([1, 1, 20]), within=200)
        elif kind < 0.6:
            value = (
                mutated(json.loads(files[forms.LABELS[0]]), draw) if forms.LABELS[0] in files else draw.choice(NASTY)
            )
            files[forms.LABELS[draw.randrange(2)]] = json.dumps(value, default=str).encode()
        elif kind < 0.7:
            del files[name]
        whole = archive(files, draw.choice(["w:gz", "w:bz2", "w"]))
        path.write_bytes(whole if kind < 0.75 else flipped(whole, draw, places=3, within=3000))
        taken_or_refused(lambda: forms.from_path(path))


def flipped(data, draw, places, within):
    """The same bytes, or fewer, with some near the beginning changed."""
    changed = bytearray(data)
    for _ in range(places):
        if changed:
            changed[draw.randrange(min(len(changed), within))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.2 else changed)


def zeros(path, header, size):
    """A tar file, packed, that begins with this header and goes on with so many zeros."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header)
        for _ in range(size // 2**24):
            file.write(bytes(2**24))


@pytest.mark.parametrize("kind", ["a batch", "another file", "a long name"])
def test_an_archive_that_unpacks_to_gigabytes_is_refused_in_a_line(tmp_path, kind):
    entry = tarfile.TarInfo("test_batch.bin" if kind == "a batch" else "readme.txt")
    entry.size = 3 * 2**30
    if kind == "a long name":
        entry.type = tarfile.GNUTYPE_LONGNAME
    zeros(tmp_path / "bomb.tgz", entry.tobuf(tarfile.GNU_FORMAT), 2**28)
    assert not taken_or_refused(lambda: forms.from_path(tmp_path / "bomb.tgz"))


def huge_png(side):
    """A header that says how large the image is, and nothing else."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


LABELS_THAT_ARE_NONE = {
    "300": [300] * 15,
    "negative": [-1] * 15,
    "no numbers": ["a"] * 15,
    "true": [True] * 15,
    "an object": {"a": 1},
    "too few": [1],
}


@pytest.mark.parametrize("kind", [*LABELS_THAT_ARE_NONE, "deep", "20,000 × 20,000", "wide", "grey", "no image"])
def test_sheets_and_labels_that_are_none_are_refused_in_a_line(tmp_path, kind):
    draw = random.Random(0)
    files = sheets(draw)
    if kind in LABELS_THAT_ARE_NONE:
        files[forms.LABELS[0]] = json.dumps(LABELS_THAT_ARE_NONE[kind]).encode()
    elif kind == "deep":
        files[forms.LABELS[1]] = b"[" * 100_000 + b"]" * 100_000
    else:
        image = {"20,000 × 20,000": huge_png(20_000), "no image": b"x"}.get(kind)
        other = sheets(draw, width=2048 if kind == "wide" else 1024, mode="L" if kind == "grey" else "RGB")
        files["data_batch_2.png"] = image or other["data_batch_2.png"]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert not taken_or_refused(lambda: forms.from_path(tmp_path))


def test_a_file_larger_than_any_of_cifar_10_is_not_read(tmp_path):
    for name, content in binaries(random.Random(0)).items():
        (tmp_path / name).write_bytes(content)
    os.truncate(tmp_path / "data_batch_3.bin", 2**40)  # takes no room
    assert not taken_or_refused(lambda: forms.from_path(tmp_path))


@pytest.mark.parametrize("kind", ["400 megapixels", "pipe", "folder", "damaged"])
def test_an_image_that_cannot_be_read_is_none(tmp_path, kind):
    path = tmp_path / "image.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(huge_png(20_000) if kind == "400 megapixels" else huge_png(10)[:40])
    with bounded():
        assert read_image(path) is None


def test_images_that_were_changed_are_read_or_left_out(tmp_path):
    from PIL import Image

    draw = random.Random(6)
    path = tmp_path / "image"
    for _ in range(TRIES or 60):
        encoded = io.BytesIO()
        kind = draw.choice(["png", "jpeg", "gif", "bmp", "tiff", "webp"])
        Image.frombytes("RGB", (12, 9), draw.randbytes(12 * 9 * 3)).save(encoded, kind)
        path.write_bytes(flipped(encoded.getvalue(), draw, places=draw.choice([1, 5]), within=300))
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = read_image(path)
            assert image is None or image.mode == "RGB"


# A file must not choose how much memory is taken


@pytest.mark.parametrize(
    "model",
    [
        {"name": "alexnet", "classes": 1_000_000},
        {"name": "alexnet", "width": 100.0},
        {"name": "torchvision:vgg16", "classes": 100_000},
        {"name": "torchvision:resnet18", "width_per_group": 10**9},
        "timm:vit_giant_patch14_224",
        {"name": "timm:vit_tiny_patch16_224", "depth": 10**9},
        {"name": "timm:resnet18", "checkpoint_path": "weights.pth"},
        {"name": "lenet-5", "self": 1},
        "nothing",
    ],
    ids=str,
)
def test_a_network_file_cannot_have_a_model_built_that_it_has_no_room_for(tmp_path, model):
    path = tmp_path / "net.safetensors"
    dh.save(small_network(), path, provenance={"recipe": {"model": model}})
    assert not taken_or_refused(lambda: open_network(path))


def test_a_network_file_that_names_its_own_model_is_opened(tmp_path):
    dh.save(models.make("lenet-5"), tmp_path / "net.safetensors", provenance={"recipe": {"model": "lenet-5"}})
    network, example = open_network(tmp_path / "net.safetensors")
    assert network(example).shape == (2, 10)


# Records


def test_records_with_one_thing_changed_are_read_or_refused(tmp_path):
    draw = random.Random(7)
    sources = sorted(Path("results").glob("lenet-*/*/*.json"))[::7] or [pytest.skip("results are not at hand")]
    path = tmp_path / "record.json"
    for _ in range(TRIES or 60):
        content = json.loads(draw.choice(sources).read_text())
        for _ in range(draw.randint(1, 2)):
            content = mutated(content, draw)
        path.write_text(json.dumps(content))
        taken_or_refused(lambda: contradictions(records.read(path)))


# The API, with values that nobody means in one place of a call that is sound otherwise

STRANGE = [
    *NASTY, 10**400, -1.5, b"x", object(), np.float64("nan"), np.ones((2, 2)), torch.ones(2), torch.tensor(1 + 2j), 3j,
    torch.ones(3, 5, 7), torch.zeros(0, 4), torch.ones(1, device="meta"), nn.Linear, nn.LazyLinear(3), (), ((),), set(),
    lambda *a, **k: None, Path("nowhere/at/all"), range(3), slice(2), "elements", "l1", dh.L1(), float, dh,
]  # fmt: skip


def sound_calls(folder):
    """Name → (function, its arguments by name)."""

    def net():
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))

    x, file = torch.randn(3, 6), str(folder / "net.safetensors")
    dh.save(net(), file)
    return {
        "Regularizer": (dh.Regularizer, lambda: dict(model=net(), penalty="hoyer", groups="filters", strength=1e-3,
                                                     parameters="*.weight", weigh="size")),
        "attach": (lambda optimizer: dh.Regularizer(net()).attach(optimizer),
                   lambda: dict(optimizer=torch.optim.SGD(net().parameters(), 0.1))),
        "strengthen": (lambda factor: dh.Regularizer(net()).strengthen(factor), lambda: dict(factor=2)),
        "load_state_dict": (lambda state: dh.Regularizer(net()).load_state_dict(state),
                            lambda: dict(state=dh.Regularizer(net()).state_dict())),
        "prune": (dh.prune, lambda: dict(model=net(), rule=dh.Density(0.5), groups="channels", parameters="*.weight",
                                         allow_empty=True, multiple=2, score="magnitude")),
        "hold": (lambda optimizer: dh.prune(net(), dh.Density(0.5)).hold(optimizer),
                 lambda: dict(optimizer=torch.optim.SGD(net().parameters(), 0.1))),
        "Masks": (dh.Masks, lambda: dict(masks={"0.weight": torch.ones(4, 6, dtype=torch.bool)}, model=net())),
        "compact": (dh.compact, lambda: dict(model=net(), example_inputs=x, groups=None, joints="gather", exact=True)),
        "Coupled": (dh.Coupled, lambda: dict(model=net(), example_inputs=x, exact=True)),
        "summary": (dh.summary, lambda: dict(model=net(), example_inputs=x, baseline=net(), latency=False)),
        "explain": (dh.explain, lambda: dict(model=net(), example_inputs=x)),
        "save": (dh.save, lambda: dict(model=net(), path=str(folder / "other.safetensors"), provenance={"a": 1})),
        "load": (dh.load, lambda: dict(path=file, model=net())),
        "Target": (dh.Target, lambda: dict(macs=0.5, drop=0.1)),
        "shrink": (dh.shrink, lambda: dict(model=net(), example_inputs=x, target=dh.Target(macs=0.5), multiple=2,
                                           least=0.1, protect=())),
        "Density": (dh.Density, lambda: dict(value=0.5)),
        "Effective": (dh.Effective, lambda: dict(value=0.5)),
        "StdRatio": (dh.StdRatio, lambda: dict(value=0.5)),
        "Absolute": (dh.Absolute, lambda: dict(value=0.5)),
        "PerLayer": (dh.PerLayer, lambda: dict(rules={"*": dh.Density(0.5)})),
        "IndexGroups": (lambda groups: dh.Regularizer(net(), groups=dh.IndexGroups(groups)),
                        lambda: dict(groups={"0.weight": [[0, 1], [2]]})),
        "SCAD": (dh.SCAD, lambda: dict(lam=0.1, a=3.0)),
        "TransformedL1": (dh.TransformedL1, lambda: dict(a=0.1)),
        "TrimmedL1": (dh.TrimmedL1, lambda: dict(keep=0.1)),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_calls_with_one_strange_argument_are_taken_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some strange values are names of files
    draw = random.Random(8)
    calls = sound_calls(tmp_path)
    for _ in range(TRIES // 10 or 120):
        name = draw.choice(sorted(calls))
        function, arguments = calls[name]
        given = arguments()
        place = draw.choice(sorted(given))
        given[place] = value = draw.choice(STRANGE)
        try:
            taken_or_refused(lambda f=function, g=given: f(**g))
        except Exception as why:
            raise AssertionError(f"{name}({place}={value!r:.80}) raises {type(why).__name__}: {why}") from why


# Plain weights


def test_plain_weights_of_unknown_types_are_refused_by_name(tmp_path):
    net = small_network()
    state = {**net.state_dict(), "4.weight": torch.ones(3, 24, dtype=torch.int32)}
    safetensors.torch.save_file(state, tmp_path / "plain.safetensors")
    with pytest.raises(dh.UserError, match=r"4\.weight"):
        checkpoint.fill(small_network(), tmp_path / "plain.safetensors", "start")
