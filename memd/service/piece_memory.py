"""The memory that an export shares with its caller: pieces, first in, first out."""

from __future__ import annotations

import os
import select
from collections import deque
from typing import TYPE_CHECKING, Self

from memd.refusal import Refused, StatusCode
from memd_native import SnapshotMemory

if TYPE_CHECKING:
    from types import TracebackType

# Pieces have up to 5 MiB, and a few keep the disk and the caller busy at once: half the memory cost
# a fifth of the rate, and twice as much gained less than a tenth.
_MEMORY_BYTES = 16 << 20
# Bounds small pieces, whose messages wait in the caller's socket.
_PIECES_MAX = 64


class PieceMemory:
    """One export has it; its thread alone calls it. The caller maps it for reading, and adds to
    `event_fd` how many pieces it needs no more. If it adds too many, it reads other bytes of the
    same snapshot.
    """

    def __init__(self) -> None:
        """StatusError, Refused: there is no memory, or no descriptor."""
        self.memory = SnapshotMemory(_MEMORY_BYTES)
        try:
            self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise Refused(
                StatusCode.CAPACITY,
                f"the daemon has no descriptor for an export: {error.strerror}; raise its limit of "
                "open files",
            ) from error
        # Positions count on where the memory ends, so that a place is one modulo its size.
        self._end = 0
        self._begin = 0
        self._piece_ends: deque[int] = deque()  # of those that the caller has, or that are read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The memory goes once nobody maps it, and no read is in flight."""
        os.close(self.event_fd)

    @property
    def fds(self) -> tuple[int, int]:
        return self.memory.fd, self.event_fd

    def take(self, size_bytes: int) -> int | None:
        """The offset of a place for the next piece; None until earlier ones are released."""
        assert size_bytes <= _MEMORY_BYTES
        begin = self._end
        if begin % _MEMORY_BYTES + size_bytes > _MEMORY_BYTES:
            begin += -begin % _MEMORY_BYTES
        is_room = begin + size_bytes - self._begin <= _MEMORY_BYTES
        if not is_room or len(self._piece_ends) == _PIECES_MAX:
            return None
        self._end = begin + size_bytes
        self._piece_ends.append(self._end)
        return begin % _MEMORY_BYTES

    def release(self, wait_s: float = 0.0) -> None:
        """Takes back what the caller needs no more; waits so long for any."""
        if wait_s:
            waiting = select.poll()
            waiting.register(self.event_fd, select.POLLIN)
            waiting.poll(wait_s * 1000)
        try:
            count = os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return
        for _ in range(min(count, len(self._piece_ends))):
            self._begin = self._piece_ends.popleft()
        if not self._piece_ends:
            self._begin = self._end
