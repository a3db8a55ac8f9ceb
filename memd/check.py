"""`memd check`: everything on volumes is read and compared, by this process or by their daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memd.refusal import Refused, StatusCode
from memd.sizes import format_size
from memd.volumes import job_record, progress_bar, told_to_people, volume_record
from memd_native import check_volumes
from memd_proto.v1 import check_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memd.client import DaemonClient
    from memd_native import CheckFinding, CheckReport

# A bucket of small shards may hold thousands; programs get all of them.
_NAMED_MAX = 5


def check_offline(folders: Sequence[Path], *, job: str) -> dict[str, Any]:
    """Reads everything on volumes that no daemon has open, and writes nothing."""
    with told_to_people(), progress_bar("checking") as progress:
        report = check_volumes([str(path) for path in folders], job=job, progress=progress)
    return _record(report, bytes_read=report.bytes, findings=report.findings)


def check_online(daemon: DaemonClient, *, job: str) -> dict[str, Any]:
    """The daemon reads what its last commits name, beside its work: the same record."""
    findings: list[check_pb2.CheckFinding] = []
    answer = check_pb2.CheckResponse()
    with progress_bar("checking") as progress:
        for answer in daemon.check(job):
            findings += answer.findings
            progress(answer.bytes, answer.bytes_all)
    if not answer.HasField("report"):
        raise Refused(StatusCode.UNAVAILABLE, "the daemon broke the check off")
    return _record(answer.report, bytes_read=answer.bytes, findings=findings)


def _record(
    report: CheckReport | check_pb2.CheckReport,
    *,
    bytes_read: int,
    findings: Sequence[CheckFinding | check_pb2.CheckFinding],
) -> dict[str, Any]:
    jobs = [job_record(each) for each in report.jobs]
    return {
        "volumes": [volume_record(each) for each in report.volumes],
        "jobs": jobs,
        "findings": [_finding(each) for each in findings],
        "bytes": bytes_read,
        "seconds": report.seconds,
        # A daemon may have lost before what no reading shows any more.
        "lost": any(each.is_lost for each in findings) or any(_has_lost(job) for job in jobs),
    }


def _has_lost(job: dict[str, Any]) -> bool:
    kept = job["snapshots"]
    return bool(job["lost_shards"]) or any(each["lost"] or each["lost_shards"] for each in kept)


def _finding(finding: CheckFinding | check_pb2.CheckFinding) -> dict[str, Any]:
    return {
        "lost": finding.is_lost,
        "path": finding.path,
        "offset_bytes": finding.offset_bytes,
        "length_bytes": finding.length_bytes,
        "job": finding.job,
        "snapshot": finding.snapshot,
        "shards": list(finding.shards),
        "part": finding.part,
        "reason": finding.reason,
    }


def print_check(report: dict[str, Any]) -> None:
    for finding in report["findings"]:
        place = f"{finding['path']} at {finding['offset_bytes']}, {finding['length_bytes']} bytes"
        names = list(finding["shards"])
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        shards = ", ".join(names[:_NAMED_MAX]) + more
        snapshot = f"snapshot {finding['snapshot']}" if finding["snapshot"] else ""
        owner = "/".join(text for text in (finding["job"], snapshot, shards) if text)
        what = " ".join(text for text in (owner, finding["part"]) if text)
        click.echo(f"{'LOST' if finding['lost'] else 'warning'}: {what}: {finding['reason']}")
        click.echo(f"  {place}")
    for job in report["jobs"]:
        lost = len(job["lost_shards"])
        state = f"{lost} of {job['shards']} shards LOST" if lost else "all right"
        click.echo(
            f"job {job['job']}: {state}, step {job['step']}, {job['shards']} shards, "
            f"{job['extents']} extents, {format_size(job['bytes'])}"
        )
        for kept in job["snapshots"]:
            lost = len(kept["lost_shards"])
            state = f"{lost} shards LOST" if lost else "all right"
            if kept["lost"]:
                click.echo(
                    f"  snapshot {kept['snapshot']}: LOST, step {kept['step']}: its catalogue is "
                    f"damaged; `memd snapshot drop {job['job']} {kept['snapshot']}` removes it"
                )
                continue
            click.echo(
                f"  snapshot {kept['snapshot']}: {state}, step {kept['step']}, {kept['extents']} "
                f"extents, {format_size(kept['bytes'])}"
            )
    rate = int(report["bytes"] / max(report["seconds"], 1e-6))
    click.echo(
        f"{'DAMAGED' if report['lost'] else 'all right'}: {format_size(report['bytes'])} read in "
        f"{report['seconds']:.1f} s, {format_size(rate)}/s"
    )
