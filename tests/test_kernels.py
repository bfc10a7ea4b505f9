"""Every backend gives the gradient that autograd finds in float64.

The Triton kernels run on CUDA where there is one, and otherwise through Triton's interpreter, in a
process of its own: `TRITON_INTERPRET=1 pytest tests/test_kernels.py -k triton`.
"""

import copy
import importlib.util
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import deephoyer as dh
from deephoyer.groups import Grouping, Slices, SliceUnit
from deephoyer.kernels.zeroing import Zeroing, laid_like

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
RUNS_TRITON = HAS_TRITON and (INTERPRETED or torch.cuda.is_available())
ON_DEVICE = (
    () if INTERPRETED else pytest.mark.cuda
)  # what runs on a GPU, where the interpreter does not stand in for it
FAST = ["foreach", *([pytest.param("triton", marks=ON_DEVICE)] if RUNS_TRITON else [])]
PENALTIES = ["l1", "hoyer", "hoyer-square", "transformed-l1", "scad", "mcp"]
SLACK = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EXAMPLES = 10 if INTERPRETED else 40  # the interpreter takes its time


compiled = pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="for Triton's compiled kernels")


def on_device(test):
    """Runs on a GPU, where the interpreter does not stand in for it."""
    return test if INTERPRETED else pytest.mark.cuda(test)


def device_of(backend):
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"


class Experts(nn.Module):
    """Stacked matrices, one for each expert of a mixture."""

    def __init__(self, experts, inputs, outputs, is_transposed):
        super().__init__()
        self.num_experts, self.is_transposed = experts, is_transposed
        self.stack = nn.Parameter(torch.empty(experts, *((inputs, outputs) if is_transposed else (outputs, inputs))))


@st.composite
def networks(draw):
    """Layers of all kinds with weights from 1e-6 to 1e6, some exactly 0, down to a single weight or none alive."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    layers = [nn.Linear(draw(st.integers(1, 40)), draw(st.integers(1, 9)), bias=False), nn.Linear(1, 1, bias=False)]
    groups, inputs, outputs, kernel = (draw(st.integers(1, 3)) for _ in range(4))
    for conv in (nn.Conv2d, nn.ConvTranspose2d):
        layers.append(conv(groups * inputs, groups * outputs, kernel, groups=groups, bias=False))
    model = nn.Sequential(*layers, Experts(*(draw(st.integers(2, 4)) for _ in range(3)), draw(st.booleans())))
    for p in model.parameters():
        w = torch.randn(p.shape, generator=random) * 10.0 ** draw(st.floats(-6, 6))
        w[torch.rand(p.shape, generator=random) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
        p.data.copy_(w)
    return model.to(memory_format=torch.channels_last) if draw(st.booleans()) else model


def fill_grads(model, dtype=None, seed=0):
    """Gradients as large as weights are; returns copies in float64."""
    random = torch.Generator().manual_seed(seed)
    before = []
    for p in model.parameters():
        p.grad = None
        noise = torch.randn(p.shape, generator=random).to(p.device)
        if dtype is not None and dtype != p.dtype:
            if not hasattr(p, "grad_dtype"):
                pytest.skip("this PyTorch has gradients of the weights' type only")
            p.grad_dtype = dtype
        p.grad = torch.empty_like(p, dtype=dtype).copy_(noise * p.detach().abs().max())
        before.append(p.grad.double().cpu().clone())
    return before


def autograd(model, *terms, **options):
    """The regularizer's gradient from autograd, in float64 on the CPU."""
    exact = copy.deepcopy(model).double().cpu()
    exact.zero_grad()
    dh.Regularizer(exact, *terms, **options).loss().backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in exact.parameters()]


def steepest(p):
    """A bound on the slope of all penalties; where A − B·r nearly cancels, rounding is still as large as A's."""
    r = p.detach().double().abs()
    return 2 + 2 * r.sum().item() / max(r.square().sum().item(), 1e-30)


