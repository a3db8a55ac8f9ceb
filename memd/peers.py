"""The processes that connected to the attach socket, their tokens and their sessions."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memd.owner import Owner, owner_by_uid
from memd.refusal import Quota, Refused, StatusCode
from memd.users import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A rank has one connection a session; data loaders have none. Each of these is less than the one
# before it, so that no user keeps other users out, and no process or job the others of its user:
# most nodes have one user. A connection takes two descriptors, a session two.
PEERS_MAX = 1024
PEERS_PER_UID_MAX = 128
PEERS_PER_PROCESS_MAX = 32
SESSIONS_MAX = 1024
SESSIONS_PER_UID_MAX = 256
SESSIONS_PER_JOB_MAX = 64
SESSIONS_PER_PROCESS_MAX = 32
DESCRIPTORS_MAX = 2 * PEERS_MAX + 2 * SESSIONS_MAX

# pid, start time, uid. Processes of sibling PID namespaces have no number here: then it is 0 and
# the negative inode of the pidfd, or before Linux 6.9 the connection's negative number and 0.
Process = tuple[int, int, int]

_connection_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    session_id: int
    job_id: int
    job_name: str


@dataclass(kw_only=True, slots=True, eq=False)
class Peer:
    """One connection of one process, and what the process has through it. Owned by Peers, whose
    lock guards `sessions` and `connection`."""

    pid: int
    uid: int
    pidfd: int
    connection: socket.socket | None  # None: closed by the client, which may live on
    start_time: int = 0  # clock ticks since boot; 0: not known
    pidfd_inode: int = 0  # its process's alone for as long as the machine runs; 0: not known
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    sessions: dict[int, Session] = field(default_factory=dict)
    identified: Owner | None = None  # set once, by the identity that the daemon is set to
    connection_number: int = field(default_factory=lambda: next(_connection_numbers))

    @property
    def owner(self) -> Owner:
        """The user, as long as nothing else has told whose jobs it uses."""
        return self.identified or owner_by_uid(self.uid)

    @property
    def is_known(self) -> bool:
        """Whether other connections of the process are known to be its own; else no session can be
        resumed."""
        return bool(self.start_time or self.pidfd_inode)

    @property
    def process(self) -> Process:
        """The same for all connections of one process that is known, and for those of no other."""
        if self.start_time:
            return self.pid, self.start_time, self.uid
        if self.pidfd_inode:
            return 0, -self.pidfd_inode, self.uid
        return -self.connection_number, 0, self.uid


def _name(peer: Peer) -> str:
    """Without the user's name, which may come from the network: others wait for the lock."""
    return peer.owner.tenant or f"user {peer.uid}"


