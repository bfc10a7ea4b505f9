"""A saved network comes back as it was, takes the room its nonzeros take, and a bad file never gets in."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deephoyer.errors import UserError
from deephoyer.export import container, export, load, load_masks, provenance, save
from deephoyer.export.container import rewrite
from deephoyer.lab.models import input_shape, make
from deephoyer.packing import PackingError, pack_pattern, packed_size, pattern_size, unpack_pattern
from deephoyer.structure.compact import compact
from deephoyer.summary import summary


def sparse(name="lenet-300-100", density=0.02, seed=0):
    torch.manual_seed(seed)
    model = make(name)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand_like(p) < density)
    return model


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# --- packing


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 3000), density=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_pattern_is_unpacked_as_it_was_packed(size, density, seed):
    pattern = np.random.default_rng(seed).random(size) < density**3
    form, packed = pack_pattern(pattern)
    assert np.array_equal(unpack_pattern(form, packed, size), pattern)
    assert len(packed) == pattern_size(pattern) <= (size + 7) // 8
    assert packed_size(pattern, 4) <= 4 * size


def test_gaps_are_taken_for_very_sparse_patterns_and_bitmaps_otherwise():
    rng = np.random.default_rng(0)
    assert pack_pattern(rng.random(9999) < 0.02)[0] == "gaps"
    assert pack_pattern(rng.random(9999) < 0.5)[0] == "bitmap"


def test_bytes_that_packing_never_gives_are_refused():
    for form, packed, size in [
        ("gaps", [5], 5), ("gaps", [255], 300), ("gaps", [255, 255, 1], 300),
        ("bitmap", [1], 9), ("bitmap", [0, 2], 9), ("runs", [1], 1),
    ]:  # fmt: skip
        with pytest.raises(PackingError):
            unpack_pattern(form, np.array(packed, np.uint8), size)


# --- save and load


@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5", "resnet-20"])
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_a_network_comes_back_as_it_was(tmp_path, name, density):
    model = sparse(name, density)
    save(model, tmp_path / "a.safetensors")
    assert same(load(tmp_path / "a.safetensors", model=make(name)), model)


def test_lenet_300_100_with_two_percent_left_takes_under_45_kb(tmp_path):
    size = save(sparse(), tmp_path / "a.safetensors", provenance={"recipe": "lenet-300-100-hs", "seed": 0})
    assert size == os.path.getsize(tmp_path / "a.safetensors") < 45_000


@pytest.mark.parametrize("name", ["lenet-300-100", "resnet-20"])
@pytest.mark.parametrize("density", [0.02, 0.4, 1.0])
def test_the_summary_says_how_many_bytes_the_tensors_take_in_the_file(tmp_path, name, density):
    model = sparse(name, density)
    save(model, tmp_path / "a.safetensors")
    _, body = parts((tmp_path / "a.safetensors").read_bytes())
    assert summary(model, latency=False).total.bytes_stored == len(body)


def test_a_new_process_computes_the_same(tmp_path):
    model, x = sparse("lenet-5", 0.1), torch.ones(2, 1, 28, 28)
    save(model, tmp_path / "a.safetensors")
    code = (
        "import sys, torch; from deephoyer.lab.models import make; from deephoyer.export import load;"
        "m = load(sys.argv[1], model=make('lenet-5'));"
        "print(m(torch.ones(2, 1, 28, 28)).double().flatten().tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code, tmp_path / "a.safetensors"], capture_output=True, text=True)
    assert json.loads(out.stdout) == model(x).double().flatten().tolist(), out.stderr


def test_halves_are_widened_exactly_and_nothing_is_narrowed(tmp_path):
    model = sparse("lenet-5", 0.05)
    for p in model.parameters():
        p.data = p.data.half() if p.dim() > 1 else p.data
    save(model, tmp_path / "half.safetensors")
    back = load(tmp_path / "half.safetensors", model=make("lenet-5"))
    assert all(p.dtype == torch.float32 for p in back.parameters())
    assert all(torch.equal(p, q.float()) for p, q in zip(back.parameters(), model.parameters(), strict=True))
    save(make("lenet-5"), tmp_path / "whole.safetensors")
    with pytest.raises(UserError, match=r"float32 in the file, not torch\.float16"):
        load(tmp_path / "whole.safetensors", model=make("lenet-5").half())


def test_the_same_network_is_the_same_bytes_in_every_process(tmp_path):
    code = (
        "import sys, torch, deephoyer as dh; torch.manual_seed(0); net = torch.nn.Linear(3, 2); "
        "[dh.save(net, f'{sys.argv[1]}{i}', provenance={'b': 1, 'a': {'d': 2, 'c': 3}}) for i in range(4)]"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, tmp_path / seed], env=environment, check=True)
    written = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(written) == 8 and len(set(written)) == 1


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float64, torch.float32)],
)
def test_other_kinds_of_numbers_come_back_too(tmp_path, dtype, other):
    model = sparse("lenet-5", 0.05).to(dtype)
    save(model, tmp_path / "a.safetensors")
    assert same(load(tmp_path / "a.safetensors", model=make("lenet-5").to(dtype)), model)
    with pytest.raises(UserError, match=r"conv1.weight is torch\.\w+ in the file, not torch"):
        load(tmp_path / "a.safetensors", model=make("lenet-5").to(other))


def test_tied_weights_are_stored_once(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        model[1].weight = model[0].weight
        return model

    model = tied()
    assert save(model, tmp_path / "a.safetensors") < 45_000
    back = load(tmp_path / "a.safetensors", model=tied())
    assert same(back, model) and back[0].weight is back[1].weight


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_network_whose_weight_is_computed_into_an_attribute_is_loaded(tmp_path):
    """As `torch.nn.utils.weight_norm` does, in many vocoders."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 2)) for _ in range(2)]
    save(nets[0], tmp_path / "a.safetensors")
    x = torch.randn(3, 4)
    assert torch.equal(load(tmp_path / "a.safetensors", nets[1])(x), nets[0](x))


