"""Which checks there are, and how their findings are printed."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from memd.doctor import calls, folders, memory, sockets
from memd.doctor.finding import Finding, State, note, obstacle, ok
from memd.refusal import Refused, StatusCode
from memd.users import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd.client import DaemonClient
    from memd.config import Settings


def findings(settings: Settings, connect: Callable[[], DaemonClient]) -> Iterator[Finding]:
    """A daemon that answers is asked. Else this looks at what one of this user would need."""
    member = sockets.group_member(settings.attach_socket)
    if member is not None:
        yield member
        if member.state is State.OBSTACLE:
            return
    try:
        with connect() as daemon:
            yield from _about_the_daemon(daemon)
        return
    except Refused as refused:
        if refused.code is not StatusCode.UNAVAILABLE:
            cure = "do what the daemon says; its log has the refusal too"
            yield obstacle("daemon", str(refused), cure)
            return
    yield note(
        "daemon",
        f"none answers at {settings.attach_socket}; what follows is what `memd serve` of user "
        f"{user_name(os.geteuid())} would find",
        "systemctl start memd, or memd serve; run this as its user, with its --config",
    )
    yield from _about_a_start(settings)


def _about_a_start(settings: Settings) -> Iterator[Finding]:
    yield memory.room(settings.host)
    yield memory.locking(settings.host)
    yield memory.huge_pages(settings.host, wanted=settings.huge_pages)
    yield memory.descriptors()
    yield calls.needed()
    yield calls.peer_pidfds()
    if settings.io_engine != "threads":
        yield calls.io_uring()
    for folder in settings.data:
        yield from folders.look(folder, volume_bytes=settings.nvme // len(settings.data))
    yield from sockets.metrics_port(settings.metrics)


def _about_the_daemon(daemon: DaemonClient) -> Iterator[Finding]:
    """Findings of its start, and since."""
    status = daemon.status()
    yield ok("daemon", f"memd {status.version} answers")
    if status.pool.locked:
        yield ok("memlock", "the pool is locked")
    else:
        yield note(
            "memlock",
            f"the pool is not locked and may be swapped: {status.pool.note}",
            "`memd doctor` where no daemon runs says why",
        )
    if status.io_engine_reason:
        yield note(
            "io_uring",
            f"not used: {status.io_engine_reason}",
            "`memd doctor` where no daemon runs says why, unless io_engine is set to threads",
        )
    else:
        yield ok("io_uring", f"I/O by {status.io_engine}")
    if status.fence_reason:
        yield obstacle(
            "volumes",
            f"nothing is committed: {status.fence_reason}",
            "see `memd check` and the drive; then restart the daemon",
        )
    for job in status.jobs:
        if job.lost_shard_count:
            yield obstacle(
                f"job {job.name}",
                f"{job.lost_shard_count} shards are lost; it stays at step {job.committed_step}",
                "`memd job show` names them; `memd snapshot restore` an older step, or start anew",
            )
        if job.unreadable_shards:
            names = ", ".join(job.unreadable_shards)
            yield obstacle(
                f"job {job.name}",
                f"the device failed to read {names}; nothing is lost yet",
                "look at the drive: the next use tries again; the log names file, offset and errno",
            )


def run(settings: Settings, connect: Callable[[], DaemonClient]) -> list[Finding]:
    return list(findings(settings, connect))


def print_for_people(found: list[Finding]) -> None:
    width = max(len(each.check) for each in found)
    for each in found:
        click.echo(f"{each.state:<8}  {each.check:<{width}}  {each.found}")
        if each.cure:
            click.echo(f"{'':<8}  {'':<{width}}  → {each.cure}")
    counts = Counter(each.state for each in found)
    click.echo(f"\nobstacles: {counts[State.OBSTACLE]}, notes: {counts[State.NOTE]}")


def records(found: list[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "check": each.check,
            "state": str(each.state),
            "found": each.found,
            "cure": each.cure,
        }
        for each in found
    ]
