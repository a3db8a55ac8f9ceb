"""The models of the matrix: small, and with a parameter of a tile or more wherever the form allows
it, so that a short pool evicts. Each offers the blocks that may be checkpointed or compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH = 4, 8
CLASSES = 16
VOCABULARY = 256


class Model(nn.Module):
    """Calls its blocks through `run`, which checkpoints them where `use_reentrant` says how."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.use_reentrant: bool | None = None

    def run(self, block: nn.Module, *inputs: Tensor) -> Any:
        if self.use_reentrant is None or not self.training:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=self.use_reentrant)

    def loss(self, index: int) -> Tensor:
        """The loss of the batch of this number."""
        raise NotImplementedError


def drawn(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def floats(index: int, *shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=drawn(index)).to(like.dtype)


def tokens(index: int, *shape: int, below: int = VOCABULARY) -> Tensor:
    return torch.randint(0, below, shape, generator=drawn(index))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Residual(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(functional.gelu(self.up(x)))
        return x + changed


class Mlp(Model):
    def __init__(self) -> None:
        super().__init__([Residual(512, 640), Residual(512, 640)])
        self.first = nn.Linear(64, 512)
        self.last = nn.Linear(512, CLASSES)

    def loss(self, index: int) -> Tensor:
        x = self.first(floats(index, BATCH, 64, like=self.last.bias))
        for block in self.blocks:
            x = self.run(block, x)
        return cross_entropy(self.last(x), tokens(index, BATCH, below=CLASSES))


class Attention(nn.Module):
    """Attention and MLP, with dropout: a recomputation must draw what the first call drew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.second_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first_norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=normed.dtype)
        attended, _ = self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)
        x = x + attended
        added: Tensor = self.mlp(self.second_norm(x))
        return x + added


class TiedGpt(Model):
    """One matrix is embedding and head, and positions are a parameter of which a view is used."""

    def __init__(self) -> None:
        width = 256
        super().__init__([Attention(width), Attention(width)])
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.1 * torch.randn(2 * LENGTH, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)

    def loss(self, index: int) -> Tensor:
        text = tokens(index, BATCH, LENGTH + 1)
        x = self.embedding(text[:, :-1]) + self.positions[:LENGTH]
        for block in self.blocks:
            x = self.run(block, x)
        return cross_entropy(self.head(self.norm(x)), text[:, 1:])


class EncoderDecoder(Model):
    """torch's own layers, whose evaluation takes another kernel. All parameters are below a tile:
    they share buckets."""

    def __init__(self) -> None:
        width, inner = 128, 1024
        settings: dict[str, Any] = {"dim_feedforward": inner, "dropout": 0.1, "batch_first": True}
        encoder = [nn.TransformerEncoderLayer(width, 4, **settings) for _ in range(2)]
        decoder = [nn.TransformerDecoderLayer(width, 4, **settings) for _ in range(2)]
        super().__init__([*encoder, *decoder])
        self.source = nn.Embedding(VOCABULARY, width)
        self.target = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, index: int) -> Tensor:
        text = tokens(index, BATCH, LENGTH + 1)
        memory = self.source(tokens(index + 100, BATCH, LENGTH))
        x = self.target(text[:, :-1])
        for block in self.blocks:
            if isinstance(getattr(block, "_orig_mod", block), nn.TransformerEncoderLayer):
                memory = self.run(block, memory)
            else:
                x = self.run(block, x, memory)
        return cross_entropy(self.head(x), text[:, 1:])


class Experts(nn.Module):
    """The best of four experts for each token. Few tokens: some experts see none, and have no
    gradient in that step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 16)
        self.experts = nn.ModuleList(Residual(width, 4 * width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x)[:, :4].softmax(-1)
        chosen = weights.argmax(-1)
        parts = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                given = expert(x[rows]) * weights[rows, number, None]
                parts = parts.index_add(0, rows, given.to(parts.dtype))
        return x + parts


class MixtureOfExperts(Model):
    def __init__(self) -> None:
        width = 128
        super().__init__([Experts(width), Experts(width)])
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, index: int) -> Tensor:
        text = tokens(index, BATCH)
        x = self.embedding(text)
        for block in self.blocks:
            x = self.run(block, x)
        return cross_entropy(self.head(x), (text + 1) % VOCABULARY)


class Convolution(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.convolution(x)))


class Convolutions(Model):
    """Buffers change in every training step, and evaluation reads them."""

    def __init__(self) -> None:
        super().__init__([Convolution(64, 256), Convolution(256, 256)])
        self.stem = Convolution(16, 64)
        self.head = nn.Linear(256, CLASSES)

    def loss(self, index: int) -> Tensor:
        x = self.stem(floats(index, BATCH, 16, 6, 6, like=self.head.bias))
        for block in self.blocks:
            x = self.run(block, x)
        return cross_entropy(self.head(x.mean((2, 3))), tokens(index, BATCH, below=CLASSES))


class LoraLinear(nn.Module):
    """A frozen matrix and a trainable product of two thin ones."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width).requires_grad_(False)
        self.down = nn.Linear(width_in, 16, bias=False)
        self.up = nn.Linear(16, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        added: Tensor = self.up(self.down(x))
        return base + 0.5 * added


class LoraBlock(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = LoraLinear(width, inner)
        self.down = LoraLinear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(functional.gelu(self.up(x)))
        return x + changed


class Lora(Model):
    def __init__(self) -> None:
        super().__init__([LoraBlock(512, 1024), LoraBlock(512, 1024)])
        self.first = LoraLinear(64, 512)
        self.last = LoraLinear(512, CLASSES)

    def loss(self, index: int) -> Tensor:
        x = self.first(floats(index, BATCH, 64, like=self.last.base.bias))
        for block in self.blocks:
            x = self.run(block, x)
        return cross_entropy(self.last(x), tokens(index, BATCH, below=CLASSES))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


class Lstm(Model):
    """A kernel gets four parameters of one module in a list."""

    def __init__(self) -> None:
        width = 256
        super().__init__([Recurrent(width), Recurrent(width)])
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, index: int) -> Tensor:
        text = tokens(index, BATCH, LENGTH + 1)
        x = self.embedding(text[:, :-1])
        for block in self.blocks:
            x = self.run(block, x)
        return cross_entropy(self.head(x), text[:, 1:])


MODELS: dict[str, Callable[[], Model]] = {
    "MLP": Mlp,
    "tied GPT": TiedGpt,
    "encoder-decoder": EncoderDecoder,
    "experts": MixtureOfExperts,
    "convolution": Convolutions,
    "LoRA": Lora,
    "LSTM": Lstm,
}
