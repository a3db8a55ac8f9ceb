"""The way to the daemon, and to its metrics."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
from typing import TYPE_CHECKING

from memd.doctor.finding import Finding, note, obstacle, ok
from memd.users import user_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def group_member(attach_socket: Path) -> Finding | None:
    """Whether this user may connect to the daemon that is there; None where there is none."""
    closed = _closed_to_us(attach_socket)
    if closed is None:
        return (
            None if not attach_socket.exists() else ok("socket", f"{attach_socket} is open to you")
        )
    user = user_name(os.geteuid())
    group = _group_name(closed.stat().st_gid)
    if _is_member(user, group):
        return obstacle(
            "socket",
            f"{closed} is closed to this session, although {user} is in its group {group}",
            "log in again, so that new processes are in the group",
        )
    return obstacle(
        "socket",
        f"{closed} is closed to user {user}, who is not in its group {group}",
        f"as root: usermod --append --groups {group} {user}, and then log in again",
    )


def _closed_to_us(attach_socket: Path) -> Path | None:
    """The outermost folder, or the socket, that this user may not use."""
    for path in (*reversed(attach_socket.parents), attach_socket):
        wanted = os.W_OK if path == attach_socket else os.X_OK
        try:
            path.stat()
        except OSError:
            return None
        if not os.access(path, wanted, effective_ids=True):
            return path
    return None


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _is_member(user: str, group: str) -> bool:
    """By the group file: what a new login would get."""
    try:
        entry = grp.getgrnam(group)
        return user in entry.gr_mem or pwd.getpwnam(user).pw_gid == entry.gr_gid
    except KeyError:
        return False


def metrics_port(endpoint: str) -> Iterator[Finding]:
    if not endpoint:
        return
    host, _, port = endpoint.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the metrics' own
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            yield obstacle(
                "metrics",
                f"{endpoint} cannot be bound: {error.strerror or error}",
                f"`ss -ltnp sport = :{port}` shows who has it; or set metrics to another"
                if taken
                else "set metrics to an address of this machine, such as 127.0.0.1:9464",
            )
            return
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        yield note(
            "metrics",
            f"{endpoint} can be reached from other machines, without a password",
            "127.0.0.1, or a firewall that lets Prometheus alone through",
        )
        return
    yield ok("metrics", f"{endpoint} is free")
