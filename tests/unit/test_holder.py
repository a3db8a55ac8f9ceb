"""The process that keeps a dead daemon's descriptors: what it hands on, and when it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memd import holder
from memd.keeper import Keeper, find_keeper
from memd.refusal import Refused
from memd.systemd import Notifier, offers_store, passed_descriptors
from tests.descriptors import open_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holder.sock"


@pytest.fixture
def find(path: Path) -> Iterator[Callable[..., Keeper]]:
    processes = []

    def find(seconds: float = 600) -> Keeper:
        found = find_keeper(path, seconds=seconds, environ={}, notifier=Notifier({}))
        assert found is not None
        if found.process is not None:
            processes.append(found.process)
        return found

    yield find
    for process in processes:
        process.kill()
        process.wait(PATIENCE_S)


def keep(keeper: Keeper, name: str, fd: int) -> None:
    socket.send_fds(keeper.connection, [f"FDSTORE=1\nFDNAME={name}\n".encode()], [fd])


def forget(keeper: Keeper, name: str) -> None:
    keeper.connection.send(f"FDSTOREREMOVE=1\nFDNAME={name}\n".encode())


def memfd(text: bytes, name: str = "kept") -> int:
    fd = os.memfd_create(name)
    os.write(fd, text)
    return fd


def contents(kept: list[tuple[str, int]]) -> dict[str, bytes]:
    found = {name: os.pread(fd, 100, 0) for name, fd in kept}
    for _, fd in kept:
        os.close(fd)
    return found


def died(keeper: Keeper) -> None:
    """As a daemon that is killed: nothing is said, its descriptors close."""
    keeper.connection.close()


def test_the_next_daemon_gets_what_was_kept_and_not_forgotten(find: Callable[..., Keeper]) -> None:
    first = find()
    # More than one packet's worth.
    for number in range(holder.DESCRIPTORS_MAX + 7):
        fd = memfd(b"segment %d" % number)
        keep(first, f"segment.{number}", fd)
        os.close(fd)
    keep(first, "ledger.1", replaced := memfd(b"old"))
    keep(first, "ledger.1", new := memfd(b"new"))
    forget(first, "segment.3")
    forget(first, "segment.999")
    os.close(replaced)
    os.close(new)
    died(first)
    second = find()
    assert second.process is None, "the same holder serves"
    kept = contents(second.take_kept())
    assert kept.pop("ledger.1") == b"new"
    assert kept == {
        f"segment.{number}": b"segment %d" % number
        for number in range(holder.DESCRIPTORS_MAX + 7)
        if number != 3
    }
    died(second)
    third = find()
    assert len(contents(third.take_kept())) == holder.DESCRIPTORS_MAX + 7, "and again"
    third.close()


def test_what_a_dying_daemon_said_last_counts_though_the_next_is_quick(
    find: Callable[..., Keeper],
) -> None:
    first = find()
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    keep(first, "segment.1", fd := memfd(b"last"))
    os.close(fd)
    died(first)
    first.process.send_signal(signal.SIGCONT)
    second = find()
    assert contents(second.take_kept()) == {"segment.1": b"last"}
    second.close()


def test_it_ends_when_a_daemon_says_that_nobody_returns(
    find: Callable[..., Keeper], path: Path
) -> None:
    keeper = find()
    keep(keeper, "segment.1", fd := memfd(b"x"))
    os.close(fd)
    keeper.end()
    keeper.close()
    assert keeper.process is not None
    assert keeper.process.wait(PATIENCE_S) == 0
    assert not path.exists()


def test_it_ends_with_the_folder_of_its_socket(find: Callable[..., Keeper], path: Path) -> None:
    keeper = find()
    died(keeper)
    path.unlink()
    assert keeper.process is not None
    assert keeper.process.wait(PATIENCE_S) == 0


def test_it_ends_when_no_daemon_comes(find: Callable[..., Keeper], path: Path) -> None:
    keeper = find(seconds=0.1)
    keep(keeper, "segment.1", fd := memfd(b"x"))
    os.close(fd)
    time.sleep(0.5)
    assert keeper.process is not None
    assert keeper.process.poll() is None, "while a daemon is there it stays"
    died(keeper)
    assert keeper.process.wait(PATIENCE_S) == 0
    assert not path.exists()
    after = find()
    assert after.kept == []
    after.close()


def test_it_is_small_and_apart(find: Callable[..., Keeper], path: Path) -> None:
    keeper = find()
    assert keeper.process is not None
    pid = keeper.process.pid
    deadline = time.monotonic() + PATIENCE_S
    while (name := Path(f"/proc/{pid}/comm").read_text()) != "memd-holder\n":
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
    assert os.getsid(pid) == pid, "a session of its own: a killed group takes it not along"
    assert path.stat().st_mode & 0o777 == 0o600
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    assert int(resident.split()[1]) < 16 * 1024, resident
    for number in (signal.SIGINT, signal.SIGHUP):
        keeper.process.send_signal(number)
    died(keeper)
    again = find()
    assert again.process is None, "it lives on"
    again.close()


def test_a_holder_that_hands_over_nothing_stops_the_start(
    path: Path, find: Callable[..., Keeper]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as broken:
        broken.bind(str(path))
        broken.listen(1)

        def answer() -> None:
            connection, _ = broken.accept()
            connection.send(b"FDNAMES=segment.1\n")  # and no descriptor
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Refused, match="what a daemon left in memory, and it does not come"):
            find()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("first", ["the end is said", "the next one comes"])
def test_a_daemon_that_comes_while_it_ends_starts_another(
    find: Callable[..., Keeper], path: Path, first: str
) -> None:
    old = find()
    assert old.process is not None
    keep(old, "segment.1", fd := memfd(b"x"))
    os.close(fd)
    old.process.send_signal(signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(PATIENCE_S)
        if first == "the next one comes":
            connection.connect(str(path))
        old.end()
        died(old)
        if first == "the end is said":
            connection.connect(str(path))
        old.process.send_signal(signal.SIGCONT)
        with pytest.raises(ConnectionResetError):
            holder.take(connection)
        assert not path.exists(), "it is removed before anybody may make another"
    assert old.process.wait(PATIENCE_S) == 0
    new = find()
    assert new.process is not None
    assert new.kept == []
    assert path.exists()
    new.close()


class Clock:
    """Of a process that the scheduler left out for a long time after it began."""

    def __init__(self) -> None:
        self.calls = 0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        self.calls += 1
        return 0.0 if self.calls == 1 else 100_000.0


def test_a_daemon_that_dies_before_it_took_what_is_kept_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(4)
        first, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # All of it lies there when the holder looks: a last packet, an end, and one that came and
        # is dead too.
        socket.send_fds(first, [b"FDSTORE=1\nFDNAME=segment.1\n"], [fd := memfd(b"x")])
        os.close(fd)
        first.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
            second.connect(str(path))
        monkeypatch.setattr(holder, "time", Clock())
        keeping = holder.Holder(listening, theirs, path=path, seconds=600)
        ended: list[str] = []
        thread = threading.Thread(target=lambda: ended.append(keeping.run()))
        thread.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as third:
            third.settimeout(PATIENCE_S)
            third.connect(str(path))
            try:
                assert contents(holder.take(third)) == {"segment.1": b"x"}
            finally:
                third.send(holder.END)
                thread.join(PATIENCE_S)
        assert ended == ["the daemon stopped and no session is alive"]
        if keeping._daemon is not None:
            keeping._daemon.close()


def test_a_holder_that_lives_and_does_not_answer_keeps_its_socket(
    path: Path, find: Callable[..., Keeper]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
            waiting.connect(str(path))
            with pytest.raises(Refused, match="cannot be reached: Resource temporarily unavail"):
                find()
    assert path.exists()
    after = find()
    assert after.process is not None, "and one that is dead leaves it to the next"
    after.close()


def test_without_seconds_there_is_none(path: Path) -> None:
    assert find_keeper(path, seconds=0, environ={}, notifier=Notifier({})) is None
    assert not path.exists()


def test_systemds_store_is_used_where_it_is_offered(path: Path, tmp_path: Path) -> None:
    address = tmp_path / "notify"
    assert not offers_store({"FDSTORE": "5"}), "there is nobody to tell"
    assert not offers_store({"NOTIFY_SOCKET": str(address)})
    assert not offers_store({"NOTIFY_SOCKET": str(address), "FDSTORE": "0"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        environ = {"NOTIFY_SOCKET": str(address), "FDSTORE": "100"}
        keeper = find_keeper(path, seconds=600, environ=environ, notifier=Notifier(environ))
        assert keeper is not None
        keep(keeper, "ledger.1", fd := memfd(b"x"))
        os.close(fd)
        said, fds, _, _ = socket.recv_fds(systemd, 1000, 10)
        assert said == b"FDSTORE=1\nFDNAME=ledger.1\n"
        assert os.pread(fds[0], 10, 0) == b"x"
        os.close(fds[0])
        keeper.end()
        keeper.close()
        systemd.setblocking(False)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
    assert not path.exists()


def test_descriptors_of_another_process_are_not_ours() -> None:
    assert passed_descriptors({"LISTEN_PID": "1", "LISTEN_FDS": "3"}) == []


@pytest.mark.parametrize(
    "packets",
    [
        [(b"FDNAMES=a:b\n", 3), (b"FDCOUNT=3\n", 0)],  # more descriptors than names
        [(b"FDNAMES=a:b\n", 1)],
        [(b"FDNAMES=a\n", 1), (b"FDCOUNT=2\n", 0)],
        [(b"FDNAMES=a\n", 1), (b"FDCOUNT=1\n", 1)],
        [(b"\xff\xfe\n", 2)],
        [(b"FDNAMES=a\n", 1), (b"", 0)],  # it has ended
    ],
)
def test_what_is_handed_over_wrongly_leaves_no_descriptor_open(
    packets: list[tuple[bytes, int]],
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            for packet, count in packets:
                fds = [memfd(b"x", "handed over") for _ in range(count)]
                if packet:
                    socket.send_fds(theirs, [packet], fds)
                for fd in fds:
                    os.close(fd)
        with pytest.raises((OSError, ValueError)):
            holder.take(ours)
        assert "/memfd:handed over" not in open_names()
