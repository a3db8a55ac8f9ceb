"""The memory that an export shares with its caller: pieces, first in, first out."""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from memd.refusal import Refused, StatusCode
from memd.service.export_memories import MEMORY_BYTES
from memd_native import StatusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from memd.service.export_memories import ExportMemories

# Bounds small pieces, whose messages wait in the caller's socket.
_PIECES_MAX = 64
# A native u64: how many pieces.
_COUNT_BYTES = 8


class PieceMemory:
    """One export has it; its thread alone calls it, but for `reading`. The caller maps it for
    reading, and says in packets how many pieces it needs no more. If it says so too early, it reads
    other bytes of the same snapshot.
    """

    def __init__(self, memories: ExportMemories, owner: int | str) -> None:
        """StatusError, Refused: there is no memory, or no descriptor."""
        self._memories = memories
        self._owner = owner
        self._lock = threading.Lock()
        self._reads_count = 0
        self._is_over = False
        self._is_read_for_ever = False
        self._is_given_back = False
        self.memory = memories.take(owner)
        try:
            # A pair, of which each end has flags of its own: the caller must not be able to make a
            # read of ours wait.
            self._releases, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            memories.give_back(owner, self.memory)
            raise Refused(
                StatusCode.CAPACITY,
                f"the daemon has no descriptor for an export: {error.strerror}; raise its limit of "
                "open files",
            ) from error
        # Positions count on where the memory ends, so that a place is one modulo its size.
        self._end = 0
        self._begin = 0
        self._piece_ends: deque[int] = deque()  # of those that the caller has, or that are read
        # Those that the caller has; and how many it says it needs no more, also others.
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
        """The memory is the next export's once no read is in flight."""
        self._releases.close()
        self._far_end.close()
        with self._lock:
            self._is_over = True
        self._end_use()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around each read into the memory. Any thread. Refused: the export is over."""
        with self._lock:
            if self._is_over:
                raise Refused(StatusCode.UNAVAILABLE, "the export is over")
            self._reads_count += 1
        try:
            yield
        except StatusError as error:
            # The daemon goes on with a read for which nobody waits any more.
            if error.code in (StatusCode.DEADLINE, StatusCode.UNAVAILABLE):
                self._is_read_for_ever = True
            raise
        finally:
            with self._lock:
                self._reads_count -= 1
            self._end_use()

    def _end_use(self) -> None:
        """Once, with the end or the last read behind it."""
        with self._lock:
            if not self._is_over or self._reads_count or self._is_given_back:
                return
            self._is_given_back = True
        if self._is_read_for_ever:
            self._memories.give_up(self._owner)
        else:
            self._memories.give_back(self._owner, self.memory)

    @property
    def fds(self) -> tuple[int, int]:
        """The memory, and the socket that the caller writes to."""
        return self.memory.fd, self._far_end.fileno()

    def is_with_caller(self) -> None:
        """Once the descriptors are passed: only the caller's copy keeps its end open."""
        self._far_end.close()

    def take(self, size_bytes: int) -> int | None:
        """The offset of a place for the next piece; None until earlier ones are released."""
        assert size_bytes <= MEMORY_BYTES
        begin = self._end
        if begin % MEMORY_BYTES + size_bytes > MEMORY_BYTES:
            begin += -begin % MEMORY_BYTES
        is_room = begin + size_bytes - self._begin <= MEMORY_BYTES
        if not is_room or len(self._piece_ends) == _PIECES_MAX:
            return None
        self._end = begin + size_bytes
        self._piece_ends.append(self._end)
        return begin % MEMORY_BYTES

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
        """Takes what an honest caller sends at most: one that goes on sending holds nobody."""
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
