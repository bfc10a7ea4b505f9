"""Several networks of one kind as one batched network: layer by layer their weights lie in one tensor.

The batch that goes through it is all networks' batches one after the other, so that a model's own `forward`
serves unchanged; only layers with weights must know which images are whose. What is trained, and how,
is in `stack.py`.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import UserError

SPLIT = 256
"""Matrix products that a GPU is to work on at once."""


class StackedLinear(nn.Module):
    """`count` linear layers: the first share of the batch goes through the first one, and so on."""

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        self.weight = _stack([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _stack([layer.bias for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.weight)
        # Weight × inputs and not the other way round: the weight's gradient then lies as the weight does.
        columns = x.reshape(count, -1, x.shape[-1]).transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(self.weight, columns)
        else:
            y = torch.baddbmm(self.bias.unsqueeze(2), self.weight, columns)
        return y.transpose(1, 2).reshape(len(x), -1)


class StackedConv2d(nn.Module):
    """`count` convolutions as one batched matrix product: cuDNN is slow at many small groups.

    On CUDA a kernel of our own reads the windows where they are; the plain path copies them.
    """

    def __init__(self, layers: Sequence[nn.Conv2d]):
        super().__init__()
        first = layers[0]
        plain = first.groups == 1 and first.dilation == (1, 1) and first.padding_mode == "zeros"
        if not plain or isinstance(first.padding, str):
            raise UserError(f"stack: {first} can't be stacked; only plain convolutions can.")
        self.weight = _stack([layer.weight for layer in layers])
        self.bias = None if first.bias is None else _stack([layer.bias for layer in layers if layer.bias is not None])
        self.stride, self.padding = first.stride, (first.padding[0], first.padding[1])
        self.taps = first.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        count, outputs, _, high, wide = self.weight.shape
        x = _cast(x)  # before the windows are copied, which is most of the work
        if self._fits(x):
            from deephoyer.kernels.convolutions import convolve

            return convolve(x, self.weight, self.bias, self.padding)
        rows, columns = self.padding
        x = F.pad(x, (columns, columns, rows, rows)) if rows or columns else x
        windows = x.permute(0, 2, 3, 1).unfold(1, high, self.stride[0]).unfold(2, wide, self.stride[1])
        images, height, width = windows.shape[:3]
        # Channels last, in the windows and in what comes out: runs of memory stay long.
        windows = windows.permute(0, 1, 2, 4, 5, 3).reshape(count, images // count * height * width, -1)
        weight = self.weight.permute(0, 3, 4, 2, 1).reshape(count, -1, outputs)
        y = self._products(windows, weight)
        return y.view(images, height, width, outputs).permute(0, 3, 1, 2)

    def pooled(self, x: Tensor) -> Tensor:
        """max_pool2d(relu(…), 2) of what `forward` gives."""
        x = _cast(x)
        even = all((size + 2 * p - t) % 2 for size, p, t in zip(x.shape[2:], self.padding, self.taps, strict=True))
        if even and self._fits(x):
            from deephoyer.kernels.convolutions import convolve_and_pool

            return convolve_and_pool(x, self.weight, self.bias, self.padding)
        return F.max_pool2d(F.relu(self(x)), 2)

    def _fits(self, x: Tensor) -> bool:
        """Whether the kernel can: no strides, no row of padding alone, and 32 bits for places in a network's images."""
        if not _kernels_take(x):
            return False
        count, outputs, channels, *_ = self.weight.shape
        padded = [size + 2 * p for size, p in zip(x.shape[2:], self.padding, strict=True)]
        size = len(x) // count * padded[0] * padded[1] * max(channels, outputs)
        inner = all(p < tap <= long for p, tap, long in zip(self.padding, self.taps, padded, strict=True))
        return self.stride == (1, 1) and inner and size < 2**31

    def _products(self, windows: Tensor, weight: Tensor) -> Tensor:
        """Windows × weight, each network in parts: so the weight's gradient, a sum over all windows, fills a GPU."""
        count, rows, _ = windows.shape
        parts = next((p for p in range(-(-SPLIT // count), 1, -1) if rows % p == 0), 1)
        windows = windows.view(count * parts, rows // parts, -1)
        weight = weight.repeat_interleave(parts, 0)
        if self.bias is None:
            return torch.bmm(windows, weight)
        return torch.baddbmm(self.bias.unsqueeze(1).repeat_interleave(parts, 0), windows, weight)


def _cast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _kernels_take(x: Tensor) -> bool:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and _HAS_TRITON and x.dtype in kinds and not torch.compiler.is_compiling()


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _stack(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack([part.detach() for part in parts]))


_STACKED = {nn.Linear: StackedLinear, nn.Conv2d: StackedConv2d}


def stacked(models: Sequence[nn.Module]) -> nn.Module:
    """One network that is all of them. The parameters of the models become views of its parameters.

    >>> nets = [nn.Sequential(nn.Linear(3, 2), nn.ReLU()) for _ in range(4)]
    >>> stacked(nets)(torch.ones(8, 3)).shape
    torch.Size([8, 2])
    """
    twin = copy.deepcopy(models[0])
    for name, module in list(twin.named_modules()):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if type(module) in _STACKED and name:
            place, _, last = name.rpartition(".")
            layers = [model.get_submodule(name) for model in models]
            setattr(twin.get_submodule(place), last, _STACKED[type(module)](layers))
        elif own:
            raise UserError(
                f"stack: {type(module).__name__} {name!r} can't be stacked; linear layers and convolutions can."
            )
    for name, parameter in twin.named_parameters():
        for i, model in enumerate(models):
            model.get_parameter(name).data = parameter.data[i]
    return twin


def lend_gradients(twin: nn.Module, models: Sequence[nn.Module]) -> None:
    """The models' gradients become views of the twin's, where `backward` has just left them."""
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        for model, grad in zip(models, parameter.grad.unbind(), strict=True):
            model.get_parameter(name).grad = grad


@torch.no_grad()
def count_right(ask: Callable[[Tensor], Tensor], networks: int, x: Tensor, y: Tensor, batch: int = 1000) -> Tensor:
    """For each network how many images it gets right; `ask` gives the stack's outputs. Does not wait for the device."""
    right = torch.zeros(networks, dtype=torch.int64, device=x.device)
    for images, labels in zip(x.split(batch), y.split(batch), strict=True):
        found = ask(images.repeat(networks, *[1] * (images.dim() - 1)))
        right += (found.view(networks, len(images), -1).argmax(2) == labels).sum(1)
    return right
