"""One look in lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.printing import table_lines
from memd.sizes import format_size
from memd.status_text import head_lines, queue_text, tier_texts, trouble_lines
from memd.users import user_name

if TYPE_CHECKING:
    from memd.top.rates import JobRates, Rates
    from memd_proto.v1 import job_pb2, status_pb2

_UNKNOWN = "-"
_VOLUME_HEADER = ("volume", "size", "free", "read", "written", "errors", "in flight")
_JOB_HEADER = (
    *("job", "user", "state", "step", "steps", "host", "nvme", "fetched", "spilled", "stalled"),
)


def lines_of(answer: status_pb2.GetStatusResponse, rates: Rates) -> list[str]:
    return [
        *head_lines(answer),
        "",
        *_volume_lines(answer, rates),
        "",
        *_job_lines(answer, rates),
        *trouble_lines(answer.jobs),
    ]


def _volume_lines(answer: status_pb2.GetStatusResponse, rates: Rates) -> list[str]:
    rows = []
    for device in answer.devices:
        moved = rates.volumes.get(device.path)
        rows.append(
            (
                device.path,
                format_size(device.bytes),
                format_size(device.bytes_free),
                _per_second(moved.read_bytes) if moved else _UNKNOWN,
                _per_second(moved.written_bytes) if moved else _UNKNOWN,
                str(device.error_count),
                queue_text(device),
            )
        )
    return table_lines(_VOLUME_HEADER, rows)


def _job_lines(answer: status_pb2.GetStatusResponse, rates: Rates) -> list[str]:
    rows = [
        (
            job.name,
            user_name(job.uid),
            _state(job),
            str(job.committed_step),
            *_rate_texts(job, rates.jobs.get(job.job_id)),
        )
        for job in answer.jobs
    ]
    return table_lines(_JOB_HEADER, rows)


def _rate_texts(job: job_pb2.Job, rates: JobRates | None) -> tuple[str, ...]:
    if rates is None:
        return (_UNKNOWN, *tier_texts(job), _UNKNOWN, _UNKNOWN, _UNKNOWN)
    return (
        _UNKNOWN if rates.steps is None else f"{rates.steps:.2f}/s",
        *tier_texts(job),
        _per_second(rates.fetched_bytes),
        _per_second(rates.spilled_bytes),
        _stalled_text(rates.stalled),
    )


def _state(job: job_pb2.Job) -> str:
    if job.lost_shards:
        return "lost"
    if job.unreadable_shards:
        return "unreadable"
    return "attached" if job.session_count else "idle"


def _stalled_text(stalled: dict[str, float]) -> str:
    causes = ", ".join(f"{reason} {part:.0%}" for reason, part in stalled.items())
    return f"{sum(stalled.values()):.0%}" + (f": {causes}" if causes else "")


def _per_second(rate: float) -> str:
    return f"{format_size(round(rate))}/s"
