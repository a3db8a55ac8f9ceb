"""The attach socket: whom it lets in, what it hands over, how it notices that a process died."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memd import attach, peers
from memd.attach import AttachListener, send_session
from memd.peers import Peer, Peers, Session
from memd.refusal import StatusCode
from memd_native import PROTOCOL_OLDEST, PROTOCOL_VERSION
from memd_proto.v1 import attach_pb2
from tests.descriptors import name_of, open_names
from tests.unit.fake_native import FakeServer, KeptSession, as_server, status_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTROL = "unix:///run/memd/memd.sock"
TIMEOUT_S = 30.0


@dataclass
class Listening:
    path: Path
    server: FakeServer
    peers: Peers

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(TIMEOUT_S)
        client.connect(str(self.path))
        return client

    def welcomed(self) -> tuple[socket.socket, Peer]:
        client = self.connect()
        return client, self.peer_of(client)

    def peer_of(self, client: socket.socket) -> Peer:
        peer = self.peers.find(attach_pb2.Welcome.FromString(client.recv(4096)).token)
        assert peer is not None
        return peer

    def open_session(self, peer: Peer) -> int:
        job = self.server.open_job("job", uid=peer.uid)
        grant = self.server.attach(job.job_id)
        self.peers.add_session(
            peer, Session(session_id=grant.session_id, job_id=job.job_id, job_name="job")
        )
        send_session(self.peers, peer, grant)  # type: ignore[arg-type]  # the fake's own record
        return grant.session_id


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    server, known = FakeServer(), Peers()
    path = tmp_path / "attach.sock"
    listener = AttachListener(
        attach.bind(path), server=as_server(server), peers=known, control_address=CONTROL
    )
    listener.start()
    yield Listening(path, server, known)
    listener.stop()


def send_often(client: socket.socket, packet: bytes) -> None:
    for _ in range(10_000):
        client.send(packet)


def wait_until(condition: Callable[[], bool]) -> None:
    """The bound is against hangs: bench_reclaim.py measures how long the daemon takes."""
    ends = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_only_owner_and_group_may_connect(listening: Listening) -> None:
    assert listening.path.stat().st_mode & 0o777 == 0o660


def test_a_client_is_welcomed_with_a_token_of_its_own(listening: Listening) -> None:
    tokens = set()
    for _ in range(2):
        with listening.connect() as client:
            welcome = attach_pb2.Welcome.FromString(client.recv(4096))
            assert (welcome.protocol_version, welcome.refusal) == (PROTOCOL_VERSION, "")
            spoken = welcome.protocol_range
            assert (spoken.oldest, spoken.newest) == (PROTOCOL_OLDEST, PROTOCOL_VERSION)
            assert welcome.control_address == CONTROL
            tokens.add(welcome.token)
    assert len(tokens) == 2
    assert all(len(token) == 64 and int(token, 16) for token in tokens)


def test_the_peer_is_known_by_the_kernel_not_by_its_word(listening: Listening) -> None:
    client, peer = listening.welcomed()
    with client:
        assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())


def test_the_session_descriptors_arrive_in_order(listening: Listening) -> None:
    client, peer = listening.welcomed()
    with client:
        session_id = listening.open_session(peer)
        packet, fds, _, _ = socket.recv_fds(client, 4096, 8)
        descriptors = attach_pb2.Descriptors.FromString(packet)
        names = [name_of(fd) for fd in fds]
        for fd in fds:
            os.close(fd)
    assert descriptors.kind == attach_pb2.Descriptors.KIND_SESSION
    assert descriptors.session_id == session_id
    assert names == ["/memfd:session", "/memfd:table", "/memfd:doorbell"]


def test_segments_are_sent_to_who_has_the_session(listening: Listening) -> None:
    client, peer = listening.welcomed()
    with client:
        session_id = listening.open_session(peer)
        for fd in socket.recv_fds(client, 4096, 8)[1]:
            os.close(fd)
        wanted = attach_pb2.SegmentsWanted(session_id=session_id, segment_first=7)
        client.send(wanted.SerializeToString())
        packet, fds, _, _ = socket.recv_fds(client, 4096, 64)
        descriptors = attach_pb2.Descriptors.FromString(packet)
        assert name_of(fds[0]) == "/memfd:segment-7"
        for fd in fds:
            os.close(fd)
        wait_until(lambda: "/memfd:segment-7" not in open_names())  # the daemon keeps no copy
    assert (descriptors.segment_first, descriptors.segment_count) == (7, len(fds))


def test_a_packet_of_a_newer_client_is_served_by_what_is_known_of_it(listening: Listening) -> None:
    client, peer = listening.welcomed()
    with client:
        session_id = listening.open_session(peer)
        for fd in socket.recv_fds(client, 4096, 8)[1]:
            os.close(fd)
        wanted = attach_pb2.ClientPacket(
            kind=attach_pb2.ClientPacket.KIND_SEGMENTS, session_id=session_id, segment_first=7
        )
        # Field 999 is of bytes, 1,000 of them.
        client.send(wanted.SerializeToString() + b"\xba\x3e\xe8\x07" + b"x" * 1000)
        packet, fds, _, _ = socket.recv_fds(client, 4096, 64)
        for fd in fds:
            os.close(fd)
    descriptors = attach_pb2.Descriptors.FromString(packet)
    assert descriptors.kind == attach_pb2.Descriptors.KIND_SEGMENTS
    assert (descriptors.segment_first, descriptors.segment_count) == (7, len(fds))


def test_a_packet_of_an_unknown_kind_is_refused_and_the_connection_goes_on(
    listening: Listening,
) -> None:
    client = listening.connect()
    with client:
        welcome = attach_pb2.Welcome.FromString(client.recv(4096))
        assert welcome.takes_kinds
        peer = listening.peers.find(welcome.token)
        assert peer is not None
        session_id = listening.open_session(peer)
        for fd in socket.recv_fds(client, 4096, 8)[1]:
            os.close(fd)
        # All that KIND_SEGMENTS needs is there: the kind alone tells that it is another question.
        wanted = attach_pb2.ClientPacket(session_id=session_id, segment_first=7)
        wanted.kind = 99  # type: ignore[assignment]  # of a newer client
        client.send(wanted.SerializeToString())
        packet, fds, _, _ = socket.recv_fds(client, 4096, 64)
        refused = attach_pb2.Descriptors.FromString(packet)
        assert (refused.kind, fds) == (attach_pb2.Descriptors.KIND_REFUSED, [])
        assert "knows no packets of kind 99" in refused.refusal
        wanted.kind = attach_pb2.ClientPacket.KIND_SEGMENTS
        client.send(wanted.SerializeToString())
        packet, fds, _, _ = socket.recv_fds(client, 4096, 64)
        for fd in fds:
            os.close(fd)
    answer = attach_pb2.Descriptors.FromString(packet)
    assert (answer.kind, answer.segment_count) == (attach_pb2.Descriptors.KIND_SEGMENTS, len(fds))


def test_the_session_of_another_connection_is_not_served(listening: Listening) -> None:
    owner, peer = listening.welcomed()
    stranger, _ = listening.welcomed()
    with owner, stranger:
        session_id = listening.open_session(peer)
        wanted = attach_pb2.SegmentsWanted(session_id=session_id, segment_first=0)
        stranger.send(wanted.SerializeToString())
        assert stranger.recv(4096) == b""
        assert session_id not in listening.server.detached


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 20, b"\x08", bytes(60_000)],
    ids=["no message", "cut short", "too long"],
)
def test_garbage_closes_the_connection_and_nothing_else(
    listening: Listening, garbage: bytes
) -> None:
    bystander, peer = listening.welcomed()
    hostile, hostile_peer = listening.welcomed()
    with bystander, hostile:
        session_id = listening.open_session(hostile_peer)
        for fd in socket.recv_fds(hostile, 4096, 8)[1]:
            os.close(fd)
        hostile.send(garbage)
        assert hostile.recv(4096) == b""
        # The process is alive and has views of its leases: they stay until it dies or detaches.
        assert session_id not in listening.server.detached
        assert listening.open_session(peer) > session_id
        for fd in socket.recv_fds(bystander, 4096, 8)[1]:
            os.close(fd)


def test_a_client_that_never_reads_does_not_hold_up_the_others(listening: Listening) -> None:
    deaf, peer = listening.welcomed()
    with deaf:
        session_id = listening.open_session(peer)
        wanted = attach_pb2.SegmentsWanted(session_id=session_id, segment_first=0)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_often(deaf, wanted.SerializeToString())
        with listening.connect() as other:
            assert attach_pb2.Welcome.FromString(other.recv(4096)).token


def test_a_closed_connection_without_sessions_is_forgotten(listening: Listening) -> None:
    client, peer = listening.welcomed()
    client.close()
    wait_until(lambda: listening.peers.find(peer.token) is None)
    assert listening.peers.reclaims() == {}


def test_too_many_connections_are_refused_with_a_reason(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS_PER_UID_MAX", 2)
    clients = [listening.connect() for _ in range(3)]
    answers = [attach_pb2.Welcome.FromString(client.recv(4096)) for client in clients]
    assert [bool(answer.refusal) for answer in answers] == [False, False, True]
    assert f"user {os.getuid()} has 2 of at most 2 connections" in answers[2].refusal
    assert not answers[2].token
    clients[0].close()
    wait_until(lambda: listening.peers.count() == 1)
    with listening.connect() as client:
        assert attach_pb2.Welcome.FromString(client.recv(4096)).token
    for client in clients:
        client.close()


TRAINER = """
import os, socket, sys, time
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
token = client.recv(4096)
worker = os.fork()  # a data loader's: it inherits the connection and keeps it open
if worker:
    sys.stdout.buffer.write(b"%d\\n" % worker)
    sys.stdout.flush()
