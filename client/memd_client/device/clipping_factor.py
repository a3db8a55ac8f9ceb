"""The number that a clipping multiplies gradients by, on a device and on its way to the host."""

from __future__ import annotations

import torch


class ClippingFactor:
    """A tensor of one element. Any thread may ask."""

    def __init__(self, factor: torch.Tensor) -> None:
        self._factor = factor
        self._copied: torch.Event | None = None
        if factor.is_cpu:
            self._host = factor
            return
        self._host = torch.empty((), dtype=factor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(factor, non_blocking=True)
        self._copied = torch.Event(device=factor.device, blocking=True)
        self._copied.record(torch.accelerator.current_stream(factor.device))

    @property
    def factor(self) -> torch.Tensor:
        """As it was given, where that is."""
        return self._factor

    @property
    def copied(self) -> torch.Event | None:
        """The rest may be asked for when it has passed."""
        return self._copied

    @property
    def is_one(self) -> bool:
        """It changes nothing."""
        return float(self._host) == 1.0

    @torch.no_grad()
    def multiply(self, gradient: torch.Tensor) -> None:
        """In host memory, rounded as on the device."""
        if not self.is_one:
            gradient.mul_(self._host)