class Peers:
    """Any thread may call it. A peer is there until its process dies, or until it closes its
    connection without having a session. Only the attach listener's thread removes peers and closes
    their descriptors, because it polls them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_token: dict[str, Peer] = {}
        self._reclaims: Counter[str] = Counter()
        self._ending_since_s: dict[int, float] = {}  # by session, of peers that are gone

    def add(self, peer: Peer) -> None:
        """Refused where there are too many already."""
        with self._lock:
            connected, waiting = self._places()
            # A process that connects anew to come back to its sessions takes the places of their
            # connections of before.
            if connected[peer.process] >= waiting[peer.process]:
                taken = connected | waiting  # of each process the larger number
                of_this_user = sum(
                    taken[process]
                    for process, owner in self._owners().items()
                    if owner == peer.owner.key
                )
                of_this_process = connected[peer.process]
                is_back = waiting[peer.process] > 0
                if of_this_process >= PEERS_PER_PROCESS_MAX and not is_back:
                    raise Refused(
                        StatusCode.CAPACITY,
                        f"process {peer.pid} has {of_this_process} of at most "
                        f"{PEERS_PER_PROCESS_MAX} connections; close some",
                    )
                if of_this_user >= PEERS_PER_UID_MAX or taken.total() >= PEERS_MAX:
                    raise Refused(
                        StatusCode.CAPACITY,
                        f"{_name(peer)} has {of_this_user} of at most {PEERS_PER_UID_MAX} "
                        f"connections and the daemon {taken.total()} of at most {PEERS_MAX}; close "
                        "some",
                    )
            self._by_token[peer.token] = peer

    def add_kept(self, peer: Peer) -> None:
        """At start: its sessions are there already, and who has many must not keep the daemon from
        serving others."""
        with self._lock:
            self._by_token[peer.token] = peer

    def _places(self) -> tuple[Counter[Process], Counter[Process]]:
        """How many connections each process has, and how many of its sessions have lost theirs. A
        peer with neither waits for its process to die."""
        connected: Counter[Process] = Counter()
        waiting: Counter[Process] = Counter()
        for peer in self._by_token.values():
            if peer.connection is not None:
                connected[peer.process] += 1
            elif peer.sessions:
                waiting[peer.process] += 1
        return connected, waiting

    def _owners(self) -> dict[Process, int | str]:
        return {peer.process: peer.owner.key for peer in self._by_token.values()}

    def identify(self, peer: Peer, owner: Owner) -> None:
        """The first word counts: a connection does not change its owner."""
        with self._lock:
            if peer.identified is None:
                peer.identified = owner

    def find(self, token: str) -> Peer | None:
        with self._lock:
            return self._by_token.get(token)

    def count(self) -> int:
        with self._lock:
            return len(self._by_token)

    def reclaims(self) -> Counter[str]:
        """Peers whose sessions the daemon had to end, by reason."""
        with self._lock:
            return Counter(self._reclaims)

    def session_ended(self, session_id: int) -> None:
        """One that remove() returned holds nothing any more."""
        with self._lock:
            self._ending_since_s.pop(session_id, None)

    def ending_s(self) -> float:
        """How long the sessions of peers that are gone have been ending: the oldest's time, or 0
        where all have ended."""
        with self._lock:
            oldest_s = min(self._ending_since_s.values(), default=None)
        return 0.0 if oldest_s is None else self._clock() - oldest_s

    def add_session(self, peer: Peer, session: Session) -> None:
        """Refused where the process has died meanwhile: nobody would end the session. And where
        there are too many already."""
        with self._lock:
            if peer.token not in self._by_token:
                raise Refused(StatusCode.UNAVAILABLE, f"process {peer.pid} has died")
            self._check_session(peer, session.job_id)
            peer.sessions[session.session_id] = session

    def check_session(self, peer: Peer, job_id: int) -> None:
        """Refused where a session more is too many: before anything is made for it."""
        with self._lock:
            self._check_session(peer, job_id)

    def _check_session(self, peer: Peer, job_id: int) -> None:
        of_process = of_job = of_user = of_all = 0
        for other in self._by_token.values():
            count = len(other.sessions)
            of_all += count
            of_user += count if other.owner.key == peer.owner.key else 0
            of_process += count if other.process == peer.process else 0
            of_job += sum(each.job_id == job_id for each in other.sessions.values())
        for holder, who, count, most in (
            ("process", f"process {peer.pid}", of_process, SESSIONS_PER_PROCESS_MAX),
            ("job", "this job", of_job, SESSIONS_PER_JOB_MAX),
            ("user", _name(peer), of_user, SESSIONS_PER_UID_MAX),
            ("daemon", "the daemon", of_all, SESSIONS_MAX),
        ):
            if count >= most:
                raise Refused(
                    StatusCode.CAPACITY,
                    f"{who} has {count} of at most {most} sessions; close some",
                    quota=Quota(holder=holder, what="sessions", most=most),
                )

    def session(self, peer: Peer, session_id: int) -> Session:
        with self._lock:
            session = peer.sessions.get(session_id)
        if session is None:
            raise Refused(
                StatusCode.NOT_FOUND,
                f"this connection has no session {session_id}; it was detached, or belongs to "
                "another connection: attach again",
            )
        return session

    def has_session(self, peer: Peer, job_id: int) -> bool:
        """Whether the process has a session of the job: it reads snapshots over a connection of
        their own."""
        with self._lock:
            return any(
                session.job_id == job_id
                for other in self._by_token.values()
                if other is peer or (peer.is_known and other.process == peer.process)
                for session in other.sessions.values()
            )

    def claim_session(self, peer: Peer, session_id: int) -> Session | None:
        """Moves a session to this connection of the same process; None where the process has no
        such session. It may be that of a connection which seems to be open: the process has left it
        and nobody has read its end, or a forked data loader keeps it, so that there is none."""
        with self._lock:
            if peer.token not in self._by_token or not peer.is_known:
                return None
            for other in self._by_token.values():
                if other.process == peer.process and session_id in other.sessions:
                    session = other.sessions.pop(session_id)
                    peer.sessions[session_id] = session
                    return session
            return None

    def remove_session(self, peer: Peer, session_id: int) -> None:
        with self._lock:
            peer.sessions.pop(session_id, None)

    def send(self, peer: Peer, packet: bytes, fds: Sequence[int] = ()) -> None:
        """One packet on the peer's connection, at once or not at all: OSError if it takes none."""
        with self._lock:
            if peer.connection is None:
                raise BrokenPipeError(f"process {peer.pid} closed its attach connection")
            socket.send_fds(peer.connection, [packet], list(fds))

    def close_connection(self, peer: Peer) -> bool:
        """The process may live on, and so do its sessions: whether it has any."""
        with self._lock:
            if peer.connection is not None:
                peer.connection.close()
                peer.connection = None
            return bool(peer.sessions)

    def remove(self, peer: Peer, *, reason: str) -> list[Session]:
        """The peer is gone for good; the caller ends the sessions returned, and tells
        session_ended() of each."""
        with self._lock:
            if self._by_token.pop(peer.token, None) is None:
                return []
            if peer.connection is not None:
                peer.connection.close()
                peer.connection = None
            os.close(peer.pidfd)
            sessions = list(peer.sessions.values())
            peer.sessions.clear()
            if sessions:
                self._reclaims[reason] += 1
                now_s = self._clock()
                self._ending_since_s |= {each.session_id: now_s for each in sessions}
            return sessions

    def all(self) -> list[Peer]:
        with self._lock:
            return list(self._by_token.values())


def by_whom(peer: Peer) -> dict[str, object]:
    """The user of an event of the log, the process, and the tenant where there are some."""
    tenant = {"tenant": peer.owner.tenant} if peer.owner.tenant else {}
    return {**tenant, "user": user_name(peer.uid), "uid": peer.uid, "pid": peer.pid}
