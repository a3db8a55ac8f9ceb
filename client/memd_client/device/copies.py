"""Copies of parameters on a device, in a range of its memory.

A use of a copy is a *lease* as of host memory: a tensor over its bytes, which ends when the last
tensor that shares its storage is freed. An event on the user's stream marks that end: until it has
passed, the stream that copies waits before it overwrites the bytes. The host waits for nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.base.dtypes import DTYPE_NUMBERS
from memd_client.device.device_range import Copy, DeviceRange
from memd_client.device.space import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.core.registration import HostRegistration
    from memd_client.device.event_thread import EventThread


# With one lease, or none any more.
Box = list[torch.Tensor]
# The value of `change_count` from before the lease was asked for comes last.
Wanted = tuple["Shard", Box, int]
# Uses that have ended: the copy, and the events on its users' streams.
_Ended = deque[tuple[Copy, list[torch.Event]]]


class DeviceCopies:
    """Copies of parameters in `size_bytes` of a device's memory. Any thread may call."""

    def __init__(
        self,
        device: torch.device,
        *,
        size_bytes: int,
        needed_bytes: int,
        next_use: Callable[[int], float],
    ) -> None:
        """
        Args:
            needed_bytes: what modules need at once, at most.
            next_use: of a shard's copy.

        Raises:
            torch.OutOfMemoryError: the device has less memory free.
        """
        self._device = device
        self._next_use = next_use
        self._lock = RLock()
        self._stream = torch.Stream(device=device)
        self._needed_bytes = needed_bytes
        self._range = self._range_of(size_bytes)
        self._left: list[DeviceRange] = []  # ranges of before, of which somebody uses a part
        self._current: dict[int, Copy] = {}  # by shard id
        self._change_counts: dict[int, int] = {}  # by shard id
        # A lease may end anywhere, also while this thread is in here: it only adds to these.
        self._ended: _Ended = deque()
        self._is_closed = False

    @property
    def size_bytes(self) -> int:
        return self._range.size_bytes

    @property
    def held_bytes(self) -> int:
        """With the memory of an older range, of which somebody uses a part."""
        with self._lock:
            self._note_ends()
            return sum(each.size_bytes for each in (self._range, *self._left))

    @property
    def kept_bytes(self) -> int:
        """The memory of ranges that somebody uses, which a new range does not get."""
        with self._lock:
            self._note_ends()
            return sum(each.size_bytes for each in (self._range, *self._left) if each.used_bytes)

    def resize(self, size_bytes: int, *, is_needed: bool = False) -> None:
        """Begins anew in a range of this size, and waits for the device.

        A lease keeps all of its range's memory until it ends, so nothing happens while there are
        leases both in this range and in an older one, or in this one and the device has no room for
        another. If it has none for a larger range, the range has the old size.

        Args:
            is_needed: the leases belong to a use that finds no room: it moves to a new range even
                if older ones are leased.

        Raises:
            torch.OutOfMemoryError: there is no room for a smaller range, or none for one of the old
                size any more. Until this was called again there are no copies.
        """
        with self._lock:
            self._note_ends()
            old_bytes = self._range.size_bytes
            if self._is_closed or size_bytes == old_bytes:
                return
            if self._range.used_bytes:
                if is_needed or not self._left:
                    with suppress(torch.OutOfMemoryError):
                        self._leave_for(self._range_of(size_bytes))
                return
            self._leave_for(self._range_of(0))
            # torch keeps a freed range for this stream. A smaller one would take a part of it, and
            # nobody else could have the rest.
            torch.accelerator.empty_cache()
            try:
                self._range = self._range_of(size_bytes)
            except torch.OutOfMemoryError:
                if size_bytes < old_bytes or not old_bytes:
                    raise
                self._range = self._range_of(old_bytes)

    def _leave_for(self, new: DeviceRange) -> None:
        for copy in list(self._current.values()):
            self._drop(copy)
        self._range.give_back()
        if self._range.used_bytes:
            self._left.append(self._range)
        self._range = new

    def _range_of(self, size_bytes: int) -> DeviceRange:
        return DeviceRange(
            self._device, self._stream, size_bytes=size_bytes, needed_bytes=self._needed_bytes
        )

    def has(self, shard: Shard) -> bool:
        """Whether the present value is there."""
        return shard.shard_id in self._current

    def lease(self, shard: Shard) -> torch.Tensor | None:
        """A lease of the copy for the current stream; None if it is not there, or lies where what
        is used beside it may need room."""
        with self._lock:
            self._note_ends()
            copy = self._current.get(shard.shard_id)
            if copy is None:
                return None
            if not copy.range.may_be_used(copy):
                self._drop(copy)
                return None
            return self._lease(copy)

    def bring_one(
        self, wanted: Wanted, registration: HostRegistration, arrivals: EventThread
    ) -> torch.Tensor | None:
        """A lease of a new copy: no other thread's copies take its place between. See `bring`."""
        with self._lock:
            if not self.bring([wanted], registration, arrivals):
                return None
            return self.lease(wanted[0])

    def bring(
        self,
        wanted: Sequence[Wanted],
        registration: HostRegistration,
        arrivals: EventThread,
        *,
        is_ahead: bool = False,
    ) -> int:
        """Copies leases of values, each the only content of a box, which end when the copies have
        passed. Stops at the first for which there is no room, or whose value has changed since its
        lease was asked for, and returns how many it has copied; `is_ahead`: only what is needed
        later gives way.
        """
        with self._lock:
            if self._is_closed:
                return 0
            self._note_ends()
            copied = torch.Event(device=self._device, blocking=True)
            boxes: list[Box] = []
            copies: list[Copy] = []
            try:
                with self._stream:
                    for shard, box, change_count in wanted:
                        if change_count != self.change_count(shard):
                            break
                        copy = self._place(shard, box[0], copied, is_ahead=is_ahead)
                        if copy is None:
                            break
                        boxes.append(box)
                        copies.append(copy)
                        for event in copy.range.ends_of_uses(copy.place):
                            self._stream.wait_event(event)
                        self._copy(copy, box, registration)
            except BaseException:
                for copy in copies:
                    if copy.is_current:
                        self._drop(copy)
                raise
            finally:
                # Even then: some copies may be under way.
                copied.record(self._stream)
                if boxes:
                    arrivals.after(copied, partial(_clear, boxes))
            return len(boxes)

    def _place(
        self, shard: Shard, lease: torch.Tensor, copied: torch.Event, *, is_ahead: bool
    ) -> Copy | None:
        size_bytes = aligned(lease.nbytes)
        room = self._range.find(
            size_bytes,
            next_use=self._next_use,
            sooner_than=self._next_use(shard.shard_id) if is_ahead else -1.0,
        )
        if room is None:
            return None
        for victim in self._range.victims(room):
            self._drop(victim)
        place = self._range.take(room, size_bytes)
        form = lease.dtype, lease.shape, lease.stride()
        copy = Copy(shard.shard_id, *form, self._range, place, copied)
        self._range.add(copy)
        self._current[shard.shard_id] = copy
        return copy

    def _copy(self, copy: Copy, box: Box, registration: HostRegistration) -> None:
        there = copy.range.tensor(copy)
        if copy.dtype in DTYPE_NUMBERS:
            registration.copy(there, registration.host(box[0], self._device))
        else:  # a frozen parameter's, whose dtype the arena does not know
            registration.copy(_bytes_of(there), registration.host(_bytes_of(box[0]), self._device))

    def forget(self, shard: Shard) -> None:
        """Its value has changed, or will."""
        with self._lock:
            self._note_ends()
            self._change_counts[shard.shard_id] = self.change_count(shard) + 1
            copy = self._current.get(shard.shard_id)
            if copy is not None:
                self._drop(copy)

    def change_count(self, shard: Shard) -> int:
        """How often `forget` was called for it. A lease that was asked for at another count may
        show another value."""
        return self._change_counts.get(shard.shard_id, 0)

    def close(self) -> None:
        """The memory goes back with the last lease. Nothing is copied any more."""
        with self._lock:
            self._note_ends()
            for copy in list(self._current.values()):
                self._drop(copy)
            self._range.give_back()
            self._is_closed = True

    @property
    def used_bytes(self) -> int:
        """The bytes of copies that somebody uses."""
        with self._lock:
            self._note_ends()
            return self._range.used_bytes

    def _drop(self, copy: Copy) -> None:
        """It is not the value any more. Its memory is free when its users have left."""
        copy.is_current = False
        self._current.pop(copy.shard_id, None)
        if not copy.place.user_count:
            copy.range.free(copy)

    def _lease(self, copy: Copy) -> torch.Tensor:
        self._join(copy)
        copy.range.use(copy)
        lease = copy.range.tensor(copy)
        weakref.finalize(
            lease.untyped_storage(), _end_use, self._ended, copy.range.memory, copy
        ).atexit = False
        return lease

    def join(self, shard: Shard) -> None:
        """The current stream uses a lease that was made for another one, perhaps."""
        with self._lock:
            for each in (self._range, *self._left):
                for copy in each.copies:
                    if copy.shard_id == shard.shard_id:
                        self._join(copy)

    def _join(self, copy: Copy) -> None:
        user = torch.accelerator.current_stream(self._device)
        if user in copy.users:
            return
        user.wait_event(copy.copied)
        copy.users.add(user)
        copy.range.note_user(user)

    def _note_ends(self) -> None:
        while self._ended:
            copy, events = self._ended.popleft()
            # Those of one user come in no order.
            copy.ended = [each for each in copy.ended if not each.query()] + events
            copy.range.leave(copy)
            if not copy.place.user_count and not copy.is_current:
                copy.range.free(copy)
        if self._left:
            self._left = [each for each in self._left if each.copies]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _clear(boxes: Sequence[Box]) -> None:
    for box in boxes:
        box.clear()


def _end_use(ended: _Ended, memory: torch.Tensor, copy: Copy) -> None:
    """The last tensor over a lease was freed. `memory` is kept until here."""
    events = []
    for stream in tuple(copy.users):
        event = torch.Event(device=memory.device)
        event.record(stream)
        events.append(event)
    ended.append((copy, events))
