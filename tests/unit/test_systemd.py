"""systemd's protocol, spoken to a socket of the test's own."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from memd.daemon import told_of_prefault
from memd.systemd import Notifier

if TYPE_CHECKING:
    from pathlib import Path


def test_states_arrive_as_one_datagram(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        Notifier({"NOTIFY_SOCKET": str(path)}).notify(READY=1, STATUS="memd ready")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=memd ready"


def test_an_abstract_address_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0memd-test-{os.getpid()}")
        Notifier({"NOTIFY_SOCKET": f"@memd-test-{os.getpid()}"}).notify(STOPPING=1)
        assert systemd.recv(4096) == b"STOPPING=1"


def test_without_systemd_nothing_is_sent_and_no_watchdog_runs() -> None:
    notifier = Notifier({})
    notifier.notify(READY=1)
    assert notifier.watchdog_s is None


def test_the_watchdog_interval_is_for_the_process_it_names() -> None:
    ours = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert Notifier(ours).watchdog_s == 30.0
    assert Notifier({**ours, "WATCHDOG_PID": "1"}).watchdog_s is None


def test_systemd_hears_of_a_pool_that_grows_and_not_of_one_that_does_not(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(30)
        with (
            told_of_prefault(Notifier({"NOTIFY_SOCKET": str(path)}), interval_s=0.01),
            mmap.mmap(-1, 8 << 20) as pool,
        ):
            pool.write(b"x" * (8 << 20))
            assert systemd.recv(4096).startswith(b"EXTEND_TIMEOUT_USEC=20000000\n")
            time.sleep(0.1)  # ten looks at a pool that grows no more
            systemd.setblocking(False)
            said = waiting(systemd)
    assert len(said) <= 1


def waiting(systemd: socket.socket) -> list[bytes]:
    said = []
    with contextlib.suppress(BlockingIOError):
        while True:
            said.append(systemd.recv(4096))
    return said


PASSED = """
import os
from memd.systemd import listening_socket
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "other:attach"}
print(listening_socket(environ, "attach").getsockname(), listening_socket(environ, "none"))
environ["LISTEN_PID"] = "1"
print(listening_socket(environ, "attach"))
"""


def test_a_passed_socket_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "attach.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        # As systemd does: descriptors 3 and 4, of which the second is the attach socket.
        shell = f'exec 3</dev/null 4<&{listening.fileno()}; exec {sys.executable} -c "$PROGRAM"'
        answer = subprocess.run(
            ["bash", "-c", shell],
            env={**os.environ, "PROGRAM": PASSED},
            pass_fds=[listening.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    assert answer.stdout == f"{path} None\nNone\n"
