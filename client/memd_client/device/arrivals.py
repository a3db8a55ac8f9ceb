"""Copies of values that are on their way to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd_client.device.event_thread import EventThread
from memd_client.errors import MemdError

if TYPE_CHECKING:
    import torch


class Arrivals(EventThread):
    """The thread that waits for them. Before a value is used, `refuse_lost` raises if a copy is
    known to have failed."""

    def __init__(self, device: torch.device, *, job: str) -> None:
        super().__init__("memd-arrivals")
        self._device = device
        self._job = job

    def refuse_lost(self) -> None:
        """
        Raises:
            MemdError: a value did not reach the device.
        """
        error = self.error
        if error is not None:
            raise MemdError(
                f"job {self._job!r}: a value did not reach {self._device}, so what it computes is "
                f"wrong; end the process and resume the job: {error}"
            )
