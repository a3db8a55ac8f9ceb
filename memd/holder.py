"""A small process that keeps the daemon's descriptors, where systemd's store is not there.

Memory that only descriptors refer to is freed with the last of them. This process has copies, so
that a daemon that is killed, restarted or upgraded finds its memory again. It speaks systemd's
words (`FDSTORE=1`, `FDSTOREREMOVE=1`, sd_notify(3)) on packets, maps nothing and reads nothing of
what it keeps, and needs only the standard library: it runs with `python -I -S`, a few MiB.

One holder a control socket. It ends when the daemon says so, when the folder of its socket
vanishes, or when no daemon has come for the configured time: then the memory is freed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Descriptors of one packet; the kernel takes 253.
DESCRIPTORS_MAX = 64
PACKET_BYTES_MAX = 16 * 1024
END = b"HOLDER_END=1\n"
_NAMES = "FDNAMES="
_COUNT = "FDCOUNT="
_UCRED = struct.Struct("iII")  # pid, uid, gid
# How often a holder without a daemon looks whether its socket is still there.
_LOOK_S = 2.0
# For a daemon that died, until its last packet and the end of its connection are read; and for one
# that takes what is kept.
_PATIENCE_S = 30.0

_log_format = "text"


class Holder:
    def __init__(
        self, listening: socket.socket, daemon: socket.socket | None, *, path: Path, seconds: float
    ) -> None:
        self._listening = listening
        self._daemon = daemon
        self._path = path
        self._seconds = seconds
        self._kept: dict[str, int] = {}
        self._is_over = False
        self._file = _identity(path)

    def run(self) -> str:
        """Why it ended."""
        selector = selectors.DefaultSelector()
        selector.register(self._listening, selectors.EVENT_READ)
        if self._daemon is not None:
            selector.register(self._daemon, selectors.EVENT_READ)
        deadline = time.monotonic() + self._seconds
        while not self._was_told_to_end():
            events = selector.select(None if self._daemon is not None else _LOOK_S)
            for key, _ in events:
                if self._was_told_to_end():
                    # A daemon that has connected by now is reset when this process ends, and starts
                    # a holder of its own: by then the socket here is removed.
                    break
                if key.fileobj is self._listening:
                    came = self._accept()
                    if came is None:
                        continue
                    if self._daemon is not None:
                        selector.unregister(self._daemon)
                        self._read_to_the_end(self._daemon)
                    self._daemon = came
                    if self._was_told_to_end():
                        continue
                    if self._hand_over(came):
                        selector.register(came, selectors.EVENT_READ)
                    else:
                        self._daemon = None
                        deadline = time.monotonic() + self._seconds
                elif key.fileobj is self._daemon and not self._read(self._daemon):
                    selector.unregister(self._daemon)
                    self._daemon.close()
                    self._daemon = None
                    deadline = time.monotonic() + self._seconds
            if self._daemon is None and not self._was_told_to_end():
                if self._file is None or _identity(self._path) != self._file:
                    return "the folder of its socket has vanished"
                if time.monotonic() > deadline:
                    return f"no daemon came for {self._seconds:g} s"
        return "the daemon stopped and no session is alive"

    @property
    def count(self) -> int:
        return len(self._kept)

    def remove_socket(self) -> None:
        if self._file is not None and _identity(self._path) == self._file:
            self._path.unlink(missing_ok=True)

    def _was_told_to_end(self) -> bool:
        return self._is_over

    def _accept(self) -> socket.socket | None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        uid = _UCRED.unpack(credentials)[1]
        if uid != os.geteuid():
            _say("warning", "a daemon of another user was refused", uid=uid)
            connection.close()
            return None
        connection.settimeout(_PATIENCE_S)
        return connection

    def _read(self, daemon: socket.socket) -> bool:
        """One packet; False at the connection's end."""
        try:
            packet, fds, flags, _ = socket.recv_fds(daemon, PACKET_BYTES_MAX, DESCRIPTORS_MAX)
        except OSError:
            return False
        if not packet:
            return False
        if packet == END:
            self._is_over = True
            return True
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _say(
                "error",
                "a descriptor did not come through; is the limit of open files too small?",
                descriptors=self.count,
            )
        lines = packet.decode(errors="replace").splitlines()
        words = dict(line.split("=", 1) for line in lines if "=" in line)
        name = words.get("FDNAME", "")
        if words.get("FDSTORE") == "1" and name and len(fds) == 1:
            self._forget(name)
            self._kept[name] = fds[0]
            return True
        for fd in fds:
            os.close(fd)
        if words.get("FDSTOREREMOVE") == "1":
            self._forget(name)
        return True

    def _read_to_the_end(self, daemon: socket.socket) -> None:
        """The last words of a dead daemon still count. One daemon a socket: the one that connects
        holds its lock, so this one is ending."""
        daemon.settimeout(_PATIENCE_S)
        while self._read(daemon):
            pass
        daemon.close()

    def _hand_over(self, daemon: socket.socket) -> bool:
        names = list(self._kept)
        try:
            for first in range(0, len(names), DESCRIPTORS_MAX):
                part = names[first : first + DESCRIPTORS_MAX]
                packet = (_NAMES + ":".join(part) + "\n").encode()
                _send(daemon, packet, [self._kept[name] for name in part])
            _send(daemon, f"{_COUNT}{len(names)}\n".encode(), [])
        except OSError as error:
            _say("error", "a daemon did not take what is kept", reason=error)
            daemon.close()
            return False
        return True

    def _forget(self, name: str) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)


