"""Small models whose bits on a device are compared with the CPU's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, WORDS, BATCH, LENGTH = 32, 4, 64, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.before_attention(x))
        heads = heads.view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        changed: Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return changed


class Transformer(nn.Module):
    """Returns the loss of a batch of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(words))))
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


class Convolutions(nn.Module):
    """One convolution of each kind, with batch norms; returns the loss of a batch of images."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, groups=4, bias=False)
        self.dilated = nn.Conv2d(16, 8, 2, dilation=2)
        self.transposed = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)
        self.line = nn.Conv1d(4, 4, 3)
        self.head = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.plain(images)))
        x = functional.max_pool2d(functional.gelu(self.grouped(x)), 2)
        x = self.transposed(self.dilated(x))
        x = self.line(x.flatten(2)).mean(2)
        target = torch.arange(len(images), device=x.device) % 4
        return functional.cross_entropy(self.head(x), target)


def words() -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 20, 20, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, batch: Tensor, *, steps: int = 3, fused: bool = False) -> list[Tensor]:
    """The losses of some steps, then all of the model's state, on the host."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    losses: list[Tensor] = []
    for _ in range(steps):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in (*losses, *model.state_dict().values())]


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