def assert_adds(model, penalty, groups, backend, strength=0.3, grad_dtype=None, only=True):
    model = model.to(device_of(backend))
    want = autograd(model, penalty, groups, strength)
    before = fill_grads(model, grad_dtype)
    reg = dh.Regularizer(model, penalty, groups, strength, backend=backend)
    reg.add_grad_()
    for p, old, gradient in zip(model.parameters(), before, want, strict=True):
        slack = SLACK[p.grad.dtype] * (old.abs().max() + gradient.abs().max() + strength * steepest(p))
        assert (p.grad.double().cpu() - old - gradient).abs().max() <= slack
    if only:
        assert set(reg.stats()["backend"]) == {backend}


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("penalty", PENALTIES)
@settings(max_examples=EXAMPLES)
@given(model=networks())
def test_elements_agree_with_autograd(backend, penalty, model):
    assert_adds(model, penalty, "elements", backend)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("penalty", PENALTIES)
@settings(max_examples=EXAMPLES)
@given(model=networks(), groups=st.sampled_from(["filters", "channels", "filters+channels"]))
def test_slices_agree_with_autograd(backend, penalty, model, groups):
    assert_adds(model, penalty, groups, backend)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("groups", ["elements", "filters+channels"])
@pytest.mark.parametrize("weights", SLACK)
def test_every_precision_with_gradients_of_its_own_or_another(backend, groups, weights):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, bias=False), nn.Linear(64, 24, bias=False)).to(weights)
    assert_adds(model, "hoyer-square", groups, backend)
    assert_adds(model, "hoyer-square", groups, backend, grad_dtype=torch.float32)


class Twins(Grouping):
    """Row i of the first layer goes with columns i and i + n of the second; the last row is free."""

    name = "twins"

    def units(self, weights):
        first, second = weights
        rows = first.tensor.shape[0]
        alone = torch.arange(rows)
        alone[-1] = -1
        twice = torch.arange(2 * rows) % rows
        parts = [
            Slices.along(first.name, first.tensor, 0, group=alone),
            Slices.along(second.name, second.tensor, 1, group=twice),
        ]
        return [SliceUnit("twins", parts, rows)]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("penalty", ["hoyer-square", "mcp", "trimmed-l1"])
def test_groups_across_layers(backend, penalty):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(10, 3, bias=False))
    assert_adds(model, penalty, Twins(), backend)
    assert_adds(model, penalty, [Twins(), "filters"], backend)


@pytest.mark.parametrize("backend", FAST)
def test_larger_than_a_block(backend):
    torch.manual_seed(0)
    size = (300, 1100) if INTERPRETED else (1100, 1100)
    model = nn.Linear(*size, bias=False)
    assert_adds(model, "hoyer-square", "elements", backend)
    assert_adds(model, "hoyer-square", "filters+channels", backend)


@pytest.mark.parametrize("backend", FAST)
def test_what_a_backend_cannot_take_is_left_to_the_plain_one(backend):
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False)
    model.weight = nn.Parameter(torch.randn(12, 5)[::2].t())  # neither dense nor in rows
    assert_adds(model, "hoyer-square", "elements", backend, only=False)
    reg = dh.Regularizer(model, "hoyer-square", "filters", backend=backend)
    assert reg.stats()["backend"] == {"plain": 1}
    index = dh.IndexGroups({"weight": [[0, 1], [1, 2]]})
    assert_adds(model, "hoyer-square", index, backend, only=False)


@pytest.mark.parametrize("backend", FAST)
def test_addresses_may_change_from_step_to_step(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7, bias=False), nn.Linear(8, 8, bias=False)).to(device_of(backend))
    reg = dh.Regularizer(model, "hoyer-square", "elements+filters", backend=backend)
    held = []
    for seed in range(20):
        before = fill_grads(model, seed=seed)
        held.append([p.grad for p in model.parameters()])  # so that the next ones are elsewhere
        reg.add_grad_()
        want = autograd(model, "hoyer-square", "elements+filters")
        for p, old, gradient in zip(model.parameters(), before, want, strict=True):
            torch.testing.assert_close(p.grad.double().cpu(), old + gradient, rtol=1e-4, atol=1e-6)
        model[1].weight.data = torch.randn_like(model[1].weight)


