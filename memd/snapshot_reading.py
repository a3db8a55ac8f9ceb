"""A snapshot that a daemon reads for this process: messages say what lies where in the memory that
both share.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from memd.refusal import StatusCode, Unreachable
from memd_proto.v1 import attach_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

_PACKET_BYTES_MAX = 64 * 1024
_DESCRIPTORS_MAX = 64


class SnapshotReading:
    """Its contents, then its shards, then its pieces; the daemon's memory is given back with the
    end. Each call raises Refused.
    """

    def __init__(
        self, answers: Generator[job_pb2.ReadSnapshotResponse], connection: socket.socket
    ) -> None:
        self._answers = answers
        self._connection = connection
        self._contents: job_pb2.SnapshotContents | None = None
        self._memory = memoryview(b"")
        self._releases: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._answers.close()
        # Unmapped once nobody has a view of it.
        self._memory = memoryview(b"")
        if self._releases is not None:
            self._releases.close()
            self._releases = None

    def contents(self) -> job_pb2.SnapshotContents:
        if self._contents is None:
            self._contents = self._next().contents
            self._map(self._contents.reading_id)
        return self._contents

    def shards(self) -> list[job_pb2.SnapshotShard]:
        """In the catalogue's order. Once, before the pieces."""
        shards: list[job_pb2.SnapshotShard] = []
        count = self.contents().shard_count
        while len(shards) < count:
            shards += self._next().shards
        return shards

    def _next(self) -> job_pb2.ReadSnapshotResponse:
        if (answer := next(self._answers, None)) is None:
            raise _lost("it ended the call")
        return answer

    def pieces(self) -> Iterator[job_pb2.ReadSnapshotResponse]:
        """Asking for the next one releases the bytes of the piece before."""
        piece_next = self.contents().piece_first
        for answer in self._answers:
            yield answer
            if answer.piece_next > piece_next:
                self._release(answer.piece_next - piece_next)
                piece_next = answer.piece_next

    def _release(self, count: int) -> None:
        assert self._releases is not None
        # The daemon closes its end after the last message, and where it ends: the next answer says.
        with suppress(ConnectionError):
            self._releases.send(count.to_bytes(8, sys.byteorder), socket.MSG_NOSIGNAL)

    def bytes_of(self, run: job_pb2.SnapshotRun) -> memoryview:
        """Valid until the next answer is asked for."""
        return self._memory[run.memory_offset_bytes :][: run.length_bytes]

    def _map(self, reading_id: int) -> None:
        """The daemon sent both descriptors before its first answer."""
        memory_fd, releases_fd = self._descriptors(reading_id)
        self._releases = socket.socket(fileno=releases_fd)
        try:
            mapping = mmap.mmap(memory_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(memory_fd)
        self._memory = memoryview(mapping)

    def _descriptors(self, reading_id: int) -> tuple[int, int]:
        while True:
            try:
                packet, fds, *_ = socket.recv_fds(
                    self._connection, _PACKET_BYTES_MAX, _DESCRIPTORS_MAX
                )
            except OSError as error:
                raise _lost(str(error)) from error
            if not packet:
                raise _lost("it closed the attach connection")
            sent = attach_pb2.Descriptors.FromString(packet)
            is_export = sent.kind == attach_pb2.Descriptors.KIND_EXPORT
            if is_export and sent.reading_id == reading_id and len(fds) == 2:
                return fds[0], fds[1]
            # They belong to a reading that ended before it began here.
            for fd in fds:
                os.close(fd)


def _lost(why: str) -> Unreachable:
    return Unreachable(StatusCode.UNAVAILABLE, f"the daemon broke the export off: {why}")
