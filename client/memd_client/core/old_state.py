"""The state that a job had when a load began, from its snapshot, written back bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.connection.shard import MASTER, MAXIMUM, MOMENTS, Shard
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.core.moving_moments import MomentPiece, MovingMoments
from memd_client.core.snapshot_reader import SnapshotReader
from memd_client.errors import MemdError
from memd_proto.v1 import job_pb2, session_pb2

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from memd_client.core.job_store import JobStore
    from memd_client.core.snapshot_reader import SnapshotTaker

# After so many bytes a commit frees what the load has written in their places: a job at its disk
# quota has room for little more.
_COMMIT_BYTES = 4 << 20
# An export may be reading another snapshot of the job for hours. The daemon takes the job back
# without reading.
_PATIENCE_S = 60.0
_VALUE = job_pb2.SNAPSHOT_PART_VALUE
_PARTS = {
    "exp_avg": job_pb2.SNAPSHOT_PART_EXP_AVG,
    "exp_avg_sq": job_pb2.SNAPSHOT_PART_EXP_AVG_SQ,
    MAXIMUM: job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ,
    MASTER: job_pb2.SNAPSHOT_PART_MASTER,
}


class OldState:
    """The state of a job in a snapshot. One thread."""

    def __init__(self, store: JobStore, snapshot_name: str) -> None:
        self._store = store
        self._snapshot_name = snapshot_name

    def put_back(self, values: Collection[int], moments: Collection[int]) -> None:
        """Gives the shards `values` the values of then, and the shards `moments` their moments and
        numbers of updates. They are not durable yet. A parameter that had no update then has
        moments of zero after no update, from which Adam goes on as without.

        Raises:
            MemdError: a part of them may have been put back.
        """
        shards = {each.spec.name: Shard.of(each) for each in self._store.shards.list_all()}
        # Values come first: the daemon compares what it publishes of fp32 numbers with them.
        old_values = _OldValues(self._store, shards, values)
        if values:
            self._read(old_values)
            old_values.finish()
        # A value that was another one has lost what Adam knows beside it.
        wanted = {*moments, *old_values.half_shard_ids}
        if wanted:
            old_moments = _OldMoments(self._store, shards, wanted)
            self._read(old_moments)
            old_moments.finish()

    def _read(self, taker: SnapshotTaker) -> None:
        store = self._store
        reader = SnapshotReader(store.job, store.control, self._snapshot_name, taker)
        reader.read(store.retrying, patience_s=_PATIENCE_S)


@dataclass(slots=True)
class _Written:
    """A value that is being written, over a lease."""

    lease: torch.Tensor  # as bytes
    left_bytes: int


class _OldValues:
    """A `SnapshotTaker` of the values of some shards."""

    def __init__(
        self, store: JobStore, shards: dict[str, Shard], shard_ids: Collection[int]
    ) -> None:
        assert store.leases is not None  # of a session that loads
        self._store = store
        self._leases = store.leases
        self._job = store.job
        self._uncommitted_bytes = 0
        self._shards = shards
        self._shard_ids = shard_ids
        self._by_number: dict[int, Shard] = {}  # in the snapshot; no byte has come yet
        self._open: dict[int, _Written] = {}
        self._half_shard_ids: list[int] = []

    @property
    def half_shard_ids(self) -> Sequence[int]:
        """Those of the shards that are bf16 and that Adam has updated."""
        return self._half_shard_ids

    def begin(self, shards: Sequence[job_pb2.SnapshotShard]) -> None:
        """See `SnapshotTaker`."""
        for number, found in enumerate(shards):
            shard = self._shards.get(found.spec.name)
            if shard is None or shard.shard_id not in self._shard_ids:
                continue
            _refuse_unwritten(self._job, found)
            self._by_number[number] = shard
            if found.has_moments and shard.dtype == torch.bfloat16:
                self._half_shard_ids.append(shard.shard_id)

    def take(self, run: job_pb2.SnapshotRun, data: memoryview) -> None:
        """See `SnapshotTaker`."""
        if run.part != _VALUE:
            return
        shard = self._by_number.pop(run.shard, None)
        if shard is not None:
            self._open[run.shard] = self._begin(shard)
        written = self._open.get(run.shard)
        if written is None:
            return
        written.lease.numpy().data[run.offset_bytes : run.offset_bytes + len(data)] = data
        written.left_bytes -= len(data)
        if not written.left_bytes:
            del self._open[run.shard]

    def end_piece(self) -> None:
        """See `SnapshotTaker`. The lease of a value ends with its last byte."""
        # A commit is refused while a value is leased for writing. A value that is larger than the
        # free part of the quota fails it: then only the daemon can take the job back.
        if self._uncommitted_bytes >= _COMMIT_BYTES and not self._open:
            self._uncommitted_bytes = 0
            self._store.control.sync(session_pb2.SyncRequest(session_id=self._store.session_id))

    def finish(self) -> None:
        """The snapshot was read. Values without a run are zero."""
        for shard in self._by_number.values():
            self._begin(shard)
        self._by_number.clear()
        self._open.clear()

    def _begin(self, shard: Shard) -> _Written:
        self._uncommitted_bytes += shard.size_bytes
        lease = self._leases.value(shard, MODE_OVERWRITE).view(-1).view(torch.uint8)
        return _Written(lease.zero_(), shard.size_bytes)


@dataclass(frozen=True, slots=True)
class _OldShard:
    shard: Shard
    update_count: int
    has_maximum: bool

    @property
    def is_half(self) -> bool:
        return self.shard.dtype == torch.bfloat16


class _OldMoments:
    """A `SnapshotTaker` of the moments of some shards, and of the fp32 numbers of those in bf16."""

    def __init__(
        self, store: JobStore, shards: dict[str, Shard], shard_ids: Collection[int]
    ) -> None:
        self._job = store.job
        self._moving = MovingMoments(store)
        self._shards = shards
        self._shard_ids = shard_ids
        self._by_number: dict[int, _OldShard] = {}
        # The parts of the elements of this piece, by the shard's number and the first element.
        self._runs: dict[tuple[int, int], dict[int, memoryview]] = {}

    def begin(self, shards: Sequence[job_pb2.SnapshotShard]) -> None:
        """See `SnapshotTaker`."""
        for number, found in enumerate(shards):
            shard = self._shards.get(found.spec.name)
            if shard is not None and shard.shard_id in self._shard_ids:
                _refuse_unwritten(self._job, found)
                has_maximum = found.spec.keeps_maximum
                self._by_number[number] = _OldShard(shard, found.generation, has_maximum)

    def take(self, run: job_pb2.SnapshotRun, data: memoryview) -> None:
        """See `SnapshotTaker`."""
        old = self._by_number.get(run.shard)
        if old is None:
            return
        element_bytes = old.shard.dtype.itemsize if run.part == _VALUE else 4
        element_first = run.offset_bytes // element_bytes
        self._runs.setdefault((run.shard, element_first), {})[run.part] = data

    def end_piece(self) -> None:
        """See `SnapshotTaker`."""
        for (number, element_first), parts in self._runs.items():
            self._put(self._by_number[number], element_first, parts)
        self._runs.clear()

    def finish(self) -> None:
        """The snapshot was read."""
        self._moving.finish()

    def _put(self, old: _OldShard, element_first: int, parts: dict[int, memoryview]) -> None:
        # Each run of moments comes with that of the value of the same elements.
        count = len(parts[_VALUE]) // old.shard.dtype.itemsize
        piece = MomentPiece(
            old.shard.shard_id,
            old.update_count,
            element_first,
            count,
            old.has_maximum,
            old.is_half,
        )

        def fill(into: torch.Tensor) -> None:
            for name, part in piece.split(into).items():
                data = parts.get(_PARTS[name])
                if data is not None:
                    part.view(torch.uint8).numpy().data[:] = data
                elif name == MASTER:
                    _copy_halves(parts[_VALUE], part)
                else:
                    part.zero_()

        self._moving.put(piece, fill)


def _refuse_unwritten(job: str, shard: job_pb2.SnapshotShard) -> None:
    """No write makes a shard one without a value: only the daemon takes a first value back.
    `offload()` has stored all values, so no load of a model meets this."""
    if not shard.written:
        raise MemdError(
            f"job {job!r}: {shard.spec.name!r} had no value before the load, and has one now"
        )


def _copy_halves(halves: memoryview, into: torch.Tensor) -> None:
    """bf16 values whose fp32 numbers they are."""
    words = into.view(torch.int16).view(-1, 2)
    words.zero_()
    low, high = words.unbind(1)
    del low
    high.copy_(torch.frombuffer(bytearray(halves), dtype=torch.int16))


assert set(_PARTS) == {*MOMENTS, MASTER}
