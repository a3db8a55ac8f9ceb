"""Keepers of the daemon's descriptors while there is no daemon: systemd's store, or a holder."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memd import holder
from memd.refusal import Refused, StatusCode
from memd.systemd import offers_store, passed_descriptors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from memd.systemd import Notifier

log = logging.getLogger(__name__)

_ANSWER_S = 60.0


@dataclass(kw_only=True)
class Keeper:
    """The daemon's end of the connection, and what the daemon before left."""

    connection: socket.socket
    kept: list[tuple[str, int]]
    is_holder: bool
    process: subprocess.Popen[bytes] | None = None  # a holder that this daemon started

    def server_fd(self) -> int:
        """For the data plane, which sends on it from then on."""
        return os.dup(self.connection.fileno())

    def take_kept(self) -> list[tuple[str, int]]:
        """For the data plane, which owns them from then on."""
        kept, self.kept = self.kept, []
        return kept

    def end(self) -> None:
        """Nobody needs what is kept: the memory is freed. systemd's store is left as it is, so that
        a restart of an idle daemon is quick; it is emptied when the service is stopped."""
        if self.is_holder:
            with contextlib.suppress(OSError):
                self.connection.send(holder.END)

    def close(self) -> None:
        for _, fd in self.take_kept():
            os.close(fd)
        self.connection.close()


def find_keeper(
    path: Path,
    *,
    seconds: float,
    log_format: str = "text",
    environ: Mapping[str, str],
    notifier: Notifier,
) -> Keeper | None:
    """systemd's store where there is one, the holder that listens at `path`, or a new one. None
    where `seconds` is 0: nothing in memory outlives the daemon then. The caller holds the lock of
    the control socket."""
    if offers_store(environ):
        kept = [(name, fd) for name, fd in passed_descriptors(environ) if "." in name]
        for _, fd in kept:
            os.set_inheritable(fd, False)
        return Keeper(connection=notifier.connected(), kept=kept, is_holder=False)
    found = _running_holder(path)
    if found is not None:
        if seconds > 0:
            return found
        found.end()
        found.close()
    return _new_holder(path, seconds=seconds, log_format=log_format) if seconds > 0 else None


def _running_holder(path: Path) -> Keeper | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        path.unlink(missing_ok=True)  # of one that is dead
        return None
    except OSError as error:
        # It lives: without its socket nobody would find it and the memory that it keeps.
        connection.close()
        raise Refused(
            StatusCode.DEVICE,
            f"the holder at {path} cannot be reached: {error.strerror or error}; start memd again, "
            "or end that process to go on from the disk alone",
        ) from error
    try:
        kept = holder.take(connection)
    except ConnectionResetError:
        connection.close()  # it was about to end
        path.unlink(missing_ok=True)
        return None
    except (OSError, ValueError) as error:
        connection.close()
        raise Refused(
            StatusCode.DEVICE,
            f"the holder at {path} has what a daemon left in memory, and it does not come through: "
            f"{error}; start memd again, or end that process to go on from the disk alone",
        ) from error
    log.info("holder found", extra={"descriptors": len(kept)})
    return Keeper(connection=connection, kept=kept, is_holder=True)


def _new_holder(path: Path, *, seconds: float, log_format: str) -> Keeper:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)  # nobody else may connect, not even before a chmod
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise Refused(
            StatusCode.DEVICE,
            f"the holder's socket {path} cannot be made: {error.strerror}; choose another folder "
            "with --socket, or --holder-seconds 0",
        ) from error
    finally:
        os.umask(mask)
    listening.listen(4)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listening, theirs:
        command = [sys.executable, "-I", "-S", holder.__file__, "--socket", str(path)]
        command += ["--seconds", str(seconds), "--log-format", log_format]
        command += ["--listening-fd", str(listening.fileno())]
        command += ["--daemon-fd", str(theirs.fileno())]
        # A session of its own: what kills the daemon's group does not kill it. A pipe for our
        # output would never end while it lives, so that only files get what it says.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if _is_file(2) else subprocess.DEVNULL,
            pass_fds=(listening.fileno(), theirs.fileno()),
            start_new_session=True,
            cwd="/",
        )
    return Keeper(connection=ours, kept=[], is_holder=True, process=process)


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False
