"""A load: values and moments that are replaced in place, all of them or none, whoever is killed.

A snapshot keeps what the job had. Then the new bytes are written where they belong, once. The load
counts from the moment at which the snapshot is dropped. If the session ends before, the daemon
takes the job back to the snapshot; if the session goes on, the old bytes are put back here
(docs/decisions/safetensors.md).
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import contextmanager, suppress
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING

from memd_client.base.interrupts import pause, safe_point
from memd_client.base.sizes import format_size
from memd_client.connection.shard import Shard
from memd_client.core.moving_moments import MovingMoments, staged_spec, zero_part
from memd_client.core.old_state import OldState
from memd_client.errors import (
    CapacityError,
    DaemonUnavailable,
    DeadlineExceeded,
    InUse,
    InvalidArgument,
    MemdError,
    NotYet,
    SessionFenced,
    UnknownName,
    retold,
)
from memd_proto.v1 import job_pb2, session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from memd_client.connection.calls import SyncCall
    from memd_client.core.job_store import JobStore
    from memd_client.core.moving_moments import MomentPiece
    from memd_client.core.steps import Steps

_log = logging.getLogger("memd_client")
# The daemon knows a load's snapshot by its name: `load/20261126T010203Z-0123456789ab`.
LOAD_PREFIX = "load/"
# Blobs of this size prove that the disk quota holds the maxima of parameters that have none yet.
# They are never written, and are deleted again. Each must fit into the job's host memory.
_ROOM_BYTES = 1 << 20
# After so many bytes of values the disk begins to take them, while others are read. A commit costs
# two flushes of the disk, and more bytes wait longer in memory.
_BEHIND_BYTES = 64 << 20
# The daemon needs less to notice that a reading has ended.
_LAST_READER_S = 5.0
_LOOK_S = 0.05


class Unfinished:
    """A load that broke off. This session may have a part of it."""

    def __init__(self, job: str) -> None:
        self._job = job

    def __str__(self) -> str:
        return (
            f"job {self._job!r}: a load broke off, and this session may have some old values and "
            "some new ones; close it and connect again, which finds all old ones or all new ones"
        )

    def refuse_replaced(self) -> None:
        """Before a step, which would use the values."""
        raise MemdError(str(self))


class Load:
    """One load of one session. One thread; it waits for the daemon."""

    def __init__(self, store: JobStore, steps: Steps) -> None:
        assert store.leases is not None  # of a session that loads
        self._job = store.job
        self._store = store
        self._steps = steps
        self._leases = store.leases
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._snapshot_name = f"{LOAD_PREFIX}{began}-{secrets.token_hex(6)}"
        self._moving = MovingMoments(store)
        self._behind = _CommitsBehind(store, self._note_sync)
        self._staged: list[Shard] = []  # blobs of bytes that are for this process alone
        self._staged_names: list[str] = []
        # Shards whose value, or whose moments, may be other ones than in the snapshot.
        self._values: dict[int, None] = {}
        self._moments: dict[int, None] = {}
        self._may_be_dropped = False  # the snapshot, now or by a request that is on its way

    @contextmanager
    def all_or_none(
        self, create: Callable[[str], object], note_unfinished: Callable[[Unfinished], None]
    ) -> Iterator[None]:
        """Begins with the snapshot. When the block has ended, the load counts. If it raises, the
        job has what it had; if that cannot be put back, `note_unfinished` and the error say so.

        Args:
            create: makes the snapshot of this name, and raises what is in the way.
        """
        self._make_snapshot(create, note_unfinished)
        try:
            yield
            self._end()
        except BaseException as error:
            # Frames refer to the lease of a value that was being written: it ends here.
            clear_frames(error.__traceback__)
            # The session has ended, and the daemon takes the job back.
            if isinstance(error, SessionFenced):
                raise
            try:
                self._go_back()
            except BaseException as failure:
                clear_frames(failure.__traceback__)
                self.tell_unfinished(error, failure, note_unfinished)
                raise
            raise

    def tell_unfinished(
        self,
        error: BaseException,
        failure: BaseException,
        note_unfinished: Callable[[Unfinished], None],
    ) -> None:
        """Raises `error`, which says that `failure` has left the load unfinished. If that is an
        interrupt, it gets a note, and the caller raises it."""
        unfinished = Unfinished(self._job)
        note_unfinished(unfinished)
        if not isinstance(failure, Exception):
            failure.add_note(str(unfinished))
            return
        told = f"{unfinished}: {error}" + (f"; {failure}" if failure is not error else "")
        if isinstance(error, MemdError):
            raise retold(error, told) from failure
        if isinstance(error, Exception):
            raise MemdError(f"{unfinished}: {error!r}") from failure
        error.add_note(told)
        raise error

    def prepare(
        self,
        staged_bytes: Sequence[int],
        pieces: Sequence[MomentPiece],
        *,
        maxima_bytes: int,
    ) -> None:
        """Before anything changes: makes sure of all disk space that the load needs.

        Args:
            staged_bytes: the sizes of what `stage` gets.
            pieces: of moments that `put` gets.
            maxima_bytes: disk space for maxima that parameters do not have yet.

        Raises:
            CapacityError: the job's disk quota does not hold it.
        """
        specs = [staged_spec(str(number), size) for number, size in enumerate(staged_bytes)]
        room_count = -(-maxima_bytes // _ROOM_BYTES)
        room = [staged_spec(f"maxima.{number}", _ROOM_BYTES) for number in range(room_count)]
        moving = self._moving.wanted(pieces)
        self._staged_names = [spec.name for spec in (*specs, *room)]
        if not self._staged_names and not moving:
            return
        try:
            declared = self._store.shards.declare([*specs, *room, *moving])
        except CapacityError as error:
            raise _with_terms(
                error,
                {
                    "tensors that stay in this process": staged_bytes,
                    "moments on their way": [spec.shape[0] for spec in moving],
                    "maxima that the job has not": [maxima_bytes],
                },
            ) from error
        self._staged = [Shard.of(each) for each in declared[: len(specs)]]
        self._moving.add(declared[len(specs) + len(room) :])
        if room:
            self._store.delete([spec.name for spec in room])
            self._staged_names = [spec.name for spec in specs]

    def write(self, shard: Shard, write: Callable[[], None]) -> None:
        """`write` replaces the value of `shard`."""
        safe_point()
        self._values[shard.shard_id] = None
        write()
        self._behind.written(shard.size_bytes)

    def overwrite(self, shard: Shard, fill: Callable[[torch.Tensor], None]) -> None:
        """As `write`: `fill` writes all its bytes."""
        self.write(shard, lambda: self._leases.fill(shard, fill))

    def stage(self, number: int, fill: Callable[[torch.Tensor], None]) -> None:
        """`fill` writes bytes that are for this process alone. They are in memd until `forget`."""
        safe_point()
        self._leases.fill(self._staged[number], fill)

    def staged(self, number: int) -> torch.Tensor:
        """The bytes that `stage` has got."""
        return self._leases.value(self._staged[number])

    def put(self, pieces: Sequence[MomentPiece], fill: Callable[[int, torch.Tensor], None]) -> None:
        """Replaces moments, after all values. `fill` writes those of number `index`."""
        # A commit would write the blobs, too.
        self._behind.wait()
        for index, piece in enumerate(pieces):
            self._moments[piece.shard_id] = None
            self._moving.put(piece, partial(fill, index))

    def put_zeros(self, pieces: Sequence[MomentPiece]) -> None:
        """Sets moments to zero, after all values."""
        if not pieces:
            return
        self._behind.wait()
        self._moments.update((piece.shard_id, None) for piece in pieces)
        self._store.streams.put_moments(lambda: map(zero_part, pieces))

    def forget(self) -> None:
        """Deletes what was staged. If this fails, the next session does."""
        with suppress(MemdError):
            self._store.delete(self._staged_names)

    def _make_snapshot(
        self, create: Callable[[str], object], note_unfinished: Callable[[Unfinished], None]
    ) -> None:
        try:
            create(self._snapshot_name)
        except BaseException as error:
            if isinstance(error, SessionFenced):
                raise
            # The daemon may have made it, although its answer was lost.
            try:
                self._drop_snapshot()
            except BaseException as failure:
                self.tell_unfinished(error, failure, note_unfinished)
                raise
            if isinstance(error, CapacityError):
                raise CapacityError(
                    f"{error}; a load keeps what the job has on disk in a snapshot until the new "
                    "values are all there"
                ) from error
            raise

    def _end(self) -> None:
        """From here on the load counts."""
        self._moving.finish()
        self._behind.wait()
        self._sync()
        self._drop_snapshot()

    def _go_back(self) -> None:
        """Puts back what the job had."""
        self._moving.give_up()
        with suppress(MemdError):
            self._behind.wait()
        if self._may_be_dropped:
            # A request that is late would make a load count of which a part was put back. This one
            # leaves it nothing to drop.
            self._drop_snapshot()
            raise MemdError("the load counts, and the daemon's first answer was lost")
        self._store.delete(self._staged_names)
        if self._values or self._moments:
            _log.info(
                "job %r: a load broke off, and its %d values and moments of %d parameters are put "
                "back; if that is interrupted, close the session, and the daemon does it",
                self._job,
                len(self._values),
                len(self._moments),
            )
            # No value is in memory alone from here on.
            self._sync()
            OldState(self._store, self._snapshot_name).put_back(self._values, self._moments)
            self._sync()
        self._drop_snapshot()

    def _drop_snapshot(self) -> None:
        request = job_pb2.DropSnapshotRequest(
            job=self._job, name=self._snapshot_name, session_id=self._store.session_id
        )
        until = time.monotonic() + _LAST_READER_S
        while True:
            self._may_be_dropped = True
            try:
                self._store.control.drop_snapshot(request)
            except UnknownName:
                # The daemon has dropped it, and its answer was lost. Or the session or the job is
                # gone, and then this raises the same.
                self._sync()
                return
            except (DaemonUnavailable, DeadlineExceeded):
                raise  # nobody knows
            except MemdError as error:
                self._may_be_dropped = False
                if not isinstance(error, InUse) or time.monotonic() > until:
                    raise
                pause(_LOOK_S)
            else:
                return

    def _sync(self) -> None:
        self._note_sync(self._store.control.sync(_sync_request(self._store)))

    def _note_sync(self, response: session_pb2.SyncResponse) -> None:
        self._steps.note_sync(response.committed_step)


class _CommitsBehind:
    """Commits what was written while more is read, so that the disk works meanwhile. One commit is
    under way at a time: if the disk is slower than the reads, these wait for it. No commit makes
    the load count; an error of one ends it."""

    def __init__(self, store: JobStore, note: Callable[[session_pb2.SyncResponse], None]) -> None:
        self._store = store
        self._note = note
        self._bytes = 0  # written since the last commit began
        self._call: SyncCall | None = None

    def written(self, size_bytes: int) -> None:
        """Counts bytes whose lease has ended."""
        self._bytes += size_bytes
        if self._bytes >= _BEHIND_BYTES:
            self.wait()
            self._begin()
            self._bytes = 0

    def wait(self) -> None:
        """Waits until no commit is under way."""
        if self._call is None:
            return
        try:
            self._note(self._call.result())
        except InvalidArgument:
            # The lease for the next value came first. A later commit has these bytes.
            _log.debug("a commit beside a load met a lease for writing")
        self._call = None

    def _begin(self) -> None:
        self._call = self._store.control.begin_sync(_sync_request(self._store))
        # A commit begins while nobody writes a parameter, and the lease for the next value takes
        # another way than calls. This call's answer comes after the commit has begun.
        self._store.control.get_job(job_pb2.GetJobRequest(name=self._store.job))


def _sync_request(store: JobStore) -> session_pb2.SyncRequest:
    return session_pb2.SyncRequest(session_id=store.session_id)


def older_daemon(job: str) -> NotYet:
    """The error of a load that the daemon would not take back."""
    return NotYet(
        f"job {job!r}: the daemon is older than this client, and would leave a part of a load if "
        "this process were killed; update it"
    )


def refuse_company(store: JobStore) -> None:
    """Before a load: other sessions would see some values before the others.

    Raises:
        InvalidArgument: the job has some.
    """
    others = store.other_session_count()
    if others > 0:
        raise InvalidArgument(
            f"job {store.job!r} has {others} other sessions, which would see a load half-way; "
            "close them first"
        )


def _with_terms(error: MemdError, terms: dict[str, Sequence[int]]) -> MemdError:
    """`error`, a refusal of the daemon, and what the load takes."""
    sums = {what: sum(sizes) for what, sizes in terms.items()}
    listed = " + ".join(f"{format_size(size)} ({what})" for what, size in sums.items() if size)
    return retold(
        error,
        f"{error}; a load takes {format_size(sum(sums.values()))} of nvme_bytes more while it "
        f"lasts = {listed}",
    )
