"""Trainers of other PID and user namespaces: told apart by their pidfds, or refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from memd_proto.v1 import attach_pb2
from tests.daemons import TIMEOUT_S, Attached, Daemon
from tests.integration.test_daemon_service import with_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.daemons import Daemons

# To a daemon in there, every process out here is one without a number.
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
USER_NAMESPACE = ("unshare", "--user", "--map-root-user")
NO_HOLDER = {"MEMD_HOLDER_SECONDS": "0"}


def needs(before: Sequence[str]) -> None:
    if shutil.which(before[0]) is None:
        pytest.skip(f"{before[0]} is not installed")
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("such a namespace can't be made here")


@pytest.fixture
def apart(daemons: Daemons) -> Iterator[Daemon]:
    needs(PID_NAMESPACE)
    daemon = daemons.start(name="apart", before=PID_NAMESPACE, environ=NO_HOLDER)
    yield daemon
    daemon.process.kill()  # and with it the daemon, the first process of the namespace
    daemon.process.wait(TIMEOUT_S)


TRAINER = """
import sys, time
from pathlib import Path
from tests.daemons import Attached
client = Attached(Path(sys.argv[1]))
print(client.attach(sys.argv[2]).session_id, flush=True)
sys.stdin.read()
"""


def trainer(daemon: Daemon, job: str) -> tuple[subprocess.Popen[str], str]:
    """One that has a session, and its number."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(daemon.attach_socket), job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_trainers_without_a_number_are_told_apart(apart: Daemon) -> None:
    first, first_session = trainer(apart, "first")
    second, _ = trainer(apart, "second")
    with first, second, Attached(apart.attach_socket) as client:
        first.kill()
        wait_until(lambda: client.session_count("first") == 0)
        assert client.session_count("second") == 1
        ended = [line for line in apart.log.read_text().splitlines() if "session ended" in line]
        assert len(ended) == 1
        assert f"session={first_session} " in ended[0]
        assert " pid=0 " in ended[0]
        second.kill()
        wait_until(lambda: client.session_count("second") == 0)


def test_sessions_of_a_trainer_without_a_number_are_claimed_by_it_alone(apart: Daemon) -> None:
    other, session = trainer(apart, "other")
    with other, Attached(apart.attach_socket) as client:
        answer = client.attach("other", kept_session_id=int(session))
        assert not answer.kept
        mine = client.attach("mine").session_id
        with Attached(apart.attach_socket) as again:
            kept = again.attach("mine", kept_session_id=mine).kept
        # From Linux 6.9 on a pidfd's inode tells that both connections are of this process.
        has_inodes = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 9)
        assert kept == has_inodes
        other.kill()


WITHOUT_PEER_PIDFDS = """
import sys
from memd import attach
attach._SO_PEERPIDFD = 4242  # one that no kernel knows answers as SO_PEERPIDFD does before 6.5
from memd.cli import main
main(sys.argv[1:])
"""


def test_without_peer_pidfds_a_trainer_without_a_number_is_refused(daemons: Daemons) -> None:
    needs(PID_NAMESPACE)
    command = [sys.executable, "-c", WITHOUT_PEER_PIDFDS]
    # `python -m memd serve …` becomes `python -c … serve …`.
    daemon = daemons.start(
        name="old",
        before=[*PID_NAMESPACE, "bash", "-c", 'exec "${@:1:3}" "${@:7}"', "bash", *command],
        environ=NO_HOLDER,
    )
    assert "no number in the daemon's PID namespace" in refusal_of(daemon)
    assert "Linux 6.5 or newer, or let the daemon share" in refusal_of(daemon)
    daemon.process.kill()
    daemon.process.wait(TIMEOUT_S)


def refusal_of(daemon: Daemon) -> str:
    """Of a process out here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(str(daemon.attach_socket))
        return str(attach_pb2.Welcome.FromString(client.recv(4096)).refusal)


# It loads what it needs before it becomes a user who may read nothing.
STRANGER = """
import os, socket, sys
from memd_proto.v1 import attach_pb2
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(1234)
os.setuid(1234)
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect("attach.sock")
print(attach_pb2.Welcome.FromString(client.recv(4096)).refusal)
"""


def test_a_user_whom_the_daemons_namespace_does_not_map_is_refused(daemons: Daemons) -> None:
    needs(USER_NAMESPACE)
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    daemon = daemons.start(name="mapped", before=USER_NAMESPACE, environ=NO_HOLDER)
    folder = daemon.socket.parent
    command = [sys.executable, "-c", STRANGER, str(folder)]
    with (
        with_mode(0o755, daemons.sockets, folder),
        with_mode(0o666, daemon.attach_socket),
    ):
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("the user of this process has no number in the daemon's user namespace")
    assert refusal_of(daemon) == "", "root is mapped"
    assert daemon.stop() == 0
