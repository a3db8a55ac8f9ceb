"""A target that stays in this process, and may get the value of its last update with the next
step."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from memd_client.base.tensor_bytes import checksum_of
from memd_client.updates.delayed_value import DelayedValue
from memd_client.updates.stateful_target import UpdatedTarget

if TYPE_CHECKING:
    from memd_client.connection.shard import Shard
    from memd_client.core.job import Job


class LateTarget(UpdatedTarget):
    """The part of `ResidentTarget` that knows of delayed updates. Who calls has the turn of the
    transaction, with no step in flight."""

    _job: Job

    def __init__(self, *, keeps_maximum: bool) -> None:
        super().__init__(keeps_maximum=keeps_maximum)
        self._delay = DelayedValue()

    @property
    @abstractmethod
    def parameter(self) -> torch.Tensor | None:
        """None if it does not exist any more."""

    @abstractmethod
    def _take_value(self, parameter: torch.Tensor, shard: Shard | None = None) -> None:
        """Puts the value of its own shard, or of another one, in place."""

    @abstractmethod
    def _write_value(self, parameter: torch.Tensor) -> None:
        """memd has its value from now on."""

    @property
    def is_delayed(self) -> bool:
        """See `UpdatedTarget.is_delayed`."""
        return self._delay.is_late

    @property
    def delay(self) -> DelayedValue:
        """Whether the value here lacks its last update."""
        return self._delay

    def bring_pending(self) -> bool:
        """Puts the value with the pending update in place. Returns whether the program has written
        the one from before it, which is lost. What it `compare_value` is made."""
        parameter, is_written = self.parameter, False
        if parameter is not None:
            with torch.no_grad():
                is_written = self._is_written_late(parameter)
                self._take_value(parameter)
        self._delay.end()
        return is_written

    def show_from_before(self, shard: Shard) -> None:
        """Puts the value of `shard` in place, from before an update that memd has made."""
        parameter = self.parameter
        if parameter is not None:
            self._take_value(parameter, shard)
            self._delay.note_pending(self._checksum_for_delay(parameter), is_stored=True)

    def load_pending(self, value: torch.Tensor, checksum: int) -> None:
        """`value` has the update that is pending. The program gives the parameter the one from
        before it, which has this checksum."""
        self._job.leases.write(self.shard, value)
        self._job.mark_written()
        self._delay.note_pending(checksum, is_stored=False)

    def drop_pending(self) -> None:
        """The value here counts, and the pending update does not."""
        parameter = self.parameter
        if self._delay.is_pending and parameter is not None:
            self._write_value(parameter)
        self._delay.end()

    def _checksum_for_delay(self, parameter: torch.Tensor) -> int | None:
        """For `_is_written_late`; None if it needs none."""
        return checksum_of(parameter)

    def _is_written_late(self, parameter: torch.Tensor) -> bool:
        """The program has written the value while an update was pending."""
        return checksum_of(parameter.cpu()) != self._delay.checksum
