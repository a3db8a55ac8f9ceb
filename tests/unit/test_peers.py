"""Peers: whose sessions they are, and who takes a place."""

from __future__ import annotations

import socket
from contextlib import closing

from memd import peers
from memd.peers import Peer, Peers, Session


def test_every_session_that_was_kept_can_be_claimed_by_its_process() -> None:
    known = Peers()
    count = peers.PEERS_PER_UID_MAX - 8
    for number in range(count):
        session = Session(session_id=number, job_id=1, job_name="kept")
        known.add(
            Peer(
                pid=1,
                uid=1000,
                pidfd=-1,
                connection=None,
                start_time=7,
                sessions={number: session},
            )
        )
    with closing(socket.socket()) as connection:
        for number in range(count):
            peer = Peer(pid=1, uid=1000, pidfd=-1, connection=connection, start_time=7)
            known.add(peer)
            claimed = known.claim_session(peer, number)
            assert claimed is not None
            assert claimed.session_id == number
