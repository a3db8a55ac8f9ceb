"""JobService: administration."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from memd.attach import send_export
from memd.peers import by_whom
from memd.refusal import Refused, StatusCode
from memd.service import access, wire
from memd.service.export_memories import ExportMemories
from memd.service.piece_memory import PieceMemory
from memd.service.snapshot_stream import SnapshotStream
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from memd.peers import Peers, Session
    from memd.service.call import Call
    from memd_native import JobInfo, Server, SnapshotInfo, SnapshotReading

log = logging.getLogger(__name__)


class JobService:
    def __init__(self, server: Server, *, peers: Peers) -> None:
        self._server = server
        self._peers = peers
        self._lock = threading.Lock()
        self._exports: set[grpc.ServicerContext] = set()
        self._memories = ExportMemories()

    def end_exports(self) -> None:
        """They take hours, and their callers go on with the next daemon. Any thread."""
        with self._lock:
            contexts = list(self._exports)
        for context in contexts:
            context.cancel()

    def ListJobs(self, request: job_pb2.ListJobsRequest, call: Call) -> job_pb2.ListJobsResponse:
        jobs, page_next = access.administered_jobs(
            self._server, owner=call.peer.owner, first=request.page_first
        )
        return job_pb2.ListJobsResponse(
            jobs=wire.job_messages(jobs, self._server.statistics().jobs), page_next=page_next
        )

    def GetJob(self, request: job_pb2.GetJobRequest, call: Call) -> job_pb2.GetJobResponse:
        job = access.administered_job(self._server, request.name, owner=call.peer.owner)
        shards, page_next = wire.shard_page(self._server, job.job_id, first=request.page_first)
        (message,) = wire.job_messages([job], self._server.statistics().jobs)
        return job_pb2.GetJobResponse(job=message, shards=shards, page_next=page_next)

    def DropJob(self, request: job_pb2.DropJobRequest, call: Call) -> job_pb2.DropJobResponse:
        job = access.administered_job(self._server, request.name, owner=call.peer.owner)
        self._server.drop_job(job.job_id, force=request.force)
        log.info(
            "job dropped", extra={"job": job.name, "step": job.committed_step, **_caller(call)}
        )
        return job_pb2.DropJobResponse()

    def SetJobWeight(
        self, request: job_pb2.SetJobWeightRequest, call: Call
    ) -> job_pb2.SetJobWeightResponse:
        job = access.administered_job(self._server, request.name, owner=call.peer.owner)
        access.check_job_weight(request.weight, job, owner=call.peer.owner)
        self._server.set_job_weight(job.job_id, request.weight)
        log.info("job weighted", extra={"job": job.name, "weight": request.weight, **_caller(call)})
        return job_pb2.SetJobWeightResponse()

    def CreateSnapshot(
        self, request: job_pb2.CreateSnapshotRequest, call: Call
    ) -> job_pb2.CreateSnapshotResponse:
        access.check_snapshot_name(request.name, is_load=request.session_id != 0)
        job = access.administered_job(self._server, request.job, owner=call.peer.owner)
        self._check_job(request.session_id, job, call)
        snapshot = self._server.create_snapshot(
            job.job_id,
            request.name,
            created_s=int(time.time()),
            number=request.number,
            load_session_id=request.session_id,
            timeout_s=call.timeout_s(),
        )
        _log_snapshot("snapshot created", job, snapshot, call)
        return job_pb2.CreateSnapshotResponse(
            snapshot=wire.snapshot_message(snapshot), is_load=request.session_id != 0
        )

    def ListSnapshots(
        self, request: job_pb2.ListSnapshotsRequest, call: Call
    ) -> job_pb2.ListSnapshotsResponse:
        job = access.administered_job(self._server, request.job, owner=call.peer.owner)
        return job_pb2.ListSnapshotsResponse(
            snapshots=[wire.snapshot_message(each) for each in self._server.snapshots(job.job_id)]
        )

    def RestoreSnapshot(
        self, request: job_pb2.RestoreSnapshotRequest, call: Call
    ) -> job_pb2.RestoreSnapshotResponse:
        job = access.administered_job(self._server, request.job, owner=call.peer.owner)
        snapshot = self._server.restore_snapshot(
            job.job_id, request.name, timeout_s=call.timeout_s()
        )
        _log_snapshot("job restored", job, snapshot, call)
        return job_pb2.RestoreSnapshotResponse(snapshot=wire.snapshot_message(snapshot))

    def ReadSnapshot(
        self, request: job_pb2.ReadSnapshotRequest, call: Call
    ) -> Iterator[job_pb2.ReadSnapshotResponse]:
        job = access.administered_job(self._server, request.job, owner=call.peer.owner)
        is_own = self._peers.has_session(call.peer, job.job_id)
        access.check_reads_load(request.name, job, is_own=is_own)
        reading = self._server.begin_snapshot_reading(
            job.job_id,
            request.name,
            owner=call.peer.owner.key_text,
            uid=call.peer.uid,
            pid=call.peer.pid,
            piece_first=request.piece_first,
            identity=request.identity,
        )
        log.info("export begun", extra={"job": job.name, "snapshot": request.name, **_caller(call)})

        def end() -> None:
            with self._lock:
                self._exports.discard(call.context)
            self._server.end_snapshot_reading(reading.reading_id)

        with self._lock:
            self._exports.add(call.context)
        # gRPC closes no generator that it does not ask any more.
        if not call.context.add_callback(end):
            end()
            return
        try:
            with PieceMemory(self._memories, call.peer.owner.key) as memory:
                self._hand_over(memory, reading, call)
                yield from SnapshotStream(self._server, reading, memory, call.context.is_active)
        finally:
            end()
            log.info("export ended", extra={"job": job.name, "snapshot": request.name})

    def _hand_over(self, memory: PieceMemory, reading: SnapshotReading, call: Call) -> None:
        try:
            send_export(self._peers, call.peer, reading.reading_id, memory.fds)
            memory.is_with_caller()
        except OSError as error:
            raise Refused(
                StatusCode.UNAVAILABLE,
                f"the export's memory cannot be passed to process {call.peer.pid}: keep its attach "
                f"connection open and read from it ({error.strerror or error})",
            ) from error

    def DropSnapshot(
        self, request: job_pb2.DropSnapshotRequest, call: Call
    ) -> job_pb2.DropSnapshotResponse:
        # Before the job, whose NOT_FOUND would say that the load counts.
        self._check_session(request.session_id, call)
        job = access.administered_job(self._server, request.job, owner=call.peer.owner)
        if request.session_id:
            self._check_job(request.session_id, job, call)
            self._server.end_load(request.session_id, request.name, timeout_s=call.timeout_s())
        else:
            self._server.drop_snapshot(job.job_id, request.name, timeout_s=call.timeout_s())
        log.info(
            "snapshot dropped", extra={"job": job.name, "snapshot": request.name, **_caller(call)}
        )
        return job_pb2.DropSnapshotResponse()

    def _check_session(self, session_id: int, call: Call) -> Session | None:
        """Raises unless it is 0, or one of the caller's."""
        if not session_id:
            return None
        try:
            return self._peers.session(call.peer, session_id)
        except Refused as refused:
            raise Refused(StatusCode.FENCED, str(refused)) from refused

    def _check_job(self, session_id: int, job: JobInfo, call: Call) -> None:
        """Raises unless it is 0, or one of the caller's that are attached to the job."""
        session = self._check_session(session_id, call)
        if session is not None and session.job_id != job.job_id:
            raise Refused(
                StatusCode.INVALID_ARGUMENT,
                f"session {session_id} is attached to job {session.job_name!r}, and not to "
                f"{job.name!r}",
            )


def _caller(call: Call) -> dict[str, object]:
    return by_whom(call.peer)


def _log_snapshot(event: str, job: JobInfo, snapshot: SnapshotInfo, call: Call) -> None:
    log.info(
        event,
        extra={
            "job": job.name,
            "snapshot": snapshot.name,
            "step": snapshot.step,
            **_caller(call),
        },
    )