def half_the_rows(model):
    for p in model.parameters():
        p.data, p.grad = p.data[: len(p) // 2], None


def turned(model):
    """Other strides at the same addresses."""
    for p in model.parameters():
        p.data, p.grad = p.data.t(), None


CHANGES = {
    "no gradients": lambda model: model.zero_grad(set_to_none=True),
    "a frozen weight": lambda model: model[0].weight.requires_grad_(False),
    "a thawed weight": lambda model: model[0].weight.requires_grad_(True),
    "turned": turned,
    "other precision": lambda model: model.double(),
    "back again": lambda model: model.float(),
    "half the rows": half_the_rows,
    "nothing": lambda model: None,
}


@pytest.mark.parametrize("backend", FAST)
def test_whatever_happens_to_the_weights_between_steps_is_noticed(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16, bias=False), nn.Linear(8, 8, bias=False)).to(device_of(backend))
    reg = dh.Regularizer(model, "hoyer-square", "elements", 0.3, backend=backend)
    for change in CHANGES.values():
        reg.add_grad_()
        change(model)
        for _ in range(2):
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            reg.add_grad_()
            want = autograd(model, "hoyer-square", "elements", 0.3)
            for p, old, gradient in zip(model.parameters(), before, want, strict=True):
                added = torch.zeros_like(p) if p.grad is None else p.grad - old
                torch.testing.assert_close(added.double().cpu(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", FAST)
def test_a_copy_of_model_and_regularizer_goes_its_own_way(backend):
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False).to(device_of(backend))
    reg = dh.Regularizer(model, "hoyer-square", "elements+filters", lambda step: 0.1 * (step + 1), backend=backend)
    reg.add_grad_()
    twin, its = copy.deepcopy((model, reg))
    twin.zero_grad()
    reg.step()  # the original's strength, not the copy's
    its.add_grad_()
    want = autograd(twin, "hoyer-square", "elements+filters", 0.2)[0]
    torch.testing.assert_close(twin.weight.grad.double().cpu(), want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("backend", FAST)
def test_results_repeat_bit_for_bit(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(130, 70), nn.Linear(70, 9)).to(device_of(backend))
    seen = []
    for _ in range(2):
        model.zero_grad()
        dh.Regularizer(model, "hoyer-square", "elements+filters+channels", backend=backend).add_grad_()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("backend", ["plain", *FAST])
def test_a_loss_scale_multiplies_the_gradient(backend):
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False).to(device_of(backend))
    reg = dh.Regularizer(model, "hoyer-square", "elements+filters", backend=backend)
    want = autograd(model, "hoyer-square", "elements+filters")[0]
    with torch.no_grad():
        reg._backend.add_grad_(torch.tensor(8.0, device=model.weight.device))
    torch.testing.assert_close(model.weight.grad.double().cpu(), 8 * want, rtol=1e-4, atol=1e-7)


@pytest.mark.cuda
@compiled
@pytest.mark.parametrize("groups", ["elements", "filters"])
def test_more_than_two_billion_weights(groups):
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.zeros(32769, 65536, dtype=torch.bfloat16, device="cuda"))
    model.weight.data[0, 0], model.weight.data[-1, -1] = 1, 3
    dh.Regularizer(model, "hoyer-square", groups, 1.0, backend="triton").add_grad_()
    grad = model.weight.grad
    ends = torch.stack([grad[0, 0], grad[-1, -1]]).float().cpu()  # S₁ = 4 and S₂ = 10, so A = 0.8 and B = 0.32
    torch.testing.assert_close(ends, torch.tensor([0.48, -0.16]), rtol=1e-2, atol=0)
    assert grad.count_nonzero() == 2


