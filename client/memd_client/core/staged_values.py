"""Values that replace many shards at once: all of them or none, whoever is killed meanwhile.

A lease for writing changes its shard when it ends, and the daemon keeps that when the trainer dies.
So new values are put beside the old ones first, as blobs. The commit that makes the *plan* durable,
which is written last, is the moment from which they count. Then they are copied to their shards,
and Adam's moments to the parameters that have them.
A session that finds values without a plan forgets them. One that finds a plan finishes it, before
anybody uses a parameter (docs/decisions/safetensors.md).
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch

from memd_client.base.interrupts import safe_point
from memd_client.base.sizes import TILE_ELEMENTS, format_size
from memd_client.connection.shard import MAXIMUM, MOMENTS, Shard, shard_spec
from memd_client.core.leases import MODE_OVERWRITE, MODE_READ
from memd_client.core.tensor_streams import MomentPart, StagedBlob
from memd_client.errors import (
    CapacityError,
    DeadlineExceeded,
    InvalidArgument,
    MemdError,
    UnknownName,
    retold,
)
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memd_client.connection.calls import SyncCall
    from memd_client.core.job_store import JobStore
    from memd_client.core.steps import Steps

    # Takes the bytes of a staged value, and the shard in the job that gets them.
    Taking = Callable[["StagedValue", Shard | None, torch.Tensor], None]

_log = logging.getLogger("memd_client")
STAGED_PREFIX = "@load/"
_PLAN = STAGED_PREFIX + "plan"
_TURN = STAGED_PREFIX + "turn"
# Never written: with them the disk quota holds what one commit replaces, and the maxima that
# parameters will have which have none.
_ROOM = STAGED_PREFIX + "room."
_MAXIMA_ROOM = STAGED_PREFIX + "maxima."
_ROOM_BYTES = 1 << 20  # of one: it must fit into the job's host memory
# So many bytes of values one commit moves to their shards; the extents of the old ones are free
# then.
_COMMIT_BYTES = 64 << 20
# A value of this part of the job's host memory, or less, moves without a copy: the memory holds it
# twice beside what the daemon keeps for tiles.
_BESIDE = 8
# After so many staged bytes the disk begins to take them, while others are staged. A commit costs
# two flushes of the disk, and more bytes wait longer in memory.
_BEHIND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StagedMoments:
    """Moments of a run of elements of a parameter, after `update_count` updates: one after the
    other, fp32."""

    update_count: int
    element_first: int
    element_count: int
    has_maximum: bool

    @property
    def names(self) -> Sequence[str]:
        """In the order of the bytes."""
        return [name for name in MOMENTS if self.has_maximum or name != MAXIMUM]

    @property
    def size_bytes(self) -> int:
        return 4 * self.element_count * len(self.names)

    def split(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """`size_bytes` bytes as moments by their names."""
        parts = data.view(torch.float32).view(len(self.names), self.element_count)
        return dict(zip(self.names, parts, strict=True))

    def zeros(self) -> dict[str, torch.Tensor]:
        """By their names."""
        return dict.fromkeys(self.names, torch.zeros(1).expand(self.element_count))


@dataclass(frozen=True, slots=True)
class StagedValue:
    """A blob with the bytes that a shard, or the moments of a parameter, will have."""

    name: str  # "": there is none, and the moments will be zero
    size_bytes: int
    # The shard in the job, or None: the bytes are for this process alone.
    target_id: int | None
    moments: StagedMoments | None = None

    @staticmethod
    def of_row(row: Sequence[Any]) -> StagedValue:
        """As a plan has it."""
        name, size_bytes, target_id, *moments = row
        return StagedValue(
            name, size_bytes, target_id, StagedMoments(*moments) if moments else None
        )

    @property
    def row(self) -> Sequence[Any]:
        """For a plan."""
        moments = astuple(self.moments) if self.moments is not None else ()
        return (self.name, self.size_bytes, self.target_id, *moments)

    @property
    def moved_bytes(self) -> int:
        """When it moves to its place."""
        return self.moments.size_bytes if self.moments is not None else self.size_bytes


class StagedValues:
    """The staged values of one job, of which one session has the turn at a time. Any thread may
    call; it waits for the daemon."""

    def __init__(self, store: JobStore, steps: Steps) -> None:
        self._job = store.job
        self._store = store
        self._steps = steps
        self._moves_beside = True  # of the load that is settled: host memory may hold a value twice

    def list_settled(self) -> Iterable[types_pb2.Shard]:
        """All shards of the job, with nothing staged: a load that broke off is finished, or
        forgotten. Before this session has parameters."""
        listed = self._store.shards.list_all()
        if self._store.leases is None or not any(_is_staged(shard) for shard in listed):
            return listed
        with self.turn(self._take_in_job):
            return [shard for shard in self._store.shards.list_all() if not _is_staged(shard)]

    @contextmanager
    def turn(self, take: Taking, wanted: Sequence[StagedValue] = ()) -> Iterator[None]:
        """Inside, no other session stages values. Those that one which was killed has staged are
        given to `take`, or forgotten, before.

        Args:
            wanted: what will be staged, for messages.

        Raises:
            DeadlineExceeded: another session has the turn for too long.
            CapacityError: the job's disk quota has no room for anything.
        """
        try:
            held = [self._take_turn()]
        except CapacityError as error:
            if not wanted:
                raise
            raise _with_terms(error, wanted, maxima_bytes=0) from error
        try:
            self.settle(take)
            yield
        except BaseException as error:
            # Frames refer to the lease of a value that was being written: it ends here.
            clear_frames(error.__traceback__)
            # Values that count stay for whoever comes next.
            with suppress(MemdError):
                if not _is_written(self._staged(), _PLAN):
                    self._forget()
            raise
        finally:
            held.clear()
            with suppress(MemdError):
                self._store.delete([_TURN])

    def refuse_company(self) -> None:
        """Raises if other sessions are attached to the job: they would see some values before the
        others, and go on with them if this process is killed."""
        others = self._store.other_session_count()
        if others > 0:
            raise InvalidArgument(
                f"job {self._job!r} has {others} other sessions, which would see a load half-way; "
                "close them first"
            )

    def stage(
        self,
        wanted: Sequence[StagedValue],
        fill: Callable[[int, torch.Tensor], None],
        *,
        maxima_bytes: int,
    ) -> None:
        """Puts the values `wanted` beside the old ones. `fill` writes number `index` of those that
        have bytes into a tensor of so many. None counts yet.

        Args:
            maxima_bytes: so much more disk space will be needed where they go.

        Raises:
            CapacityError: the job's quota of disk space does not hold the values beside the old
                ones. Nothing has changed.
        """
        values = [value for value in wanted if value.name]
        specs = [_blob(value.name, value.size_bytes) for value in values]
        specs += _room(_ROOM, _replaced_bytes(values)) + _room(_MAXIMA_ROOM, maxima_bytes)
        try:
            declared = self._store.shards.declare(specs)
        except MemdError as error:
            raise _with_terms(error, values, maxima_bytes=maxima_bytes) from error
        behind = _CommitsBehind(self._begin_sync, self._note_sync)
        for index, shard in enumerate(declared[: len(values)]):
            safe_point()
            fill(index, self._lease(Shard.of(shard), MODE_OVERWRITE))
            behind.staged(values[index].size_bytes)
        behind.wait()

    def commit(self, values: Sequence[StagedValue]) -> None:
        """From here on the values count, whoever is killed."""
        text = json.dumps([value.row for value in values])
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        (declared,) = self._store.shards.declare([_blob(_PLAN, data.numel())])
        self._lease(Shard.of(declared), MODE_OVERWRITE).copy_(data)
        try:
            self._sync()
        except BaseException:
            with suppress(MemdError):
                self._store.delete([_PLAN])
            raise

    def may_count(self) -> bool:
        """After `commit` has raised: false only if the values certainly do not count."""
        try:
            return _is_written(self._staged(), _PLAN)
        except (MemdError, KeyboardInterrupt):  # the caller raises what came first
            return True

    def settle(self, take: Taking) -> None:
        """Gives `take` the bytes of each value that counts, and its shard; moments go to their
        parameters; then forgets all. `take` may get one again that another process has taken before
        it was killed. No interrupt ends this half-way."""
        self._moves_beside = True
        listed = {shard.shard_id: shard for shard in self._store.shards.list_all()}
        staged = {shard.spec.name: shard for shard in listed.values() if _is_staged(shard)}
        if _is_written(staged, _PLAN):
            self._store.delete([name for name in staged if name.startswith(_MAXIMA_ROOM)])
            rows = json.loads(self._lease(Shard.of(staged[_PLAN])).numpy().tobytes())
            values = [StagedValue.of_row(row) for row in rows]
            values = [value for value in values if value.name in staged or not value.name]
            for part in _parts(values):
                for value in (value for value in part if value.moments is None):
                    target = value.target_id
                    shard = Shard.of(listed[target]) if target is not None else None
                    self._move(take, value, shard, Shard.of(staged[value.name]))
                moments = [value for value in part if value.moments is not None]
                if moments:
                    self._store.streams.put_moments(partial(self._moments_of, moments, staged))
                # One commit has the values in their shards, and not here.
                self._store.delete([value.name for value in part if value.name])
                self._sync()
            _log.info("job %r: %d loaded values are in place", self._job, len(values))
        if staged:
            self._forget()

    def _move(self, take: Taking, value: StagedValue, shard: Shard | None, blob: Shard) -> None:
        """Gives `take` the bytes where they are staged, or a copy of them if host memory may not
        hold the shard beside them."""
        if self._moves_beside and value.size_bytes <= self._store.host_bytes // _BESIDE:
            try:
                take(value, shard, self._lease(blob))
            except (CapacityError, DeadlineExceeded) as error:
                # Tier host may leave less, and so may leases of others, which are waited for once.
                # The lease of the blob ends.
                clear_frames(error.__traceback__)
                self._moves_beside = False
            else:
                return
        take(value, shard, self._lease(blob).clone())

    def _moments_of(
        self, values: Sequence[StagedValue], staged: dict[str, types_pb2.Shard]
    ) -> Iterator[MomentPart]:
        for value in values:
            assert value.moments is not None
            assert value.target_id is not None
            found: dict[str, torch.Tensor] = {}
            blob: StagedBlob | None = None
            if not value.name:
                found = value.moments.zeros()
            elif self._store.can_take_staged_moments:
                # They are in the daemon, and pass no process.
                blob = StagedBlob(staged[value.name].shard_id, value.moments.has_maximum)
            else:
                found = value.moments.split(self._lease(Shard.of(staged[value.name])))
            yield MomentPart(
                value.target_id,
                value.moments.update_count,
                value.moments.element_first,
                found,
                blob,
            )
            # The lease ends before the next one begins.
            del found

    def overwrite(self, shard: Shard, data: torch.Tensor) -> None:
        """Replaces the bytes of a parameter or buffer of the job."""
        self._lease(shard, MODE_OVERWRITE).view(-1).view(torch.uint8).copy_(data)

    def _take_in_job(self, value: StagedValue, shard: Shard | None, data: torch.Tensor) -> None:
        del value
        if shard is not None:
            self.overwrite(shard, data)

    def _take_turn(self) -> torch.Tensor:
        """A lease for writing, which one session has at a time, and none that is dead."""
        while True:
            (declared,) = self._store.shards.declare([_blob(_TURN, 1)])
            try:
                turn = self._lease(Shard.of(declared), MODE_OVERWRITE)
            except UnknownName:
                continue  # the session that had it has removed it
            except DeadlineExceeded as error:
                raise DeadlineExceeded(
                    f"job {self._job!r}: another session loads a checkpoint into it; try again "
                    "when that is done"
                ) from error
            if any(
                shard.spec.name == _TURN and shard.shard_id == declared.shard_id
                for shard in self._store.shards.list_all()
            ):
                return turn

    def _forget(self) -> None:
        """The plan goes first: without it the values count for nobody."""
        staged = self._staged()
        names = [name for name in staged if name not in (_TURN, _PLAN)]
        self._store.delete([name for name in staged if name == _PLAN])
        self._store.delete(names)
        if any(staged[name].written for name in names):
            # Extents that a commit named are free after the next commit: this one, or a later one.
            with suppress(MemdError):
                self._sync()

    def _staged(self) -> dict[str, types_pb2.Shard]:
        return {
            shard.spec.name: shard for shard in self._store.shards.list_all() if _is_staged(shard)
        }

    def _lease(self, shard: Shard, mode: int = MODE_READ) -> torch.Tensor:
        assert self._store.leases is not None  # of a session that has the turn
        return self._store.leases.value(shard, mode)

    def _sync(self) -> None:
        request = session_pb2.SyncRequest(session_id=self._store.session_id)
        self._note_sync(self._store.control.sync(request))

    def _begin_sync(self) -> SyncCall:
        request = session_pb2.SyncRequest(session_id=self._store.session_id)
        return self._store.control.begin_sync(request)

    def _note_sync(self, response: session_pb2.SyncResponse) -> None:
        self._steps.note_sync(response.committed_step)


class _CommitsBehind:
    """Commits what was staged while more is staged, so that the disk writes while the client reads.
    One is under way at a time: if the disk is slower than the reads, these wait for it. Without a
    plan nothing of it counts; an error of a commit ends the load."""

    def __init__(
        self,
        begin: Callable[[], SyncCall],
        note: Callable[[session_pb2.SyncResponse], None],
    ) -> None:
        self._begin = begin
        self._note = note
        self._bytes = 0  # staged since the last commit began
        self._call: SyncCall | None = None

    def staged(self, size_bytes: int) -> None:
        """So many bytes more, whose lease has ended."""
        self._bytes += size_bytes
        if self._bytes >= _BEHIND_BYTES:
            self.wait()
            self._call, self._bytes = self._begin(), 0

    def wait(self) -> None:
        """Until none is under way."""
        call, self._call = self._call, None
        if call is not None:
            self._note(call.result())


def split_moments(shard: Shard, update_count: int, *, has_maximum: bool) -> Iterator[StagedMoments]:
    """All moments of a parameter, in runs of which host memory holds the bytes."""
    for first in range(0, shard.element_count, TILE_ELEMENTS):
        count = min(TILE_ELEMENTS, shard.element_count - first)
        yield StagedMoments(update_count, first, count, has_maximum)


def staged_name(index: int) -> str:
    """The blob with this number."""
    return f"{STAGED_PREFIX}{index}"


def _replaced_bytes(values: Iterable[StagedValue]) -> int:
    """Disk space for what one commit replaces. The job's quota holds moments twice anyway, for
    steps."""
    sizes = [value.size_bytes for value in values if value.name and value.moments is None]
    return max(min(_COMMIT_BYTES, sum(sizes)), max(sizes, default=0))


def _with_terms(error: MemdError, values: Sequence[StagedValue], *, maxima_bytes: int) -> MemdError:
    """`error`, a refusal of the daemon, and what a load of `values` takes."""
    terms = {
        "parameters and buffers": sum(each.size_bytes for each in values if each.moments is None),
        "moments": sum(each.size_bytes for each in values if each.moments is not None),
        "the old values of one commit": _replaced_bytes(values),
        "maxima that the job has not": maxima_bytes,
    }
    total_bytes = sum(terms.values())
    if not total_bytes:
        return retold(error, str(error))
    listed = " + ".join(f"{format_size(size)} ({what})" for what, size in terms.items() if size)
    return retold(
        error,
        f"{error}; a load keeps the new values beside the old ones until all are there, which "
        f"takes {format_size(total_bytes)} of nvme_bytes more = {listed}",
    )


def _room(prefix: str, size_bytes: int) -> list[types_pb2.ShardSpec]:
    return [
        _blob(f"{prefix}{index}", _ROOM_BYTES) for index in range(-(-size_bytes // _ROOM_BYTES))
    ]


def _blob(name: str, size_bytes: int) -> types_pb2.ShardSpec:
    return shard_spec(name, kind=types_pb2.SHARD_KIND_BLOB, dtype=torch.uint8, shape=[size_bytes])


def _is_staged(shard: types_pb2.Shard) -> bool:
    return shard.spec.kind == types_pb2.SHARD_KIND_BLOB and shard.spec.name.startswith(
        STAGED_PREFIX
    )


def _is_written(staged: dict[str, types_pb2.Shard], name: str) -> bool:
    return name in staged and staged[name].written


def _parts(values: Sequence[StagedValue]) -> Iterator[list[StagedValue]]:
    """Each has at most `_COMMIT_BYTES`, or one value."""
    part: list[StagedValue] = []
    part_bytes = 0
    for value in values:
        if part and part_bytes + value.moved_bytes > _COMMIT_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(value)
        part_bytes += value.moved_bytes
    if part:
        yield part
