"""A daemon's life beside its clients: signals, its parent, systemd, and a scrape."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.daemons import TIMEOUT_S, Attached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon, Daemons

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "memd.service"


def test_sigterm_drains_and_exits_with_0(daemons: Daemons) -> None:
    daemon = daemons.start(name="term")
    with Attached(daemon.attach_socket) as client:
        client.attach("gpt")
        began = time.monotonic()
        assert daemon.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 15  # without the 20 s that calls under way are given
    assert not daemon.socket.exists()
    assert not daemon.attach_socket.exists()
    log = daemon.log.read_text()
    assert "event=draining" in log
    assert log.splitlines()[-1].endswith("event=stopped logger=memd.daemon")


def test_a_jobs_weight_is_checked_shown_and_kept(daemons: Daemons) -> None:
    first = daemons.start(name="weights")

    def weight(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "memd",
            "job",
            *arguments,
            "--socket",
            str(daemon.attach_socket),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with Attached(first.attach_socket) as client:
        client.attach("gpt")
    for bad in ("0", "-1", "nan", "inf", "0.09", "11", "1e300"):
        refused = weight(first, "weight", "gpt", bad)
        assert refused.returncode == 1, bad
        assert refused.stderr.startswith("Error: a job's weight is a number from 0.1 to 10: "), bad
        assert refused.stderr.count("\n") == 1, refused.stderr
    assert weight(first, "weight", "gpt", "much").returncode == 2
    assert weight(first, "weight", "nope", "2").returncode == 1
    assert "  1       step (" in weight(first, "list").stdout
    assert weight(first, "weight", "gpt", "2.5").stdout == "gpt has weight 2.5\n"
    assert 'memd_job_weight{memd_job="gpt"} 2.5\n' in first.get("/metrics")
    assert first.stop() == 0
    second = daemons.start(name="weights")
    assert "  2.5     step (" in weight(second, "show", "gpt").stdout
    assert second.stop() == 0


STANDING_STILL = """
import os, signal, sys
from pathlib import Path
from memd.client import DaemonClient