def test_values_that_are_not_finite_come_back(tmp_path):
    model = nn.Linear(100, 10)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0, :2] = torch.tensor([float("nan"), float("inf")])
    save(model, tmp_path / "a.safetensors")
    weight = load(tmp_path / "a.safetensors", model=nn.Linear(100, 10)).weight
    assert weight[0, 0].isnan() and weight[0, 1].isinf() and torch.count_nonzero(weight) == 2


def test_provenance_comes_back_and_must_be_json(tmp_path):
    save(nn.Linear(2, 2), tmp_path / "a.safetensors", provenance={"seed": 3, "tags": ["x"]})
    assert provenance(tmp_path / "a.safetensors") == {"seed": 3, "tags": ["x"]}
    for bad in ({"x": torch.zeros(1)}, {"x": float("nan")}):
        with pytest.raises(UserError, match="provenance"):
            save(nn.Linear(2, 2), tmp_path / "b.safetensors", provenance=bad)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("joints", ["none", "gather"])
@pytest.mark.parametrize("name", ["lenet-5", "resnet-20"])
def test_a_compacted_network_comes_back_into_a_fresh_one(tmp_path, name, joints):
    torch.manual_seed(0)
    model, x = make(name).eval(), torch.randn(2, *input_shape(name))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight[torch.rand(layer.out_channels) < 0.4] = 0
            if isinstance(layer, nn.Linear) and layer.out_features > 10:
                layer.weight[torch.rand(layer.out_features) < 0.4] = 0
    small = compact(model, x, joints=joints)
    size = save(small, tmp_path / "a.safetensors")
    back = load(tmp_path / "a.safetensors", model=make(name)).eval()
    assert torch.equal(back(x), small(x)) and size < save(make(name), tmp_path / "b.safetensors")
    assert len(load_masks(tmp_path / "a.safetensors", back)) == 0


def test_masks_come_back_and_cost_nothing_when_they_are_the_nonzeros(tmp_path):
    model = sparse()
    nonzero = {n: p != 0 for n, p in model.named_parameters() if p.dim() > 1}
    wider = {n: m | (torch.rand_like(m.float()) < 0.01) for n, m in nonzero.items()}
    plain = save(model, tmp_path / "plain.safetensors")
    assert save(model, tmp_path / "a.safetensors", masks=nonzero) < plain + 200
    save(model, tmp_path / "b.safetensors", masks=wider)
    for name, masks in (("a", nonzero), ("b", wider)):
        back = load_masks(tmp_path / f"{name}.safetensors", make("lenet-300-100"))
        assert set(back) == set(masks) and all(torch.equal(back[n], masks[n]) for n in masks)


def test_masks_that_contradict_the_weights_are_refused(tmp_path):
    model = nn.Linear(3, 2)
    for masks in (
        {"weight": torch.zeros(2, 3, dtype=torch.bool)},
        {"weight": torch.ones(3, 2, dtype=torch.bool)},
        {"weight": torch.ones(2, 3)},
        {"other": torch.ones(2, 3, dtype=torch.bool)},
    ):
        with pytest.raises(UserError, match="mask"):
            save(model, tmp_path / "a.safetensors", masks=masks)


