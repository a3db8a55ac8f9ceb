"""Memory of exports, which is kept for the next export of the same owner."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from memd.refusal import Quota, Refused, StatusCode
from memd_native import SnapshotMemory

# A piece has some 5 MiB at most. As many as keep the disk and the caller busy at a time: half of it
# cost a fifth of the rate, and twice as much gained less than a tenth.
MEMORY_BYTES = 16 << 20
# A user's readings at a time, and as many that have ended while reads of theirs are in flight.
_OF_OWNER_MAX = 8
# Owners may be pods, of which new ones come all the time.
_OWNERS_KEPT_MAX = 16


class ExportMemories:
    """Any thread may call it.

    A caller that keeps its mapping keeps the pages, which count as the daemon's. So memory is used
    again rather than given up: an owner has some at most. It is nobody else's ever after, so that
    an old mapping shows exports of its own owner alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_counts: Counter[int | str] = Counter()
        self._free: OrderedDict[int | str, list[SnapshotMemory]] = OrderedDict()  # last used last

    def take(self, owner: int | str) -> SnapshotMemory:
        """StatusError, Refused: there is no memory."""
        with self._lock:
            if free := self._free.get(owner):
                memory = free.pop()
                self._used_counts[owner] += 1
                return memory
            if self._used_counts[owner] >= _OF_OWNER_MAX:
                raise Refused(
                    StatusCode.CAPACITY,
                    f"reads of {_OF_OWNER_MAX} exports that you began are in flight; wait for them",
                    quota=Quota(holder="user", what="exports at once", most=_OF_OWNER_MAX),
                )
            memory = SnapshotMemory(MEMORY_BYTES)
            self._used_counts[owner] += 1
            return memory

    def give_back(self, owner: int | str, memory: SnapshotMemory) -> None:
        """No read into it is in flight."""
        with self._lock:
            self._end_use(owner)
            self._free.setdefault(owner, []).append(memory)
            self._free.move_to_end(owner)
            if len(self._free) > _OWNERS_KEPT_MAX:
                self._free.popitem(last=False)

    def give_up(self, owner: int | str) -> None:
        """Memory that somebody may still read into is used no more."""
        with self._lock:
            self._end_use(owner)

    def _end_use(self, owner: int | str) -> None:
        self._used_counts[owner] -= 1
        if not self._used_counts[owner]:
            del self._used_counts[owner]
