"""Client and daemon of different versions on the attach socket: each runs whole, and the daemon's
native part is faked."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import memd_client
from memd import attach
from memd.attach import AttachListener, send_session
from memd.peers import Peers, Session
from memd.service import session as session_service
from memd.service.control import ControlServer
from memd_client.base.address import UnixAddress
from memd_client.connection import attach as attach_module
from memd_client.connection.attach import AttachConnection
from memd_client.connection.control import Control
from memd_native import PROTOCOL_VERSION
from memd_native.protocol import ProtocolVersions
from memd_proto.v1 import attach_pb2, session_pb2
from tests.unit.fake_native import FakeServer, as_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEWER_KIND = 99
# Field 999, which nobody knows, with the bytes "new".
NEWER_FIELD = b"\xba\x3e\x03new"


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[AttachConnection, int]]:
    """A client and its session."""
    server, peers = FakeServer(), Peers()
    address = UnixAddress(socket=tmp_path / "memd.sock")
    listening = attach.bind(address.attach_socket)
    listener = AttachListener(
        listening, server=as_server(server), peers=peers, control_address="unix:///nowhere"
    )
    listener.start()
    connection = AttachConnection(address)
    peer = peers.find(connection.token)
    assert peer is not None
    job = server.open_job("job", uid=peer.uid)
    grant = server.attach(job.job_id)
    peers.add_session(peer, Session(session_id=grant.session_id, job_id=job.job_id, job_name="job"))
    send_session(peers, peer, grant)  # type: ignore[arg-type]  # the fake's own record
    close_all(connection.session_descriptors(grant.session_id))
    yield connection, grant.session_id
    connection.close()
    listener.stop()


def close_all(fds: tuple[int, ...] | list[int]) -> None:
    for fd in fds:
        os.close(fd)


def newer_packet(session_id: int) -> attach_pb2.ClientPacket:
    packet = attach_pb2.ClientPacket(session_id=session_id)
    packet.kind = NEWER_KIND  # type: ignore[assignment]  # no member yet
    return packet


def test_a_packet_that_the_daemon_does_not_know_is_an_error_and_the_next_one_is_answered(
    connected: tuple[AttachConnection, int],
) -> None:
    connection, session_id = connected
    with pytest.raises(memd_client.NotYet, match=r"this daemon .* knows no packets of kind 99"):
        connection.ask(newer_packet(session_id))
    fds = connection.segments(session_id, 7)
    close_all(fds)
    assert fds
    assert not connection.is_closed_there()


def test_a_clients_packet_with_more_fields_is_answered(
    connected: tuple[AttachConnection, int],
) -> None:
    connection, session_id = connected
    plain = attach_pb2.ClientPacket(
        kind=attach_pb2.ClientPacket.KIND_SEGMENTS, session_id=session_id, segment_first=7
    )
    grown = attach_pb2.ClientPacket.FromString(plain.SerializeToString() + NEWER_FIELD)
    assert grown != plain
    descriptors, fds = connection.ask(grown)
    close_all(fds)
    assert (descriptors.kind, descriptors.segment_count) == (
        attach_pb2.Descriptors.KIND_SEGMENTS,
        len(fds),
    )


@contextmanager
def daemon_that_says(
    welcome: attach_pb2.Welcome, folder: Path
) -> Iterator[tuple[AttachConnection, socket.socket]]:
    """A client, and the other end of its connection."""
    address = UnixAddress(socket=folder / "memd.sock")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        ThreadPoolExecutor(1) as daemon,
    ):
        listener.settimeout(5)
        listener.bind(str(address.attach_socket))
        listener.listen()

        def accept() -> socket.socket:
            far_end, _ = listener.accept()
            far_end.send(welcome.SerializeToString())
            return far_end

        accepted = daemon.submit(accept)
        connection = AttachConnection(address)
        with accepted.result() as far_end:
            far_end.settimeout(5)
            yield connection, far_end
        connection.close()


def older_welcome() -> attach_pb2.Welcome:
    """As daemons sent it before packets had a kind."""
    return attach_pb2.Welcome(protocol_version=PROTOCOL_VERSION, daemon_version="0.0.9")


def test_a_daemon_that_knows_no_kinds_gets_no_packet_that_it_would_misread(tmp_path: Path) -> None:
    with daemon_that_says(older_welcome(), tmp_path) as (connection, far_end):
        with pytest.raises(memd_client.NotYet, match=r"memd 0\.0\.9\) is older.*kind 99"):
            connection.ask(newer_packet(session_id=5))
        far_end.setblocking(False)
        with pytest.raises(BlockingIOError):
            far_end.recv(4096)


def test_a_daemon_that_knows_no_kinds_is_asked_for_segments_as_ever(tmp_path: Path) -> None:
    answer = attach_pb2.Descriptors(kind=attach_pb2.Descriptors.KIND_SEGMENTS, segment_first=7)
    with daemon_that_says(older_welcome(), tmp_path) as (connection, far_end):
        # A newer daemon's answer, with a field more, is taken as well.
        far_end.send(answer.SerializeToString() + NEWER_FIELD)
        assert connection.segments(5, 7) == []
        # It reads at most 256 bytes.
        wanted = attach_pb2.SegmentsWanted.FromString(far_end.recv(256))
    assert (wanted.session_id, wanted.segment_first) == (5, 7)


@pytest.mark.parametrize(
    ("daemon", "client", "agreed"),
    [
        ((4, 5), (4, 5), 5),
        ((4, 5), (3, 4), 4),  # an older client
        ((3, 4), (4, 5), 4),  # an older daemon
        ((4, 6), (5, 9), 6),
        ((4, 9), (5, 6), 6),
        ((4, 5), (6, 7), None),
        ((6, 7), (4, 5), None),
    ],
)
def test_both_sides_find_the_same_version_or_part_with_both_ranges_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemon: tuple[int, int],
    client: tuple[int, int],
    agreed: int | None,
) -> None:
    here, there = (ProtocolVersions(oldest=each[0], newest=each[1]) for each in (client, daemon))
    # The package has a function of that name.
    for module in (sys.modules[memd_client.connect.__module__], attach_module):
        monkeypatch.setattr(module, "SPOKEN", here)
    for module in (attach, session_service):
        monkeypatch.setattr(module, "SPOKEN", there)
    with daemon_at(tmp_path) as address:
        if agreed is None:
            with pytest.raises(memd_client.InvalidArgument, match=f"{here} here, {there} there"):
                memd_client.connect(str(address), job="job", shared_memory=False)
            return
        answers: list[session_pb2.AttachResponse] = []
        keep_answer(monkeypatch, answers)
        memd_client.connect(str(address), job="job", shared_memory=False).close()
    assert [answer.protocol_version for answer in answers] == [agreed]


@contextmanager
def daemon_at(folder: Path) -> Iterator[UnixAddress]:
    """Both its sockets."""
    address = UnixAddress(socket=folder / "memd.sock")
    server, peers = FakeServer(), Peers()
    control = ControlServer(as_server(server), peers=peers, jobs_max=lambda: 8)
    control.listen(address.socket)
    listener = AttachListener(
        attach.bind(address.attach_socket),
        server=as_server(server),
        peers=peers,
        control_address=f"unix://{address.socket}",
    )
    listener.start()
    try:
        yield address
    finally:
        control.stop(grace_s=1)
        listener.stop()


def keep_answer(monkeypatch: pytest.MonkeyPatch, answers: list[session_pb2.AttachResponse]) -> None:
    attach_to = Control.attach

    def attach_and_keep(
        control: Control, request: session_pb2.AttachRequest
    ) -> session_pb2.AttachResponse:
        answers.append(attach_to(control, request))
        return answers[-1]

    monkeypatch.setattr(Control, "attach", attach_and_keep)
