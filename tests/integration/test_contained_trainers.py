"""Trainers with PID, mount and user namespaces of their own, as containers have them, and a daemon
that sees them from outside. tests/soak/containers.py does this with an engine and images."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.daemons import START_S, Attached
from tests.faults.restarts import Restarts, restarts
from tests.integration.test_namespaces import needs, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.daemons import Daemon

__all__ = ["restarts"]

ROOT = Path(__file__).parents[2]
CONTAINED = (
    *("unshare", "--user", "--map-root-user", "--mount", "--mount-proc"),
    *("--pid", "--fork", "--kill-child"),
)
STEPS, KILLED_AT = 40, 5


def trainer(
    *arguments: str, daemon: Daemon | None = None, before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "tests.soak.contained_trainer", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **({"MEMD_ADDRESS": daemon.address} if daemon else {})},
    )


def first_lines(process: subprocess.Popen[str], count: int) -> Iterator[str]:
    assert process.stdout is not None
    for _ in range(count):
        line = process.stdout.readline()
        assert line, "the trainer has ended"
        yield line


def rest_of(process: subprocess.Popen[str]) -> str:
    """The output that was not read yet, when it has ended; a pipe holds it."""
    assert process.wait(START_S) == 0
    assert process.stdout is not None
    return process.stdout.read()


def child_of(process: subprocess.Popen[str]) -> int:
    """The first process of the namespaces, by its number out here."""
    pid = process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def is_apart(process_id: int, namespace: str) -> bool:
    ours, theirs = (Path(f"/proc/{each}/ns/{namespace}") for each in ("self", process_id))
    return ours.readlink() != theirs.readlink()


def test_a_contained_trainer_has_equal_bits_through_a_restart_of_the_daemon(
    restarts: Restarts,
) -> None:
    needs(CONTAINED)
    with trainer("--plain", "--steps", str(STEPS)) as plain:
        wanted = rest_of(plain)
    arguments = ("--job", "bits", "--steps", str(STEPS))
    with trainer(*arguments, daemon=restarts.daemon, before=CONTAINED) as contained:
        begun = "".join(first_lines(contained, KILLED_AT))
        inside = child_of(contained)
        assert all(is_apart(inside, each) for each in ("user", "mnt", "pid"))
        restarts.kill_and_begin_start()
        went_on = rest_of(contained)
        restarts.settle()
    # Steps once each: the session was kept, too.
    assert begun + went_on == wanted


def test_a_contained_trainer_that_is_killed_leaves_no_session(restarts: Restarts) -> None:
    needs(CONTAINED)
    daemon = restarts.daemon
    with (
        trainer("--job", "killed", daemon=daemon, before=CONTAINED) as contained,
        Attached(daemon.attach_socket) as client,
    ):
        list(first_lines(contained, 1))
        assert client.session_count("killed") == 1
        inside = child_of(contained)
        os.kill(inside, signal.SIGKILL)
        wait_until(lambda: client.session_count("killed") == 0)
    (ended,) = [line for line in daemon.log.read_text().splitlines() if "session ended" in line]
    assert f" pid={inside} " in ended
    assert 'reason="process died"' in ended
