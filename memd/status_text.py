"""The daemon, its volumes and jobs in lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.printing import table_lines
from memd.sizes import format_size
from memd.users import user_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_proto.v1 import job_pb2, status_pb2


def daemon_lines(answer: status_pb2.GetStatusResponse) -> list[str]:
    rows = [
        (
            device.path,
            format_size(device.bytes),
            format_size(device.bytes_free),
            format_size(device.read_bytes),
            format_size(device.written_bytes),
            str(device.error_count),
            queue_text(device),
        )
        for device in answer.devices
    ]
    volumes = table_lines(
        ("volume", "size", "free", "read", "written", "errors", "in flight"), rows
    )
    return [*head_lines(answer), "", *volumes, "", *job_lines(answer.jobs)]


def head_lines(answer: status_pb2.GetStatusResponse) -> list[str]:
    """All but the tables of volumes and jobs."""
    pool = answer.pool
    lines = [f"memd {answer.version}, up {answer.uptime_seconds:.0f} s, I/O by {answer.io_engine}"]
    if answer.io_engine_reason:
        lines.append(f"io_uring is not used: {answer.io_engine_reason}")
    locked = "locked" if pool.locked else "not locked"
    free = f"{format_size(pool.bytes_free)} of {format_size(pool.bytes)} free"
    lines.append(f"pool: {free}, pages of {format_size(pool.page_bytes)}, {locked}")
    if pool.note:
        lines.append(f"pool: {pool.note}")
    if answer.fence_reason:
        lines.append(f"not committing: {answer.fence_reason}")
    return lines + _scrub_lines(answer.scrub)


def _scrub_lines(scrub: status_pb2.Scrub) -> list[str]:
    if not scrub.bytes_per_second:
        return ["scrub: off"]
    texts = [f"at most {format_size(scrub.bytes_per_second)}/s"]
    if scrub.in_pass:
        done, of_all = format_size(scrub.pass_bytes), format_size(scrub.pass_bytes_all)
        texts.append(f"{done} of {of_all} verified in this pass")
    if scrub.pass_count:
        texts.append(f"last full pass ended {scrub.last_pass_age_seconds:.0f} s ago")
    else:
        texts.append("no full pass yet")
    texts.append(f"{scrub.error_count} errors")
    lines = [f"scrub: {', '.join(texts)}"]
    return [*lines, f"scrub: {scrub.last_error}"] if scrub.last_error else lines


def queue_text(device: status_pb2.Device) -> str:
    """How much is in flight on the volume, and waits for its turn."""
    waiting = f", {device.waiting_count} wait" if device.waiting_count else ""
    return f"{device.inflight_count}{waiting}"


def in_flight_lines(answer: status_pb2.InFlightResponse) -> list[str]:
    if not answer.activities:
        return ["nothing is in flight"]
    rows = [
        (
            each.kind,
            each.job or "-",
            f"{each.seconds:.1f} s",
            each.priority or "-",
            each.what or "-",
            each.waits_on or "-",
        )
        for each in answer.activities
    ]
    return table_lines(("kind", "job", "since", "priority", "what", "waits on"), rows)


def job_lines(jobs: Sequence[job_pb2.Job]) -> list[str]:
    rows = [
        (
            each.name,
            user_name(each.uid),
            str(each.committed_step),
            str(each.session_count),
            *tier_texts(each),
            str(each.shard_count),
            str(each.snapshot_count),
            f"{each.weight:g}",
            f"{each.durability} ({each.durable_step})",
        )
        for each in jobs
    ]
    header = (
        *("job", "user", "step", "sessions", "host", "nvme", "shards", "snapshots", "weight"),
        "durability (on disk)",
    )
    return table_lines(header, rows) + trouble_lines(jobs)


def tier_texts(job: job_pb2.Job) -> tuple[str, str]:
    """The job's use of its quotas of host and nvme."""
    return (
        f"{format_size(job.host_bytes_used)} / {format_size(job.host_bytes)}",
        f"{format_size(job.nvme_bytes_used)} / {format_size(job.nvme_bytes)}",
    )


def trouble_lines(jobs: Sequence[job_pb2.Job]) -> list[str]:
    """Bytes that are lost, would be lost by a power cut, or could not be read."""
    lines = []
    for each in jobs:
        if each.lost_shards:
            more = each.lost_shard_count - len(each.lost_shards)
            lines.append(
                f"{each.name} stays at step {each.committed_step}: the bytes of "
                f"{', '.join(each.lost_shards)}{f' and {more} more' if more > 0 else ''} on disk "
                "are gone"
            )
        if each.host_tier_bytes:
            lines.append(f"{each.name}: {_host_tier_text(each)}")
        if each.unreadable_shards:
            lines.append(
                f"{each.name}: the device failed to read {', '.join(each.unreadable_shards)}; the "
                "next use tries again"
            )
    return lines


def _host_tier_text(job: job_pb2.Job) -> str:
    lives = f"{format_size(job.host_tier_bytes)} live in tier host"
    if job.durable_step:
        return f"{lives}: a power cut takes the job back to step {job.durable_step}"
    if job.snapshot_count:
        return (
            f"{lives}: a power cut takes the job back to a snapshot of step 0, or loses it if none "
            "is whole (memd snapshot list)"
        )
    return f"{lives}, and no snapshot has them: a power cut loses the job"
