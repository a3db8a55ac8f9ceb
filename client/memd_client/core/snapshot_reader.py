"""A snapshot's bytes, for whoever takes them, over several connections if the daemon restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from memd_client.base.interrupts import pause, safe_point
from memd_client.errors import DaemonUnavailable, InUse, MemdError
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.connection.calls import ControlPlane, SnapshotReading
    from memd_client.connection.retry import Retrying

_LOOK_S = 0.05


class SnapshotTaker(Protocol):
    """Takes what a snapshot has."""

    def begin(self, shards: Sequence[job_pb2.SnapshotShard]) -> None:
        """Called once, before the first run. Runs have places in this list."""
        ...

    def take(self, run: job_pb2.SnapshotRun, data: memoryview) -> None:
        """Called once for each run of bytes, which are `data` until `end_piece` returns."""
        ...

    def end_piece(self) -> None:
        """Called after the runs of one place on disk: all parts of the elements that it has."""
        ...


class SnapshotReader:
    """Reads one snapshot. One thread."""

    def __init__(self, job: str, control: ControlPlane, name: str, taker: SnapshotTaker) -> None:
        self._job = job
        self._control = control
        self._name = name
        self._taker = taker
        self._piece_next = 0
        self._identity = 0
        self._is_done = False

    def read(self, retrying: Retrying, *, patience_s: float) -> None:
        """Gives the taker all shards and bytes, in the daemon's order.

        Args:
            patience_s: how long somebody else may read another snapshot of the job.

        Raises:
            IntegrityError: bytes are damaged on disk.
            InUse: another snapshot of the job is read.
        """
        until = time.monotonic() + patience_s
        while not self._is_done:
            safe_point()
            try:
                retrying.calling(self._go_on)
            except InUse:
                if time.monotonic() > until:
                    raise
                pause(_LOOK_S)

    def _go_on(self) -> None:
        """Takes the pieces that are left."""
        request = job_pb2.ReadSnapshotRequest(
            job=self._job,
            name=self._name,
            piece_first=self._piece_next,
            identity=self._identity,
        )
        with self._control.read_snapshot(request) as reading:
            self._take_shards(reading)
            self._take_pieces(reading)
            if self._piece_next != reading.contents.piece_count:
                raise DaemonUnavailable("the daemon broke the reading of a snapshot off")
        self._is_done = True

    def _take_shards(self, reading: SnapshotReading) -> None:
        shards, contents = reading.shards(), reading.contents
        if not self._identity:
            self._identity = contents.identity
            self._taker.begin(shards)
        if contents.identity != self._identity or contents.piece_first != self._piece_next:
            raise MemdError(
                f"job {self._job!r}: snapshot {self._name} is another one than before the "
                "daemon restarted"
            )

    def _take_pieces(self, reading: SnapshotReading) -> None:
        """A piece may come in several messages, and counts once all of them are here: another
        daemon sends it again."""
        runs: list[job_pb2.SnapshotRun] = []
        for answer in reading.pieces():
            safe_point()
            runs += answer.runs
            if answer.piece_next > self._piece_next:
                for run in runs:
                    self._taker.take(run, reading.bytes_of(run))
                self._taker.end_piece()
                runs.clear()
                self._piece_next = answer.piece_next
