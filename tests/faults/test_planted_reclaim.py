"""A killed trainer's leases are freed while its forked worker lives, and a daemon that waits for
the end of the connection instead is caught by the same check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memd.client import DaemonClient

if TYPE_CHECKING:
    from tests.daemons import Daemon, Daemons

_TRAINER = """
import os, sys, time
import torch
import memd_client

session = memd_client.connect(sys.argv[1], job="job", host_bytes="32MiB", nvme_bytes="64MiB")
session.put("x", torch.arange(1000))
held = session.get("x")
worker = os.fork()
if worker == 0:
    time.sleep(600)
    os._exit(0)
print(worker, flush=True)
time.sleep(600)
"""


def _leases_after_a_kill(daemon: Daemon, *, within_s: float) -> int:
    """What the job's leases come to once its trainer is dead and a worker of it is not."""
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _TRAINER, daemon.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    try:
        with DaemonClient(daemon.attach_socket) as client:
            assert client.jobs()[0].lease_count == 1
            trainer.kill()
            trainer.wait()
            os.kill(worker, 0)
            end = time.monotonic() + within_s
            while (leases := client.jobs()[0].lease_count) and time.monotonic() < end:
                time.sleep(0.02)
            return leases
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "reclaim on end-of-file"])
def test_a_killed_trainers_leases_are_freed_while_its_worker_lives(
    daemons: Daemons, planted: bool
) -> None:
    before = [sys.executable, str(Path(__file__).with_name("planted_daemon.py"))] if planted else []
    daemon = daemons.start(before=before, name="planted" if planted else "whole")
    # The bound of the first only tells a hang; the second one never frees it.
    leases = _leases_after_a_kill(daemon, within_s=3.0 if planted else 60.0)
    assert leases == (1 if planted else 0)
    assert daemon.stop() == 0
