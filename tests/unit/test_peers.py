"""Peers: whose sessions they are, and who takes a place."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from memd import peers
from memd.peers import Peer, Peers, Session
from memd.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX = peers.PEERS_PER_UID_MAX


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def session(number: int) -> Session:
    return Session(session_id=number, job_id=1, job_name="kept")


def peer_of(
    connection: socket.socket | None, *, pid: int = 1, uid: int = 1000, start_time: int = 7
) -> Peer:
    return Peer(pid=pid, uid=uid, pidfd=-1, connection=connection, start_time=start_time)


def keep(known: Peers, number: int, *, pid: int = 1) -> None:
    peer = peer_of(None, pid=pid)
    peer.sessions[number] = session(number)
    known.add_kept(peer)


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("processes", [1, 1000], ids=["of one process", "of one process each"])
def test_every_session_that_was_kept_can_be_claimed_by_its_process(
    connection: socket.socket, together: bool, processes: int
) -> None:
    known = Peers()
    for number in range(MAX):
        keep(known, number, pid=number % processes)
    came = []
    for number in range(MAX):
        peer = peer_of(connection, pid=number % processes)
        known.add(peer)
        came.append((peer, number))
        if not together:
            assert known.claim_session(peer, number) == session(number)
    for peer, number in came:
        assert known.claim_session(peer, number) == session(number)
        assert known.session(peer, number) == session(number)


def test_kept_sessions_take_the_places_of_their_processes(connection: socket.socket) -> None:
    known = Peers()
    for number in range(MAX):
        keep(known, number)
    came = peer_of(connection)
    known.add(came)
    with pytest.raises(Refused, match=f"user 1000 has {MAX} of at most {MAX} connections"):
        known.add(peer_of(connection, pid=2))
    known.add(peer_of(connection, pid=2, uid=1001))
    for number in range(MAX):
        assert known.claim_session(came, number) is not None
    known.add(peer_of(connection, pid=2))


def test_one_process_leaves_connections_to_the_others_of_its_user(
    connection: socket.socket,
) -> None:
    known = Peers()
    for _ in range(peers.PEERS_PER_PROCESS_MAX):
        known.add(peer_of(connection, pid=1))
    with pytest.raises(Refused, match="process 1 has 32 of at most 32 connections"):
        known.add(peer_of(connection, pid=1))
    known.add(peer_of(connection, pid=2))


@pytest.mark.parametrize(
    ("who", "pid_of", "job_of", "uid_of", "most"),
    [
        ("process 1", 1, None, 1000, peers.SESSIONS_PER_PROCESS_MAX),
        ("this job", None, 7, 1000, peers.SESSIONS_PER_JOB_MAX),
        ("user 1000", None, None, 1000, peers.SESSIONS_PER_UID_MAX),
        ("the daemon", None, None, None, peers.SESSIONS_MAX),
    ],
)
def test_sessions_are_bounded(
    who: str, pid_of: int | None, job_of: int | None, uid_of: int | None, most: int
) -> None:
    """Each is the first bound that is met where the others are spread wide."""
    known = Peers()

    def attach(number: int) -> None:
        peer = peer_of(
            None,
            pid=number if pid_of is None else pid_of,
            uid=number if uid_of is None else uid_of,
        )
        known.add_kept(peer)
        job_id = number if job_of is None else job_of
        known.add_session(peer, Session(session_id=number, job_id=job_id, job_name=""))

    for number in range(most):
        attach(number + 10)
    with pytest.raises(Refused, match=f"{who} has {most} of at most {most} sessions"):
        attach(pid_of or 5)
    other = peer_of(None, pid=3, uid=2000)
    known.add_kept(other)
    if who != "the daemon":
        known.add_session(other, Session(session_id=3, job_id=3, job_name=""))


def test_no_number_of_kept_sessions_keeps_a_daemon_from_starting() -> None:
    known = Peers()
    for number in range(peers.PEERS_MAX + 1):
        keep(known, number)
    assert known.count() == peers.PEERS_MAX + 1


def test_a_session_whose_connection_seems_open_is_claimed_by_its_process_alone(
    connection: socket.socket,
) -> None:
    known = Peers()
    first, second = peer_of(connection), peer_of(connection)
    others = [
        peer_of(connection, pid=2),
        peer_of(connection, uid=0),
        peer_of(connection, start_time=8),
    ]
    for peer in (first, second, *others):
        known.add(peer)
    known.add_session(first, session(5))
    for other in others:
        assert known.claim_session(other, 5) is None
    assert known.claim_session(second, 5) == session(5)
    assert known.claim_session(second, 5) == session(5), "its answer may have been lost"
    with pytest.raises(Refused, match="attach again"):
        known.session(first, 5)
    assert known.claim_session(first, 6) is None


def test_processes_that_cannot_be_told_apart_claim_nothing(connection: socket.socket) -> None:
    known = Peers()
    first, second = peer_of(connection, start_time=0), peer_of(connection, start_time=0)
    known.add(first)
    known.add(second)
    known.add_session(first, session(5))
    assert known.claim_session(second, 5) is None


def test_processes_without_a_number_are_told_apart_by_their_pidfds(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS_PER_PROCESS_MAX", 2)
    monkeypatch.setattr(peers, "SESSIONS_PER_PROCESS_MAX", 1)

    def connected(inode: int) -> Peer:
        peer = Peer(pid=0, uid=0, pidfd=-1, connection=connection, pidfd_inode=inode)
        known.add(peer)
        return peer

    known = Peers()
    first, other, again = connected(7), connected(8), connected(7)
    with pytest.raises(Refused, match="has 2 of at most 2 connections"):
        connected(7)
    known.add_session(first, session(5))
    known.add_session(other, session(6))
    with pytest.raises(Refused, match="process 0 has 1 of at most 1 sessions"):
        known.check_session(again, job_id=2)
    assert known.claim_session(again, 6) is None
    assert known.claim_session(again, 5) == session(5)
    # Before Linux 6.9 nothing is the same for both of a process's connections.
    assert connected(0).process != connected(0).process


def test_a_peer_that_is_gone_has_no_session_for_calls_that_are_under_way() -> None:
    known = Peers()
    peer = Peer(pid=1, uid=1000, pidfd=os.memfd_create("pid"), connection=None, start_time=7)
    known.add(peer)
    known.add_session(peer, session(3))
    assert known.remove(peer, reason="process_died") == [session(3)]
    with pytest.raises(Refused, match="no session 3"):
        known.session(peer, 3)
    assert known.remove(peer, reason="process_died") == []


def test_the_oldest_session_that_is_ending_tells_how_long_it_has_been() -> None:
    now = [100.0]
    known = Peers(clock=lambda: now[0])
    for number in (1, 2):
        peer = Peer(pid=number, uid=1000, pidfd=os.eventfd(0), connection=None, start_time=7)
        peer.sessions[number] = session(number)
        known.add_kept(peer)
    assert known.ending_s() == 0
    for peer in known.all():
        known.remove(peer, reason="process_died")
        now[0] += 30
    assert known.ending_s() == 60
    known.session_ended(1)
    assert known.ending_s() == 30
    known.session_ended(2)
    assert known.ending_s() == 0
