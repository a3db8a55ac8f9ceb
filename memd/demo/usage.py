"""Reports of the daemon and the session, read between steps."""

import memd_client
from memd.client import DaemonClient
from memd.demo.report import Usage


def read_usage(daemon: DaemonClient, session: memd_client.Session) -> Usage:
    status = daemon.status()
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
