"""Models that stay on a device, with memd's optimizer and with one that is written out: gradients
to the host, torch's fused AdamW there, values back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

import memd_client
from tests.device.offloaded import RATE, STEPS, batch, train
from tests.device.offloaded_models import build
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from memd_client import Session
    from tests.daemons import Daemon
    from tests.device.offloaded import Loop

    # A program makes it between backward and step().
    Change = Callable[[nn.Module, int], None]


class Stepped(Protocol):
    """The part of an optimizer that programs use."""

    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class WrittenOut:
    """The reference, of parameters in float32. An update that is delayed comes into them with the
    next step."""

    def __init__(self, parameters: list[nn.Parameter], *, is_delayed: bool = False) -> None:
        self._there = parameters
        self._is_delayed = is_delayed
        self._pending: list[Tensor | None] | None = None
        self._here = [nn.Parameter(each.detach().cpu()) for each in parameters]
        self._optimizer = torch.optim.AdamW(self._here, lr=RATE, fused=True)

    def step(self) -> None:
        gradients = [each.grad.cpu() if each.grad is not None else None for each in self._there]
        self.bring_pending_update()
        if self._is_delayed:
            self._pending = gradients
        else:
            self._update(gradients)

    def bring_pending_update(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._update(pending)

    @torch.no_grad()
    def _update(self, gradients: list[Tensor | None]) -> None:
        for there, here, gradient in zip(self._there, self._here, gradients, strict=True):
            here.copy_(there)  # the program may have written it
            here.grad = gradient
        self._optimizer.step()
        for there, here in zip(self._there, self._here, strict=True):
            there.copy_(here)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for there in self._there:
            if set_to_none:
                there.grad = None
            elif there.grad is not None:
                there.grad.zero_()


def stayed(
    daemon: Daemon,
    patch: pytest.MonkeyPatch,
    model: str,
    loop: Loop,
    *,
    delayed_update: bool | int = False,
    steps: int = STEPS,
) -> list[Tensor]:
    """As `trained`, of a model that stays on the device."""
    with connected(daemon, patch) as session:
        module = build(model, dtype=loop.dtype, has_checkpoints=loop.has_checkpoints).to("sim")
        return train(module, session, loop, "sim", steps, delayed_update=delayed_update)


def backward(model: nn.Module, number: int) -> None:
    model(batch(number).to("sim", non_blocking=True)).backward()


def run(
    model: nn.Module, optimizer: Stepped, change: Change, *, backwards: int, set_to_none: bool
) -> list[Tensor]:
    """Steps of one, two and so many backwards; the values at the end."""
    for step in range(STEPS):
        for part in range(1 + step % backwards):
            backward(model, 3 * step + part)
        change(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [each.cpu() for each in model.state_dict().values()]


def written_out(
    change: Change,
    *,
    backwards: int = 3,
    set_to_none: bool = True,
    is_delayed: bool = False,
) -> list[Tensor]:
    model = build("mlp").to("sim")
    optimizer = WrittenOut(list(model.parameters()), is_delayed=is_delayed)
    return run(model, optimizer, change, backwards=backwards, set_to_none=set_to_none)


def with_memd(
    session: Session,
    change: Change,
    *,
    backwards: int = 3,
    set_to_none: bool = True,
    **settings: Any,
) -> list[Tensor]:
    model = build("mlp").to("sim")
    optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session, **settings)
    return run(model, optimizer, change, backwards=backwards, set_to_none=set_to_none)


# --- what programs do between backward and step() -------------------------------------------------


def nothing(model: nn.Module, step: int) -> None:
    """The loop changes nothing."""


def clip(model: nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clamp_data(model: nn.Module, step: int) -> None:
    """Which no version shows."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def replace_gradient(model: nn.Module, step: int) -> None:
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad = parameter.grad * (step + 2)


def drop_gradient(model: nn.Module, step: int) -> None:
    if step % 2:
        next(model.parameters()).grad = None


def change_late(model: nn.Module, step: int) -> None:
    """In a step that nobody could expect to."""
    if step == 3:
        clip(model, step)


def write_data(model: nn.Module, step: int) -> None:
    """Which no version shows."""
    if step == 2:
        next(model.parameters()).data.mul_(0.5)


def write_value(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        list(model.parameters())[step].clamp_(-0.1, 0.1)
