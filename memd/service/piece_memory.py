"""The memory that an export shares with its caller: pieces, first in, first out."""

from __future__ import annotations

import select
import socket
import sys
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
# A native u64: how many pieces.
_COUNT_BYTES = 8


class PieceMemory:
    """One export has it; its thread alone calls it. The caller maps it for reading, and says in
    packets how many pieces it needs no more. If it says so too early, it reads other bytes of the
    same snapshot.
    """

    def __init__(self) -> None:
        """StatusError, Refused: there is no memory, or no descriptor."""
        self.memory = SnapshotMemory(_MEMORY_BYTES)
        try:
            # A pair, of which each end has flags of its own: the caller must not be able to make a
            # read of ours wait.
            self._releases, self._far_end = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
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
        # Of those that the caller has; and what it says it needs no more, also of others.
        self._sent_count = 0
        self._claimed_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The memory goes once nobody maps it, and no read is in flight."""
        self._releases.close()
        self._far_end.close()

    @property
    def fds(self) -> tuple[int, int]:
        """Of the memory, and of the socket that the caller writes to."""
        return self.memory.fd, self._far_end.fileno()

    def is_with_caller(self) -> None:
        """Once the descriptors are passed: only the caller's copy keeps its end open."""
        self._far_end.close()

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

    def sent(self) -> None:
        """The next piece is about to be the caller's. Until then nobody else gets its place, for it
        is read there."""
        self._sent_count += 1

    def release(self, wait_s: float = 0.0) -> None:
        """Takes back what the caller needs no more; waits so long for any. Refused: the caller
        has closed its end, or writes something else."""
        if wait_s:
            waiting = select.poll()
            waiting.register(self._releases, select.POLLIN)
            waiting.poll(wait_s * 1000)
        self._claimed_count += self._count_of_packets()
        count = min(self._claimed_count, self._sent_count)
        self._claimed_count -= count
        self._sent_count -= count
        for _ in range(count):
            self._begin = self._piece_ends.popleft()
        if not self._piece_ends:
            self._begin = self._end

    def _count_of_packets(self) -> int:
        """Of as many as an honest caller can have sent: one that goes on sending holds nobody."""
        count = 0
        for _ in range(_PIECES_MAX):
            try:
                packet = self._releases.recv(_COUNT_BYTES + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                packet = b""
            if len(packet) != _COUNT_BYTES:
                raise Refused(
                    StatusCode.INVALID_ARGUMENT,
                    "the caller of an export says in packets of 8 bytes how many pieces it needs "
                    f"no more, and keeps the socket open until the end; it sent {len(packet)}",
                )
            count += int.from_bytes(packet, sys.byteorder)
        return count
