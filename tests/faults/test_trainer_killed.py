"""A trainer dies in the middle of a step while a worker it forked lives on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import memd_client
from memd.client import DaemonClient
from tests.daemons import TIMEOUT_S, Daemon, running_daemon
from tests.faults.small_training import batch, build, loss_of

ROOT = Path(__file__).parents[2]
JOB = "killed"
STEPS_BEFORE, STEPS_AFTER = 3, 3


def reference() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and final parameters of the same training, in memory and undisturbed."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in model.parameters()]


def kill_and_time_reclaim(daemon: Daemon) -> float:
    """Seconds from SIGKILL until the daemon lists no lease; the worker outlives it meanwhile.
    bench_reclaim.py measures them: a test may meet a busy machine, and has a bound against hangs
    alone."""
    command = [sys.executable, "-m", "tests.faults.killed_trainer", daemon.address, JOB]
    with subprocess.Popen(
        [*command, str(STEPS_BEFORE)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as trainer:
        assert trainer.stdout is not None
        said = re.fullmatch(r"holding (\d+) worker (\d+)\n", trainer.stdout.readline())
        assert said is not None
        worker = int(said[2])
        try:
            with DaemonClient(daemon.attach_socket) as client:
                (job,) = client.jobs()
                assert job.lease_count == int(said[1]) > 0
                assert job.session_count == 1
                started = time.perf_counter()
                trainer.kill()
                while client.jobs()[0].lease_count > 0:
                    assert time.perf_counter() - started < TIMEOUT_S, "the leases of the dead stay"
                gone_s = time.perf_counter() - started
                (job,) = client.jobs()
                assert job.name == JOB
                assert job.session_count == 0
                assert job.committed_step == STEPS_BEFORE
                os.kill(worker, 0)  # the socket is still open in it: end-of-file would tell nothing
        finally:
            os.kill(worker, signal.SIGKILL)
    return gone_s


def test_a_killed_trainers_leases_go_at_once_and_a_new_session_trains_on() -> None:
    losses, parameters = reference()
    with running_daemon() as daemon:
        kill_and_time_reclaim(daemon)

        session = memd_client.connect(daemon.address, job=JOB)
        model = memd_client.offload(build(), session)
        optimizer = memd_client.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.1, session=session
        )
        for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            loss = loss_of(model, batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(loss.detach(), losses[step]), step
        with memd_client.gather(model):
            for got, wanted in zip(model.parameters(), parameters, strict=True):
                assert torch.equal(got, wanted)
        session.close()
        assert daemon.process.poll() is None