def test_a_file_of_another_network_is_refused_and_the_model_stays_as_it_was(tmp_path):
    save(sparse("lenet-5"), tmp_path / "a.safetensors")
    fresh = make("lenet-300-100")
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    with pytest.raises(UserError, match="fit"):
        load(tmp_path / "a.safetensors", model=fresh)
    assert all(torch.equal(v, before[k]) for k, v in fresh.state_dict().items())
    with pytest.raises(UserError, match="fit"):
        load(tmp_path / "a.safetensors", model=make("lenet-5", classes=9))


def test_a_header_of_any_length_can_be_read_back(tmp_path):
    """The length stands in the first bytes, and 640 looks like the beginning of a pickle."""
    lengths = set()
    for extra in range(0, 1200, 8):
        path = tmp_path / f"{extra}.safetensors"
        path.write_bytes(container.seal({"w": torch.ones(2)}, {"kind": "test", "text": "x" * extra}))
        lengths.add(int.from_bytes(path.read_bytes()[:8], "little"))
        assert container.unseal(path)[1]["text"] == "x" * extra
    assert lengths >= {640, 896, 1152}


def test_pickles_foreign_and_missing_files_are_refused(tmp_path):
    import safetensors.torch

    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    with pytest.raises(UserError, match="pickle"):
        load(tmp_path / "a.pt", model=nn.Linear(2, 2))
    (tmp_path / "b.pkl").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(UserError, match="pickle"):
        load(tmp_path / "b.pkl", model=nn.Linear(2, 2))
    safetensors.torch.save_file(nn.Linear(2, 2).state_dict(), tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="not one of deephoyer's"):
        load(tmp_path / "c.safetensors", model=nn.Linear(2, 2))
    with pytest.raises(UserError, match="No such file"):
        load(tmp_path / "d.safetensors", model=nn.Linear(2, 2))
    with pytest.raises(UserError, match="can't be read"):
        load(tmp_path, model=nn.Linear(2, 2))


def test_what_a_file_cannot_hold_is_refused_when_saving(tmp_path):
    with pytest.raises(UserError, match="meta"):
        save(nn.Linear(2, 2, device="meta"), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="lazy"):
        save(nn.LazyLinear(2), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="can't be written"):
        save(nn.Linear(2, 2), tmp_path / "no" / "a.safetensors")


# --- bad files


def parts(data):
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def edited(data, edit, body=None):
    """The file with its header or manifest edited and its digest made right again."""
    header, old = parts(data)
    manifest = json.loads(header["__metadata__"]["manifest"])
    text = edit(header, manifest)
    header["__metadata__"]["manifest"] = json.dumps(manifest) if text is None else text
    return rewrite(header, old if body is None else body)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    model = sparse("lenet-5", 0.05)
    wider = (model.conv2.weight != 0) | (torch.rand(50, 20, 5, 5) < 0.1)
    save(model, path, masks={"fc1.weight": model.fc1.weight != 0, "conv2.weight": wider})
    return path.read_bytes()


def refused(tmp_path, data):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        load_masks(path, load(path, make("lenet-5")))
    message = str(caught.value)
    assert "bad.safetensors" in message and "\n" not in message and len(message) < 500
    return message


def test_two_hundred_mutated_files_are_refused(tmp_path, saved):
    rng = random.Random(0)
    header_end = len(saved) - len(parts(saved)[1])
    for i in range(200):
        data = bytearray(saved)
        kind = i % 4
        if kind == 0:  # a bit anywhere
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:  # a bit in the header
            data[rng.randrange(header_end)] ^= 1 << rng.randrange(8)
        elif kind == 2:  # cut
            data = data[: rng.randrange(len(data))]
        else:  # a run of bytes taken out, doubled or overwritten
            at, long = rng.randrange(len(data)), rng.randrange(1, 64)
            piece = rng.choice([b"", bytes(data[at : at + long]) * 2, rng.randbytes(long)])
            data[at : at + long] = piece
        if bytes(data) != saved:
            refused(tmp_path, bytes(data))


