"""A range of device memory, and the copies in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memd_client.device.space import DeviceSpace, Place, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(slots=True, eq=False)
class Copy:
    """The value of one parameter, at one place."""

    shard_id: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    range: DeviceRange
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


class DeviceRange:
    """`copies.DeviceCopies` serialises."""

    def __init__(
        self, device: torch.device, stream: torch.Stream, *, size_bytes: int, needed_bytes: int
    ) -> None:
        """
        Args:
            stream: that copies. It allocates the range, so that its first use waits for nothing.
            needed_bytes: what modules need at once, at most.

        Raises:
            torch.OutOfMemoryError: the device has less memory free.
        """
        with stream:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._owned: torch.Tensor | None = memory  # until it is given back
        self._memory = weakref.ref(memory)  # leases keep it until then
        self._space = DeviceSpace(size_bytes, needed_bytes)
        self._at: dict[Place, Copy] = {}
        self._freed: list[_Freed] = []
        self._users: set[torch.Stream] = set()

    @property
    def size_bytes(self) -> int:
        """0 once nobody keeps the memory any more."""
        memory = self._memory()
        return memory.nbytes if memory is not None else 0

    @property
    def used_bytes(self) -> int:
        """The bytes of copies that somebody uses."""
        return self._space.used_bytes

    @property
    def memory(self) -> torch.Tensor:
        """All of it, until it is given back. Who refers to this keeps it."""
        assert self._owned is not None
        return self._owned

    @property
    def copies(self) -> Iterable[Copy]:
        """Those that are there, or that somebody uses still."""
        return self._at.values()

    def give_back(self) -> None:
        """The memory is torch's again when the last lease has ended."""
        self._owned = None

    def find(
        self, size_bytes: int, *, next_use: Callable[[int], float], sooner_than: float
    ) -> Room | None:
        """See `DeviceSpace.find`; `next_use` is of a shard's copy."""
        return self._space.find(
            size_bytes,
            next_use=lambda place: next_use(self._at[place].shard_id),
            sooner_than=sooner_than,
        )

    def victims(self, room: Room) -> list[Copy]:
        """Those that have to be freed before `room` is taken."""
        return [self._at[place] for place in room.victims]

    def take(self, room: Room, size_bytes: int) -> Place:
        """See `DeviceSpace.take`."""
        return self._space.take(room, size_bytes)

    def add(self, copy: Copy) -> None:
        """Its place was taken for it."""
        self._at[copy.place] = copy

    def may_be_used(self, copy: Copy) -> bool:
        """See `DeviceSpace.may_be_used`."""
        return self._space.may_be_used(copy.place)

    def use(self, copy: Copy) -> None:
        """Somebody uses it, until `leave` was called as often."""
        self._space.use(copy.place)

    def leave(self, copy: Copy) -> None:
        """Undoes one `use`."""
        self._space.leave(copy.place)

    def free(self, copy: Copy) -> None:
        """Nobody uses it any more; its last users may not have passed yet."""
        del self._at[copy.place]
        self._space.free(copy.place)
        self._freed.append(_Freed(copy.place.begin, copy.place.end, copy.ended))

    def ends_of_uses(self, place: Place) -> list[torch.Event]:
        """Those of these bytes so far, which are forgotten here."""
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

    def note_user(self, user: torch.Stream) -> None:
        """Until it has passed, torch gives this memory to nobody else."""
        memory = self._memory()
        if memory is not None and user not in self._users:
            self._users.add(user)
            memory.record_stream(user)

    def tensor(self, copy: Copy) -> torch.Tensor:
        """Over its bytes, with a storage of its own."""
        storage = torch._C._construct_storage_from_data_pointer(
            self.memory.data_ptr() + copy.place.begin,
            self.memory.device,
            copy.shape.numel() * copy.dtype.itemsize,
        )
        tensor = torch.empty(0, dtype=copy.dtype, device=self.memory.device)
        with torch.no_grad():
            tensor.set_(storage, 0, copy.shape, copy.stride)
        return tensor
