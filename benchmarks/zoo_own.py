"""Twenty networks of a few lines each, as people write them by hand, for `zoo.py`; each with example inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[nn.Module, Any]


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a classifier."""

    def __init__(self, kind: type[nn.RNNBase], both_ways: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = kind(32, 48, num_layers=2, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(96 if both_ways else 48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x))[0][:, -1])


class DenseGCN(nn.Module):
    """Graph convolutions with a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.second(torch.relu(adjacency @ self.first(x)))


class PointNet(nn.Module):
    """Points, each through the same layers, then the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU()),
            *(nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU()),
            *(nn.Conv1d(128, 256, 1), nn.BatchNorm1d(256)),
        )
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).max(2).values)


class DLRM(nn.Module):
    """A recommender: embeddings and a bottom network meet in dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(16 + 6, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        low = self.bottom(dense)
        all_ = torch.stack([low, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = all_ @ all_.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([low, products[:, rows, columns]], 1))


class EncoderDecoder(nn.Module):
    """torch's own Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(self.embedding(source), self.embedding(target)))


class TransformerBlock(nn.Module):
    """Attention and neurons, with one matrix for queries, keys and values; norms come first."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True, ratio: int = 4):
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.first(x)).split(self.qkv.out_features // 3, 2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        chance = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=self.causal)
        x = x + self._dropped(self.out(y.transpose(1, 2).reshape(batch, length, -1)))
        return x + self._dropped(self.down(functional.gelu(self.up(self.second(x)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class CharacterGPT(nn.Module):
    """nanoGPT's shape, with the head's weight tied to the embedding's."""

    def __init__(
        self,
        vocabulary: int = 65,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        length: int = 32,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

        self.down, self.lower, self.bottom = block(3, 32), block(32, 64), block(64, 128)
        self.up, self.upper = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.left, self.right = block(128, 64), block(64, 32)
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.lower(functional.max_pool2d(a, 2))
        c = self.bottom(functional.max_pool2d(b, 2))
        b = self.left(torch.cat([self.up(c), b], 1))
        return self.head(self.right(torch.cat([self.upper(b), a], 1)))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 64)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def _cnn(norm: Callable[[int], nn.Module], act: Callable[[int], nn.Module]) -> Built:
    widths = (3, 32, 64, 128)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, 2, 1), norm(b), act(b)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), _images()


def _images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size)


def _text(length: int = 12) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))


def _audio() -> Built:
    layers: list[nn.Module] = []
    for a, b, kernel, stride in ((1, 32, 80, 16), (32, 32, 3, 1), (32, 64, 3, 1), (64, 64, 3, 1)):
        layers += [nn.Conv1d(a, b, kernel, stride), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(2, 1, 2000)


def _generator() -> Built:
    layers: list[nn.Module] = []
    for a, b, stride, pad in ((32, 128, 1, 0), (128, 64, 2, 1), (64, 32, 2, 1)):
        layers += [nn.ConvTranspose2d(a, b, 4, stride, pad, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()), torch.randn(2, 32, 1, 1)


def _mlp() -> Built:
    layers: list[nn.Module] = []
    for a, b in ((20, 256), (256, 256)):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(256, 5)), torch.randn(4, 20)


def _superresolution() -> Built:
    body = (nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
    up = (nn.Conv2d(64, 128, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1))
    return nn.Sequential(*body, *up), _images(16)


def _weight_norm() -> Built:
    norm = nn.utils.parametrizations.weight_norm
    layers = (norm(nn.Conv1d(8, 64, 3)), nn.ReLU(), norm(nn.Conv1d(64, 64, 3)), nn.ReLU(), nn.Conv1d(64, 4, 1))
    return nn.Sequential(*layers), torch.randn(2, 8, 20)


def _encoder() -> Built:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 5)), torch.randn(2, 12, 64)


def _adjacency() -> Tensor:
    links = (torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) < 0.2).float() + torch.eye(20)
    return links / math.sqrt(20)


NETWORKS: dict[str, Callable[[], Built]] = {
    "lstm": lambda: (Recurrent(nn.LSTM), _text()),
    "bilstm": lambda: (Recurrent(nn.LSTM, both_ways=True), _text()),
    "gru": lambda: (Recurrent(nn.GRU), _text()),
    "rnn": lambda: (Recurrent(nn.RNN), _text()),
    "audio-m5": _audio,
    "gcn-dense-adjacency": lambda: (DenseGCN(), (torch.randn(20, 16), _adjacency())),
    "pointnet": lambda: (PointNet(), torch.randn(2, 3, 100)),
    "dcgan-generator": _generator,
    "dlrm": lambda: (DLRM(), (torch.randn(2, 8), _text(3))),
    "nn-transformer-encoder": _encoder,
    "nn-transformer": lambda: (EncoderDecoder(), (_text(), _text(6))),
    "nanogpt-tied": lambda: (CharacterGPT(), _text()),
    "unet": lambda: (UNet(), _images()),
    "groupnorm-cnn": lambda: _cnn(lambda n: nn.GroupNorm(8, n), lambda n: nn.ReLU()),
    "instancenorm-cnn": lambda: _cnn(lambda n: nn.InstanceNorm2d(n, affine=True), lambda n: nn.ReLU()),
    "prelu-cnn": lambda: _cnn(nn.BatchNorm2d, nn.PReLU),
    "mlp-dropout-bn": _mlp,
    "pixelshuffle-sr": _superresolution,
    "embeddingbag": lambda: (Bag(), _text()),
    "weight-norm": _weight_norm,
}
