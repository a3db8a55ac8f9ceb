"""The blobs that loads have left in a job: of one that broke off, or with a plan of an earlier
client.

Those put new values beside the old ones first, as blobs, and a *plan* last. From the commit on that
had the plan the values counted; then they were moved to their shards. A plan that is found is
finished, before anybody uses a parameter. All other blobs are forgotten.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memd_client.connection.shard import Shard
from memd_client.core.leases import MODE_OVERWRITE
from memd_client.core.moving_moments import STAGED_PREFIX, MomentPiece, zero_part
from memd_client.core.tensor_streams import MomentPart, StagedBlob
from memd_client.errors import InUse
from memd_proto.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memd_client.core.job_store import JobStore
    from memd_client.core.steps import Steps

_log = logging.getLogger("memd_client")
_PLAN = STAGED_PREFIX + "plan"
# The quota holds what one commit replaces: the plan's client saw to that.
_COMMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _PlannedValue:
    """A row of a plan: the bytes that a shard, or the moments of a parameter, will have."""

    name: str  # of the blob; "": there is none, and the moments will be zero
    size_bytes: int
    target_id: int | None  # None: they were for the process that has ended
    moments: MomentPiece | None

    @staticmethod
    def of_row(row: Sequence[Any]) -> _PlannedValue:
        name, size_bytes, target_id, *moments = row
        piece = MomentPiece(target_id, *moments) if moments else None
        return _PlannedValue(name, size_bytes, target_id, piece)

    @property
    def moved_bytes(self) -> int:
        return self.moments.size_bytes if self.moments is not None else self.size_bytes


class OldLoads:
    """Those of one session's job. Any thread may call; it waits for the daemon."""

    def __init__(self, store: JobStore, steps: Steps) -> None:
        self._store = store
        self._steps = steps

    def list_settled(self) -> Iterable[types_pb2.Shard]:
        """All shards of the job, with nothing left of a load. Before this session has parameters.

        Raises:
            InUse: other sessions have the job, and one may be at work on what is left.
        """
        listed = list(self._store.shards.list_all())
        left = {shard.spec.name: shard for shard in listed if _is_left(shard)}
        if self._store.leases is None or not left:
            return listed
        if self._store.other_session_count() > 0:
            raise InUse(
                f"job {self._store.job!r}: another session ends a load, or settles what one has "
                "left; try again when that is done, or close the job's other sessions"
            )
        if _PLAN in left and left[_PLAN].written:
            self._finish(left, {shard.shard_id: shard for shard in listed})
        # The plan goes first: without it the rest counts for nobody.
        self._store.delete([_PLAN])
        self._store.delete([name for name in left if name != _PLAN])
        if any(shard.written for shard in left.values()):
            # Extents that a commit has named are free after the next one.
            self._sync()
        return [shard for shard in self._store.shards.list_all() if not _is_left(shard)]

    def _finish(self, left: dict[str, types_pb2.Shard], shards: dict[int, types_pb2.Shard]) -> None:
        """It may be done again, if it breaks off."""
        rows = json.loads(self._lease(left[_PLAN]).numpy().tobytes())
        values = [_PlannedValue.of_row(row) for row in rows]
        values = [value for value in values if value.name in left or not value.name]
        for part in _parts(values):
            for value in part:
                if value.moments is None and value.target_id is not None:
                    data = self._lease(left[value.name]).clone()
                    target = self._lease(shards[value.target_id], MODE_OVERWRITE)
                    target.view(-1).view(torch.uint8).copy_(data)
                    del target
            moments = [value for value in part if value.moments is not None]
            if moments:
                self._store.streams.put_moments(partial(_moment_parts, moments, left))
            # One commit has the values in their shards, and not here.
            self._store.delete([value.name for value in part if value.name])
            self._sync()
        _log.info("job %r: %d loaded values are in place", self._store.job, len(values))

    def _lease(self, shard: types_pb2.Shard, *mode: int) -> torch.Tensor:
        assert self._store.leases is not None  # see `list_settled`
        return self._store.leases.value(Shard.of(shard), *mode)

    def _sync(self) -> None:
        request = session_pb2.SyncRequest(session_id=self._store.session_id)
        self._steps.note_sync(self._store.control.sync(request).committed_step)


def _moment_parts(
    values: Iterable[_PlannedValue], left: dict[str, types_pb2.Shard]
) -> Iterator[MomentPart]:
    for value in values:
        piece = value.moments
        assert piece is not None
        if not value.name:
            yield zero_part(piece)
            continue
        blob = StagedBlob(left[value.name].shard_id, piece.has_maximum, piece.has_master)
        yield MomentPart(piece.shard_id, piece.update_count, piece.element_first, {}, blob)


def _is_left(shard: types_pb2.Shard) -> bool:
    is_blob = shard.spec.kind == types_pb2.SHARD_KIND_BLOB
    return is_blob and shard.spec.name.startswith(STAGED_PREFIX)


def _parts(values: Sequence[_PlannedValue]) -> Iterator[list[_PlannedValue]]:
    """Each has at most `_COMMIT_BYTES`, or one value."""
    part: list[_PlannedValue] = []
    part_bytes = 0
    for value in values:
        if part and part_bytes + value.moved_bytes > _COMMIT_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(value)
        part_bytes += value.moved_bytes
    if part:
        yield part
