"""A snapshot's bytes as messages: its shards first, then piece by piece. The next one is read
ahead.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memd.service import wire
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_native import Server, SnapshotPiece, SnapshotPlace, SnapshotReading, SnapshotRun

# The one that is sent, and the one that is read meanwhile: some 5 MiB each.
_PIECES_AHEAD = 2
# Training that wants the path all the time leaves one byte in 512 to an export.
_READ_TIMEOUT_S = 3600.0
# How often somebody who waits for a read looks whether its caller has gone.
_LOOK_S = 0.1
_EXTENT_BYTES = 1 << 20
# A run takes some bytes beside its data: a message stays below gRPC's 4 MiB.
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
        self, server: Server, reading: SnapshotReading, is_waited_for: Callable[[], bool]
    ) -> None:
        self._server = server
        self._reading = reading
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
        )
        return job_pb2.ReadSnapshotResponse(contents=contents, piece_next=reading.piece_first)

    def _shards(self) -> Iterator[job_pb2.ReadSnapshotResponse]:
        reading = self._reading
        for first in range(0, reading.shard_count, wire.SHARDS_IN_PAGE):
            end = min(first + wire.SHARDS_IN_PAGE, reading.shard_count)
            shards = [wire.snapshot_shard_message(reading.shard(i)) for i in range(first, end)]
            yield job_pb2.ReadSnapshotResponse(shards=shards, piece_next=reading.piece_first)

    def _pieces(self, reads: ThreadPoolExecutor) -> Iterator[job_pb2.ReadSnapshotResponse]:
        ahead: deque[tuple[int, SnapshotPlace, Future[SnapshotPiece]]] = deque()
        pieces = iter(range(self._reading.piece_first, self._reading.piece_count))
        while True:
            while len(ahead) < _PIECES_AHEAD and (piece := next(pieces, None)) is not None:
                place = self._reading.place(piece)
                ahead.append((piece, place, reads.submit(self._read, place)))
            if not ahead:
                return
            piece, place, read = ahead.popleft()
            if not self._wait(read):
                return
            yield from self._messages(piece, place, read.result())

    def _read(self, place: SnapshotPlace) -> SnapshotPiece:
        return self._server.read_snapshot(
            self._reading.reading_id, place, timeout_s=_READ_TIMEOUT_S
        )

    def _wait(self, read: Future[SnapshotPiece]) -> bool:
        """False where the caller has gone."""
        while self._is_waited_for():
            try:
                read.exception(_LOOK_S)
            except TimeoutError:
                continue
            return True
        return False

    def _messages(
        self, number: int, place: SnapshotPlace, piece: SnapshotPiece
    ) -> Iterator[job_pb2.ReadSnapshotResponse]:
        """Those of one piece; the last one counts it."""
        runs: list[job_pb2.SnapshotRun] = []
        for part_runs in self._parts(place, piece):
            if runs:
                yield job_pb2.ReadSnapshotResponse(runs=runs, piece_next=number)
            runs = part_runs
        yield job_pb2.ReadSnapshotResponse(runs=runs, piece_next=number + 1)

    def _parts(
        self, place: SnapshotPlace, piece: SnapshotPiece
    ) -> Iterator[list[job_pb2.SnapshotRun]]:
        """The runs of each part, a MiB at most, split where they are many."""
        if not place.is_tile:
            yield [
                job_pb2.SnapshotRun(
                    shard=place.owner,
                    part=job_pb2.SNAPSHOT_PART_VALUE,
                    offset_bytes=place.index * _EXTENT_BYTES,
                    data=piece.value,
                )
            ]
            return
        runs = self._reading.runs(place)
        shards = {run.shard: self._reading.shard(run.shard) for run in runs}
        written = [run for run in runs if shards[run.shard].written]
        updated = [run for run in written if shards[run.shard].has_moments]
        maxima = [run for run in updated if shards[run.shard].spec.keeps_maximum]
        is_half = any(each.spec.dtype == types_pb2.D_TYPE_BFLOAT16 for each in shards.values())
        value_bytes = _HALF if is_half else _WORD
        yield from _runs(job_pb2.SNAPSHOT_PART_VALUE, written, piece.value, value_bytes)
        for part, name in _PARTS:
            having = maxima if part == job_pb2.SNAPSHOT_PART_MAX_EXP_AVG_SQ else updated
            if having:
                yield from _runs(part, having, getattr(piece, name), _WORD)


def _runs(
    part: job_pb2.SnapshotPart, runs: list[SnapshotRun], data: bytes, element_bytes: int
) -> Iterator[list[job_pb2.SnapshotRun]]:
    """Their bytes in `data`, which are those of a tile; nothing where it is empty."""
    if not data:
        return
    view = memoryview(data)
    for first in range(0, len(runs), _RUNS_IN_MESSAGE):
        yield [
            job_pb2.SnapshotRun(
                shard=run.shard,
                part=part,
                offset_bytes=run.element_in_shard * element_bytes,
                data=bytes(view[begin : begin + run.element_count * element_bytes]),
            )
            for run in runs[first : first + _RUNS_IN_MESSAGE]
            for begin in (run.element_in_tile * element_bytes,)
        ]


@contextmanager
def _reads_ahead() -> Iterator[ThreadPoolExecutor]:
    """Its threads wait for the disk; whoever leaves does not wait for them."""
    threads = ThreadPoolExecutor(_PIECES_AHEAD, thread_name_prefix="memd-export")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