def take(connection: socket.socket) -> list[tuple[str, int]]:
    """For the daemon: names and descriptors that the holder has. The caller owns them. OSError or
    ValueError where they do not come through."""
    taken: list[tuple[str, int]] = []
    received: list[int] = []
    try:
        while True:
            packet, fds, flags, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, DESCRIPTORS_MAX)
            received += fds  # with or without a name
            if not packet:
                raise ConnectionResetError(errno.ECONNRESET, "the holder has ended")
            text = packet.decode().rstrip("\n")
            if text.startswith(_COUNT):
                if int(text.removeprefix(_COUNT)) != len(received):
                    raise ValueError(f"{len(taken)} descriptors came, and {text}")
                return taken
            names = text.removeprefix(_NAMES).split(":")
            taken += zip(names, fds, strict=False)
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(names) != len(fds):
                raise ValueError(
                    "descriptors did not come through; is the limit of open files (ulimit -n) too "
                    f"small? {len(fds)} of {len(names)}"
                )
    except BaseException:
        for fd in received:
            os.close(fd)
        raise


def _send(connection: socket.socket, packet: bytes, fds: list[int]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.send_fds(connection, [packet], fds)
        except OSError as error:
            # Too many descriptors of this user are on their way: nothing tells when fewer are.
            if (
                error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS)
                or time.monotonic() > deadline
            ):
                raise
            time.sleep(0.01)
        else:
            return


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _say(level: str, event: str, **values: object) -> None:
    """One event a line, as the daemon's log: see log.py, which this process cannot import."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    record: dict[str, Any] = {"time": moment, "level": level, "event": event}
    record |= {"logger": "memd.holder", "pid": os.getpid(), **values}
    # The reader of our output may be gone.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line_of(record, log_format=_log_format)}\n")
        sys.stderr.flush()


def line_of(record: dict[str, Any], *, log_format: str) -> str:
    if log_format == "json":
        return json.dumps(record, default=str)
    return " ".join(f"{name}={_quoted(value)}" for name, value in record.items())


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' ="') else json.dumps(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="memd-holder", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--listening-fd", type=int, required=True)
    parser.add_argument("--daemon-fd", type=int, required=True)
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    global _log_format  # of the process: whatever goes wrong is said in it
    _log_format = arguments.log_format
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("memd-holder", encoding="utf-8")
    # Signals of a terminal or of a daemon's group are not for us; our own session keeps most away.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    holder = Holder(
        socket.socket(fileno=arguments.listening_fd),
        socket.socket(fileno=arguments.daemon_fd),
        path=arguments.socket,
        seconds=arguments.seconds,
    )
    reason = holder.run()
    if holder.count:
        _say(
            "info",
            "ended, and with it the memory that it kept",
            descriptors=holder.count,
            reason=reason,
        )
    holder.remove_socket()


if __name__ == "__main__":
    main()
