"""The attach socket: who connects, tokens, descriptors, and the end of a dead process's sessions.

gRPC knows no peer credentials and carries no descriptors: ARCHITECTURE.md, "Two planes".
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from memd import __version__
from memd.identity import UidIdentity
from memd.owner import Owner, tenant_of
from memd.peers import Peer, Session, by_whom
from memd.refusal import Refused, StatusCode
from memd_native import StatusError
from memd_native.protocol import SPOKEN
from memd_proto.v1 import attach_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd.identity import Identity
    from memd.peers import Peers
    from memd_native import KeptSession, Server, SessionGrant

log = logging.getLogger(__name__)

_UCRED = struct.Struct("iII")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not name it
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_UID_MAP = Path("/proc/self/uid_map")
_UIDS_ALL = (1 << 32) - 1  # one number is no user
# The protocol's own limit for ClientPacket, of which the kinds of today need 20.
_PACKET_BYTES_MAX = 4096
# A client that knows no kinds says none.
_KINDS_OF_SEGMENTS = (
    attach_pb2.ClientPacket.KIND_UNSPECIFIED,
    attach_pb2.ClientPacket.KIND_SEGMENTS,
)
_BACKLOG = 128


class AttachListener:
    """One thread that polls the listening socket, the connections and the pidfds of the peers.

    That a process is dead is known by its pidfd. A connection's end says nothing: a forked data
    loader keeps it open for seconds after the trainer was killed.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        server: Server,
        peers: Peers,
        control_address: str,
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity or UidIdentity()
        self._server = server
        self._peers = peers
        self._control_address = control_address
        self._listening = listening
        self._listening.setblocking(False)
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Ending a session may wait for a write that is under way; others who die meanwhile, or
        # connect, do not wait for it.
        self._reclaimers = ThreadPoolExecutor(4, thread_name_prefix="memd-reclaim")
        self._thread = threading.Thread(target=self._run, name="memd-attach", daemon=True)

    def adopt(self, kept: Sequence[KeptSession]) -> None:
        """Before start(): sessions of the daemon before. They end with their processes, which may
        come back for as long as they live; those of dead ones end now, and then the steps that
        were closed before are made: no lease of the dead is in their way."""
        ending: list[Future[None]] = []
        names = {job.job_id: job.name for job in self._server.jobs()}
        for each in kept:
            session = Session(
                session_id=each.session_id,
                job_id=each.job_id,
                job_name=names.get(each.job_id, ""),
            )
            pidfd = _pidfd_of(each.pid, each.start_time)
            if pidfd is None:
                ghost = Peer(pid=each.pid, uid=each.uid, pidfd=-1, connection=None)
                ending.append(
                    self._reclaimers.submit(
                        self._reclaim, ghost, session, "process died while no daemon ran"
                    )
                )
                continue
            peer = Peer(
                pid=each.pid,
                uid=each.uid,
                pidfd=pidfd,
                connection=None,
                start_time=each.start_time,
                sessions={session.session_id: session},
                identified=self._owner_of(each.uid, session.job_name),
            )
            self._peers.add_kept(peer)
            self._watch(pidfd, partial(self._end, peer, reason="process died"))
            log.info(
                "session kept",
                extra={
                    "session": session.session_id,
                    "job": session.job_name,
                    "pid": each.pid,
                    "uid": each.uid,
                },
            )
        wait(ending)
        self._server.redo_steps()

    def _owner_of(self, uid: int, job_name: str) -> Owner | None:
        """The owner of a kept session, for the limits."""
        if isinstance(self._identity, UidIdentity):
            return None
        return Owner(uid=uid, tenant=tenant_of(job_name))

    def start(self) -> None:
        self._watch(self._listening.fileno(), self._accept)
        self._watch(self._wake, self._drop_listening)
        self._thread.start()

    def stop_accepting(self) -> None:
        """Peers and their sessions stay."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Closes every connection; the sessions are left to the end of the server."""
        self._is_stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._listening.close()
        self._reclaimers.shutdown()
        for peer in self._peers.all():
            self._peers.remove(peer, reason="stopped")
        self._selector.close()
        os.close(self._wake)

    def _watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def _run(self) -> None:
        while not self._is_stopping:
            for key, _ in self._selector.select():
                # An event earlier in this round may have ended what this one is about.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def _drop_listening(self) -> None:
        os.eventfd_read(self._wake)
        if self._listening.fileno() >= 0:
            self._selector.unregister(self._listening.fileno())
            self._listening.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has given up meanwhile
        except OSError as error:
            log.error("an attach connection cannot be accepted", extra={"reason": str(error)})
            time.sleep(0.05)  # out of descriptors: the listening socket stays readable
            return
        connection.setblocking(False)
        try:
            peer = _identify(connection)
        except OSError as error:
            log.warning("an attaching process cannot be identified", extra={"reason": str(error)})
            connection.close()
            return
        except Refused as refused:
            self._refuse(connection, refused)
            return
        self._welcome(peer, connection)

    def _refuse(self, connection: socket.socket, refused: Refused, **values: int) -> None:
        log.warning("connection refused", extra={**values, "reason": str(refused)})
        welcome = _first_words()
        welcome.refusal = str(refused)
        _send_or_forget(connection, welcome.SerializeToString())
        connection.close()

    def _welcome(self, peer: Peer, connection: socket.socket) -> None:
        welcome = _first_words()
        try:
            peer.identified = self._identity.of_peer(peer)
            self._peers.add(peer)
        except Refused as refused:
            self._refuse(connection, refused, uid=peer.uid)
            os.close(peer.pidfd)
            return
        welcome.daemon_version = __version__
        welcome.token = peer.token
        welcome.control_address = self._control_address
        welcome.takes_kinds = True
        self._watch(connection.fileno(), lambda: self._read(peer, connection))
        self._watch(peer.pidfd, lambda: self._end(peer, reason="process died"))
        _send_or_forget(connection, welcome.SerializeToString())
        log.debug("client connected", extra={"pid": peer.pid, "uid": peer.uid})

    def _read(self, peer: Peer, connection: socket.socket) -> None:
        try:
            packet, _, flags, _ = connection.recvmsg(_PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet:
            self._close_connection(peer, connection)
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise ValueError(f"a packet is longer than {_PACKET_BYTES_MAX} bytes")
            self._answer(peer, attach_pb2.ClientPacket.FromString(packet))
        except (DecodeError, ValueError, Refused, StatusError, OSError) as error:
            # Only this connection is closed: the process is alive, and keeps its leases.
            log.warning(
                "attach connection closed after a bad packet",
                extra={"pid": peer.pid, "uid": peer.uid, "reason": str(error)},
            )
            self._close_connection(peer, connection)

    def _answer(self, peer: Peer, packet: attach_pb2.ClientPacket) -> None:
        if packet.kind in _KINDS_OF_SEGMENTS:
            self._send_segments(peer, packet)
            return
        answer = attach_pb2.Descriptors(
            kind=attach_pb2.Descriptors.KIND_REFUSED,
            refusal=f"this daemon (memd {__version__}) knows no packets of kind {packet.kind}; the "
            "client is newer: install its version of memd for the daemon",
        )
        self._peers.send(peer, answer.SerializeToString())

    def _send_segments(self, peer: Peer, wanted: attach_pb2.ClientPacket) -> None:
        session = self._peers.session(peer, wanted.session_id)
        fds = self._server.segment_fds(session.session_id, wanted.segment_first)
        answer = attach_pb2.Descriptors(
            kind=attach_pb2.Descriptors.KIND_SEGMENTS,
            session_id=session.session_id,
            segment_first=wanted.segment_first,
            segment_count=len(fds),
        )
        try:
            self._peers.send(peer, answer.SerializeToString(), fds)
        finally:
            _close_all(fds)

    def _close_connection(self, peer: Peer, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        if not self._peers.close_connection(peer):
            self._end(peer, reason="connection closed")

    def _end(self, peer: Peer, *, reason: str) -> None:
        """The peer has died, or has closed its connection and has no session."""
        if peer.connection is not None:
            self._selector.unregister(peer.connection)
        self._selector.unregister(peer.pidfd)
        for session in self._peers.remove(peer, reason=reason.replace(" ", "_")):
            self._reclaimers.submit(self._reclaim, peer, session, reason)

    def _reclaim(self, peer: Peer, session: Session, reason: str) -> None:
        began = time.monotonic()
        error: StatusError | None = None
        leases = 0
        try:
            leases = self._ended(session)
        except StatusError as failed:
            error = failed
        took_ms = round((time.monotonic() - began) * 1e3, 1)
        # The name of its user may take long: others wait for what the session held.
        values = {
            "session": session.session_id,
            "job": session.job_name,
            **by_whom(peer),
            "reason": reason,
        }
        if error is not None:
            log.error("session cannot be ended", extra={**values, "error": str(error)})
            return
        log.info(
            "session ended for its process", extra={**values, "leases": leases, "took_ms": took_ms}
        )

    def _ended(self, session: Session) -> int:
        """How many leases it held. It is among those of peers.ending_s() until it holds nothing."""
        is_asked_again = False
        while True:
            try:
                leases = self._server.detach(session.session_id)
            except StatusError as failed:
                if failed.code == StatusCode.DEADLINE and not self._is_stopping:
                    self._tell_that_it_takes_long(session, failed)
                    is_asked_again = True
                    continue
                if failed.code != StatusCode.FENCED:
                    raise
                # The store has no such session.
                self._peers.session_ended(session.session_id)
                if not is_asked_again:
                    raise
                return 0  # what was asked before is done
            self._peers.session_ended(session.session_id)
            return leases

    def _tell_that_it_takes_long(self, session: Session, failed: StatusError) -> None:
        log.error(
            "a dead process's session has not ended yet",
            extra={
                "session": session.session_id,
                "job": session.job_name,
                "error": str(failed),
            },
        )


def send_session(peers: Peers, peer: Peer, grant: SessionGrant) -> None:
    """Passes what a session shares. OSError where the client does not take it."""
    fds = (grant.session_fd, grant.table_fd, grant.doorbell_fd)
    answer = attach_pb2.Descriptors(
        kind=attach_pb2.Descriptors.KIND_SESSION, session_id=grant.session_id
    )
    peers.send(peer, answer.SerializeToString(), fds)


def send_export(peers: Peers, peer: Peer, reading_id: int, fds: tuple[int, int]) -> None:
    """Passes the memory and the socket of an export. OSError where the client does not take it."""
    answer = attach_pb2.Descriptors(kind=attach_pb2.Descriptors.KIND_EXPORT, reading_id=reading_id)
    peers.send(peer, answer.SerializeToString(), fds)


def bind(path: Path) -> socket.socket:
    """Listens at `path`, mode 0660. The caller knows that nobody else does."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The mode of a socket is that of its creation: nobody can connect before a chmod.
    mask = os.umask(0o117)
    try:
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(mask)
    return listening


def _first_words() -> attach_pb2.Welcome:
    spoken = types_pb2.ProtocolRange(oldest=SPOKEN.oldest, newest=SPOKEN.newest)
    return attach_pb2.Welcome(protocol_version=SPOKEN.newest, protocol_range=spoken)


def _identify(connection: socket.socket) -> Peer:
    """OSError where the process has gone already; Refused where nothing tells it from others."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    if _may_be_unmapped(uid):
        raise Refused(
            StatusCode.PERMISSION_DENIED,
            f"the user of this process has no number in the daemon's user namespace, where it "
            f"shows as {uid}, as all such users do; map it there, or run the daemon in the "
            "machine's own user namespace",
        )
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        if pid == 0:
            raise Refused(
                StatusCode.PERMISSION_DENIED,
                "this process has no number in the daemon's PID namespace, and this kernel hands "
                "out no pidfd of it (SO_PEERPIDFD); use Linux 6.5 or newer, or let the daemon "
                "share the machine's PID namespace (hostPID)",
            ) from error
        pidfd = _pidfd_by_number(pid)
    return Peer(
        pid=pid,
        uid=uid,
        pidfd=pidfd,
        connection=connection,
        start_time=_start_time_or_none(pid),
        pidfd_inode=_inode_or_none(pidfd),
    )


def _may_be_unmapped(uid: int) -> bool:
    """The kernel shows users whom this namespace does not map as one, whom it may map too."""
    if uid != int(_OVERFLOW_UID.read_text(encoding="utf-8")):
        return False
    counts = [int(line.split()[2]) for line in _UID_MAP.read_text(encoding="utf-8").splitlines()]
    return sum(counts) < _UIDS_ALL


def _inode_or_none(pidfd: int) -> int:
    """0 before Linux 6.9, where all pidfds share an inode with other anonymous descriptors."""
    inode, device = os.fstat(pidfd).st_ino, os.fstat(pidfd).st_dev
    anonymous = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return 0 if os.fstat(anonymous).st_dev == device else inode
    finally:
        os.close(anonymous)


def _pidfd_of(pid: int, start_time: int) -> int | None:
    """None where that process is dead, whoever has its number now."""
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, ValueError, OSError):
        return None
    if start_time and _start_time_or_none(pid) == start_time:
        return pidfd
    os.close(pidfd)
    return None


def _start_time_or_none(pid: int) -> int:
    """0 for a process that this one cannot see, in another pid namespace."""
    try:
        return _start_time(pid)
    except (OSError, IndexError):
        return 0


def _pidfd_by_number(pid: int) -> int:
    """Before Linux 6.5. The number could be another process's by the time it is opened; then the
    start time that /proc shows differs before and after."""
    started = _start_time(pid)
    pidfd = os.pidfd_open(pid)
    if _start_time(pid) != started:
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has been replaced by another one")
    return pidfd


def _start_time(pid: int) -> int:
    """In clock ticks since boot."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # Field 22, counted after the command's name, which may hold spaces and brackets.
    return int(text.rpartition(")")[2].split()[19])


def _send_or_forget(connection: socket.socket, packet: bytes) -> None:
    """A client that has closed its end already is noticed by the poll."""
    try:
        connection.send(packet)
    except OSError as error:
        log.debug("a client does not wait for its welcome", extra={"reason": str(error)})


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