time.sleep(60)
"""


def test_the_sessions_of_a_killed_process_end_while_its_worker_lives_on(
    listening: Listening,
) -> None:
    command = [sys.executable, "-c", TRAINER, str(listening.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        try:
            (peer,) = listening.peers.all()
            session_id = listening.open_session(peer)
            trainer.kill()
            wait_until(lambda: session_id in listening.server.detached)
            os.kill(worker, 0)  # it lives, and the connection with it
        finally:
            os.kill(worker, signal.SIGKILL)
    assert listening.peers.reclaims() == {"process_died": 1}
    assert listening.peers.find(peer.token) is None


@contextlib.contextmanager
def killed(listening: Listening) -> Iterator[int]:
    """A session whose process has just been killed."""
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, str(listening.path)], stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        (peer,) = listening.peers.all()
        session_id = listening.open_session(peer)
        trainer.kill()
        yield session_id


@pytest.mark.parametrize("was_done", [False, True], ids=["not done yet", "done since"])
def test_a_session_that_does_not_end_is_told_with_its_time_and_asked_for_again(
    listening: Listening,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    was_done: bool,
) -> None:
    detach, may_go_on = listening.server.detach, threading.Event()
    answers = [status_error(StatusCode.DEADLINE, "detaching is not done yet; it goes on")]
    answers += [status_error(StatusCode.FENCED, "no such session")] if was_done else []

    def slow_detach(session_id: int) -> int:
        assert may_go_on.wait(TIMEOUT_S)
        if answers:
            raise answers.pop(0)
        return detach(session_id)

    monkeypatch.setattr(listening.server, "detach", slow_detach)
    with killed(listening) as session_id:
        wait_until(lambda: listening.peers.ending_s() > 0)
        may_go_on.set()
        wait_until(lambda: listening.peers.ending_s() == 0)
    assert (session_id in listening.server.detached) == (not was_done)
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in told] == [
        "a dead process's session has not ended yet"
    ]
    assert "it goes on" in vars(told[0])["error"]


def test_a_session_that_cannot_be_ended_stays_among_those_that_are_ending(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing_detach(session_id: int) -> int:
        raise status_error(StatusCode.DEVICE, "the journal cannot be written")

    monkeypatch.setattr(listening.server, "detach", failing_detach)
    with killed(listening):
        wait_until(lambda: "session cannot be ended" in caplog.text)
    assert listening.peers.ending_s() > 0


ALONE = """
import socket, sys, time
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
client.recv(4096)
print(flush=True)
time.sleep(60)
"""


def test_nobody_waits_for_the_name_of_a_user_whose_process_died(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def slow(peer: Peer) -> dict[str, object]:
        answered.wait(2 * TIMEOUT_S)
        return {"user": str(peer.uid)}

    monkeypatch.setattr(attach, "by_whom", slow)
    command = [sys.executable, "-c", ALONE, str(listening.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        (peer,) = listening.peers.all()
        session_id = listening.open_session(peer)
        trainer.kill()
    try:
        wait_until(lambda: session_id in listening.server.detached)
    finally:
        answered.set()


def test_closed_steps_are_made_once_the_sessions_of_the_dead_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    own_start_time = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    server = FakeServer()
    job = server.open_job("job", uid=os.getuid())
    kept = [
        KeptSession(
            session_id=server.attach(job.job_id).session_id,
            job_id=job.job_id,
            pid=pid,
            start_time=start_time,
            uid=os.getuid(),
        )
        for pid, start_time in (
            (dead.pid, 1),
            (os.getpid(), own_start_time - 1),  # dead, and its number is another process's
            (os.getpid(), own_start_time),
        )
    ]
    redone = threading.Event()
    redo_steps, detach = server.redo_steps, server.detach

    def redo_and_tell() -> None:
        redo_steps()
        redone.set()

    def detach_late(session_id: int) -> int:
        redone.wait(0.2)  # who does not wait for this has redone the steps by then
        return detach(session_id)

    monkeypatch.setattr(server, "redo_steps", redo_and_tell)
    monkeypatch.setattr(server, "detach", detach_late)
    listener = AttachListener(
        attach.bind(tmp_path / "attach.sock"),
        server=as_server(server),
        peers=Peers(),
        control_address=CONTROL,
    )
    listener.adopt(kept)  # type: ignore[arg-type]  # the fake's own records
    listener.start()
    listener.stop()
    assert server.detached_before_redo == {kept[0].session_id, kept[1].session_id}


def test_without_peer_pidfds_the_number_and_the_start_time_serve(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An option that no kernel knows answers as SO_PEERPIDFD does before Linux 6.5.
    monkeypatch.setattr(attach, "_SO_PEERPIDFD", 4242)
    client, peer = listening.welcomed()
    with client:
        status = Path(f"/proc/self/fdinfo/{peer.pidfd}").read_text()
        assert f"Pid:\t{os.getpid()}\n" in status
