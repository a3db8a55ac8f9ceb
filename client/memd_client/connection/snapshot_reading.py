"""A snapshot that the daemon reads for this process, over a connection of its own: messages say
what lies where in memory that both share.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Self

from memd_client.connection.attach import AttachConnection
from memd_client.connection.control import Control
from memd_client.errors import DaemonUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from memd_client.base.address import UnixAddress
    from memd_proto.v1 import job_pb2


class SnapshotReading:
    """See `calls.SnapshotReading`. The connection carries the daemon's memory, and nothing else:
    that of a session carries segments."""

    def __init__(self, where: UnixAddress, request: job_pb2.ReadSnapshotRequest) -> None:
        with ExitStack() as opened:
            connection = AttachConnection(where)
            opened.callback(connection.close)
            control = Control(address=connection.control_address, token=connection.token)
            opened.callback(control.close)
            self._answers = control.read_snapshot(request)
            opened.callback(self._answers.close)
            self._contents = self._next().contents
            memory_fd, releases_fd = connection.reading_descriptors(self._contents.reading_id)
            self._releases = opened.enter_context(socket.socket(fileno=releases_fd))
            try:
                # Unmapped once nobody has a view of it.
                mapping = mmap.mmap(memory_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(memory_fd)
            self._memory = memoryview(mapping)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    @property
    def contents(self) -> job_pb2.SnapshotContents:
        return self._contents

    def shards(self) -> list[job_pb2.SnapshotShard]:
        """In the catalogue's order. Once, before the pieces."""
        shards: list[job_pb2.SnapshotShard] = []
        while len(shards) < self._contents.shard_count:
            shards += self._next().shards
        return shards

    def pieces(self) -> Iterator[job_pb2.ReadSnapshotResponse]:
        """Asking for the next one releases the bytes of a piece of which the last message came."""
        piece_next = self._contents.piece_first
        for answer in self._answers:
            yield answer
            if answer.piece_next > piece_next:
                self._release(answer.piece_next - piece_next)
                piece_next = answer.piece_next

    def _release(self, count: int) -> None:
        # The daemon closes its end after the last message, and where it ends: the next answer says.
        with suppress(ConnectionError):
            self._releases.send(count.to_bytes(8, sys.byteorder), socket.MSG_NOSIGNAL)

    def bytes_of(self, run: job_pb2.SnapshotRun) -> memoryview:
        """Valid until the next message is asked for."""
        return self._memory[run.memory_offset_bytes :][: run.length_bytes]

    def _next(self) -> job_pb2.ReadSnapshotResponse:
        answer = next(self._answers, None)
        if answer is None:
            raise DaemonUnavailable("the daemon broke the reading of a snapshot off")
        return answer
