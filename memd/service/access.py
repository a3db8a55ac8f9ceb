"""Owners of jobs: a user has own jobs; root and the daemon's user administer all."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from memd.refusal import Refused, StatusCode
from memd.users import user_name

if TYPE_CHECKING:
    from memd_native import Activity, JobInfo, Server

# A job takes a kilobyte, with names of lost shards more: below gRPC's 4 MiB.
JOBS_IN_PAGE = 256

# A job's name is a label of every metric about it, and as that of a snapshot a word on the command
# line.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}")


def check_job_name(name: str) -> None:
    _check_name("job", name)


def check_snapshot_name(name: str) -> None:
    _check_name("snapshot", name)


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"a {what}'s name has 1 to 128 letters, digits and any of . _ : @ / + -, and begins "
            f"with a letter or digit: {name!r}",
        )


def administers_all(uid: int) -> bool:
    return uid in (0, os.geteuid())


def may_administer(uid: int, job: JobInfo | Activity) -> bool:
    return uid == job.uid or administers_all(uid)


def find(server: Server, name: str) -> JobInfo | None:
    return next((job for job in server.jobs() if job.name == name), None)


def administered_jobs(server: Server, *, uid: int, first: int) -> tuple[list[JobInfo], int]:
    """A page of them, in the order of their ids, from `first` on; and where the next one begins, or
    0."""
    jobs = [job for job in server.jobs() if job.job_id >= first and may_administer(uid, job)]
    rest = jobs[JOBS_IN_PAGE:]
    return jobs[:JOBS_IN_PAGE], rest[0].job_id if rest else 0


def administered_job(server: Server, name: str, *, uid: int) -> JobInfo:
    job = find(server, name)
    if job is None:
        raise Refused(
            StatusCode.NOT_FOUND, f"there is no job {name!r}; `memd job list` shows those there are"
        )
    if not may_administer(uid, job):
        raise foreign_job(job, uid=uid)
    return job


def check_job_weight(weight: float, job: JobInfo, *, uid: int) -> None:
    """A user divides what own jobs get; what is above 1 other users' jobs would lack."""
    if weight > 1 and not administers_all(uid):
        raise Refused(
            StatusCode.PERMISSION_DENIED,
            f"a weight above 1 takes from other users' jobs; give your other jobs less than 1, or "
            f"ask root: job {job.name!r}, {weight:g}",
        )


def foreign_job(job: JobInfo, *, uid: int) -> Refused:
    return Refused(
        StatusCode.PERMISSION_DENIED,
        f"job {job.name!r} belongs to user {user_name(job.uid)} and you are user "
        f"{user_name(uid)}; choose another name, or ask its owner or root to drop it",
    )
