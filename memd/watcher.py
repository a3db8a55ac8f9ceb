"""Tells the log of changes that no call brings: a disk that fails, shards that are lost, loads that
broke off."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_native import JobStatistics, Server, ServerStatistics

log = logging.getLogger(__name__)

# Names of shards in one line.
_NAMES_MAX = 20


class Watcher:
    """Compares each look with the one before, and tells each change once. One thread calls it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._fence_reason = ""
        self._lost: dict[int, frozenset[str]] = {}
        self._unreadable: dict[int, frozenset[str]] = {}
        self._scrub_passes = 0
        self._scrub_errors = 0
        self._scrub_errors_before_pass = 0

    def look(self) -> None:
        statistics = self._server.statistics()
        self._look_at_fence(statistics.fence_reason)
        self._look_at_shards(statistics.jobs)
        self._look_at_scrub(statistics)
        for note in self._server.take_load_notes():
            log.warning("a load broke off", extra={"reason": note})

    def _look_at_fence(self, reason: str) -> None:
        if reason and reason != self._fence_reason:
            log.error(
                "volumes fenced: nothing is committed until memd is restarted",
                extra={"reason": reason},
            )
        self._fence_reason = reason

    def _look_at_shards(self, jobs: Sequence[JobStatistics]) -> None:
        lost: dict[int, frozenset[str]] = {}
        unreadable: dict[int, frozenset[str]] = {}
        for job in (each.job for each in jobs):
            lost[job.job_id] = frozenset(job.lost_shards)
            unreadable[job.job_id] = frozenset(job.unreadable_shards)
            lost_before = self._lost.get(job.job_id, frozenset())
            unreadable_before = self._unreadable.get(job.job_id, frozenset())
            _tell(
                logging.ERROR,
                "shards lost: the job stays at its last commit",
                job.name,
                lost[job.job_id] - lost_before,
            )
            _tell(
                logging.WARNING,
                "shards unreadable: the next use tries again",
                job.name,
                unreadable[job.job_id] - unreadable_before,
            )
            _tell(
                logging.INFO,
                "shards readable again",
                job.name,
                unreadable_before - unreadable[job.job_id] - lost[job.job_id],
            )
        self._lost, self._unreadable = lost, unreadable

    def _look_at_scrub(self, statistics: ServerStatistics) -> None:
        scrub = statistics.scrub
        if scrub.errors > self._scrub_errors:
            log.error(
                "scrub found damage",
                extra={"errors": scrub.errors - self._scrub_errors, "reason": scrub.last_error},
            )
            self._scrub_errors = scrub.errors
        if scrub.pass_count > self._scrub_passes:
            log.info(
                "scrub pass ended",
                extra={
                    "passes": scrub.pass_count,
                    "verified_bytes": scrub.bytes,
                    "errors": scrub.errors - self._scrub_errors_before_pass,
                },
            )
            self._scrub_passes = scrub.pass_count
            self._scrub_errors_before_pass = scrub.errors


def _tell(level: int, event: str, job: str, names: frozenset[str]) -> None:
    if not names:
        return
    shown = ",".join(sorted(names)[:_NAMES_MAX])
    log.log(level, event, extra={"job": job, "count": len(names), "shards": shown})