@on_device
@pytest.mark.skipif(not RUNS_TRITON, reason="Triton does not run in this process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_triton_kernel_zeroes_what_is_dropped_and_nothing_else(dtype, monkeypatch):
    monkeypatch.setattr("deephoyer.kernels.triton_zeroing.PROGRAMS", 2)  # so that programs take turns
    torch.manual_seed(0)
    device = torch.device("cpu" if INTERPRETED else "cuda")
    tensors = [torch.randn(shape, dtype=dtype, device=device) for shape in ((1,), (130, 100), (3, 4, 5, 6))]
    tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    tensors[1][0] = torch.nan
    drops = [laid_like(torch.rand(t.shape, device=device) < 0.5, t) for t in tensors]
    expected = [t.masked_fill(drop, 0) for t, drop in zip(tensors, drops, strict=True)]
    Zeroing().fused(device, list(zip(tensors, drops, strict=True)))
    for found, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_on_a_cpu_zeroing_by_bits_is_a_fill_and_keeps_the_bits_of_all_else(dtype):
    torch.manual_seed(0)
    whole = torch.randn(40, 60).to(dtype)
    tensors = [torch.randn(7).to(dtype), torch.randn(3, 4, 5, 6).to(dtype).to(memory_format=torch.channels_last)]
    tensors += [whole[:, ::2], whole.t(), nn.Parameter(torch.randn(5, 5).to(dtype), requires_grad=dtype.is_complex)]
    zero = Zeroing()
    for tensor in tensors:
        with torch.no_grad():
            tensor[0], tensor[-1] = torch.nan, -0.0
            drop = laid_like(torch.rand(tensor.shape) < 0.5, tensor)
            expected = tensor.clone().masked_fill_(drop, 0)
            for _ in range(2):  # at the second call the mask is at hand
                zero([(tensor, drop)])
        bytes_of = [t.detach().contiguous().view(torch.uint8) for t in (tensor, expected)]
        assert torch.equal(*bytes_of)


def test_zeroing_by_bits_follows_a_mask_that_took_anothers_place():
    zero = Zeroing()
    for _ in range(20):  # masks that are gone leave their numbers to the next
        tensor, drop = torch.randn(50), torch.rand(50) < 0.5
        zero([(tensor, drop)])
        assert torch.equal(tensor == 0, drop)


@pytest.mark.cuda
@compiled
@pytest.mark.parametrize("groups", ["elements", "filters+channels"])
def test_a_captured_step_follows_the_strength_and_nothing_waits(groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Conv2d(8, 16, 3, bias=False)).cuda()
    fill_grads(model)
    reg = dh.Regularizer(model, "hoyer-square", groups, lambda step: 0.1 * (step + 1))
    reg.add_grad_(advance=False)  # compiles, and builds the tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reg.add_grad_(advance=False)
        model.zero_grad(set_to_none=True)
        reg.add_grad_(advance=False)  # to gradients that are elsewhere
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):  # the gradients are allocated in the capture
        reg.add_grad_(advance=False)
    for step in range(3):
        for p in model.parameters():
            p.grad.zero_()
        graph.replay()
        for p, want in zip(model.parameters(), autograd(model, "hoyer-square", groups, 0.1 * (step + 1)), strict=True):
            torch.testing.assert_close(p.grad.double().cpu(), want, rtol=1e-3, atol=1e-5)
        reg.step()


def test_a_frozen_weight_counts_but_gets_no_gradient():
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(10, 3, bias=False))
    reg = dh.Regularizer(model, "hoyer-square", Twins(), backend="foreach")
    want = autograd(model, "hoyer-square", Twins())[1]
    model[0].weight.requires_grad_(False)
    reg.add_grad_()
    assert model[0].weight.grad is None
    torch.testing.assert_close(model[1].weight.grad.double(), want, rtol=1e-4, atol=1e-7)


def test_auto_is_foreach_on_a_cpu():
    reg = dh.Regularizer(nn.Linear(3, 2), groups="elements")
    assert reg.stats()["backend"] == {"foreach": 1}
    assert reg.stats()["weight (elements)"]["value"] > 0


