"""The command line's own connection to a daemon."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from memd.refusal import Refused, StatusCode, Unreachable
from memd.snapshot_reading import SnapshotReading
from memd_native.protocol import SPOKEN, versions_said
from memd_proto.v1 import (
    attach_pb2,
    check_pb2,
    check_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

_TIMEOUT_S = 30.0
# It waits for a job's steps, and for the disk to take everything that is newer in memory.
_COMMIT_TIMEOUT_S = 600.0
_WELCOME_BYTES_MAX = 64 * 1024


class DaemonClient:
    """`with DaemonClient(settings.attach_socket) as daemon`. Each call raises Refused."""

    def __init__(self, attach_socket: Path) -> None:
        credential = _credential()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_TIMEOUT_S)
        try:
            self._connection.connect(str(attach_socket))
            welcome = attach_pb2.Welcome.FromString(self._connection.recv(_WELCOME_BYTES_MAX))
        except OSError as error:
            self._connection.close()
            raise Unreachable(
                StatusCode.UNAVAILABLE,
                f"no daemon answers at {attach_socket}: {error.strerror or error}; start one with "
                "`memd serve`, or say where it is with --socket or MEMD_ADDRESS",
            ) from error
        spoken = versions_said(
            welcome.protocol_version,
            oldest=welcome.protocol_range.oldest,
            newest=welcome.protocol_range.newest,
        )
        if welcome.refusal or SPOKEN.agreed_with(spoken) is None:
            self._connection.close()
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                welcome.refusal
                or f"this memd speaks protocol version {SPOKEN} and the daemon version {spoken}; "
                "use the same memd for both",
            )
        self._metadata = (("memd-token", welcome.token), *credential)
        self._channel = grpc.insecure_channel(welcome.control_address)

    def __enter__(self) -> DaemonClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()
        self._connection.close()

    def status(self) -> status_pb2.GetStatusResponse:
        """With all jobs."""
        stub = status_pb2_grpc.StatusServiceStub(self._channel)
        answer: status_pb2.GetStatusResponse = self._call(
            stub.GetStatus, status_pb2.GetStatusRequest()
        )
        if answer.jobs_page_next:
            answer.jobs.extend(self.jobs(first=answer.jobs_page_next))
            answer.jobs_page_next = 0
        return answer

    def in_flight(self) -> status_pb2.InFlightResponse:
        stub = status_pb2_grpc.StatusServiceStub(self._channel)
        answer: status_pb2.InFlightResponse = self._call(
            stub.InFlight, status_pb2.InFlightRequest()
        )
        return answer

    def jobs(self, *, first: int = 0) -> list[job_pb2.Job]:
        """From that job id on."""
        jobs: list[job_pb2.Job] = []
        request = job_pb2.ListJobsRequest(page_first=first)
        while True:
            page = self._call(self._job_service().ListJobs, request)
            jobs.extend(page.jobs)
            if not page.page_next:
                return jobs
            request.page_first = page.page_next

    def job(self, name: str) -> job_pb2.GetJobResponse:
        """With all shards."""
        request = job_pb2.GetJobRequest(name=name)
        answer: job_pb2.GetJobResponse = self._call(self._job_service().GetJob, request)
        while answer.page_next:
            request.page_first = answer.page_next
            page = self._call(self._job_service().GetJob, request)
            answer.shards.extend(page.shards)
            answer.page_next = page.page_next
        return answer

    def drop_job(self, name: str, *, force: bool) -> None:
        self._call(self._job_service().DropJob, job_pb2.DropJobRequest(name=name, force=force))

    def set_job_weight(self, name: str, weight: float) -> None:
        request = job_pb2.SetJobWeightRequest(name=name, weight=weight)
        self._call(self._job_service().SetJobWeight, request)

    def create_snapshot(self, job: str, name: str) -> job_pb2.Snapshot:
        request = job_pb2.CreateSnapshotRequest(job=job, name=name)
        answer: job_pb2.CreateSnapshotResponse = self._call(
            self._job_service().CreateSnapshot, request, timeout_s=_COMMIT_TIMEOUT_S
        )
        return answer.snapshot

    def snapshots(self, job: str) -> list[job_pb2.Snapshot]:
        request = job_pb2.ListSnapshotsRequest(job=job)
        return list(self._call(self._job_service().ListSnapshots, request).snapshots)

    def restore_snapshot(self, job: str, name: str) -> job_pb2.Snapshot:
        request = job_pb2.RestoreSnapshotRequest(job=job, name=name)
        answer: job_pb2.RestoreSnapshotResponse = self._call(
            self._job_service().RestoreSnapshot, request, timeout_s=_COMMIT_TIMEOUT_S
        )
        return answer.snapshot

    def drop_snapshot(self, job: str, name: str) -> None:
        request = job_pb2.DropSnapshotRequest(job=job, name=name)
        self._call(self._job_service().DropSnapshot, request, timeout_s=_COMMIT_TIMEOUT_S)

    def read_snapshot(
        self, job: str, name: str, *, piece_first: int = 0, identity: int = 0
    ) -> SnapshotReading:
        """One at a time of this connection."""
        request = job_pb2.ReadSnapshotRequest(
            job=job, name=name, piece_first=piece_first, identity=identity
        )
        # Without a bound on its length: it waits for the disk as long as others use that.
        answers = self._job_service().ReadSnapshot(request, metadata=self._metadata)
        return SnapshotReading(self._streamed(answers), self._connection)

    def check(self, job: str) -> Generator[check_pb2.CheckResponse]:
        """Progress, and the report in the last message; leaving the iterator ends the check."""
        stub = check_pb2_grpc.CheckServiceStub(self._channel)
        # Without a bound on its length: the daemon tells ten times a second that it is alive.
        answers = stub.Check(check_pb2.CheckRequest(job=job), metadata=self._metadata)
        yield from self._streamed(answers)

    @staticmethod
    def _streamed(answers: Any) -> Generator[Any]:
        try:
            yield from answers
        except grpc.RpcError as error:
            raise _refused(error) from error
        finally:
            answers.cancel()

    def _job_service(self) -> job_pb2_grpc.JobServiceStub:
        return job_pb2_grpc.JobServiceStub(self._channel)

    def _call(self, method: Any, request: Any, *, timeout_s: float = _TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _refused(error) from error


def _credential() -> tuple[tuple[str, str], ...]:
    """For a daemon that knows its users by tokens of service accounts; as the client's own."""
    path = os.environ.get("MEMD_TOKEN_FILE")
    if not path:
        return ()
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"MEMD_TOKEN_FILE: {path} cannot be read as a token: {error}",
        ) from error
    return (("memd-credential", token),)


def _refused(error: grpc.RpcError) -> Refused:
    # gRPC raises objects that are both an RpcError and a Call; its types don't say so.
    details = getattr(error, "details", lambda: None)()
    trailing = dict(getattr(error, "trailing_metadata", lambda: None)() or ())
    # Only the daemon's own refusals carry it; gRPC's are about the connection.
    if (detail := trailing.get("memd-error-bin")) is None:
        return Unreachable(StatusCode.UNAVAILABLE, details or str(error))
    code = StatusCode(types_pb2.ErrorDetail.FromString(detail).code)
    return Refused(code, details or str(error))
