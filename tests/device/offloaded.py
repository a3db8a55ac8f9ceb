"""Models that are trained on a device with memd, and how they are trained without it: forward and
backward on the device, gradients to the host, torch's fused AdamW there, values back.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import memd_client

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

STEPS = 5
RATE = 1e-2


class Mlp(nn.Module):
    """Returns the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 96, 64, 96, 8)
        self.layers = nn.ModuleList(
            nn.Linear(first, second) for first, second in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.project = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 4
        x = x + self.out(scores.softmax(-1) @ value)
        changed: Tensor = x + self.down(functional.gelu(self.up(x)))
        return changed


class TiedGpt(nn.Module):
    """Its head is its embedding, and positions are a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        width, words = 32, 48
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(12, width) / 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x[:, :12].abs() * 17).long() % 48
        hidden = self.embed(words) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


class Norms(nn.Module):
    """Batch norms, whose statistics are buffers, around convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :16].reshape(-1, 1, 4, 4)
        x = functional.relu(self.norm(self.first(x)))
        x = self.last(self.second(x)).mean((2, 3))
        loss: Tensor = self.head(x).square().mean()
        return loss


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.frozen(x) + self.up(self.down(x))
        return changed


class Lora(nn.Module):
    """Most of its bytes are frozen, and some of them bfloat16 in a frame of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Halved(Mlp):
    """An Mlp in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "gpt": TiedGpt,
    "norms": Norms,
    "lora": Lora,
    "bf16": Halved,
}


@dataclass(frozen=True, slots=True)
class Loop:
    """How a model is trained."""

    name: str
    backwards: int = 1  # of a step
    max_norm: float | None = None
    autocast: torch.dtype | None = None
    scale: float = 0.0  # with which a GradScaler begins; 0: without one
    dtype: torch.dtype = torch.float32  # of parameters
    has_checkpoints: bool = False
    activations: str | None = None
    generates: bool = False  # between its steps

    def __str__(self) -> str:
        return self.name


LOOPS = (Loop("plain"), Loop("accumulated", backwards=2), Loop("clipped", max_norm=0.05))
# Those in float16 begin with gradients that are infinite, and update nothing then.
MIXED_LOOPS = (
    Loop("autocast", autocast=torch.bfloat16),
    Loop("scaled", autocast=torch.float16, scale=2.0**23),
    Loop("scaled-accumulated", backwards=2, autocast=torch.float16, scale=2.0**23),
    Loop("scaled-clipped", max_norm=0.05, autocast=torch.float16, scale=2.0**23),
    Loop("scaled-alone", scale=1024.0),
)


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def budget_bytes(model: nn.Module, share: float | None) -> int | None:
    """So much of the model's parameters; None: what memd chooses."""
    if share is None:
        return None
    return int(share * sum(each.nbytes + 512 for each in model.parameters()))


def batch(number: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(number))


def train(
    model: nn.Module, session: Session, loop: Loop, device: str, steps: int = STEPS
) -> list[Tensor]:
    """With memd: the losses and scales, then all of the model's state, on the host."""
    optimizer = memd_client.AdamW(_trained(model), lr=RATE)
    scaler = _scaler(loop, device)
    found: list[Tensor] = []
    for step in range(steps):
        found += _backwards(model, loop, step, scaler)
        if loop.max_norm is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(loop.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if loop.scale:
            found.append(torch.tensor(scaler.get_scale()))
    return _on_host(found, model)


def _scaler(loop: Loop, device: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(
        device, init_scale=loop.scale or 1.0, growth_interval=2, enabled=bool(loop.scale)
    )


def _backwards(
    model: nn.Module, loop: Loop, step: int, scaler: torch.amp.GradScaler
) -> list[Tensor]:
    """Those of one step; returns the losses."""
    device = next(model.parameters()).device
    losses = []
    for part in range(loop.backwards):
        there = batch(step * loop.backwards + part).to(device, non_blocking=True)
        with torch.autocast(device.type, loop.autocast, enabled=loop.autocast is not None):
            loss = model(there)
        scaled = scaler.scale(loss)
        scaled.backward()
        losses.append(loss.detach())
    return losses


def reference(model: str, loop: Loop, device: str, steps: int = STEPS) -> list[Tensor]:
    """The same without memd."""
    there, host = build(model).to(device), build(model)
    # Those of bfloat16 are updated in float32.
    exact = {each: each.detach().float().clone() for each in _trained(host)}
    optimizer = torch.optim.AdamW(exact.values(), lr=RATE, fused=True)
    # The scaler's numbers are where it divides, as long as nobody orders its copies.
    holder, scaler = torch.optim.SGD(_trained(host)), _scaler(loop, "cpu")
    scaler.scale(torch.zeros(()))
    found: list[Tensor] = []
    for step in range(steps):
        found += _backwards(there, loop, step, scaler)
        for one, other in zip(there.parameters(), host.parameters(), strict=True):
            other.grad = one.grad.cpu() if one.grad is not None else None
            one.grad = None
        gradients = [each.grad for each in _trained(host) if each.grad is not None]
        is_finite = all(bool(each.isfinite().all()) for each in gradients)
        scaler.unscale_(holder)
        if loop.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(_trained(host), loop.max_norm)
        for parameter, value in exact.items():
            value.grad = parameter.grad.float() if parameter.grad is not None else None
        if is_finite:
            optimizer.step()
        scaler.update()
        if loop.scale:
            found.append(torch.tensor(scaler.get_scale()))
        with torch.no_grad():
            for one, other in zip(there.parameters(), host.parameters(), strict=True):
                one.copy_(published(exact[other], one.dtype) if other in exact else other)
    return _on_host(found, there)


def published(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The value that memd shows for a float32: ties round away from zero, so a signed remainder
    of 16 bits gives the rest (docs/decisions/adam-bits.md)."""
    if dtype != torch.bfloat16:
        return exact
    halves = (exact.view(torch.int32) + 0x8000) >> 16
    return halves.to(torch.int16).view(torch.bfloat16)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _on_host(found: list[Tensor], model: nn.Module) -> list[Tensor]:
    return [tensor.cpu() for tensor in (*found, *model.state_dict().values())]
