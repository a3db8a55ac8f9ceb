"""Bytes of a storage that lie in a slot of the job, for as long as a graph needs them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch

from memd_client.base.dynamo import untraced
from memd_client.device.activation_copies import drop
from memd_client.parameters.views import is_same_bits

if TYPE_CHECKING:
    from memd_client.core.scratch import Scratch, ScratchSlot
    from memd_client.device.activation_copies import ActivationCopies, AwayBytes

# An attribute of a storage: where its bytes are stored.
_STORED = "_memd_stored"


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a storage between a tensor's first and its last."""

    storage: torch.UntypedStorage
    begin: int
    end: int

    def grown(self) -> Span:
        """The bytes to store for these: all of the storage if they are most of it, as other tensors
        show the rest."""
        whole_bytes = self.storage.nbytes()
        is_most = 2 * (self.end - self.begin) > whole_bytes
        return Span(self.storage, 0, whole_bytes) if is_most else self

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(
            self.storage, self.begin, (self.end - self.begin,), (1,)
        )


@dataclass(slots=True)
class StoredCopy:
    """The bytes of a storage are in a slot, this far behind their place in the storage."""

    stored: ref[StoredBytes]
    shift: int
    # On a device: shares the version counter of the tensor that was saved, and its version then.
    marker: torch.Tensor | None = None
    version: int = 0


def stored_copy(storage: torch.UntypedStorage) -> StoredCopy | None:
    """The place where bytes of a storage are, or were, stored."""
    found: StoredCopy | None = getattr(storage, _STORED, None)
    return found


def note_stored(storage: torch.UntypedStorage, copy: StoredCopy) -> None:
    setattr(storage, _STORED, copy)


@dataclass(frozen=True, slots=True)
class Shown:
    """A storage with the bytes of a slot, and where in it those of the slot begin."""

    storage: torch.UntypedStorage
    begin: int


class StoredBytes:
    """Bytes of host memory."""

    __slots__ = ("__weakref__", "_begin", "_end", "_is_asked", "_place", "_scratch", "_slot")

    def __init__(self, scratch: Scratch, slot: ScratchSlot, begin: int, end: int) -> None:
        self._scratch = scratch
        self._slot = slot
        self._begin, self._end = begin, end  # in the slot
        self._place = 0  # in the order of saving
        self._is_asked = False

    @untraced
    def __del__(self) -> None:
        self._scratch.give_back(self._slot)

    @property
    def size_bytes(self) -> int:
        return self._slot.size_bytes

    @property
    def scratch(self) -> Scratch:
        return self._scratch

    @property
    def place(self) -> int:
        return self._place

    def note_place(self, place: int) -> None:
        self._place = place

    def covers(self, begin: int, end: int) -> bool:
        return self._begin <= begin and end <= self._end

    def fill(self, source: torch.Tensor) -> None:
        """Stores all of them."""
        self._overwrite().copy_(source)

    def prefetch(self) -> None:
        """Backward needs them soon."""
        if self._scratch.may_spill and not self._is_asked:
            self._is_asked = True
            self._scratch.prefetch(self._slot)

    def shown(self) -> Shown:
        """They are used now."""
        self._is_asked = False
        storage = self._scratch.read(self._slot).untyped_storage()
        note_stored(storage, StoredCopy(ref(self), 0))
        return Shown(storage, 0)

    def is_copy(self, copy: StoredCopy, span: Span, tensor: torch.Tensor) -> bool:
        """Whether these are still the bytes of `tensor`. They are compared: a program may have
        changed them by ways that count in no version."""
        del tensor
        there, begin = self.shown().storage, span.begin + copy.shift
        if there.data_ptr() + begin == span.storage.data_ptr() + span.begin:
            return True  # a tensor that memd has given to backward
        stored = Span(there, begin, begin + span.end - span.begin)
        return is_same_bits(stored.bytes(), span.bytes())

    def _overwrite(self) -> torch.Tensor:
        return self._scratch.overwrite(self._slot)[self._begin : self._end]


class StoredFromDevice(StoredBytes):
    """Bytes that leave a device, and come back there."""

    __slots__ = ("_away", "_copies")

    def __init__(
        self, scratch: Scratch, slot: ScratchSlot, begin: int, end: int, copies: ActivationCopies
    ) -> None:
        super().__init__(scratch, slot, begin, end)
        self._copies = copies
        self._away: AwayBytes | None = None

    @untraced
    def __del__(self) -> None:
        if self._away is not None:
            drop(self._away)
        super().__del__()

    def fill(self, source: torch.Tensor) -> None:
        self._away = self._copies.leave(source, self._shard_id, self._overwrite)

    def prefetch(self) -> None:
        away = self._away
        if away is None or away.there is not None:
            return
        box = self._leases_at_once(away)
        if not box:
            super().prefetch()
            return
        with suppress(torch.OutOfMemoryError):  # it comes when it is used
            self._copies.bring(away, self._shard_id, self._begin, box)

    def shown(self) -> Shown:
        self._is_asked = False
        away = self._away
        assert away is not None
        there = self._copies.use(away)
        if there is None:
            box = self._leases_at_once(away) or [self._part(self._scratch.read(self._slot))]
            self._copies.bring(away, self._shard_id, self._begin, box)
            there = self._copies.use(away)
        assert there is not None
        begin = int(there.storage_offset()) + there.nbytes - self._end
        return Shown(there.untyped_storage(), begin)

    def is_copy(self, copy: StoredCopy, span: Span, tensor: torch.Tensor) -> bool:
        """By their versions: the host would wait for a comparison."""
        del span
        marker = copy.marker
        return marker is not None and marker._version == tensor._version == copy.version

    @property
    def _shard_id(self) -> int:
        return self._slot.shard.shard_id

    def _leases_at_once(self, away: AwayBytes) -> list[torch.Tensor]:
        """At most one: the lease of a copy that is under way, or one that takes no request. Nobody
        else may have it when the copy that it is for has passed."""
        return away.leases[:1] or [
            self._part(lease) for lease in self._scratch.resident(self._slot)
        ]

    def _part(self, lease: torch.Tensor) -> torch.Tensor:
        return lease[self._begin : self._end]
