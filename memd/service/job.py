"""JobService: administration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.service import access, wire
from memd_proto.v1 import job_pb2

if TYPE_CHECKING:
    from memd.service.call import Call
    from memd_native import Server


class JobService:
    def __init__(self, server: Server) -> None:
        self._server = server

    def ListJobs(self, request: job_pb2.ListJobsRequest, call: Call) -> job_pb2.ListJobsResponse:
        jobs, page_next = access.administered_jobs(
            self._server, uid=call.peer.uid, first=request.page_first
        )
        return job_pb2.ListJobsResponse(
            jobs=[wire.job_message(job) for job in jobs], page_next=page_next
        )

    def GetJob(self, request: job_pb2.GetJobRequest, call: Call) -> job_pb2.GetJobResponse:
        job = access.administered_job(self._server, request.name, uid=call.peer.uid)
        shards, page_next = wire.shard_page(self._server, job.job_id, first=request.page_first)
        return job_pb2.GetJobResponse(job=wire.job_message(job), shards=shards, page_next=page_next)

    def DropJob(self, request: job_pb2.DropJobRequest, call: Call) -> job_pb2.DropJobResponse:
        job = access.administered_job(self._server, request.name, uid=call.peer.uid)
        self._server.drop_job(job.job_id, force=request.force)
        return job_pb2.DropJobResponse()

    def SetJobWeight(
        self, request: job_pb2.SetJobWeightRequest, call: Call
    ) -> job_pb2.SetJobWeightResponse:
        job = access.administered_job(self._server, request.name, uid=call.peer.uid)
        access.check_job_weight(request.weight, job, uid=call.peer.uid)
        self._server.set_job_weight(job.job_id, request.weight)
        return job_pb2.SetJobWeightResponse()
