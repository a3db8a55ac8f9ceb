"""systemd's service protocol, sd_notify(3) and sd_listen_fds(3): a datagram and three variables."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_FD = 3


class Notifier:
    """Tells systemd how we are. Does nothing where nobody asked for it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        self.watchdog_s = _watchdog_s(environ)

    def notify(self, **states: str | int) -> None:
        """`notify(READY=1, STATUS="...")`."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in states.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
            datagram.sendto(text.encode(), self._address)

    def connected(self) -> socket.socket:
        """A socket of the caller's own, for who sends descriptors. OSError where nobody listens."""
        datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            datagram.connect(self._address)
        except OSError:
            datagram.close()
            raise
        return datagram


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """How often systemd wants to hear of us, or None."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    interval_us = int(environ.get("WATCHDOG_USEC", "0"))
    return interval_us / 1e6 if interval_us else None


def offers_store(environ: Mapping[str, str]) -> bool:
    """Whether systemd keeps descriptors of this service (FileDescriptorStoreMax=). It says so since
    version 254; for an older one the unit does, with MEMD_FDSTORE."""
    if not environ.get("NOTIFY_SOCKET"):
        return False
    return environ.get("FDSTORE", "0") not in ("", "0") or environ.get("MEMD_FDSTORE") == "1"


def passed_descriptors(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Descriptors that systemd passed, by name: sockets that it listens on, and its store's.
    Children inherit them until the caller changes that."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    count = int(environ.get("LISTEN_FDS", "0"))
    return [
        (names[index] if index < len(names) else "", _FIRST_FD + index) for index in range(count)
    ]


def listening_socket(environ: Mapping[str, str], name: str) -> socket.socket | None:
    """The listening socket that systemd passed under this name; None where it passed none."""
    for passed, fd in passed_descriptors(environ):
        if passed == name:
            os.set_inheritable(fd, False)
            return socket.socket(fileno=fd)
    return None