def lies():
    """Edits that a forger would make, each with a right digest."""

    def set_shape(shape):
        return lambda h, m: m["packed"]["fc1.weight"].__setitem__("shape", shape)

    yield from map(set_shape, ([10**15, 10**15], [-500, -800], [500], [400000], [800, 500], [500.0, 800], "500", []))
    yield set_shape([2**80]), set_shape([True, 800])
    yield lambda h, m: m["packed"].pop("fc1.weight")
    yield lambda h, m: m["packed"]["fc1.weight"].update(form="bitmap")
    yield lambda h, m: m["packed"]["fc1.weight"].update(form="pickle")
    yield lambda h, m: m["packed"]["fc1.weight"].update(code="import os")
    yield lambda h, m: m["packed"].update({"conv1.bias": {"shape": [20], "form": "gaps"}})
    yield lambda h, m: m["packed"].update({"nothing": {"shape": [20], "form": "gaps"}})
    yield lambda h, m: m["same"].update({"fc1.weight": "fc2.weight"})
    yield lambda h, m: m["same"].update({"fc1.weight": "fc1.weight"})
    yield lambda h, m: m["same"].update({"fc1.weight": "nothing"})
    yield lambda h, m: m["same"].update({"a": "b", "b": "a"})
    yield lambda h, m: m["masks"].update({"nothing": {"form": "nonzeros"}})
    yield lambda h, m: m["masks"]["conv2.weight"].update(form="gaps")
    yield lambda h, m: m["masks"].pop("conv2.weight")
    yield lambda h, m: m["masks"].update({"fc2.weight": {"form": "bitmap"}})
    yield lambda h, m: m.update(version=2)
    yield lambda h, m: m.update(version=True)
    yield lambda h, m: m.update(extra=1)
    yield lambda h, m: m.update(packed=[])
    yield lambda h, m: m.update(provenance="x")
    yield lambda h, m: m.update(structure={})
    yield lambda h, m: m.update(structure=[])
    yield lambda h, m: m["structure"].update(version=9)
    for key, value in (("out", 10**12), ("out", -1), ("out", 0), ("in", 2.5), ("kind", "exec"), ("bias", False)):
        yield lambda h, m, k=key, v=value: m["structure"]["modules"]["fc1"].update({k: v})
    yield lambda h, m: m["structure"]["modules"].pop("fc1")
    yield lambda h, m: m["structure"]["modules"].update({"__class__": {"kind": "linear"}})
    yield lambda h, m: "[" * 100_000
    yield lambda h, m: '{"a":' * 100_000
    yield lambda h, m: "[]"
    yield lambda h, m: ""
    yield lambda h, m: '{"version": 1, "version": 1}'
    yield lambda h, m: '{"version": NaN}'
    yield lambda h, m: '{"version": ' + "1" * 10_000 + "}"
    yield lambda h, m: h["conv2.bias"].update(shape=[40])
    yield lambda h, m: h["conv2.bias"].update(shape=[-50])
    yield lambda h, m: h["conv2.bias"].update(shape=[2**63, 2**63])
    yield lambda h, m: h["conv2.bias"].update(dtype="F64")
    yield lambda h, m: h["conv2.bias"].update(dtype="I32")
    yield lambda h, m: h["conv2.bias"].update(dtype="NONE")
    yield lambda h, m: h["conv2.bias"].update(data_offsets=[0, 200])
    yield lambda h, m: h["conv2.bias"].update(data_offsets=[0, 10**18])
    yield lambda h, m: h.update(other=h["conv2.bias"])
    yield lambda h, m: h.update(other=h.pop("conv2.bias"))
    yield lambda h, m: h.pop("conv2.bias")
    yield lambda h, m: h["conv2.bias"].update(note="x")
    yield lambda h, m: h["__metadata__"].update(note="x")
    yield lambda h, m: h.update(other=[])
    yield lambda h, m: h["fc1.weight:where"].update(dtype="I8")
    yield lambda h, m: h["fc1.weight:where"].update(shape=[1, *h["fc1.weight:where"]["shape"]])
    yield lambda h, m: h["fc1.weight:values"].update(shape=[1, *h["fc1.weight:values"]["shape"]])
    yield lambda h, m: h["fc1.weight:values"].update(dtype="I32")


def flat(edits):
    for edit in edits:
        yield from edit if isinstance(edit, tuple) else (edit,)


@pytest.mark.parametrize("edit", list(flat(lies())))
def test_a_header_that_lies_is_refused_though_its_digest_is_right(tmp_path, saved, edit):
    refused(tmp_path, edited(saved, edit))


