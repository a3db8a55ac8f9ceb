"""Snapshots that a session makes, reads once and drops: what `dcp.async_save` saves from.

Their names begin with `async_save/`. A process that is killed leaves its own; the next session that
has the job for itself drops them.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from memd_client.base.interrupts import pause, safe_point
from memd_client.errors import DaemonUnavailable, InUse, MemdError, UnknownName
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memd_client.connection.calls import ControlPlane, SnapshotReading
    from memd_client.connection.retry import Retrying

PREFIX = "async_save/"
# The daemon makes no other that begins so.
_NAME = re.compile(PREFIX + r"\d{8}T\d{6}Z-[0-9a-f]{12}", re.ASCII)
_log = logging.getLogger("memd_client")
# The daemon notices in less that a reading has broken off.
_LAST_READER_S = 5.0
# Between the call and the first byte, torch plans the save.
_PLANNING_S = 30.0
_LOOK_S = 0.05


class SnapshotTaker(Protocol):
    """Takes what a snapshot has."""

    def begin(self, shards: Sequence[job_pb2.SnapshotShard]) -> None:
        """Called once, before the first run. Runs have places in this list."""
        ...

    def take(self, run: job_pb2.SnapshotRun, data: memoryview) -> None:
        """Called once for each run of bytes, which are `data` until it returns."""
        ...


class _State(Enum):
    waiting = 1  # for `read`
    reading = 2
    over = 3


class TemporarySnapshots:
    """Those of one session. Any thread may call."""

    def __init__(self, job: str, control: ControlPlane, retrying: Retrying) -> None:
        self._job = job
        self._control = control
        self._retrying = retrying
        self._names: set[str] = set()  # the daemon may have them
        self._living: WeakSet[TemporarySnapshot] = WeakSet()
        self._lock = threading.Lock()
        # The daemon reads one snapshot of a job at a time.
        self._reading = threading.Lock()
        self._is_closed = False

    def make(self, create: Callable[[str], object]) -> TemporarySnapshot:
        """A snapshot of now.

        Args:
            create: makes the one of this name, and raises what is in the way.
        """
        self.drop_abandoned()
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{PREFIX}{began}-{secrets.token_hex(6)}"
        with self._lock:
            self._names.add(name)
            snapshot = TemporarySnapshot(self, name)
            self._living.add(snapshot)
        try:
            create(name)
        except BaseException:
            # It may be there although nobody has heard of it.
            with suppress(MemdError):
                self.drop(name)
            raise
        return snapshot

    def drop_abandoned(self) -> None:
        """Drops those that nobody will read any more: of states of this session that were freed,
        and of processes that were killed. The latter only while no other session has the job."""
        with self._lock:
            own = set(self._names)
            freed = own - {each.name for each in self._living}
        for name in freed:
            self.drop(name)
        request = job_pb2.GetJobRequest(name=self._job)
        found = self._control.get_job(request).job
        if not found.snapshot_count or found.session_count > 1:
            return
        listed = self._control.list_snapshots(job_pb2.ListSnapshotsRequest(job=self._job))
        for name in (each.name for each in listed.snapshots):
            if _NAME.fullmatch(name) and name not in own:
                self.drop(name)
                _log.info(
                    "job %r: dropped snapshot %s, which a dcp.async_save that was killed has left",
                    self._job,
                    name,
                )

    def drop(self, name: str) -> None:
        """It is gone when this returns."""
        request = job_pb2.DropSnapshotRequest(job=self._job, name=name)
        until = time.monotonic() + _LAST_READER_S
        while True:
            try:
                self._control.drop_snapshot(request)
            except UnknownName:
                pass  # the daemon has dropped it, and its answer was lost
            except InUse:
                if time.monotonic() > until:
                    raise
                pause(_LOOK_S)
                continue
            with self._lock:
                self._names.discard(name)
            return

    def close(self) -> None:
        """Before the session ends: waits for those that are read, or are about to be, and drops all
        others."""
        planned_until = time.monotonic() + _PLANNING_S
        try:
            while self._is_awaited(planned_until):
                pause(_LOOK_S)
        finally:
            self._is_closed = True
        with self._lock:
            left = set(self._names)
        for name in left:
            with suppress(InUse):  # an interrupt has ended the wait: its reader drops it
                self.drop(name)

    def read(self, snapshot: TemporarySnapshot, taker: SnapshotTaker) -> None:
        """See `TemporarySnapshot.read`."""
        with self._reading:
            if self._is_closed:
                raise MemdError(
                    f"job {self._job!r}: the session was closed before dcp.async_save began "
                    "to write; wait for its future before close()"
                )
            reading = _Reading(self._job, self._control, snapshot.name, taker)
            until = time.monotonic() + _LAST_READER_S
            while not reading.is_done:
                safe_point()
                try:
                    self._retrying.calling(reading.go_on)
                except InUse:
                    if time.monotonic() > until:
                        raise
                    pause(_LOOK_S)

    def _is_awaited(self, planned_until: float) -> bool:
        with self._lock:
            states = {each.state for each in self._living}
        return _State.reading in states or (
            _State.waiting in states and time.monotonic() < planned_until
        )


class TemporarySnapshot:
    """One snapshot. It is dropped once it was read, or nobody refers to it."""

    def __init__(self, owner: TemporarySnapshots, name: str) -> None:
        self._owner = owner
        self._name = name
        self._state = _State.waiting

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> _State:
        return self._state

    def read(self, taker: SnapshotTaker) -> None:
        """Gives `taker` all shards and bytes, in the daemon's order, and drops the snapshot whether
        that succeeds or not. If the daemon restarts, the next one goes on.

        Raises:
            IntegrityError: bytes are damaged on disk.
            InUse: another snapshot of the job is exported.
            MemdError: it was read before, or the session is over.
        """
        with self._turn():
            self._owner.read(self, taker)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._state is not _State.waiting:
            raise MemdError(
                f"snapshot {self._name} was written already, and is dropped; call dcp.async_save "
                "again"
            )
        self._state = _State.reading
        try:
            yield
        except BaseException:
            # If this fails too, `close()` drops it, or the next session.
            with suppress(MemdError):
                self._owner.drop(self._name)
            raise
        else:
            self._owner.drop(self._name)
        finally:
            self._state = _State.over


class _Reading:
    """One snapshot's bytes over several connections."""

    def __init__(self, job: str, control: ControlPlane, name: str, taker: SnapshotTaker) -> None:
        self._job = job
        self._control = control
        self._name = name
        self._taker = taker
        self._piece_next = 0
        self._identity = 0
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def go_on(self) -> None:
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
                runs.clear()
                self._piece_next = answer.piece_next
