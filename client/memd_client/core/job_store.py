"""The part of a session's job that holds values which no step makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd_client.errors import NotYet
from memd_proto.v1 import job_pb2, session_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_client.connection.calls import ControlPlane
    from memd_client.connection.retry import Retrying
    from memd_client.core.leases import Leases
    from memd_client.core.ranks import Ranks
    from memd_client.core.registry import ShardRegistry
    from memd_client.core.scratch_uses import ScratchUses
    from memd_client.core.temporary_snapshots import TemporarySnapshots
    from memd_client.core.tensor_streams import TensorStreams

_NAMES_IN_CALL = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStore:
    """The shards of one job, as one session sees them. Any thread may call; it waits for the
    daemon."""

    job: str
    session_id: int
    host_bytes: int  # the job's quota
    control: ControlPlane
    shards: ShardRegistry
    streams: TensorStreams
    retrying: Retrying
    temporary_snapshots: TemporarySnapshots
    leases: Leases | None  # None without shared memory
    ranks: Ranks
    # The daemon takes fp32 values of bfloat16 parameters.
    can_take_masters: bool
    can_give_masters: bool  # the daemon gives them
    # The daemon takes the job back to the snapshot of a load that broke off.
    can_load_in_place: bool
    can_keep_scratch: bool  # the daemon knows blobs that no commit writes
    scratch_uses: ScratchUses

    def other_session_count(self) -> int:
        """How many other sessions are attached to the job, ranks that train it with this one not
        counted."""
        answer = self.control.get_job(job_pb2.GetJobRequest(name=self.job))
        return answer.job.session_count - self.ranks.world_size

    def maxima_bytes(self, shard_ids: Sequence[int]) -> int:
        """Disk space that the job's quota must have more if these parameters get maxima. Of those
        that have one, none.

        Raises:
            NotYet: the daemon is older than this question.
        """
        request = session_pb2.GetMaximaBytesRequest(session_id=self.session_id, shard_ids=shard_ids)
        try:
            return self.control.get_maxima_bytes(request).bytes
        except NotYet as error:
            raise NotYet(
                f"job {self.job!r}: the daemon is older than this client and does not say what "
                "maxima take, so none are loaded; update it"
            ) from error

    def delete(self, names: Sequence[str]) -> None:
        """Deletes shards of these names, if there are."""
        for first in range(0, len(names), _NAMES_IN_CALL):
            part = names[first : first + _NAMES_IN_CALL]
            self.control.delete(session_pb2.DeleteRequest(session_id=self.session_id, names=part))
            for name in part:
                self.shards.forget(name)
