"""The kernels for stacked convolutions give what PyTorch gives network by network, gradients too.

They run on CUDA where there is one, and otherwise through Triton's interpreter, in a process of its own:
`TRITON_INTERPRET=1 pytest tests/test_convolutions.py -k kernel`.
"""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from deephoyer import models
from deephoyer.train.stacked import stacked

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available() and not INTERPRETED and HAS_TRITON
needs_kernels = pytest.mark.skipif(not (HAS_TRITON and INTERPRETED) and not HAS_CUDA, reason="for Triton")
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="for CUDA and Triton")

DEVICE = "cuda" if HAS_CUDA else "cpu"
SHAPES = [  # networks, images each, channels, outputs, taps, padding, height, width
    (3, 2, 1, 5, 3, 0, 9, 8),
    (2, 3, 3, 20, 5, 0, 9, 10),
    (1, 3, 20, 50, 5, 0, 6, 6),
    (2, 3, 3, 5, 3, 1, 6, 7),
    (1, 2, 4, 17, 5, 2, 6, 7),
    (2, 1, 2, 70, 1, 0, 4, 4),
]
PRECISIONS = {  # dtype, float32 matmul precision, slack
    "float64": (torch.float64, "highest", 1e-9),
    "float32": (torch.float32, "highest", 2e-5),
    "tf32": (torch.float32, "high", 4e-3),
    "bfloat16": (torch.bfloat16, "highest", 3e-2),
}


@pytest.fixture(params=["float32", "tf32", "bfloat16"] if HAS_CUDA else ["float64"])
def numbers(request):
    """The type of the images, and how far results may be off; while the float32 precision is set."""
    dtype, precision, slack = PRECISIONS[request.param]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield dtype, slack
    torch.set_float32_matmul_precision(before)


def inputs(shape, biased=True):
    networks, images, channels, outputs, taps, _, high, wide = shape
    random = torch.Generator().manual_seed(0)
    sizes = [(networks * images, channels, high, wide), (networks, outputs, channels, taps, taps), (networks, outputs)]
    found = [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]
    return found if biased else found[:2]


def one_by_one(x, weight, bias=None, padding=(0, 0)):
    biases = [None] * len(weight) if bias is None else bias
    parts = zip(x.chunk(len(weight)), weight, biases, strict=True)
    return torch.cat([F.conv2d(part, w, b, padding=padding) for part, w, b in parts])


def assert_near(found, expected, slack):
    """Rounding errors are as large as the whole sum's terms, not as what is left of it."""
    assert found.shape == expected.shape
    assert (found.double().cpu() - expected).abs().max() <= slack * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("shape, biased", [(SHAPES[0], False), *((shape, True) for shape in SHAPES)])
def test_the_kernel_convolves_each_network_with_its_own_weights(shape, biased, numbers):
    from deephoyer.kernels.convolutions import convolve

    dtype, slack = numbers
    exact = [t.requires_grad_() for t in inputs(shape, biased)]
    # Weights stay in float32 while the images are in bfloat16, as under autocast.
    kinds = [dtype] + [torch.float32 if dtype == torch.bfloat16 else dtype] * 2
    own = [t.detach().to(DEVICE, kind).requires_grad_() for t, kind in zip(exact, kinds, strict=False)]
    bias = own[2] if biased else None
    found, expected = convolve(own[0], own[1], bias, (shape[5],) * 2), one_by_one(*exact, padding=shape[5])
    assert_near(found, expected, slack)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(expected, exact, slope)
    for tensor, grad, true in zip(own, torch.autograd.grad(found, own, slope.to(found)), expected, strict=True):
        assert grad.dtype == tensor.dtype
        assert_near(grad, true, slack)


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 3, 1, 20, 5, 0, 10, 8), (2, 3, 3, 5, 3, 0, 8, 6), (1, 2, 20, 5, 3, 0, 6, 6)])
def test_the_kernel_pools_what_it_convolves(shape, numbers):
    from deephoyer.kernels.convolutions import convolve_and_pool

    dtype, slack = numbers
    # Whole numbers, exact in every type: what is largest, or above 0, is not a matter of rounding.
    exact = [t.round().clamp(-2, 2).requires_grad_() for t in inputs(shape)]
    kinds = [dtype] + [torch.float32 if dtype == torch.bfloat16 else dtype] * 2
    own = [t.detach().to(DEVICE, kind).requires_grad_() for t, kind in zip(exact, kinds, strict=True)]
    found, expected = convolve_and_pool(*own), F.max_pool2d(F.relu(one_by_one(*exact)), 2)
    assert_near(found, expected, slack)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(expected, exact, slope)
    for grad, true in zip(torch.autograd.grad(found, own, slope.to(found)), expected, strict=True):
        assert_near(grad, true, slack)


@needs_kernels
@pytest.mark.parametrize("channels", [3, 20])
@pytest.mark.parametrize("last", [True, False])
def test_the_kernel_pools_as_pytorch_does_among_equals_and_nans(channels, last, numbers):
    from deephoyer.kernels.convolutions import rectify_and_pool

    x = torch.randint(-3, 3, (5, channels, 6, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE, numbers[0])
    x[0, 0, 0, 1] = torch.nan
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = rectify_and_pool(one), F.max_pool2d(F.relu(other), 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    slope = torch.randn_like(expected)
    found.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.skipif(HAS_CUDA or INTERPRETED or not HAS_TRITON, reason="Triton runs in this process, or isn't installed")
def test_the_convolutions_in_the_interpreter(interpreted):
    interpreted(__file__, "kernel")


@needs_cuda
@pytest.mark.parametrize("cast", [False, True])
def test_a_stacked_lenet_on_cuda_is_the_networks_side_by_side(cast):
    torch.manual_seed(0)
    nets = [models.make("lenet-5").cuda() for _ in range(5)]
    exact = [copy.deepcopy(net).double() for net in nets]
    x = torch.rand(5 * 7, 1, 28, 28, device="cuda")
    expected = torch.cat([net(part.double()) for net, part in zip(exact, x.split(7), strict=True)])
    expected.square().sum().backward()
    twin = stacked(nets)
    with torch.autocast("cuda", torch.bfloat16, enabled=cast):
        found = twin(x)
    found.double().square().sum().backward()
    assert_near(found, expected.cpu(), 5e-2 if cast else 1e-4)
    for name, p in twin.named_parameters():
        assert p.grad.stride() == p.stride()
        for grad, net in zip(p.grad, exact, strict=True):
            # Rounded to bfloat16, another of four may be the largest.
            assert_near(grad, net.get_parameter(name).grad.cpu(), 2e-1 if cast else 1e-3)


@needs_cuda
def test_a_captured_stack_repeats_bit_for_bit():
    twin = stacked([models.make("lenet-5").cuda() for _ in range(3)])
    x = torch.rand(3 * 10, 1, 28, 28, device="cuda")

    def grads():
        return torch.autograd.grad(twin(x).square().sum(), list(twin.parameters()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plain = grads()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grads()
    graph.replay()
    first = [grad.clone() for grad in captured]
    graph.replay()
    for once, again, outside in zip(first, captured, plain, strict=True):
        assert torch.equal(once, again)
        assert_near(once, outside.double().cpu(), 1e-4)
