"""A model small enough for a 64 MiB pool, and its batches: the same for every process of a test."""

import torch
from torch import nn

WIDTH = 256


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, WIDTH),
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs) - inputs).square().mean()
    return loss
