"""Owners of jobs have their own; root and the daemon's user administer all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from memd.owner import Owner
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from memd_native import Activity, JobInfo, Server

# A job takes a kilobyte, with names of lost shards more: below gRPC's 4 MiB.
JOBS_IN_PAGE = 256

# A job's name is a label of every metric about it, and as that of a snapshot a word on the command
# line.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}")

# Sessions make these for `dcp.async_save`, and drop those that processes which were killed left.
_TEMPORARY = "async_save/"
_TEMPORARY_NAME = re.compile(_TEMPORARY + r"\d{8}T\d{6}Z-[0-9a-f]{12}", re.ASCII)

# And these before they load a checkpoint.
_LOAD = "load/"
_LOAD_NAME = re.compile(_LOAD + r"\d{8}T\d{6}Z-[0-9a-f]{12}", re.ASCII)


def check_job_name(name: str) -> None:
    _check_name("job", name)


def check_snapshot_name(name: str, *, is_load: bool = False) -> None:
    """The name of one that is to be made, for a load or not."""
    _check_name("snapshot", name)
    if is_load and not _LOAD_NAME.fullmatch(name):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"the snapshot of a load is named {_LOAD}, the time in UTC and 12 hexadecimal digits, "
            f"as in load/20261126T092228Z-0123456789ab: {name!r}",
        )
    if name.startswith(_LOAD) and not is_load:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"names that begin with {_LOAD} are those of snapshots that memd makes before it loads "
            f"a checkpoint, and drops; choose another one than {name!r}",
        )
    if name.startswith(_TEMPORARY) and not _TEMPORARY_NAME.fullmatch(name):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"names that begin with {_TEMPORARY} are those of snapshots that dcp.async_save makes "
            f"and drops; choose another one than {name!r}",
        )


def check_reads_load(name: str, job: JobInfo, *, is_own: bool) -> None:
    """A load ends when nobody reads its snapshot, so it waits for no stranger's export."""
    if _LOAD_NAME.fullmatch(name) and not is_own:
        raise Refused(
            StatusCode.IN_USE,
            f"snapshot {name} lasts only as long as the load into job {job.name!r}; export another "
            "one, or make one when the load is done",
        )


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"a {what}'s name has 1 to 128 letters, digits and any of . _ : @ / + -, and begins "
            f"with a letter or digit: {name!r}",
        )


def may_administer(owner: Owner, job: JobInfo) -> bool:
    return owner.administers_all or owner.owns(job)


def may_see(owner: Owner, activity: Activity) -> bool:
    return owner.administers_all or owner.owns_named(activity.job, uid=activity.uid)


def find(server: Server, stored_name: str) -> JobInfo | None:
    return next((job for job in server.jobs() if job.name == stored_name), None)


def administered_jobs(server: Server, *, owner: Owner, first: int) -> tuple[list[JobInfo], int]:
    """A page of them, in the order of their ids, from `first` on; and where the next one begins, or
    0."""
    jobs = [job for job in server.jobs() if job.job_id >= first and may_administer(owner, job)]
    rest = jobs[JOBS_IN_PAGE:]
    return jobs[:JOBS_IN_PAGE], rest[0].job_id if rest else 0


def administered_job(server: Server, name: str, *, owner: Owner) -> JobInfo:
    """By its own name, or by the one that lists show, which has the tenant in front."""
    job = find(server, owner.stored_name(name)) or find(server, name)
    # A tenant hears nothing of other tenants' jobs.
    if job is None or (owner.tenant and not may_administer(owner, job)):
        raise Refused(
            StatusCode.NOT_FOUND, f"there is no job {name!r}; `memd job list` shows those there are"
        )
    if not may_administer(owner, job):
        raise foreign_job(job, owner=owner)
    return job


def check_job_weight(weight: float, job: JobInfo, *, owner: Owner) -> None:
    """A user divides what own jobs get; what is above 1 other users' jobs would lack."""
    if weight > 1 and not owner.administers_all:
        raise Refused(
            StatusCode.PERMISSION_DENIED,
            f"a weight above 1 takes from other users' jobs; give your other jobs less than 1, or "
            f"ask root: job {job.name!r}, {weight:g}",
        )


def foreign_job(job: JobInfo, *, owner: Owner) -> Refused:
    return Refused(
        StatusCode.PERMISSION_DENIED,
        f"job {job.name!r} belongs to {Owner(uid=job.uid).shown} and you are {owner.shown}; "
        "choose another name, or ask its owner or root to drop it",
    )
