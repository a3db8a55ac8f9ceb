"""Snapshots of `dcp.async_save`: which of a job's are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from memd_client.core.temporary_snapshots import TemporarySnapshots
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from memd_client.connection.calls import ControlPlane
    from memd_client.connection.retry import Retrying

LEFT = "async_save/20261126T010203Z-0123456789ab"
OF_A_USER = ["async_save/best", f"{LEFT}-kept", f"kept/{LEFT}", "best"]


class FakeJob:
    """A job that only this session has."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def get_job(self, request: job_pb2.GetJobRequest) -> job_pb2.GetJobResponse:
        job = job_pb2.Job(name=request.name, snapshot_count=len(self.names), session_count=1)
        return job_pb2.GetJobResponse(job=job)

    def list_snapshots(
        self, request: job_pb2.ListSnapshotsRequest
    ) -> job_pb2.ListSnapshotsResponse:
        del request
        listed = [job_pb2.Snapshot(name=name) for name in self.names]
        return job_pb2.ListSnapshotsResponse(snapshots=listed)

    def drop_snapshot(self, request: job_pb2.DropSnapshotRequest) -> job_pb2.DropSnapshotResponse:
        self.names.remove(request.name)
        return job_pb2.DropSnapshotResponse()


def test_a_users_snapshot_of_a_similar_name_stays() -> None:
    job = FakeJob([LEFT, *OF_A_USER])
    snapshots = TemporarySnapshots("gpt", cast("ControlPlane", job), cast("Retrying", None))
    snapshots.drop_abandoned()
    assert job.names == OF_A_USER
