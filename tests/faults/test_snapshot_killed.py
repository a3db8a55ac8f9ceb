"""The daemon is killed while snapshots are made and dropped: each is whole or absent, and the job
goes on with the same bits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memd.client import DaemonClient
from memd.refusal import Refused
from tests.faults.restarts import PATIENCE_S, STEPS, Restarts, Training, reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
# A call takes some milliseconds.
MOMENTS_S_MAX = 0.008


def killed_soon(restarts: Restarts, moments: random.Random) -> threading.Timer:
    timer = threading.Timer(moments.uniform(0, MOMENTS_S_MAX), restarts.kill_and_begin_start)
    timer.start()
    return timer


def settled(restarts: Restarts, timer: threading.Timer) -> Daemon:
    timer.join(PATIENCE_S)
    return restarts.settle()


def names(daemon: Daemon) -> list[str]:
    with DaemonClient(daemon.attach_socket) as client:
        return [each.name for each in client.snapshots("trained")]


def expect_all_is_whole(daemon: Daemon) -> Iterator[str]:
    with DaemonClient(daemon.attach_socket) as client:
        *_, last = client.check("trained")
        assert not last.findings
        for each in last.report.jobs[0].snapshots:
            assert each.extent_count > 0
            yield each.name


def test_a_snapshot_is_made_once_and_dropped_whole_whenever_the_daemon_dies(
    restarts: Restarts,
) -> None:
    losses, values = reference()
    moments = random.Random(5)
    training = Training(restarts.daemon)
    for number in range(STEPS):
        training.step(number)
        timer = killed_soon(restarts, moments)
        # It waits for the next daemon, which may find that the one before has made it.
        assert training.session.snapshot(f"s{number}") == number + 1
        daemon = settled(restarts, timer)
        assert names(daemon) == [f"s{before}" for before in range(number + 1)]
    assert list(expect_all_is_whole(daemon)) == names(daemon)
    for number in range(STEPS):
        with DaemonClient(daemon.attach_socket) as client:
            timer = killed_soon(restarts, moments)
            try:
                client.drop_snapshot("trained", f"s{number}")
                is_dropped = True
            except Refused:
                is_dropped = False
        daemon = settled(restarts, timer)
        found = names(daemon)
        left = [f"s{later}" for later in range(number + 1, STEPS)]
        assert found == left or (not is_dropped and found == [f"s{number}", *left])
        assert list(expect_all_is_whole(daemon)) == found
        if found != left:
            with DaemonClient(daemon.attach_socket) as client:
                client.drop_snapshot("trained", f"s{number}")
    training.expect_the_bits_of(losses, values)
    training.session.close()


@pytest.mark.parametrize("killed", ["caller", "daemon"])
@pytest.mark.parametrize("what", ["create", "drop"])
def test_ten_kills_at_random_moments_leave_a_snapshot_or_none(
    tmp_path: Path, what: str, killed: str
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.soak.snapshot_kills", "--what", what]
    command += ["--killed", killed, "--count", "10", "--json", str(report)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    outcome = json.loads(report.read_text())
    assert outcome["kills"] == outcome["made"] + outcome["not_made"] == 10
