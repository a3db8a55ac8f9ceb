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
from typing import TYPE_CHECKING
from weakref import WeakSet

from memd_client.base.interrupts import pause
from memd_client.core.snapshot_reader import SnapshotReader
from memd_client.errors import InUse, MemdError, UnknownName
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client.connection.calls import ControlPlane
    from memd_client.connection.retry import Retrying
    from memd_client.core.snapshot_reader import SnapshotTaker

PREFIX = "async_save/"
# The daemon makes no other that begins so.
_NAME = re.compile(PREFIX + r"\d{8}T\d{6}Z-[0-9a-f]{12}", re.ASCII)
_log = logging.getLogger("memd_client")
# The daemon notices in less that a reading has broken off.
_LAST_READER_S = 5.0
# Between the call and the first byte, torch plans the save.
_PLANNING_S = 30.0
_LOOK_S = 0.05


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
            reader = SnapshotReader(self._job, self._control, snapshot.name, taker)
            reader.read(self._retrying, patience_s=_LAST_READER_S)

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
