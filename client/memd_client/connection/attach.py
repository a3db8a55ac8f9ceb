"""The attach socket: it identifies this process, and carries descriptors of shared memory."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING

from memd_client.errors import (
    DaemonUnavailable,
    InvalidArgument,
    MemdError,
    NotYet,
    PermissionDenied,
)
from memd_native.protocol import SPOKEN, versions_said
from memd_proto.v1 import attach_pb2

if TYPE_CHECKING:
    from memd_client.base.address import UnixAddress

_PACKET_BYTES_MAX = 64 * 1024
_DESCRIPTORS_MAX = 64
_UCRED = struct.Struct("iII")  # pid, uid, gid
# The daemon answers an attach within milliseconds, even while it serves others.
_TIMEOUT_S = 30.0


class AttachConnection:
    """One process's connection to `attach.sock`. It stays open for as long as the session lives,
    since descriptors of later arena segments arrive through it. Any thread may call.
    """

    def __init__(self, address: UnixAddress) -> None:
        self._lock = threading.Lock()  # one question and its answer at a time
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_TIMEOUT_S)
            self._connect(address)
            self._daemon_process_id = self._peer_process_id()
            self._welcome = self._receive_welcome()
            self._protocol_version = self._agree()
        except BaseException:
            self._socket.close()
            raise

    @property
    def daemon_process_id(self) -> int:
        return self._daemon_process_id

    @property
    def token(self) -> str:
        """Sent with every call on the control socket."""
        return self._welcome.token

    @property
    def control_address(self) -> str:
        return self._welcome.control_address

    @property
    def daemon_version(self) -> str:
        return self._welcome.daemon_version

    @property
    def protocol_version(self) -> int:
        """The newest that both sides speak: a new session's."""
        return self._protocol_version

    def session_descriptors(self, session_id: int) -> tuple[int, int, int]:
        """Descriptors of session memory, shard table and doorbell, which the daemon sends after
        Attach. The caller owns them.
        """
        with self._lock:
            descriptors, fds = self._receive_descriptors()
        expected = descriptors.kind == attach_pb2.Descriptors.KIND_SESSION
        if not expected or descriptors.session_id != session_id or len(fds) != 3:
            _close_all(fds)
            raise DaemonUnavailable(
                f"the daemon sent descriptors that are not those of session {session_id}"
            )
        return fds[0], fds[1], fds[2]

    def reading_descriptors(self, reading_id: int) -> tuple[int, int]:
        """Descriptors of the memory and the socket of a snapshot's reading, which the daemon sends
        before the first answer. The caller owns them."""
        with self._lock:
            descriptors, fds = self._receive_descriptors()
        expected = descriptors.kind == attach_pb2.Descriptors.KIND_EXPORT
        if not expected or descriptors.reading_id != reading_id or len(fds) != 2:
            _close_all(fds)
            raise DaemonUnavailable(
                f"the daemon sent descriptors that are not those of reading {reading_id}"
            )
        return fds[0], fds[1]

    def ask(self, packet: attach_pb2.ClientPacket) -> tuple[attach_pb2.Descriptors, list[int]]:
        """The daemon's answer, with descriptors that the caller owns. Raises NotYet if the daemon
        does not know such packets; the connection can still be used.
        """
        is_old_kind = packet.kind == attach_pb2.ClientPacket.KIND_SEGMENTS
        if not is_old_kind and not self._welcome.takes_kinds:
            # It would take the packet for one that asks for segments.
            raise NotYet(
                f"the daemon (memd {self.daemon_version}) is older than this client and knows no "
                f"packets of kind {packet.kind}; install the client's version of memd for it"
            )
        with self._lock:
            self._socket.send(packet.SerializeToString())
            descriptors, fds = self._receive_descriptors()
        if descriptors.kind == attach_pb2.Descriptors.KIND_REFUSED:
            _close_all(fds)
            raise NotYet(f"the daemon refuses a packet: {descriptors.refusal}")
        return descriptors, fds

    def segments(self, session_id: int, first: int) -> list[int]:
        """Descriptors of the arena's segments from `first` on, at most 64. The caller owns them."""
        descriptors, fds = self.ask(
            attach_pb2.ClientPacket(
                kind=attach_pb2.ClientPacket.KIND_SEGMENTS,
                session_id=session_id,
                segment_first=first,
            )
        )
        expected = descriptors.kind == attach_pb2.Descriptors.KIND_SEGMENTS
        if (
            not expected
            or descriptors.segment_first != first
            or len(fds) != descriptors.segment_count
        ):
            _close_all(fds)
            raise DaemonUnavailable(
                f"the daemon sent descriptors that are not those of segments from {first} on"
            )
        return fds

    def duplicate(self) -> int:
        """Another descriptor of the connection, which the caller owns. It hangs up when the daemon
        dies."""
        return os.dup(self._socket.fileno())

    def is_closed_there(self) -> bool:
        """Whether the daemon has closed its end. It has usually ended then. A living daemon closes
        it after an invalid packet, or if it cannot send the answer."""
        other_end = select.poll()
        try:
            other_end.register(self._socket, 0)
        except ValueError:
            return False  # closed here
        return bool(other_end.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _connect(self, address: UnixAddress) -> None:
        try:
            self._socket.connect(str(address.attach_socket))
        except PermissionError as error:
            raise PermissionDenied(
                f"the daemon's socket {address.attach_socket} may not be opened; join its group: "
                f"{error.strerror}"
            ) from error
        except OSError as error:
            raise DaemonUnavailable(
                f"no daemon answers at {address} ({address.attach_socket}: "
                f"{error.strerror or error}); start one with `memd serve`, name its socket with "
                "MEMD_ADDRESS, or use a private one: connect('embedded:', ...)"
            ) from error

    def _peer_process_id(self) -> int:
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(credentials)[0])

    def _receive_welcome(self) -> attach_pb2.Welcome:
        return attach_pb2.Welcome.FromString(self._receive()[0])

    def _agree(self) -> int:
        welcome = self._welcome
        spoken = versions_said(
            welcome.protocol_version,
            oldest=welcome.protocol_range.oldest,
            newest=welcome.protocol_range.newest,
        )
        agreed = SPOKEN.agreed_with(spoken)
        if agreed is None:
            raise InvalidArgument(
                "client and daemon speak different protocol versions; install the same version of "
                f"memd for both: {SPOKEN} here, {spoken} there (daemon "
                f"{welcome.daemon_version or 'unknown'})"
            )
        if welcome.refusal:
            raise PermissionDenied(f"the daemon refuses this process: {welcome.refusal}")
        return agreed

    def _receive_descriptors(self) -> tuple[attach_pb2.Descriptors, list[int]]:
        packet, fds = self._receive()
        return attach_pb2.Descriptors.FromString(packet), fds

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            packet, fds, flags, _ = socket.recv_fds(
                self._socket, _PACKET_BYTES_MAX, _DESCRIPTORS_MAX
            )
        except TimeoutError as error:
            raise DaemonUnavailable(
                f"the daemon did not answer on its attach socket within {_TIMEOUT_S:.0f} s"
            ) from error
        except OSError as error:
            # It ended before it had accepted the connection.
            raise DaemonUnavailable(
                f"the daemon ended while this process attached: {error.strerror or error}; start "
                "it, and connect again"
            ) from error
        if not packet:
            raise DaemonUnavailable(
                "the daemon closed the attach socket; see its log, and connect again"
            )
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close_all(fds)
            raise MemdError(
                "a packet from the daemon was truncated; is the limit of open files (ulimit -n) "
                f"too small? {len(fds)} descriptors arrived"
            )
        return packet, fds


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
