"""StatusService: the daemon at a glance."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from memd import __version__
from memd.service import access, wire
from memd_proto.v1 import status_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd.service.call import Call
    from memd_native import Activity, Server


# Kinds of activities that are of a volume.
_TRANSFERS = ("read", "write", "sync")


def _count(transfers: Sequence[Activity], path: str, *, waiting: bool) -> int:
    """Those of the volume at `path` that wait for their turn, or that do not."""
    return sum(
        bool(each.waits_on) == waiting and f"{each.what} ".startswith(f"{path} ")
        for each in transfers
    )


class StatusService:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._started = time.monotonic()

    def GetStatus(
        self, request: status_pb2.GetStatusRequest, call: Call
    ) -> status_pb2.GetStatusResponse:
        report = self._server.report()
        statistics = self._server.statistics()
        pool = statistics.pool
        scrub = statistics.scrub
        transfers = [each for each in self._server.in_flight() if each.kind in _TRANSFERS]
        jobs, jobs_page_next = access.administered_jobs(
            self._server, owner=call.peer.owner, first=0
        )
        return status_pb2.GetStatusResponse(
            version=__version__,
            uptime_seconds=time.monotonic() - self._started,
            pool=status_pb2.Pool(
                bytes=pool.bytes,
                bytes_free=statistics.pool_bytes_free,
                segment_bytes=pool.segment_bytes,
                page_bytes=pool.page_bytes,
                locked=pool.locked,
                note=pool.note,
            ),
            devices=[
                status_pb2.Device(
                    path=device.path,
                    bytes=device.bytes,
                    bytes_free=device.bytes_free,
                    read_bytes=device.read.bytes,
                    written_bytes=device.write.bytes,
                    read_seconds=device.read.seconds.sum_seconds,
                    write_seconds=device.write.seconds.sum_seconds,
                    error_count=sum(
                        kind.error_count for kind in (device.read, device.write, device.sync)
                    ),
                    io_depth=device.io_depth,
                    io_chunk_bytes=device.io_chunk_bytes,
                    inflight_count=_count(transfers, device.path, waiting=False),
                    waiting_count=_count(transfers, device.path, waiting=True),
                )
                for device in statistics.devices
            ],
            jobs=wire.job_messages(jobs, statistics.jobs),
            jobs_page_next=jobs_page_next,
            io_engine=report.io_engine,
            io_engine_reason=report.io_engine_reason,
            fence_reason=statistics.fence_reason,
            scrub=status_pb2.Scrub(
                bytes_per_second=scrub.bytes_per_second,
                bytes=scrub.bytes,
                error_count=scrub.errors,
                pass_count=scrub.pass_count,
                last_pass_age_seconds=scrub.last_pass_age_seconds,
                in_pass=scrub.in_pass,
                pass_bytes=scrub.pass_bytes,
                pass_bytes_all=scrub.pass_bytes_all,
                last_error=scrub.last_error if call.peer.owner.administers_all else "",
            ),
        )

    def InFlight(
        self, request: status_pb2.InFlightRequest, call: Call
    ) -> status_pb2.InFlightResponse:
        return status_pb2.InFlightResponse(
            activities=[
                status_pb2.Activity(
                    kind=each.kind,
                    job=each.job,
                    what=each.what,
                    waits_on=each.waits_on,
                    seconds=each.age_seconds,
                    priority=each.priority,
                )
                for each in self._server.in_flight()
                # I/O is of no job.
                if not each.job or access.may_see(call.peer.owner, each)
            ]
        )