with DaemonClient(Path(sys.argv[1])) as client:
    client.status()
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_client_that_stands_still_does_not_hold_up_the_end(daemons: Daemons) -> None:
    daemon = daemons.start(name="still")
    command = [sys.executable, "-c", STANDING_STILL, str(daemon.attach_socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            os.waitid(os.P_PID, client.pid, os.WSTOPPED | os.WNOWAIT)
            daemon.process.terminate()
            # gRPC waits 20 s for an answer to its farewell.
            assert daemon.process.wait(15) == 0
        finally:
            client.kill()


def test_an_interrupt_drains_too(daemons: Daemons) -> None:
    assert daemons.start(name="term").stop(signal.SIGINT) == 0


def reload(daemon: Daemon) -> None:
    """By the unit's own command. systemd 252 has no Type=notify-reload, which needs none."""
    unit = UNIT.read_text(encoding="utf-8")
    assert re.findall("^Type=(.*)$", unit, re.MULTILINE) == ["notify"]
    (command,) = re.findall("^ExecReload=(.*)$", unit, re.MULTILINE)
    subprocess.run(command.replace("$MAINPID", str(daemon.process.pid)).split(), check=True)


def test_a_reload_takes_over_what_can_change_and_names_the_rest(
    daemons: Daemons, tmp_path: Path
) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('log_level = "info"\n')
    daemon = daemons.start("--config", str(file), name="hup")
    file.write_text('log_level = "debug"\nio_depth = 4\nmax_jobs = 2\n')
    fragment = tmp_path / "conf.d" / "site.toml"
    fragment.parent.mkdir()
    fragment.write_text("max_jobs = 3\n")
    reload(daemon)
    wait_for(daemon, "settings reloaded")
    lines = daemon.log.read_text().splitlines()
    (told,) = [line for line in lines if "settings reloaded" in line]
    assert "changed=log_level,max_jobs" in told
    assert "after_a_restart=io_depth" in told
    fragment.write_text("max_job = 5\n")
    reload(daemon)
    wait_for(daemon, "did you mean 'max_jobs'?")
    assert str(fragment) in daemon.log.read_text()
    assert daemon.get("/readyz") == "ready\n"
    assert daemon.stop() == 0


def wait_for(daemon: Daemon, text: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while text not in daemon.log.read_text():
        assert time.monotonic() < end, daemon.log.read_text()
        time.sleep(0.01)


def test_a_daemon_ends_with_the_parent_it_was_given(daemons: Daemons) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        daemon = daemons.start("--parent-pid", str(parent.pid), name="child")
        parent.kill()
        assert daemon.process.wait(TIMEOUT_S) == 0
    assert 'reason="the parent has died"' in daemon.log.read_text()


def test_a_parent_that_is_dead_already_is_refused(daemons: Daemons) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        parent.wait()
    refusal = daemons.refusal("--parent-pid", str(parent.pid), name="orphan")
    assert f"the parent {parent.pid} has died already" in refusal


@pytest.fixture
def notify_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(TIMEOUT_S)
        yield systemd


def test_systemd_hears_of_readiness_of_every_beat_and_of_the_end(
    daemons: Daemons, notify_socket: socket.socket
) -> None:
    environ = {"NOTIFY_SOCKET": notify_socket.getsockname(), "WATCHDOG_USEC": "200000"}
    daemon = daemons.start(name="notify", environ=environ)
    # A new volume is written first, and each second of that is a request for more time.
    while not (said := notify_socket.recv(4096)).startswith(b"READY=1\n"):
        assert said.startswith(b"EXTEND_TIMEOUT_USEC=")
    assert [notify_socket.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    assert daemon.stop() == 0
    while (said := notify_socket.recv(4096)) == b"WATCHDOG=1":
        pass
    assert said.startswith(b"STOPPING=1\n")


def test_a_socket_held_by_systemd_is_used_and_left(daemons: Daemons) -> None:
    path = daemons.sockets / "activated" / "attach.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as held:
        held.bind(str(path))
        held.listen()
        # LISTEN_PID is the process that is executed: a shell's number stays the daemon's.
        passed = f'export LISTEN_PID=$$; exec 3<&{held.fileno()}; exec "$0" "$@"'
        daemon = daemons.start(
            name="activated",
            before=["bash", "-c", passed],
            environ={"LISTEN_FDS": "1", "LISTEN_FDNAMES": "attach"},
            pass_fds=[held.fileno()],
        )
        with Attached(path) as client:
            assert client.attach("gpt").created
        assert daemon.stop() == 0
        assert path.is_socket()


def test_promtool_finds_nothing_wrong_with_a_live_daemon(daemon: Daemon) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    with Attached(daemon.attach_socket) as client:
        client.attach("scraped")
        text = daemon.get("/metrics")
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert 'memd_committed_step{memd_job="scraped"} 0.0' in text
    assert "memd_clients 1.0" in text


TRAINER = """
import os, sys, time
from pathlib import Path
from tests.daemons import Attached
client = Attached(Path(sys.argv[1]))
client.attach("killed")
worker = os.fork()  # a data loader's: it inherits the connection and keeps it open
if worker:
    print(worker, flush=True)
time.sleep(60)
"""


def test_a_killed_trainers_session_ends_at_once_and_its_job_stays(daemon: Daemon) -> None:
    command = [sys.executable, "-c", TRAINER, str(daemon.attach_socket)]
    with (
        Attached(daemon.attach_socket) as client,
        subprocess.Popen(command, stdout=subprocess.PIPE) as trainer,
    ):
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        try:
            assert client.session_count("killed") == 1
            trainer.kill()
            began = time.monotonic()
            while client.session_count("killed"):
                assert time.monotonic() - began < TIMEOUT_S
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)
        assert not client.attach("killed").created
    assert 'memd_client_reclaims_total{reason="process_died"}' in daemon.get("/metrics")
