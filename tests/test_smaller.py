"""Smaller for good: MACs by the arithmetic, runs whose compacted networks predict the same, files, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deephoyer as dh
from deephoyer.lab import cli, data
from deephoyer.lab.models import input_shape, make
from deephoyer.structure.indices import as_pattern, from_pattern
from deephoyer.structure.joints import Gather


def executed(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Multiply-accumulates of each convolution and linear layer, for one input."""
    found: dict[str, int] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):

            def count(layer, args, output, name=name):
                found[name] = output[0].numel() * layer.weight[0].numel()

            hooks.append(layer.register_forward_hook(count))
    with torch.no_grad():
        model.eval()(x)
    for hook in hooks:
        hook.remove()
    return found


def test_half_of_the_coupled_channels_of_resnet_56_leave_a_quarter_of_its_macs():
    torch.manual_seed(0)
    model, x = make("resnet-56").eval(), torch.randn(1, 3, 32, 32)
    dense = executed(model, x)
    coupled = dh.Coupled(model, x)
    dh.prune(model, dh.Density(0.5), groups=coupled)
    small = dh.compact(model, x, groups=coupled)
    # The first layer keeps its inputs and the last its outputs; every other loses half of both.
    ends = dense["conv1"] + dense["linear"]
    expected = ends // 2 + (sum(dense.values()) - ends) // 4
    assert dh.summary(small, x, latency=False).total.macs_executed == sum(executed(small, x).values()) == expected
    assert sum(p.numel() for p in small.parameters()) == 214_546


@pytest.mark.parametrize(
    ("name", "density"),
    [
        ("lenet-300-100", 0.1),
        ("lenet-5", 0.3),
        ("resnet-20", 0.7),
        ("resnet18", 0.3),
        ("densenet", 0.5),
        ("mobilenet_v2", 0.3),
        ("shufflenet", 0.5),
        ("regnet", 0.5),
    ],
)
def test_macs_fall_by_the_shares_of_inputs_and_outputs_that_each_layer_keeps(name, density):
    pytest.importorskip("torchvision")
    from test_compact import network

    model, x = network(name, torch.float32)
    dense = executed(model, x)
    coupled = dh.Coupled(model, x)
    masks = dh.prune(model, dh.Density(density), groups=coupled)
    small = executed(dh.compact(model, x, groups=coupled), x)
    for layer, macs in dense.items():
        mask = masks.get(f"{layer}.weight", torch.ones(1, 1, dtype=torch.bool))
        rows, columns = (mask.transpose(0, d).flatten(1).any(1) for d in (0, 1))
        share = rows.float().mean().item() * columns.float().mean().item()
        assert small[layer] == pytest.approx(macs * share, rel=1e-4), layer
    assert sum(small.values()) < density * sum(dense.values()) * 1.1


# --- runs


