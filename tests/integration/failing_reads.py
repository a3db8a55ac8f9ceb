"""A daemon whose volume is damaged under it, so that reads fail or find wrong bytes."""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from memd_proto.v1 import session_pb2
from tests.daemons import Attached
from tests.integration.test_daemon_service import get, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon, Daemons

JOB = "gpt"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBlobs:
    """Blobs of a job that are on disk, and in no memory until they are read."""

    daemon: Daemon
    client: Attached
    session_id: int
    volume: Path
    contents: dict[str, bytes]

    def failure_of(self, blob: str) -> str:
        """Why it cannot be read. Empty if it can: its bytes then are those that were stored."""
        try:
            assert get(self.client, self.session_id, blob) == self.contents[blob]
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    def flip_a_bit(self, blob: str) -> None:
        at = self._place_of(blob)
        with self.volume.open("r+b") as file:
            file.seek(at)
            file.write(bytes([self.contents[blob][0] ^ 1]))

    @contextmanager
    def failing_from(self, blob: str) -> Iterator[None]:
        """The volume ends where the blob begins: reads there fail, as those of a bad drive do."""
        at = self._place_of(blob)
        with self.volume.open("r+b") as file:
            file.seek(at)
            rest = file.read()
            file.truncate(at)
            try:
                yield
            finally:
                file.seek(at)
                file.write(rest)

    def _place_of(self, blob: str) -> int:
        with (
            self.volume.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole,
        ):
            at = whole.find(self.contents[blob])
        assert at >= 0
        return at


@contextmanager
def stored_blobs(daemons: Daemons, *blobs: str, name: str) -> Iterator[StoredBlobs]:
    """They lie on disk in this order."""

    def start() -> Daemon:
        return daemons.start(
            *("--log-format", "json", "--holder-seconds", "0"),
            name=name,
            nvme="64MiB",
            environ={"MEMD_SCRUB": "0"},
        )

    contents = {blob: blob.encode().ljust(16, b".") * 4096 for blob in blobs}
    first = start()
    with Attached(first.attach_socket) as client:
        session_id = client.attach(JOB).session_id
        for blob, data in contents.items():
            put(client, session_id, blob, data)
        client.call(client.sessions.Sync, session_pb2.SyncRequest(session_id=session_id))
    assert first.stop() == 0
    daemon = start()
    with Attached(daemon.attach_socket) as client:
        yield StoredBlobs(
            daemon=daemon,
            client=client,
            session_id=client.attach(JOB).session_id,
            volume=daemon.data / "memd.volume",
            contents=contents,
        )
    assert daemon.stop() == 0
