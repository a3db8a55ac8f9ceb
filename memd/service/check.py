"""CheckService: verification of what lies on disk, while the daemon works."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from memd.service import access
from memd_proto.v1 import check_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd.service.call import Call
    from memd_native import CheckedJob, CheckedVolume, CheckFinding, CheckReport, Server

_PROGRESS_S = 0.1


class CheckService:
    def __init__(self, server: Server) -> None:
        self._server = server

    def Check(
        self, request: check_pb2.CheckRequest, call: Call
    ) -> Iterator[check_pb2.CheckResponse]:
        owner = call.peer.owner
        if request.job:
            jobs = [access.administered_job(self._server, request.job, owner=owner)]
        else:
            jobs = [job for job in self._server.jobs() if access.may_administer(owner, job)]
        check_id = self._server.begin_check(
            [job.job_id for job in jobs],
            whole=not request.job and owner.administers_all,
        )
        try:
            # A cancelled call is found out here: gRPC closes no generator that it does not ask.
            while call.context.is_active():
                progress = self._server.check_progress(check_id)
                answer = check_pb2.CheckResponse(
                    bytes=progress.bytes,
                    bytes_all=progress.bytes_all,
                    findings=[_finding(each) for each in progress.findings],
                )
                if progress.report is not None:
                    answer.report.CopyFrom(_report(progress.report))
                    yield answer
                    return
                yield answer
                time.sleep(_PROGRESS_S)
        finally:
            self._server.end_check(check_id)


def _finding(finding: CheckFinding) -> check_pb2.CheckFinding:
    return check_pb2.CheckFinding(
        is_lost=finding.is_lost,
        path=finding.path,
        offset_bytes=finding.offset_bytes,
        length_bytes=finding.length_bytes,
        job=finding.job,
        snapshot=finding.snapshot,
        shards=finding.shards,
        part=finding.part,
        reason=finding.reason,
    )


def _report(report: CheckReport) -> check_pb2.CheckReport:
    return check_pb2.CheckReport(
        volumes=[_volume(each) for each in report.volumes],
        jobs=[_job(each) for each in report.jobs],
        seconds=report.seconds,
    )


def _volume(volume: CheckedVolume) -> check_pb2.CheckedVolume:
    return check_pb2.CheckedVolume(
        path=volume.path,
        bytes=volume.bytes,
        uuid=volume.uuid,
        index=volume.index,
        sequence=volume.sequence,
        format=volume.format,
        features=volume.features,
        holder=volume.holder,
        damaged_superblock_offsets=volume.damaged_superblock_offsets,
    )


def _job(job: CheckedJob) -> check_pb2.CheckedJob:
    return check_pb2.CheckedJob(
        name=job.name,
        job_id=job.job_id,
        step=job.step,
        shard_count=job.shard_count,
        extent_count=job.extent_count,
        bytes=job.bytes,
        lost_shards=job.lost_shards,
        snapshots=[
            check_pb2.CheckedSnapshot(
                name=each.name,
                step=each.step,
                is_lost=each.is_lost,
                extent_count=each.extent_count,
                bytes=each.bytes,
                lost_shards=each.lost_shards,
            )
            for each in job.snapshots
        ],
    )
