"""Moments on their way into a job: this process fills blobs of it, which the daemon reads."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memd_client.base.interrupts import safe_point
from memd_client.base.sizes import TILE_ELEMENTS
from memd_client.connection.shard import MASTER, MAXIMUM, MOMENTS, Shard, shard_spec
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.core.tensor_streams import MomentPart, StagedBlob
from memd_client.errors import CapacityError, MemdError
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memd_client.connection.calls import PutMomentsCall
    from memd_client.core.job_store import JobStore

STAGED_PREFIX = "@load/"
# While one call is under way, the blobs of the next are filled.
_PIECES_IN_CALL = 4
_CALLS = 2
# Blobs for whole tiles take at most an eighth of the job's host memory, but each call has one.
_HOST_BYTES_DIVISOR = 8


@dataclass(frozen=True, slots=True)
class MomentPiece:
    """Moments of a run of elements of a parameter, after `update_count` updates: one after the
    other, fp32. It lies within one tile."""

    shard_id: int
    update_count: int
    element_first: int
    element_count: int
    has_maximum: bool
    # Behind the moments: of a bf16 parameter, the numbers from which its training goes on.
    has_master: bool = False

    @property
    def names(self) -> Sequence[str]:
        """In the order of the bytes."""
        names = [name for name in MOMENTS if self.has_maximum or name != MAXIMUM]
        return [*names, MASTER] if self.has_master else names

    @property
    def size_bytes(self) -> int:
        return 4 * self.element_count * len(self.names)

    def split(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """`size_bytes` bytes as moments by their names."""
        parts = data.view(torch.float32).view(len(self.names), self.element_count)
        return dict(zip(self.names, parts, strict=True))


def split_moments(
    shard: Shard, update_count: int, *, has_maximum: bool, has_master: bool = False
) -> Iterator[MomentPiece]:
    """All moments of a parameter that the daemon has as one shard."""
    for first in range(0, shard.element_count, TILE_ELEMENTS):
        count = min(TILE_ELEMENTS, shard.element_count - first)
        yield MomentPiece(shard.shard_id, update_count, first, count, has_maximum, has_master)


def staged_spec(name: str, size_bytes: int) -> types_pb2.ShardSpec:
    """A blob that a load needs while it lasts."""
    return shard_spec(
        STAGED_PREFIX + name,
        kind=types_pb2.SHARD_KIND_BLOB,
        dtype=torch.uint8,
        shape=[size_bytes],
    )


def zero_part(piece: MomentPiece) -> MomentPart:
    """The message that makes the moments of `piece` zero."""
    zeros = torch.zeros(1).expand(piece.element_count)
    moments = dict.fromkeys(piece.names, zeros)
    return MomentPart(piece.shard_id, piece.update_count, piece.element_first, moments)


class MovingMoments:
    """The blobs of one load, and the calls that bring their bytes to parameters. One thread.

    A blob is filled again when the call that named it has been answered: until then the daemon may
    read it, or be asked anew.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        tile_bytes = 4 * TILE_ELEMENTS * len(MOMENTS)
        in_memory = store.host_bytes // _HOST_BYTES_DIVISOR // tile_bytes
        self._pieces_in_call = max(1, min(_PIECES_IN_CALL, in_memory // _CALLS))
        self._names: list[str] = []
        self._counts: Counter[int] = Counter()  # of blobs, by their size
        self._free: dict[int, list[Shard]] = {}
        self._next: list[tuple[MomentPart, Shard]] = []  # of the next call
        self._calls: deque[tuple[PutMomentsCall, list[MomentPart], list[Shard]]] = deque()

    def wanted(self, pieces: Iterable[MomentPiece]) -> list[types_pb2.ShardSpec]:
        """The blobs for these."""
        counts = Counter(piece.size_bytes for piece in pieces)
        return [
            self._spec(size)
            for size, count in counts.items()
            for _ in range(min(count, self._count_max(size)))
        ]

    def add(self, declared: Iterable[types_pb2.Shard]) -> None:
        """Takes blobs that the daemon has declared."""
        for blob in map(Shard.of, declared):
            self._free.setdefault(blob.size_bytes, []).append(blob)

    def put(self, piece: MomentPiece, fill: Callable[[torch.Tensor], None]) -> None:
        """`fill` writes the bytes of `piece`, which will be the parameter's."""
        safe_point()
        assert self._store.leases is not None  # of a session that loads
        blob = self._take(piece.size_bytes)
        fill(self._store.leases.value(blob, MODE_OVERWRITE))
        self._next.append((_part_of(piece, blob), blob))
        if len(self._next) == self._pieces_in_call:
            self._begin()

    def finish(self) -> None:
        """Waits until the parameters have all moments that were put. The blobs are gone."""
        self._begin()
        while self._calls:
            self._end_oldest()
        self._delete()

    def give_up(self) -> None:
        """Waits until no call is under way. The blobs are gone."""
        self._next.clear()
        while self._calls:
            with suppress(MemdError):
                self._calls[0][0].result()
            self._calls.popleft()
        self._delete()

    def _take(self, size_bytes: int) -> Shard:
        while not self._free.get(size_bytes):
            if self._counts[size_bytes] < self._count_max(size_bytes):
                self.add(self._store.shards.declare([self._spec(size_bytes)]))
            elif self._calls:
                self._end_oldest()
            else:
                self._begin()
        return self._free[size_bytes].pop()

    def _begin(self) -> None:
        """A call brings what was filled."""
        filled, self._next = self._next, []
        if not filled:
            return
        while len(self._calls) >= _CALLS:
            self._end_oldest()
        parts = [part for part, _ in filled]
        call = self._store.streams.begin_put_moments(parts)
        self._calls.append((call, parts, [blob for _, blob in filled]))

    def _end_oldest(self) -> None:
        # An interrupt leaves it under way, and `give_up` waits for it.
        call, parts, blobs = self._calls[0]
        try:
            call.result()
        except CapacityError:
            # If this load has replaced extents that a commit names, the next commit frees them. The
            # daemon keeps room for some tiles of them.
            request = session_pb2.SyncRequest(session_id=self._store.session_id)
            self._store.control.sync(request)
            again = self._store.streams.begin_put_moments(parts)
            self._calls[0] = again, parts, blobs
            again.result()
        self._calls.popleft()
        for blob in blobs:
            self._free[blob.size_bytes].append(blob)

    def _count_max(self, size_bytes: int) -> int:
        """The most blobs of this size. Sizes other than a whole tile's are rare."""
        is_whole_tile = size_bytes >= 4 * TILE_ELEMENTS * (len(MOMENTS) - 1)
        return _CALLS * (self._pieces_in_call if is_whole_tile else 1)

    def _spec(self, size_bytes: int) -> types_pb2.ShardSpec:
        number = self._counts[size_bytes]
        self._counts[size_bytes] += 1
        spec = staged_spec(f"moments.{size_bytes}.{number}", size_bytes)
        self._names.append(spec.name)
        return spec

    def _delete(self) -> None:
        names, self._names = self._names, []
        self._counts.clear()
        self._free.clear()
        self._store.delete(names)


def _part_of(piece: MomentPiece, blob: Shard) -> MomentPart:
    return MomentPart(
        piece.shard_id,
        piece.update_count,
        piece.element_first,
        {},
        StagedBlob(blob.shard_id, piece.has_maximum, piece.has_master),
    )