def test_an_unknown_backend_is_refused():
    with pytest.raises(dh.UserError, match=r"not a backend. Did you mean 'triton'"):
        dh.Regularizer(nn.Linear(3, 2), backend="tritn")


HAS_COMPILER = shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="compiling for a CPU takes a C++ compiler")


@pytest.mark.parametrize("by", ["eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_whose_step_is_compiled_takes_the_regularizer_along(by, kind):
    torch.manual_seed(0)
    models = [nn.Linear(5, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, compiles in zip(models, (False, True), strict=True):
        optimizer = kind(model.parameters(), lr=0.1)
        dh.Regularizer(model, "hoyer-square", "elements", strength=0.1).attach(optimizer)
        step = torch.compile(optimizer.step, backend=by) if compiles else optimizer.step
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            step()
    torch.testing.assert_close(models[0].weight, models[1].weight)


@on_device
@pytest.mark.skipif(not RUNS_TRITON, reason="for Triton")
def test_triton_tables_that_a_captured_graph_reads_are_kept_however_often_others_are_frozen():
    model = nn.Sequential(*(nn.Linear(3, 2, bias=False) for _ in range(4))).to(device_of("triton"))
    backend = dh.Regularizer(model, "hoyer-square", backend="triton")._backend
    with torch.no_grad():
        backend.add_grad_()
        ((plan,), _) = backend._last[1]
        plan.tables.pointers.captured.append(None)  # as a capture does
        for pattern in range(1, 14):
            for i, p in enumerate(model.parameters()):
                p.requires_grad_(not pattern >> i & 1)
            backend.add_grad_()
    assert any(plan in plans for plans, _ in backend._plans.values()) and len(backend._plans) < 10


@pytest.mark.skipif(RUNS_TRITON or not HAS_TRITON, reason="Triton runs in this process, or isn't installed")
def test_the_triton_kernels_in_the_interpreter(interpreted):
    interpreted(__file__, "triton")


class Log(dh.Penalty):
    """Σ log(1 + r/a)"""

    def __init__(self, a=0.1):
        self.a = a

    def value(self, r):
        return (1 + r / self.a).log().sum()

    def slope(self, r):
        return 1 / (self.a + r)


class SeparableLog(Log):
    separable = True


def test_a_penalty_that_declares_it_is_separable_takes_the_fast_path_with_the_same_gradient():
    model = nn.Linear(30, 20)
    plain, fast = (dh.Regularizer(model, SeparableLog(), backend=b, strength=0.1) for b in ("plain", "foreach"))
    gradients = []
    for reg in (plain, fast):
        model.weight.grad = torch.zeros_like(model.weight)
        reg.add_grad_()
        gradients.append(model.weight.grad)
    torch.testing.assert_close(*gradients)
    assert fast.stats()["backend"] == {"foreach": 1.0}


def test_a_penalty_without_a_fast_path_says_so_and_gives_the_same_gradient():
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="Log on elements has no fast path") as caught:
        dh.Regularizer(model, Log(), backend="foreach", strength=1.0).add_grad_()
    assert len(caught) == 1
    w = model.weight.detach()
    torch.testing.assert_close(model.weight.grad, w.sign() / (0.1 + w.abs()))


@pytest.mark.skipif(not HAS_TRITON, reason="for Triton")
def test_a_subclass_does_not_inherit_its_parents_triton_slope():
    from deephoyer.kernels.triton_slopes import SLOPES, kind_of

    class Doubled(dh.L1):
        def slope(self, r):
            return 2 * super().slope(r)

    assert kind_of(Doubled()) is None
    made = [dh.L1(), dh.Hoyer(), dh.HoyerSquare(), dh.TransformedL1(), dh.SCAD(), dh.MCP()]
    assert [SLOPES[kind_of(p)[0]] for p in made] == [p.device_slope for p in made]
