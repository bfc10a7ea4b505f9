"""Files and words made to mislead: mutated by a seeded generator, each must be taken or refused in a line or two.

`DEEPHOYER_FUZZ=5000 pytest tests/test_fuzz.py` tries that many of each kind; without it a handful. Nothing may hang
(60 s), take more than a gigabyte beyond what the process has, or end in any other exception than `UserError`.
"""

import json
import os
import random
import resource
import shutil
import signal
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from torch import nn

import deephoyer as dh
from deephoyer.export import container
from deephoyer.lab import recipe as recipes
from deephoyer.lab.recipe import Command
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.train import run as runs
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


# Plain weights


def test_plain_weights_of_unknown_types_are_refused_by_name(tmp_path):
    net = small_network()
    state = {**net.state_dict(), "4.weight": torch.ones(3, 24, dtype=torch.int32)}
    safetensors.torch.save_file(state, tmp_path / "plain.safetensors")
    with pytest.raises(dh.UserError, match=r"4\.weight"):
        checkpoint.fill(small_network(), tmp_path / "plain.safetensors", "start")
