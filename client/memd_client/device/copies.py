"""Copies of parameters on a device, in a range of its memory that never grows.

A use of a copy is a *lease* as of host memory: a tensor over its bytes, which ends when the last
tensor that shares its storage is freed. An event on the user's stream marks that end: until it has
passed, the stream that copies waits before it overwrites the bytes. The host waits for nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

import torch

from memd_client.base.dtypes import DTYPE_NUMBERS
from memd_client.device.space import DeviceSpace, Place, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_client.connection.shard import Shard
    from memd_client.core.registration import HostRegistration
    from memd_client.device.event_thread import EventThread


@dataclass(slots=True, eq=False)
class _Copy:
    """The value of one parameter, at one place."""

    shard_id: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    place: Place
    copied: torch.Event  # its bytes are there
    users: set[torch.Stream] = field(default_factory=set)  # those that wait for that
    # The ends of its last uses.
    ended: list[torch.Event] = field(default_factory=list)
    is_current: bool = True


@dataclass(frozen=True, slots=True)
class _Freed:
    """Bytes whose last users may not have passed yet."""

    begin: int
    end: int
    events: Sequence[torch.Event]


# With one lease, or none any more.
Box = list[torch.Tensor]
# The value of `change_count` from before the lease was asked for comes last.
Wanted = tuple["Shard", Box, int]
# Uses that have ended: the copy, and the events on its users' streams.
_Ended = deque[tuple[_Copy, list[torch.Event]]]


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
        # The stream that copies allocates it, so that its first use waits for nothing.
        with self._stream:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._space = DeviceSpace(size_bytes, needed_bytes)
        self._current: dict[int, _Copy] = {}  # by shard id
        self._change_counts: dict[int, int] = {}  # by shard id
        self._at: dict[Place, _Copy] = {}
        self._freed: list[_Freed] = []
        self._users: set[torch.Stream] = set()
        # A lease may end anywhere, also while this thread is in here: it only adds to these.
        self._ended: _Ended = deque()
        self._is_closed = False

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes

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
            if not self._space.may_be_used(copy.place):
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
            copies: list[_Copy] = []
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
                        for event in self._events_of(copy.place):
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
    ) -> _Copy | None:
        size_bytes = aligned(lease.nbytes)
        room = self._space.find(
            size_bytes,
            next_use=lambda place: self._next_use(self._at[place].shard_id),
            sooner_than=self._next_use(shard.shard_id) if is_ahead else -1.0,
        )
        if room is None:
            return None
        for place in room.victims:
            self._drop(self._at[place])
        place = self._space.take(room, size_bytes)
        copy = _Copy(shard.shard_id, lease.dtype, lease.shape, lease.stride(), place, copied)
        self._at[place] = self._current[shard.shard_id] = copy
        return copy

    def _copy(self, copy: _Copy, box: Box, registration: HostRegistration) -> None:
        there = self._tensor(copy)
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
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._is_closed = True

    @property
    def used_bytes(self) -> int:
        """The bytes of copies that somebody uses."""
        with self._lock:
            self._note_ends()
            return self._space.used_bytes

    def _drop(self, copy: _Copy) -> None:
        """It is not the value any more. Its memory is free when its users have left."""
        copy.is_current = False
        self._current.pop(copy.shard_id, None)
        if not copy.place.user_count:
            self._free(copy)

    def _free(self, copy: _Copy) -> None:
        del self._at[copy.place]
        self._space.free(copy.place)
        self._freed.append(_Freed(copy.place.begin, copy.place.end, copy.ended))

    def _events_of(self, place: Place) -> list[torch.Event]:
        """The ends of the uses of these bytes so far, which are forgotten here."""
        found: list[torch.Event] = []
        kept: list[_Freed] = []
        for freed in self._freed:
            if freed.end <= place.begin or place.end <= freed.begin:
                kept.append(freed)
                continue
            found += freed.events
            if freed.begin < place.begin:
                kept.append(_Freed(freed.begin, place.begin, freed.events))
            if place.end < freed.end:
                kept.append(_Freed(place.end, freed.end, freed.events))
        self._freed = kept
        return found

    def _lease(self, copy: _Copy) -> torch.Tensor:
        self._join(copy)
        self._space.use(copy.place)
        lease = self._tensor(copy)
        weakref.finalize(
            lease.untyped_storage(), _end_use, self._ended, self._memory, copy
        ).atexit = False
        return lease

    def join(self, shard: Shard) -> None:
        """The current stream uses a lease that was made for another one, perhaps."""
        with self._lock:
            for copy in self._at.values():
                if copy.shard_id == shard.shard_id:
                    self._join(copy)

    def _join(self, copy: _Copy) -> None:
        user = torch.accelerator.current_stream(self._device)
        if user in copy.users:
            return
        user.wait_event(copy.copied)
        copy.users.add(user)
        if user not in self._users:
            # Until it has passed, torch gives this memory to nobody else.
            self._users.add(user)
            self._memory.record_stream(user)

    def _tensor(self, copy: _Copy) -> torch.Tensor:
        """Over its bytes, with a storage of its own."""
        place = copy.place
        storage = torch._C._construct_storage_from_data_pointer(
            self._memory.data_ptr() + place.begin,
            self._device,
            copy.shape.numel() * copy.dtype.itemsize,
        )
        tensor = torch.empty(0, dtype=copy.dtype, device=self._device)
        with torch.no_grad():
            tensor.set_(storage, 0, copy.shape, copy.stride)
        return tensor

    def _note_ends(self) -> None:
        while self._ended:
            copy, events = self._ended.popleft()
            # Those of one user come in no order.
            copy.ended = [each for each in copy.ended if not each.query()] + events
            self._space.leave(copy.place)
            if not copy.place.user_count and not copy.is_current:
                self._free(copy)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _clear(boxes: Sequence[Box]) -> None:
    for box in boxes:
        box.clear()


def _end_use(ended: _Ended, memory: torch.Tensor, copy: _Copy) -> None:
    """The last tensor over a lease was freed. `memory` is kept until here."""
    events = []
    for stream in tuple(copy.users):
        event = torch.Event(device=memory.device)
        event.record(stream)
        events.append(event)
    ended.append((copy, events))