def call(*words: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["deephoyer", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code


@contextmanager
def two_threads() -> Iterator[None]:
    """For the ten thousand test images, which take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SHORT = [
    "data={name: mnist, limit: 2000}",
    "device=cpu",
    "epoch_selection=held-out",
    "regularize.lr=5e-3",
    "prune.value=0.1",
]
RUNS = {
    "paper/lenet-300-100": [
        "pretrain.epochs=2",
        "regularize.epochs=8",
        "regularize.strength=5e-3",
        "finetune.epochs=1",
    ],
    "paper/lenet-5-structure": [
        "pretrain.epochs=1",
        "regularize.epochs=3",
        "regularize.strength=0.3",
        "finetune.epochs=1",
    ],
}


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """The folder of a finished run, and the name of its model."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with two_threads():
        assert call("run", request.param, *SHORT, *RUNS[request.param], "--out", folder) == 0
    return folder, request.param.removeprefix("paper/").removesuffix("-structure")


def test_a_run_ends_with_a_smaller_network_that_predicts_the_same_image_by_image(run):
    folder, name = run
    big = dh.load(folder / "finetuned.safetensors", model=make(name)).eval()
    small = dh.load(folder / "compact.safetensors", model=make(name)).eval()
    digits = data.load("mnist")
    with torch.no_grad(), two_threads():
        before, after = (
            torch.cat([m(x).argmax(1) for x in digits.floats(digits.test_x).split(1000)]) for m in (big, small)
        )
    assert len(before) == 10_000 and torch.equal(before, after)
    assert (before == digits.test_y).float().mean() > 0.6
    record = json.loads((folder / "summary.json").read_text())
    assert record["changed_predictions"] == 0
    there = record["compact"]["total"]
    assert there["parameters"] == sum(p.numel() for p in small.parameters())
    assert there["parameters"] < 0.9 * sum(p.numel() for p in big.parameters())
    assert there["macs_executed"] < 0.9 * record["compact"]["baseline"]["total"]["macs_executed"]


def test_the_files_of_a_run_have_the_sizes_that_are_told_and_compaction_adds_no_more_than_an_index(run):
    folder, _ = run
    record = json.loads((folder / "summary.json").read_text())
    assert record["files"] == {file: os.path.getsize(folder / file) for file in record["files"]}
    for file, told in (("finetuned", record["sparse"]), ("compact", record["compact"])):
        assert told["total"]["bytes_stored"] == body_size(folder / f"{file}.safetensors")
    small, sparse = (record[part]["total"]["bytes_stored"] for part in ("compact", "sparse"))
    assert small <= 1.01 * sparse  # idle weights are gone from both; which inputs are passed over is stored besides


def body_size(path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


# --- files


def sparse(name: str, share: float = 0.4) -> tuple[nn.Module, Tensor]:
    """A network with filters and input channels dead in each layer by itself."""
    torch.manual_seed(0)
    model, x = make(name).eval(), torch.randn(3, *input_shape(name))
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for layer in layers:
            layer.weight[:, torch.rand(layer.weight.shape[1]) < (share if layer.weight.shape[1] > 3 else 0)] = 0
        for layer in layers[:-1]:
            layer.weight[torch.rand(layer.weight.shape[0]) < share] = 0
    return model, x


READER = """
import json, sys, torch, deephoyer as dh
from deephoyer.lab.models import make
torch.set_num_threads(1)
found = {}
for path, name, inputs in zip(*[iter(sys.argv[1:])] * 3):
    model = dh.load(path, model=make(name)).eval()
    with torch.no_grad():
        found[path] = model(torch.tensor(json.loads(open(inputs).read()))).double().tolist()
print(json.dumps(found))
"""


def test_a_new_process_loads_compacted_and_gathered_networks_and_computes_the_same(tmp_path):
    expected, words = {}, []
    for name in ("lenet-300-100", "lenet-5", "resnet-20"):
        model, x = sparse(name)
        inputs = tmp_path / f"{name}.json"
        inputs.write_text(json.dumps(x.tolist()))
        for joints in ("none", "gather"):
            small, path = dh.compact(model, x, joints=joints), tmp_path / f"{name}-{joints}.safetensors"
            dh.save(small, path)
            with torch.no_grad():
                expected[str(path)] = small(x).double()
            words += [str(path), name, str(inputs)]
    told = subprocess.run([sys.executable, "-c", READER, *words], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    for path, got in json.loads(told.stdout).items():
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), expected.pop(path), rtol=1e-6, atol=1e-6)
    assert not expected


@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5", "resnet-20"])
@pytest.mark.parametrize("joints", ["none", "gather"])
def test_the_bytes_in_the_summary_are_the_files_also_with_joints(tmp_path, name, joints):
    model, x = sparse(name)
    small = dh.compact(model, x, joints=joints)
    dh.save(small, tmp_path / "a.safetensors")
    assert dh.summary(small, latency=False).total.bytes_stored == body_size(tmp_path / "a.safetensors")


def test_indices_are_stored_as_patterns_and_come_back(tmp_path):
    chosen, live = torch.randperm(784)[:597].sort().values, torch.rand(300) < 0.3
    ranks = torch.where(live, live.cumsum(0) - 1, live.sum())
    for index, kind in ((chosen, "chosen"), (ranks, "ranks"), (torch.arange(600), "chosen")):
        found, pattern = as_pattern(index)
        assert found == kind and torch.equal(from_pattern(kind, pattern), index)
    others = [chosen.flip(0), torch.cat([chosen, chosen]), -1 - chosen, 2**40 + chosen, chosen.int(), chosen[:9]]
    others += [torch.zeros(99).long(), torch.full((99,), 7), chosen.view(3, -1), chosen * 1.0, torch.tensor(3)]
    for tensor in others:
        assert as_pattern(tensor) is None

    class Picks(nn.Module):
        def __init__(self, *indices):
            super().__init__()
            for i, index in enumerate(indices):
                self.register_buffer(f"pick{i}", index)

    big = Picks(chosen, ranks, 2 * ranks, *others)
    dh.save(big, tmp_path / "a.safetensors")
    back = dh.load(tmp_path / "a.safetensors", model=Picks(*(torch.zeros_like(t) for t in big.buffers())))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(big.buffers(), back.buffers(), strict=True))
    small = Picks(chosen, ranks)
    dh.save(small, tmp_path / "b.safetensors")
    assert body_size(tmp_path / "b.safetensors") < 98 + 38 + 1  # two bitmaps, instead of 7,176 bytes
    for wrong in (torch.zeros(596).long(), torch.zeros(597).int(), torch.zeros(3, 199).long()):
        with pytest.raises(dh.UserError, match="does not fit the model"):
            dh.load(tmp_path / "b.safetensors", model=Picks(wrong, ranks))


@pytest.mark.parametrize(
    "lie", [{"holds": "ranks"}, {"holds": "values"}, {"holds": "code"}, {"form": "gaps"}, {"shape": [9]}]
)
def test_patterns_of_indices_that_lie_are_refused(tmp_path, lie):
    from deephoyer.export.container import rewrite

    model, x = sparse("lenet-300-100")
    path = tmp_path / "a.safetensors"
    dh.save(dh.compact(model, x), path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    manifest = json.loads(header["__metadata__"]["manifest"])
    assert manifest["packed"]["fc1.read"]["holds"] == "chosen"
    manifest["packed"]["fc1.read"].update(lie)
    header["__metadata__"]["manifest"] = json.dumps(manifest)
    path.write_bytes(rewrite(header, content[end:]))
    with pytest.raises(dh.UserError, match=r"a\.safetensors"):
        dh.load(path, model=make("lenet-300-100"))


# --- commands


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Runs `deephoyer …` in an empty folder and gives its exit status and what it said."""
    monkeypatch.chdir(tmp_path)

    def say(*words):
        capsys.readouterr()
        status = call(*words)
        said = capsys.readouterr()
        return status, said.out, said.err

    return say


def test_compact_export_and_summary_take_a_runs_folder(command, run, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder, name = run
    status, out, err = command("compact", folder, "--joints", "gather", "--out", "small.safetensors")
    assert status == 0, err
    assert "before ÷ after" in out and f"{os.path.getsize(tmp_path / 'small.safetensors'):,} bytes" in out
    status, out, err = command("summary", "small.safetensors", "--baseline", folder)
    assert status == 0 and "before and after" in out and "ms per batch of 64" in out, err
    status, out, err = command("export", "small.safetensors", "small.onnx")
    assert status == 0 and (tmp_path / "small.onnx").stat().st_size > 1000, err
    small = dh.load("small.safetensors", model=make(name)).eval()
    import onnxruntime

    session = onnxruntime.InferenceSession("small.onnx")
    x = torch.randn(5, *input_shape(name))
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), small(x), rtol=1e-4, atol=1e-4)


def test_compact_and_summary_take_saved_files_and_plain_weights_with_the_models_name(command, tmp_path):
    model, x = sparse("lenet-5")
    dh.save(model, "ours.safetensors")
    safetensors.torch.save_file(model.state_dict(), "plain.safetensors")
    for source in ("ours.safetensors", "plain.safetensors"):
        status, out, err = command("compact", source, "--model", "lenet-5", "--out", f"small-{source}")
        assert status == 0 and "channels removed" in out, err
        small = dh.load(f"small-{source}", model=make("lenet-5")).eval()
        torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
        status, out, err = command("summary", f"small-{source}", "--model", "lenet-5")
        assert status == 0 and "conv1" in out, err


def test_mistakes_with_stored_networks_are_a_line_or_two_and_status_2(command, tmp_path):
    safetensors.torch.save_file(make("lenet-5").state_dict(), "plain.safetensors")
    dh.save(make("lenet-5"), "nameless.safetensors")
    dh.save(make("lenet-5"), "odd.safetensors", provenance={"recipe": "demo"})
    dh.save(make("lenet-5"), "lying.safetensors", provenance={"recipe": {"model": "lenet-300-100"}})
    dh.save(make("lenet-5"), "named.safetensors", provenance={"recipe": {"model": {"name": "lenet-5"}}})
    torch.save(make("lenet-5").state_dict(), "old.pt")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "plain.safetensors").read_bytes()[:999])
    os.mkdir("empty")
    for words, told in [
        (["summary", "plain.safetensors"], "give its name with --model"),
        (["compact", "plain.safetensors"], "give its name with --model"),
        (["export", "plain.safetensors", "a.onnx"], "give its name with --model"),
        (["summary", "nameless.safetensors"], "give its name with --model"),
        (["summary", "odd.safetensors"], "give its name with --model"),
        (["summary", "lying.safetensors"], "doesn't fit this model"),
        (["summary", "plain.safetensors", "--model", "lenet-300-100"], "does not fit the model"),
        (["summary", "nameless.safetensors", "--model", "lenet-300-100"], "doesn't fit this model"),
        (["summary", "plain.safetensors", "--model", "lenet5"], "Did you mean 'lenet-5'?"),
        (["summary", "old.pt", "--model", "lenet-300-100"], "does not fit the model"),
        (["summary", "old.pt"], "give its name with --model"),
        (["compact", "cut.safetensors", "--model", "lenet-5"], "cut"),
        (["compact", "missing.safetensors"], "No such file"),
        (["compact", "missing.safetensors", "--model", "lenet-5"], "No such file"),
        (["compact", "empty"], "folder of a finished run"),
        (["compact", "named.safetensors", "--joints", "gathered"], "Did you mean 'gather'?"),
        (["compact", "named.safetensors", "--out", "no/such/a.safetensors"], "can't be written"),
        (["export", "named.safetensors", "no/such/a.onnx"], "can't be written"),
        (["summary", "named.safetensors", "--baseline", "missing.safetensors"], "No such file"),
    ]:
        status, _, err = command(*words)
        assert status == 2 and told in err, (words, err)
        assert err.startswith("deephoyer: ") and len(err.splitlines()) <= 2, (words, err)


# --- what a compacted network is good for


@pytest.mark.parametrize("name", ["lenet-5", "resnet-20"])
@pytest.mark.parametrize("joints", ["none", "gather"])
def test_compacted_networks_are_exported_and_compiled(name, joints):
    model, x = sparse(name)
    small = dh.compact(model, x, joints=joints)
    assert joints == "none" or any(isinstance(m, Gather) for m in small.modules())
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    exported = torch.export.export(small, (x,), dynamic_shapes=(batch,)).module()
    more = torch.randn(7, *input_shape(name))
    with torch.no_grad():
        torch.testing.assert_close(exported(more), small(more), rtol=1e-4, atol=1e-5)
    compiled = torch.compile(small, backend="aot_eager" if name == "lenet-5" else "eager", fullgraph=True)
    compiled(more).square().sum().backward()
    got = {n: p.grad.clone() for n, p in small.named_parameters()}
    small.zero_grad()
    small(more).square().sum().backward()
    for n, p in small.named_parameters():
        torch.testing.assert_close(got[n], p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max()))


@pytest.mark.parametrize("joints", ["none", "gather"])
def test_a_compacted_network_trains_on_with_its_zeros_held(joints):
    model, x = sparse("lenet-5")
    dh.prune(model, dh.Density(0.3))
    small = dh.compact(model, x, joints=joints).train()
    masks = dh.prune(small, dh.Absolute(1e-30))
    zeros = {n: p == 0 for n, p in small.named_parameters() if n in masks}
    assert all(zeros[n].any() for n in zeros) and set(zeros) == set(masks)
    digits = data.load("mnist")
    images, labels = digits.floats(digits.train_x[:200]), digits.train_y[:200]
    optimizer = torch.optim.Adam(small.parameters(), 2e-3)
    dh.Regularizer(small, "hoyer-square", "elements", 1e-5).attach(optimizer)
    masks.hold(optimizer)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(small(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not p[zeros[n]].any() for n, p in small.named_parameters() if n in zeros)
    again = dh.compact(small, images[:2])
    torch.testing.assert_close(again.eval()(images), small.eval()(images), rtol=1e-4, atol=1e-4)