def test_nonzeros_that_are_not_as_many_as_the_values_are_refused(tmp_path, saved):
    header, body = parts(saved)
    start, end = header["fc1.weight:where"]["data_offsets"]
    rng = random.Random(1)
    seen = set()
    for _ in range(40):
        changed = bytearray(body)
        changed[rng.randrange(start, end)] = 255
        seen.add(refused(tmp_path, edited(saved, lambda h, m: None, bytes(changed))).split(":")[-1][:12])
    assert seen


def test_a_mask_that_is_false_where_weights_are_is_refused(tmp_path, saved):
    header, body = parts(saved)
    start, end = header["conv2.weight:mask"]["data_offsets"]
    zeros = body[:start] + bytes(end - start) + body[end:]
    refused(tmp_path, edited(saved, lambda h, m: None, zeros))


# --- ONNX


def test_onnx_runs_with_any_batch_and_computes_the_same(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make("resnet-20").train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    assert export(model, torch.randn(1, 3, 32, 32), tmp_path / "a.onnx") <= 1e-4
    assert model.training and os.listdir(tmp_path) == ["a.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    x = torch.randn(5, 3, 32, 32)
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model.eval()(x), rtol=1e-4, atol=1e-4)


def test_onnx_calls_outputs_as_the_networks_dict_does(tmp_path):
    """But not as an input, or what the exporter calls something within: names are unique in a file."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Detector(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return {"boxes": h + 1, "exp": h.relu(), "relu": h.exp(), "x": h, "linear": h, "same": x}

    export(model := Detector(4, 3), torch.randn(2, 4), tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    x = torch.randn(5, 4)
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected, names = model(x), [output.name for output in session.get_outputs()]
    assert names[0] == "boxes" and "x" not in names and len(set(names)) == len(names)
    for output, value in zip(outputs, expected.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(output), value)


def test_a_compacted_network_with_joints_exports_too(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, x = make("resnet-20").eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for conv in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
            conv.weight[torch.rand(conv.out_channels) < 0.4] = 0
    assert export(compact(model, x, joints="gather"), x, tmp_path / "a.onnx") <= 1e-4


def test_onnx_that_computes_something_else_is_not_written(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Moody(nn.Module):
        calls = 0

        def forward(self, x):
            Moody.calls += 1
            return x * Moody.calls

    with pytest.raises(UserError, match="differ"):
        export(Moody(), torch.randn(2, 3), tmp_path / "a.onnx")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", [0, 1])
def test_onnx_that_gives_nan_in_any_output_is_not_written(tmp_path, where):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Strange(nn.Module):
        def forward(self, x):
            other = x * (float("nan") if torch.compiler.is_exporting() else 1.0)
            return (other, x + 1) if where == 0 else (x + 1, other)

    with pytest.raises(UserError, match="differ"):
        export(Strange(), torch.randn(2, 3), tmp_path / "a.onnx")
    assert os.listdir(tmp_path) == []


def test_onnx_may_give_infinities_that_the_network_gives_too(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(x < 0, float("-inf"))

    assert export(Masked(), torch.tensor([[-1.0, 1.0], [2.0, -2.0]]), tmp_path / "a.onnx") == 0


def test_onnx_of_halves_may_differ_by_their_rounding_and_what_onnxruntime_does_not_know_is_a_clear_error(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 9)).half(), torch.randn(8, 64).half()
    assert export(model, x, tmp_path / "a.onnx") < 2e-2
    with pytest.raises(UserError, match="onnxruntime can't run this network"):
        export(model.bfloat16(), x.bfloat16(), tmp_path / "b.onnx")
    assert os.listdir(tmp_path) == ["a.onnx"]


def test_onnx_takes_inputs_in_tuples_and_a_network_too_large_for_one_file_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class OfPairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, pair):
            return self.layer(pair[0]) - pair[1]

    assert export(OfPairs(), ((torch.randn(2, 4), torch.randn(2, 3)),), tmp_path / "a.onnx") <= 1e-4
    monkeypatch.setattr(sys.modules["deephoyer.export.onnx"], "LARGEST_FILE", 50)
    with pytest.raises(UserError, match="60 bytes"):
        export(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "b.onnx")


def test_a_network_onnx_has_no_words_for_is_a_clear_error(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(UserError, match="can't express"):
        export(Branching(), torch.randn(2, 3), tmp_path / "a.onnx")


def test_without_its_extra_export_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"pip install 'deephoyer\[export\]'"):
        export(nn.Linear(2, 2), torch.zeros(1, 2), tmp_path / "a.onnx")
