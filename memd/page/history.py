"""Samples of the statistics, from which the page tells rates. They are taken as the page is read:
where nobody looks there is no work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd_native import JobStatistics, ServerStatistics

SAMPLES_MAX = 150
# Readers share the samples, so more readers take no more of them.
_APART_S = 1.0
# A rate over longer than that says nothing of now.
_OLDEST_S = 600.0

PHASES = ("read", "update", "write", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSample:
    step: int
    wall_s: float
    # Training threads stood still for it.
    stalls_s: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    at_s: float
    read_bytes: dict[str, int] = field(default_factory=dict)  # by volume
    written_bytes: dict[str, int] = field(default_factory=dict)
    jobs: dict[int, JobSample] = field(default_factory=dict)  # by id: a name may come anew
    step_count: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)


class History:
    """Any thread may call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    def with_now(self, statistics: ServerStatistics) -> list[Sample]:
        """The samples there are, and one of now; oldest first."""
        now = sample_of(statistics, at_s=self._clock())
        with self._lock:
            while self._samples and now.at_s - self._samples[0].at_s > _OLDEST_S:
                self._samples.popleft()
            before = list(self._samples)
            if not before or now.at_s - before[-1].at_s >= _APART_S:
                self._samples.append(now)
        return [*before, now]


def sample_of(statistics: ServerStatistics, *, at_s: float) -> Sample:
    phases = statistics.step_phases
    return Sample(
        at_s=at_s,
        read_bytes={each.path: each.read.bytes for each in statistics.devices},
        written_bytes={each.path: each.write.bytes for each in statistics.devices},
        jobs={each.job.job_id: _job_sample(each) for each in statistics.jobs},
        step_count=sum(phases.commit.counts),
        phases_s={name: getattr(phases, name).sum_seconds for name in PHASES},
    )


def _job_sample(job: JobStatistics) -> JobSample:
    stalls: dict[str, float] = {}
    for phase, waits in job.stall_phase_seconds.items():
        if phase == "other":  # between steps nothing stands still for memd
            continue
        for reason, seconds in waits.items():
            stalls[reason] = stalls.get(reason, 0.0) + seconds
    return JobSample(step=job.job.committed_step, wall_s=job.step_wall_seconds, stalls_s=stalls)


def rates(
    samples: Sequence[Sample], value: Callable[[Sample], float | None]
) -> list[tuple[float, float]]:
    """When, and how much a second since the sample before. A counter that was not there, or began
    anew, has none."""
    found = []
    for before, after in pairwise(samples):
        was, now, took_s = value(before), value(after), after.at_s - before.at_s
        if was is not None and now is not None and now >= was and took_s > 0:
            found.append((after.at_s, (now - was) / took_s))
    return found


def growth(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float:
    """Over all of the samples; where there is one only, since the start."""
    now = value(samples[-1]) or 0.0
    first = next((found for each in samples[:-1] if (found := value(each)) is not None), 0.0)
    return now - first if now >= first else now
