"""A snapshot as messages: its shards first, then where the bytes of each piece lie in the memory
that the daemon and the export's caller share.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

from memd.service import wire
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd.service.piece_memory import PieceMemory
    from memd_native import Server, SnapshotPiece, SnapshotPlace, SnapshotReading, SnapshotRun

    Read = tuple[int, SnapshotPlace, Future[SnapshotPiece]]

# Reads that wait for the disk at a time, and for the worker that hashes them.
_READS_MAX = 4
# Training that wants the path all the time leaves one byte in 512 to an export.
_READ_TIMEOUT_S = 3600.0
# How often somebody who waits for a read, or for the caller, looks whether the caller has gone.
_LOOK_S = 0.1
_EXTENT_BYTES = 1 << 20
# A run takes some 20 bytes: a message stays below gRPC's 4 MiB.
_RUNS_IN_MESSAGE = 65_536
_HALF, _WORD = 2, 4  # bytes of an element of bf16 and fp32

_PARTS = (
    (job_pb2.SNAPSHOT_PART_EXP_AVG, "exp_avg"),
    (job_pb2.SNAPSHOT_PART_EXP_AVG_SQ, "exp_avg_sq"),
    (job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ, "max_exp_avg_sq"),
    (job_pb2.SNAPSHOT_PART_MASTER, "master"),
)


class SnapshotStream:
    """Iterate over it once. It ends early if nobody waits any more, and raises StatusError."""

    def __init__(
        self,
        server: Server,
        reading: SnapshotReading,
        memory: PieceMemory,
        is_waited_for: Callable[[], bool],
    ) -> None:
        self._server = server
        self._reading = reading
        self._memory = memory
        self._is_waited_for = is_waited_for

    def __iter__(self) -> Iterator[job_pb2.ReadSnapshotResponse]:
        yield self._contents()
        yield from self._shards()
        with _reads_ahead() as reads:
            yield from self._pieces(reads)

    def _contents(self) -> job_pb2.ReadSnapshotResponse:
        reading = self._reading
        contents = job_pb2.SnapshotContents(
            snapshot=wire.snapshot_message(reading.snapshot),
            identity=reading.identity,
            shard_count=reading.shard_count,
            piece_first=reading.piece_first,
            piece_count=reading.piece_count,
            reading_id=reading.reading_id,
        )
        return job_pb2.ReadSnapshotResponse(contents=contents, piece_next=reading.piece_first)

    def _shards(self) -> Iterator[job_pb2.ReadSnapshotResponse]:
        reading = self._reading
        for first in range(0, reading.shard_count, wire.SHARDS_IN_PAGE):
            end = min(first + wire.SHARDS_IN_PAGE, reading.shard_count)
            shards = [wire.snapshot_shard_message(reading.shard(i)) for i in range(first, end)]
            yield job_pb2.ReadSnapshotResponse(shards=shards, piece_next=reading.piece_first)

    def _pieces(self, reads: ThreadPoolExecutor) -> Iterator[job_pb2.ReadSnapshotResponse]:
        ahead: deque[Read] = deque()
        piece_next, piece_count = self._reading.piece_first, self._reading.piece_count
        while ahead or piece_next < piece_count:
            self._memory.release()
            while piece_next < piece_count and (read := self._begin(piece_next, reads)):
                ahead.append(read)
                piece_next += 1
            if not self._wait(ahead):
                return
            if ahead and ahead[0][2].done():
                piece, place, done = ahead.popleft()
                yield from self._messages(piece, place, done.result())

    def _begin(self, piece: int, reads: ThreadPoolExecutor) -> Read | None:
        """None where the caller still has the memory."""
        place = self._reading.place(piece)
        offset_bytes = self._memory.take(self._reading.memory_bytes(place))
        if offset_bytes is None:
            return None
        return piece, place, reads.submit(self._read, place, offset_bytes)

    def _read(self, place: SnapshotPlace, offset_bytes: int) -> SnapshotPiece:
        with self._memory.reading():
            return self._server.read_snapshot(
                self._reading.reading_id,
                place,
                self._memory.memory,
                offset_bytes=offset_bytes,
                timeout_s=_READ_TIMEOUT_S,
            )

    def _wait(self, ahead: deque[Read]) -> bool:
        """For the first read, or for the caller if it has all the memory, a moment at most. False
        where the caller has gone."""
        if not ahead:
            self._memory.release(_LOOK_S)
        else:
            wait([ahead[0][2]], _LOOK_S)
        return self._is_waited_for()

    def _messages(
        self, number: int, place: SnapshotPlace, piece: SnapshotPiece
    ) -> Iterator[job_pb2.ReadSnapshotResponse]:
        """Those of one piece; the last one counts it."""
        runs = self._runs(place, piece)
        batch = list(islice(runs, _RUNS_IN_MESSAGE))
        while True:
            rest = list(islice(runs, _RUNS_IN_MESSAGE))
            piece_next = number if rest else number + 1
            if not rest:
                self._memory.sent()
            yield job_pb2.ReadSnapshotResponse(runs=batch, piece_next=piece_next)
            if not rest:
                return
            batch = rest

    def _runs(self, place: SnapshotPlace, piece: SnapshotPiece) -> Iterator[job_pb2.SnapshotRun]:
        if not place.is_tile:
            begin, length = piece.value
            yield job_pb2.SnapshotRun(
                shard=place.owner,
                part=job_pb2.SNAPSHOT_PART_VALUE,
                offset_bytes=place.index * _EXTENT_BYTES,
                memory_offset_bytes=begin,
                length_bytes=length,
            )
            return
        runs = self._reading.runs(place)
        shards = {run.shard: self._reading.shard(run.shard) for run in runs}
        written = [run for run in runs if shards[run.shard].written]
        updated = [run for run in written if shards[run.shard].has_moments]
        maxima = [run for run in updated if shards[run.shard].spec.keeps_maximum]
        is_half = any(each.spec.dtype == types_pb2.D_TYPE_BFLOAT16 for each in shards.values())
        value_bytes = _HALF if is_half else _WORD
        yield from _runs_of(job_pb2.SNAPSHOT_PART_VALUE, written, piece.value, value_bytes)
        for part, name in _PARTS:
            having = maxima if part == job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ else updated
            yield from _runs_of(part, having, getattr(piece, name), _WORD)


def _runs_of(
    part: job_pb2.SnapshotPart,
    runs: list[SnapshotRun],
    memory: tuple[int, int],
    element_bytes: int,
) -> Iterator[job_pb2.SnapshotRun]:
    """Those of a tile whose part lies there; none where it has no bytes."""
    begin, length = memory
    if not length:
        return
    for run in runs:
        yield job_pb2.SnapshotRun(
            shard=run.shard,
            part=part,
            offset_bytes=run.element_in_shard * element_bytes,
            memory_offset_bytes=begin + run.element_in_tile * element_bytes,
            length_bytes=run.element_count * element_bytes,
        )


@contextmanager
def _reads_ahead() -> Iterator[ThreadPoolExecutor]:
    """Its threads wait for the disk; whoever leaves does not wait for them."""
    threads = ThreadPoolExecutor(_READS_MAX, thread_name_prefix="memd-export")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
