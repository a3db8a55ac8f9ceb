"""A change of gradients by one number, which is on a device and on its way to the host."""

from __future__ import annotations

from enum import Enum

import torch


class ChangeKind(Enum):
    """The operation of torch that makes it."""

    multiply = "mul_"
    divide = "div_"
    unscale = "_amp_foreach_non_finite_check_and_unscale_"


class GradientChange:
    """By a tensor of one element. Any thread may ask."""

    def __init__(self, kind: ChangeKind, number: torch.Tensor) -> None:
        self._kind = kind
        self._number = number
        self._copied: torch.Event | None = None
        if number.is_cpu:
            self._host = number
            return
        self._host = torch.empty(number.shape, dtype=number.dtype, device="cpu", pin_memory=True)
        self._host.copy_(number, non_blocking=True)
        self._copied = torch.Event(device=number.device, blocking=True)
        self._copied.record(torch.accelerator.current_stream(number.device))

    def is_by(self, kind: ChangeKind, number: torch.Tensor) -> bool:
        """Whether it is made of these."""
        return self._kind is kind and self._number is number

    @property
    def copied(self) -> torch.Event | None:
        """The change may be made in host memory when it has passed."""
        return self._copied

    @property
    def is_none(self) -> bool:
        """Gradients stay as they are."""
        return float(self._host) == 1.0

    def make_there(self, gradient: torch.Tensor) -> None:
        """On a device."""
        _make(self._kind, gradient, self._number.to(gradient.device))

    def make_here(self, gradient: torch.Tensor) -> None:
        """In host memory, rounded as on the device."""
        if not self.is_none:
            _make(self._kind, gradient, self._host)


@torch.no_grad()
def _make(kind: ChangeKind, gradient: torch.Tensor, number: torch.Tensor) -> None:
    match kind:
        case ChangeKind.multiply:
            gradient.mul_(number)
        case ChangeKind.divide:
            gradient.div_(number)
        case ChangeKind.unscale:
            ignored = torch.zeros((), dtype=torch.float32, device=gradient.device)
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], ignored, number)
