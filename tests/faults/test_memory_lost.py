"""What a daemon had in memory does not survive it, or nobody returns for it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

import memd_client
from memd import holder
from memd.client import DaemonClient
from tests.faults.restarts import (
    PATIENCE_S,
    ROOT,
    STEPS,
    Restarts,
    Training,
    reference,
)
from tests.faults.small_training import batch, loss_of

if TYPE_CHECKING:
    from tests.daemons import Daemon


def test_without_its_memory_a_session_says_from_where_to_go_on(restarts: Restarts) -> None:
    losses, values = reference()
    training = Training(restarts.daemon)
    for number in range(3):
        training.step(number)
    loss_of(training.model, batch(3)).backward()
    assert training.session.committed_step == 3
    os.kill(restarts.holder_process_id(), signal.SIGKILL)
    restarts.kill_and_begin_start()
    training.optimizer.step()  # returns at once
    with pytest.raises(memd_client.SessionFenced, match="go on from step 3"):
        training.session.commit(wait=True)
    with pytest.raises(memd_client.SessionFenced, match="go on from step 3"):
        training.session.put("more", torch.ones(3))
    with pytest.raises(memd_client.SessionFenced, match="go on from step 3"):
        training.session.close()

    again = Training(restarts.settle())
    again.losses = training.losses
    for number in range(again.session.resume(), STEPS):
        again.step(number)
    again.expect_the_bits_of(losses, values)
    again.session.close()


@pytest.mark.parametrize("text", ["soon", "-1", "inf"])
def test_a_wrong_number_of_seconds_is_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", text)
    with pytest.raises(memd_client.InvalidArgument, match="MEMD_REATTACH_SECONDS is a number"):
        memd_client.connect(daemon.address, job="never")


def test_what_a_trainer_had_goes_when_it_dies_while_no_daemon_runs(restarts: Restarts) -> None:
    command = [sys.executable, "-m", "tests.faults.killed_trainer", restarts.daemon.address]
    with subprocess.Popen(
        [*command, "lonely", "2"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as trainer:
        assert trainer.stdout is not None
        said = trainer.stdout.readline().split()
        restarts.kill()
        trainer.kill()
        trainer.wait(PATIENCE_S)
        os.kill(int(said[3]), signal.SIGKILL)
    restarts.begin_start()
    daemon = restarts.settle()
    with DaemonClient(daemon.attach_socket) as client:
        deadline = time.monotonic() + PATIENCE_S
        while (job := client.jobs()[0]).session_count or job.lease_count:
            assert time.monotonic() < deadline, "the dead one's session stays"
            time.sleep(0.05)
        assert job.committed_step == 2
    training = memd_client.connect(daemon.address, job="lonely")
    assert training.committed_step == 2
    training.close()


def test_a_holder_ends_with_a_daemon_that_nobody_returns_to(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="short")
    session.put("a", torch.ones(3))
    session.close()
    watched = os.pidfd_open(restarts.holder_process_id())
    assert restarts.daemon.stop() == 0
    assert select.select([watched], [], [], PATIENCE_S)[0], "it frees the memory"
    os.close(watched)
    assert not restarts.daemon.socket.with_name("holder.sock").exists()


def test_a_job_whose_memory_is_not_used_is_named(restarts: Restarts) -> None:
    session = memd_client.connect(restarts.daemon.address, job="named")
    session.put("a", torch.ones(3))
    restarts.kill()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(restarts.daemon.socket.with_name("holder.sock")))
        kept = holder.take(connection)
        (table,) = (name for name, _ in kept if name.startswith("table."))
        connection.send(f"FDSTOREREMOVE=1\nFDNAME={table}\n".encode())
        for _, fd in kept:
            os.close(fd)
    restarts.begin_start()
    said = restarts.settle().log.read_text()
    assert "job named starts from disk" in said
    assert "nobody kept its shard table" in said
    with pytest.raises(memd_client.SessionFenced):
        session.put("b", torch.ones(3))
    with pytest.raises(memd_client.SessionFenced):
        session.close()


@pytest.mark.more
def test_a_holder_that_takes_nothing_is_told_of_once(restarts: Restarts) -> None:
    daemon = restarts.daemon
    process_id = restarts.holder_process_id()
    os.kill(process_id, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "takes none any more" not in daemon.log.read_text():
            assert time.monotonic() < deadline, daemon.log.read_text()
            memd_client.connect(daemon.address, job="said").close()
    finally:
        os.kill(process_id, signal.SIGKILL)
    assert daemon.stop() == 0
    said = daemon.log.read_text()
    assert said.count("takes none any more") == 1
