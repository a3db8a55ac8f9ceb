"""Models that are trained on a device with memd, and how they are trained without it: forward,
backward and clipping on the device, gradients to the host, torch's fused AdamW there, values back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import memd_client
from tests.device.offloaded_models import build, generate

if TYPE_CHECKING:
    from memd_client import Session

STEPS = 5
RATE = 1e-2


@dataclass(frozen=True, slots=True)
class Loop:
    """How a model is trained."""

    name: str
    backwards: int = 1  # of a step
    max_norm: float | None = None
    autocast: torch.dtype | None = None
    scale: float = 0.0  # with which a GradScaler begins; 0: without one
    dtype: torch.dtype | None = None  # of parameters, if not the model's own
    has_checkpoints: bool = False
    activations: str | None = None
    generates: bool = False  # after each step

    def __str__(self) -> str:
        return self.name


LOOPS = (Loop("plain"), Loop("accumulated", backwards=2), Loop("clipped", max_norm=0.001))
# Those in float16 begin with gradients that are infinite, and update nothing then.
MIXED_LOOPS = (
    Loop("autocast", autocast=torch.bfloat16),
    Loop("scaled", autocast=torch.float16, scale=2.0**23),
    Loop("scaled-accumulated", backwards=2, autocast=torch.float16, scale=2.0**23),
    Loop("scaled-clipped", max_norm=0.001, autocast=torch.float16, scale=2.0**23),
    Loop("scaled-alone", scale=1024.0),
)


def budget_bytes(model: nn.Module, share: float | None) -> int | None:
    """So much of the model's parameters; None: what memd chooses."""
    if share is None:
        return None
    return int(share * sum(each.nbytes + 512 for each in model.parameters()))


def batch(number: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(number))


def train(
    model: nn.Module,
    session: Session,
    loop: Loop,
    device: str,
    steps: int = STEPS,
    *,
    delayed_update: bool | int = False,
) -> list[Tensor]:
    """With memd: the losses and scales, then all of the model's state, on the host. Parameters that
    are not offloaded stay where they are."""
    optimizer = memd_client.AdamW(
        _trained(model), lr=RATE, session=session, delayed_update=delayed_update
    )
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
        found += _generated(model, loop, step)
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
        there = batch(step * loop.backwards + part).to(device, loop.dtype, non_blocking=True)
        with torch.autocast(device.type, loop.autocast, enabled=loop.autocast is not None):
            loss = model(there).float()
        scaled = scaler.scale(loss)
        scaled.backward()
        losses.append(loss.detach())
    return losses


def _generated(model: nn.Module, loop: Loop, step: int) -> list[Tensor]:
    """With the values of this step."""
    if not loop.generates:
        return []
    device = next(model.parameters()).device
    there = batch(step).to(device, loop.dtype, non_blocking=True)
    with torch.autocast(device.type, loop.autocast, enabled=loop.autocast is not None):
        return [generate(model, there)]


def reference(
    model: str, loop: Loop, device: str, steps: int = STEPS, *, delayed_from: int | None = None
) -> list[Tensor]:
    """The same without memd. From step `delayed_from` on, an update comes into the parameters with
    the step after its own."""
    there, host = (
        build(model, dtype=loop.dtype, has_checkpoints=loop.has_checkpoints).to(each)
        for each in (device, "cpu")
    )
    # Those of bfloat16 are updated in float32.
    exact = {each: each.detach().float().clone() for each in _trained(host)}
    optimizer = torch.optim.AdamW(exact.values(), lr=RATE, fused=True)
    holder, scaler = torch.optim.SGD(_trained(there)), _scaler(loop, device)
    found: list[Tensor] = []
    pending: list[Tensor | None] | None = None
    for step in range(steps):
        found += _backwards(there, loop, step, scaler)
        gradients = [each.grad for each in _trained(there) if each.grad is not None]
        is_finite = all(bool(each.isfinite().all()) for each in gradients)
        scaler.unscale_(holder)
        if loop.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(_trained(there), loop.max_norm)
        for one, other in zip(there.parameters(), host.parameters(), strict=True):
            other.grad = one.grad.cpu() if one.grad is not None else None
            one.grad = None
        made = [each.grad.float() if each.grad is not None else None for each in exact]
        due = [pending, made if is_finite else None]
        pending = due.pop() if delayed_from is not None and step >= delayed_from else None
        for update in due:
            if update is not None:
                for value, gradient in zip(exact.values(), update, strict=True):
                    value.grad = gradient
                optimizer.step()
        scaler.update()
        if loop.scale:
            found.append(torch.tensor(scaler.get_scale()))
        with torch.no_grad():
            for one, other in zip(there.parameters(), host.parameters(), strict=True):
                one.copy_(published(exact[other], one.dtype) if other in exact else other)
        found += _generated(there, loop, step)
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
