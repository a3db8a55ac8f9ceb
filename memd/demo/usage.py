"""What the daemon and the session report, read between steps."""

from types import TracebackType
from typing import Self

import grpc

import memd_client
from memd.demo.report import Usage
from memd_client.address import UnixAddress
from memd_client.attach import AttachConnection
from memd_proto.v1 import status_pb2, status_pb2_grpc

DEADLINE_S = 30.0


class UsageMeter:
    """Asks the daemon at `address` for its figures, over a connection of its own."""

    def __init__(self, address: UnixAddress) -> None:
        self._connection = AttachConnection(address)
        self._channel = grpc.insecure_channel(self._connection.control_address)
        self._status = status_pb2_grpc.StatusServiceStub(self._channel)

    def read(self, session: memd_client.Session) -> Usage:
        status = self._status.GetStatus(
            status_pb2.GetStatusRequest(),
            timeout=DEADLINE_S,
            metadata=(("memd-token", self._connection.token),),
        )
        statistics = session.statistics()
        return Usage(
            host_bytes=status.pool.bytes,
            host_bytes_used=sum(job.host_bytes_used for job in status.jobs),
            nvme_bytes=sum(device.bytes for device in status.devices),
            nvme_bytes_used=sum(job.nvme_bytes_used for job in status.jobs),
            read_bytes=sum(device.read_bytes for device in status.devices),
            written_bytes=sum(device.written_bytes for device in status.devices),
            commit_read_seconds=statistics.step_read_seconds,
            commit_update_seconds=statistics.step_update_seconds,
            commit_write_seconds=statistics.step_write_seconds,
            commit_sync_seconds=statistics.step_commit_seconds,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()
        self._connection.close()
