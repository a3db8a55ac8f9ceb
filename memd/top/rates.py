"""Rates, from two looks at the same daemon."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memd_proto.v1 import job_pb2, status_pb2

# Between steps nothing stands still for memd.
_NO_PHASE_OF_STEPS = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeRates:
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRates:
    # Nothing where the job went back to an earlier step.
    steps: float | None
    fetched_bytes: float
    spilled_bytes: float
    # Part of its sessions' time that a thread stood still, by what for; the largest first.
    stalled: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Nothing of volumes and jobs that came between the looks, and nothing at all at the first."""

    volumes: dict[str, VolumeRates] = field(default_factory=dict)  # by path
    jobs: dict[int, JobRates] = field(default_factory=dict)  # by id: a name may come anew


def rates_between(
    before: status_pb2.GetStatusResponse, after: status_pb2.GetStatusResponse
) -> Rates:
    """Seconds are the daemon's own. It counts from 0 when it is started anew."""
    took_s = after.uptime_seconds - before.uptime_seconds
    if took_s <= 0:
        return Rates()
    volumes_before = {each.path: each for each in before.devices}
    jobs_before = {each.job_id: each for each in before.jobs}
    return Rates(
        volumes={
            each.path: _of_volume(volumes_before[each.path], each, took_s)
            for each in after.devices
            if each.path in volumes_before
        },
        jobs={
            each.job_id: _of_job(jobs_before[each.job_id], each, took_s)
            for each in after.jobs
            if each.job_id in jobs_before
        },
    )


def _of_volume(before: status_pb2.Device, after: status_pb2.Device, took_s: float) -> VolumeRates:
    return VolumeRates(
        read_bytes=(after.read_bytes - before.read_bytes) / took_s,
        written_bytes=(after.written_bytes - before.written_bytes) / took_s,
    )


def _of_job(before: job_pb2.Job, after: job_pb2.Job, took_s: float) -> JobRates:
    steps = after.committed_step - before.committed_step
    moved, was = after.counters, before.counters
    stalls = _stalls_s(moved)
    stalls.subtract(_stalls_s(was))
    # Each session has a trainer's time.
    time_s = took_s * max(after.session_count, 1)
    return JobRates(
        steps=steps / took_s if steps >= 0 else None,
        fetched_bytes=(moved.fetched_bytes - was.fetched_bytes) / took_s,
        spilled_bytes=(moved.spilled_bytes - was.spilled_bytes) / took_s,
        stalled={
            reason: stall_s / time_s for reason, stall_s in stalls.most_common() if stall_s > 0
        },
    )


def _stalls_s(counters: job_pb2.JobCounters) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for stall in counters.stalls:
        if stall.phase != _NO_PHASE_OF_STEPS:
            seconds[stall.reason] += stall.seconds  # type: ignore[assignment]  # typeshed: int
    return seconds
