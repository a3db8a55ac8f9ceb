"""Copies of what autograd saves on a device, out to host memory and back.

Bytes leave on one stream and come back on another, both of their own. The last ones to leave are
kept on the device and used from there. When more follow, the stream that made the oldest waits for
its copy, and their memory is that stream's again: its size depends on no timing, and the host waits
for nothing. Memory for what comes back is that of the stream that asks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.base.device_waits import note_device_wait
from memd_client.device.event_thread import EventThread
from memd_client.errors import MemdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client.core.registration import HostRegistration

# Bytes that stay on the device after they have left, and bytes that have come back.
WINDOW_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class AwayBytes:
    """Bytes that leave a device, or have left it. `ActivationCopies` moves them."""

    size_bytes: int
    # On the device: the memory that was saved, or a copy that has come back.
    there: torch.Tensor | None
    user: torch.Stream  # whose memory that is
    under_way_on: torch.Stream | None  # `user` has not waited for its copy
    leases: list[torch.Tensor]  # at most one, until the bytes are in host memory
    copied: torch.Event
    arrived: torch.Event | None = None  # the copy that has come back


class _Window:
    """The last ones that came."""

    def __init__(self) -> None:
        self._entries: deque[AwayBytes] = deque()
        self._bytes = 0

    def add(self, away: AwayBytes) -> Iterator[AwayBytes]:
        """Yields those that have to go for it."""
        self._entries.append(away)
        self._bytes += away.size_bytes
        while self._bytes > WINDOW_BYTES and len(self._entries) > 1:
            oldest = self._entries.popleft()
            self._bytes -= oldest.size_bytes
            yield oldest


class ActivationCopies:
    """Those of one model. Any thread may call."""

    def __init__(self, registration: HostRegistration, device: torch.device, *, job: str) -> None:
        self._registration = registration
        self._device = device
        self._job = job
        # Reentrant: garbage that is collected under it may use what autograd has saved.
        self._lock = RLock()
        self._out, self._in = torch.Stream(device=device), torch.Stream(device=device)
        self._leaving, self._brought = _Window(), _Window()
        self._busy: dict[int, int] = {}  # copies under way, by shard id
        self._thread = EventThread("memd-activations")

    @property
    def device(self) -> torch.device:
        return self._device

    def leave(
        self, source: torch.Tensor, shard_id: int, lease: Callable[[], torch.Tensor]
    ) -> AwayBytes:
        """Copies the bytes of `source` into the slot that `lease` leases; returns at once, unless
        copies that the slot had before are under way."""
        with self._lock:
            is_busy = shard_id in self._busy
        if is_busy:  # a lease waits no longer than a minute for them
            note_device_wait("room")
            self._thread.wait_for_end()
        user = torch.accelerator.current_stream(self._device)
        copied = torch.Event(device=self._device, blocking=True)
        away = AwayBytes(source.nbytes, source, user, self._out, [lease()], copied)
        computed = torch.Event(device=self._device)
        try:
            target = self._registration.host(away.leases[0], self._device)
            computed.record(user)
            self._out.wait_event(computed)
            with self._out:
                self._registration.copy(target, source)
            del target
        finally:
            copied.record(self._out)
            self._end_after(copied, away.leases, shard_id)
        with self._lock:
            for each in self._leaving.add(away):
                _release(each)
        return away

    def bring(self, away: AwayBytes, shard_id: int, begin: int, box: list[torch.Tensor]) -> None:
        """Begins to copy bytes that are not there back, to memory of the current stream in which
        they begin at `begin`.

        Args:
            box: with a lease of them, which ends when the copy has passed.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        user = torch.accelerator.current_stream(self._device)
        memory = torch.empty(begin + away.size_bytes, dtype=torch.uint8, device=self._device)
        taken = torch.Event(device=self._device)
        arrived = torch.Event(device=self._device, blocking=True)
        try:
            host = self._registration.host(box[0], self._device)
            taken.record(user)
            self._in.wait_event(taken)
            self._in.wait_event(away.copied)
            with self._in:
                self._registration.copy(memory[begin:], host)
            del host
        finally:
            arrived.record(self._in)
            self._end_after(arrived, box, shard_id)
        with self._lock:
            away.user, away.arrived, away.under_way_on = user, arrived, self._in
            away.there = memory
            for each in self._brought.add(away):
                drop(each)

    def use(self, away: AwayBytes) -> torch.Tensor | None:
        """The bytes on the device, for the current stream; None if they are not there.

        Raises:
            MemdError: a copy has failed.
        """
        error = self._thread.error
        if error is not None:
            raise MemdError(
                f"job {self._job!r}: a tensor that autograd has saved did not come back to "
                f"{self._device}; end the process and resume the job: {error}"
            )
        with self._lock:
            there, arrived = away.there, away.arrived
            user = torch.accelerator.current_stream(self._device)
            is_joined = user == away.user and away.under_way_on is None
            if there is not None and arrived is not None and not is_joined:
                user.wait_event(arrived)
                if user == away.user:
                    away.under_way_on = None
                else:
                    there.record_stream(user)
            return there

    def close(self) -> None:
        """Waits for the copies, and ends the thread."""
        self._thread.close()

    def _end_after(self, event: torch.Event, leases: list[torch.Tensor], shard_id: int) -> None:
        with self._lock:
            self._busy[shard_id] = self._busy.get(shard_id, 0) + 1
        self._thread.after(event, partial(self._end, leases, shard_id))

    def _end(self, leases: list[torch.Tensor], shard_id: int) -> None:
        leases.clear()
        with self._lock:
            self._busy[shard_id] -= 1
            if not self._busy[shard_id]:
                del self._busy[shard_id]


def _taken(away: AwayBytes) -> torch.Tensor | None:
    """The bytes on the device, which `away` forgets. A finalizer may call within any other call."""
    there, away.there = away.there, None
    return there


def _release(away: AwayBytes) -> None:
    """Its bytes have left. The stream whose memory they had waits for that."""
    source = _taken(away)
    if source is not None:
        away.user.wait_event(away.copied)
        # If another stream has allocated it.
        source.record_stream(away.user)


def drop(away: AwayBytes) -> None:
    """Nobody asks for what is there. Its memory is torch's again when its users have left."""
    there, copying = _taken(away), away.under_way_on
    if there is not None and copying is not None:
        there.record_stream(copying)
